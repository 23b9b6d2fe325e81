"""Whatever verb prints them, numbers, dtypes and names of encodings are written in one way, and read in many."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from locant.cli import main
from locant.lab.candidate import Candidate
from locant.lab.position_overrides import PositionOverride
from locant.models.registry import presets
from locant.positions.registry import ENCODINGS, encodings, name_of
from locant.positions.scaling import SCALINGS
from tests.cli.conftest import Complains, Run
from tests.cli.test_without_extras import LINES, VERBS

OTHER_DTYPES = re.compile(r"\b(?:fp|bf|[fF]|BF)(?:16|32|64)\b|torch\.(?:bfloat|float|u?int)\d")
"""Dtypes in another form than ``float32``."""

CODE = re.compile(
    r"""
    \w*\((?:[^()]|\([^()]*\))*=(?:[^()]|\([^()]*\))*\)  # Rotary(head_dim=8, base=10000)
    | \[[^][]*\] | \{[^{}]*\}           # shapes and dictionaries
    | '[^']*' | `[^`]*`
    | --[\w-]+(?:[ =]\S+)? | -o[ ]\S+   # options
    | \w+=\S+ | \w+:[ ][\w ]+[ ]=[ ]\S+  # arguments, as in base: float = 10000.0
    | \w+\#\d+ | arXiv[ ][\d.]+ | \b(?:19|20)\d\d\b
    | \d+\.\d+\.\d+\S* | \S*/\S+ | \b\S+\.[a-z][\w.]*  # versions, fractions, files
    """,
    re.VERBOSE,
)
"""What is Python's, JSON's or a shell's, where numbers have digits alone."""

BARE = re.compile(r"\d(?:\.\d+)?e\+\d+|(?<![\w.,:-])\d{4,}(?![\w-])")
"""Numbers with an exponent above 1, or without separators of thousands."""

HAVE_EXTRAS = {line: extra for line, extra in LINES.items() if extra in (None, "hf", "lab")}


def faults(words: str, *, is_json: bool = False) -> list[str]:
    """What is written otherwise than everywhere."""
    found = OTHER_DTYPES.findall(words) and [m[0] for m in OTHER_DTYPES.finditer(words)]
    for row in [] if is_json else words.splitlines():
        text = row
        while (shorter := CODE.sub(" ", text)) != text:
            text = shorter
        found += [f"{number} in {row.strip()}" for number in BARE.findall(text)]
    return found


@pytest.mark.parametrize(
    "words",
    [
        "table  shape  fp32", "got torch.float32", "a copy in BF16", "base 1e+06", "rotations 5.22e+03",
        "over 10000000 tokens", "base 10000", "moves on by 1000 positions",
    ],
)  # fmt: skip
def test_what_is_written_otherwise_is_found(words: str) -> None:
    assert faults(words)


@pytest.mark.parametrize(
    "words",
    [
        "float32  bfloat16", "base 1,000,000", "off by 3.2e-05", "Rotary(head_dim=8, base=10000)", "--to 262144",
        "Su 2021, arXiv 2104.09864", "[2389, 16]", "scale=0.135234", "model-yarn-65536.json",
    ],
)  # fmt: skip
def test_what_is_written_as_everywhere_is_not(words: str) -> None:
    assert not faults(words)


@pytest.mark.slow
def test_every_verb_writes_numbers_and_dtypes_in_one_way(
    saved_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that are run without extras, as text and as JSON, and what these verbs refuse."""
    monkeypatch.setenv("COLUMNS", "1000")  # no sentence is broken over two lines
    (folder / "text.txt").write_text("the cat sat on the mat; the rat sat on the cat. " * 400)
    (folder / "batch.json").write_text(json.dumps({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 20_000]]}))
    shutil.copytree(saved_model, "model")
    said: dict[str, str] = {}
    for line in [*HAVE_EXTRAS, "plot rotary --base 1e6", "embed text.txt --model model --base 5"]:
        words = line.split("'")
        for more in ([], ["--json"]):
            typed = [part for at, text in enumerate(words) for part in ([text] if at % 2 else text.split())]
            if more and "--json" in typed:
                continue
            typed = [*typed, "--force"] if line.startswith(("train", "tune", "vocabulary", "compare")) else typed
            if more and any(line.startswith(verb) for verb in ("convert", "prepare", "export")):
                typed = [f"{word}-json" if typed[at - 1] == "-o" else word for at, word in enumerate(typed)]
            result = CliRunner().invoke(main, [*typed, *more])
            said[" ".join([*typed, *more])] = result.stdout + result.stderr
    assert {line.split()[0] for line in said} == {*VERBS}
    has_text = ("generate", "neighbours")  # of the model, which has read digits
    wrong = {
        line: found
        for line, words in said.items()
        if (found := faults(words, is_json="--json" in line or line.startswith(has_text)))
    }
    assert not wrong, "\n".join(f"{line}: {found}" for line, found in wrong.items())


@pytest.mark.parametrize("name", presets())
def test_models_are_explained_in_the_same_way(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert not faults(run(f"explain {name}").stdout)
    assert not faults(run(f"explain {name} --json").stdout, is_json=True)


@pytest.mark.parametrize("base", [1e6, 1_234_567.0, 123_456_789.5])
def test_what_an_encoding_prints_is_the_number_that_it_has(base: float) -> None:
    import locant

    for name in ("rotary", "sinusoidal", "pope", "sandwich", "xpos"):
        sizes = dict.fromkeys(encodings()[name].sizes(), 8)
        printed = repr(locant.encoding(name, base=base, **sizes))
        assert re.search(r"base=([\d.e+]+)", printed)[1] == str(base).removesuffix(".0")  # type: ignore[index]


@pytest.mark.parametrize("typed", ["float32", "fp32", "torch.float32", "F32", "Float32"])
def test_a_dtype_is_read_as_anybody_writes_it(typed: str, model: Path) -> None:
    import torch

    import locant
    from locant.cli.options import OneOf, dtype
    from locant.lab.evaluation import EvaluationSettings
    from locant.lab.language_model import load_model

    @dtype
    def verb(dtype: Any) -> None: ...

    kind = verb.__click_params__[0].type  # type: ignore[attr-defined]
    assert isinstance(kind, OneOf)
    assert kind.convert(typed, None, None) == "float32"
    assert EvaluationSettings(dtype=typed).dtype == "float32"
    assert next(load_model(model, dtype=typed).parameters()).dtype == torch.float32
    assert locant.TokenEmbedding.from_pretrained(model, dtype=typed).weight.dtype == torch.float32
    assert locant.Rotary(4).cos_sin_cache(2, typed).dtype == torch.float32
    k, cache = torch.zeros(1, 1, 1, 2), locant.attention.StaticKVCache(2, batch=1, kv_heads=1, head_dim=2, dtype=typed)
    assert cache.append(k, k, locant.Positions.arange(1))[0].dtype == torch.float32


@pytest.mark.parametrize("typed", ["1024", "1_024", "1,024", "1.024e3", "1024.0"])
@pytest.mark.parametrize("line", ["extend llama-3.1-8b --to", "plot alibi --length", "list rotary --d-model"])
def test_a_whole_number_is_read_as_anybody_writes_it(run: Run, line: str, typed: str) -> None:
    assert "is not a whole number" not in run(f"{line} {typed}").stderr


@pytest.mark.parametrize("line", ["extend llama-3.1-8b --to", "plot alibi --length", "evaluate model --lengths"])
@pytest.mark.parametrize("typed", ["1.5", "many", "1e400", "8__192"])
def test_what_is_no_whole_number_is_refused(complains: Complains, line: str, typed: str) -> None:
    assert "number" in complains(f"{line} {typed}")


@pytest.mark.parametrize("line", ["extend llama-3.1-8b --to", "plot alibi --length", "evaluate model --lengths"])
@pytest.mark.parametrize(("typed", "meant"), [("8k", "8192 or 8000"), ("128K", "131072 or 128000")])
def test_a_number_with_two_meanings_names_both(complains: Complains, line: str, typed: str, meant: str) -> None:
    assert f"write {meant}" in complains(f"{line} {typed}")


@pytest.mark.parametrize(
    "line", ["evaluate model --lengths", "compare --seeds", "compare --multiples", "compare --rates"]
)
@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("1,000", "write 1000"), ("1,200", "write 1200 or '1, 200'"), ("65,536", "write 65536 or '65, 536'"),
        ("1,200,2,400", "write 1200,2400 or '1, 200, 2, 400'"), ("512,1,024", "write 1000 or 1_000"),
    ],
)  # fmt: skip
def test_a_list_that_may_be_a_number_is_refused(complains: Complains, line: str, typed: str, advice: str) -> None:
    assert advice in complains(f"{line} {typed}")


@pytest.mark.parametrize("typed", ["10000", "10_000", "10,000", "1e4", "10,000.0"])
def test_every_number_is_read_as_anybody_writes_it(succeeds: Run, typed: str) -> None:
    assert "base=10000," in json.loads(succeeds(f"list rotary --base {typed} --json").stdout)["built"]


@pytest.mark.parametrize(
    "line", ["list rotary --base", "tune model --with own --minutes", "generate model x --temperature"]
)
def test_every_number_with_two_meanings_names_both(complains: Complains, line: str) -> None:
    assert "write 8192 or 8000" in complains(f"{line} 8k")


NAMES = [(alias, name) for name in encodings() for alias in (name, *ENCODINGS.aliases(name))]


@pytest.mark.parametrize(("alias", "name"), NAMES)
def test_an_encoding_has_one_name_whatever_it_is_called(alias: str, name: str) -> None:
    for typed in (alias, alias.upper(), alias.replace("_", "-"), alias.replace("_", " ").title()):
        assert name_of(typed) == name
        assert Candidate.of(typed).name == name
    if name != "rotary":
        assert str(PositionOverride.of(alias.title())).partition(":")[0].replace("-", "_") == name


@pytest.mark.parametrize("name", SCALINGS)
def test_so_has_a_scaling(name: str) -> None:
    for alias in (name, *SCALINGS[name].info.aliases):
        if name in PositionOverride.names():
            assert str(PositionOverride.of(f"{alias.upper()}:2.0")) == f"{name}:2"


def test_verbs_print_that_name(succeeds: Run) -> None:
    small = "text.txt --tokenizer bytes"
    assert "alibi does not change embeddings" in succeeds(f"embed {small} --encoding 'ALiBi positional bias'").stdout
    assert json.loads(succeeds(f"embed {small} --encoding RoPE --json").stdout)["encoding"] == "rotary"
    assert json.loads(succeeds("plot RoPE --json -o x.png").stdout)["encoding"] == "rotary"
    trained = succeeds(f"train {small} --encoding RoPE --steps 1 --train-length 8 -o m").stdout
    assert trained.startswith("m: rotary, 1 step")
    assert "2,097,152 positions, yarn" in succeeds("extend qwen2.5-7b --method YARN --to 2_097_152").stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_no_bound_of_a_number_in_python(verb: str) -> None:
    """click's words for a number without bounds are ``x<=None``, and the largest seed has 19 digits."""
    shown = CliRunner().invoke(main, [verb, "--help"]).stdout
    assert "Usage" in shown
    assert re.findall(r"None|\d{10,}", shown) == []
