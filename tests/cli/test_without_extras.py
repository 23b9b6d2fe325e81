"""Where no extra is installed, every verb and every function works, or names the extra that it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from locant.cli import VERBS

pytestmark = pytest.mark.slow

SMALL = "--steps 2 --train-length 16 --multiples 1,2 --encodings rotary,alibi --seeds 0"
LINES: dict[str, str | None] = {
    "embed text.txt -o embedded.safetensors": None,
    "embed text.txt --model model": None,
    f"compare text.txt -o report {SMALL}": None,
    f"compare text.txt -o report {SMALL} --json": None,
    f"compare -o tasks {SMALL} --tasks copy --task-length 8": None,
    f"compare text.txt -o elsewhere {SMALL} --ray local": "ray",
    "train text.txt -o trained --steps 2 --train-length 16": None,
    "generate trained 'the cat' --tokens 2": None,
    "generate model 'the cat' --with yarn:4 --tokens 2": "hf",
    "explain llama-3.1-8b": None,
    "explain model": None,
    "explain model -o explained.png": "lab",
    "explain model.gguf": "gguf",
    "extend model --to 64 -o extended.json": None,
    "extend model --to 64 -o searched.json --method longrope --search text.txt --generations 1": "hf",
    "convert model --to interleaved -o converted": None,
    "evaluate model text.txt -o evaluation --lengths 64 --windows 2 --keys 1 --json": "hf",
    "tune model text.txt --with yarn:4 -o tuned --steps 2": "hf",
    "neighbours model the": None,
    "neighbours model the cat sat": None,
    "neighbours model the cat sat --map map.png": "lab",
    "prepare text.txt -o store": None,
    "prepare rows.parquet -o other": "data",
    "prepare text.txt -o other --tokenizer trained/tokenizer.json --engine gigatoken": "fast",
    "prepare text.txt -o third --ray local": "ray",
    "export store --to nanogpt -o exported": None,
    "plot alibi": "lab",
    "probe model": "hf",
    "probe llama-3.1-8b": "hf",
    "probe qwen3": "hf",
    "audit model --length 64 --windows 10": "hf",
    "check-batch batch.json": None,
    "golden": None,
    "serve-args model --to 64 --for vllm": None,
    "serve-args model --to 64 --for vllm --text text.txt": "hf",
    "explore text.txt --no-open": "explore",
    "explore text.txt --show text --export page.html": None,
    "bench": None,
    "list": None,
    "list rotary": None,
}  # fmt: skip
"""Lines of the command line, and the extra that each needs. The order counts: some read what others wrote."""

CODE: dict[str, str | None] = {
    "import torch, locant; locant.swap(torch.nn.Linear(2, 2))": "hf",
    "from locant.checkpoints import load_swapped; load_swapped('model')": "hf",
    "import locant; locant.probe(CONFIG)": "hf",
    "import locant; locant.probe(locant.Rotary(8))": None,
    "import locant as l; l.probe(lambda x, p: l.Rotary(8).rotate_one(x, l.Positions.of(p)), head_dim=8)": None,
    "import locant; locant.plot(locant.ALiBi(2))": "lab",
    "import locant; locant.encoding_from_gguf('model.gguf')": "gguf",
    "import locant; locant.TokenEmbedding.from_pretrained('model')": None,
    "import locant; locant.InputEmbedding.from_pretrained('model')": None,
    "import locant; locant.Tokenizer.load('model')": None,
    "import locant; locant.Rotary.from_config(CONFIG)": None,
    "import locant; locant.prepare('rows.parquet', 'other')": "data",
    "import locant, locant.engines.onnx as o; o.rotary_model(locant.Rotary(8), num_heads=2, max_seq_len=9)": "onnx",
    "from locant.explore import widget; widget('compare?1=rotary&2=alibi&length=256')": "notebook",
}  # fmt: skip
"""The same for functions; CONFIG is a configuration of Llama."""
EXTRAS = {**{f"locant {line}": extra for line, extra in LINES.items()}, **CODE}


def brought_without_extras(package: str = "locant", extras: frozenset[str] = frozenset({""})) -> set[str]:
    """The distributions that an installation without extras brings, by their metadata."""
    found: set[str] = set()
    waiting = [(package, extras)]
    seen = set(waiting)
    while waiting:
        name, chosen = waiting.pop()
        found.add(canonicalize_name(name))
        try:
            wanted = [Requirement(one) for one in requires(name) or []]
        except PackageNotFoundError:  # of a platform that is not this one
            continue
        for one in wanted:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in chosen):
                following = (one.name, frozenset({"", *one.extras}))
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
    return found


def hidden() -> list[str]:
    """The importable names that only other distributions have."""
    brought = brought_without_extras()
    assert {"torch", "numpy", "huggingface-hub", "sympy"} <= brought
    names = {
        name
        for name, distributions in packages_distributions().items()
        if name.isidentifier() and not brought & {canonicalize_name(one) for one in distributions}
    }
    assert {"transformers", "matplotlib", "pyarrow", "pytest"} <= names
    return sorted(names)


@pytest.fixture(scope="module")
def answers(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What every line gave, all in one process."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(saved_model, folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat; the rat sat on the cat. " * 100)
    (folder / "batch.json").write_text(json.dumps({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 2]]}))
    (folder / "rows.parquet").write_bytes(b"PAR1")
    (folder / "model.gguf").write_bytes(b"GGUF")
    lines = [*EXTRAS]
    src = Path(__file__).resolve().parents[2] / "src"
    surroundings = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("without_extras.py")], cwd=folder, env=surroundings, text=True,
        input=json.dumps({"hidden": hidden(), "lines": lines}), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line: (code, said) for line, (code, said) in zip(lines, json.loads(done.stdout), strict=True)}


def test_every_verb_is_tried() -> None:
    assert {line.split()[0] for line in LINES} == {*VERBS}


@pytest.mark.parametrize(("line", "extra"), EXTRAS.items())
def test_it_works_or_names_its_extra(line: str, extra: str | None, answers: dict[str, tuple[int, str]]) -> None:
    code, said = answers[line]
    assert code == (0 if extra is None else 2), said
    if extra is not None:
        assert f"pip install 'locant[{extra}]'" in said
        assert "Traceback" not in said
