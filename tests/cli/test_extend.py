"""`locant extend`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import locant
from locant import Rotary
from locant.checkpoints.extension import METHODS
from locant.lab import factor_search
from locant.positions.scaling import LongRoPE, YaRN
from tests.cli.conftest import Complains, Run, refused
from tests.positions.published import PRESETS
from tests.tolerances import FORMULA, LOGITS

NARROW = {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 10_000.0}
"""Heads of 8 dimensions, whose precision is soon measured."""


@pytest.fixture
def narrow(folder: Path) -> None:
    (folder / "narrow.json").write_text(json.dumps({**NARROW, "max_position_embeddings": 32_768}))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_configuration_that_can_be_read(run: Run, folder: Path, method: str) -> None:
    result = run("extend narrow.json --to 131072 --method", method, "-o", "new.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("new.json\n")
    written = json.loads((folder / "new.json").read_text())
    Rotary.from_config(written)
    assert {key: value for key, value in NARROW.items() if key != "rope_theta"}.items() <= written.items()
    if method != "dynamic":
        assert json.loads(run("explain new.json --json").stdout)["longest"] == 131072


def test_the_method_is_yarn_and_the_name_says_it_unless_something_else_is_asked_for(run: Run, folder: Path) -> None:
    result = run("extend qwen2.5-7b --to 131072")
    assert result.exit_code == 0
    written = json.loads((folder / "qwen2.5-7b-yarn-131072.json").read_text())
    assert Rotary.from_config(written).scaling == YaRN(factor=4.0, original_max_seq_len=32768)
    said = " ".join(result.stdout.split())
    for words in ("32,768 to 131,072 positions, yarn", "max_position_embeddings: 32768 → 131072", "24 (0-23) of 64"):
        assert words in said


@pytest.mark.usefixtures("narrow")
def test_json_says_what_changed(run: Run) -> None:
    result = run("extend narrow.json --to 65536 --method ntk -o n.json --json")
    facts = json.loads(result.stdout)
    assert facts["changed"]["max_position_embeddings"] == {"before": 32768, "after": 65536}
    assert facts["stretches"][0] == 1.0
    assert facts["stretches"][-1] == pytest.approx(2.0, rel=FORMULA, abs=0)
    assert facts["written"] == "n.json"


@pytest.mark.usefixtures("narrow")
def test_a_picture_before_and_after(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    result = run("extend narrow.json --to 65536 -o n.json --figure n.svg")
    assert result.stdout.splitlines()[-2:] == ["n.json", "n.svg"]
    assert (folder / "n.svg").read_bytes().startswith(b"<?xml")


def test_the_configuration_itself_is_not_overwritten(complains: Complains, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(PRESETS["mistral-7b"]))
    for source in ("config.json", "."):
        assert "the configuration itself" in complains("extend", source, "--to", 65536, "-o", "config.json")


test_what_makes_no_sense_is_one_line = refused(
    "extend",
    ("mistral-7b --to 1000", "expected more; try: --to 131072"),
    ("nothing --to 4096", "one of the presets"),
    ("mistral-7b", "missing option '--to'"),
    ("mistral-7b --to 0", "0 is not in the range x>=1"),
    ("mistral-7b --to 65536 --method magic", "'magic' is not one of"),
    ("narrow.json --to 65536 -o no/x.json", "there is no folder no"),
    ("mistral-7b --to 65536 --figure x.gif", "ending in .png"),
    ("narrow.json --to 65536 --figure no/x.png", "there is no folder no"),
    ("", "missing argument 'CONFIG'; try: locant extend --help"),
    fixtures=["narrow"],
)


@pytest.mark.slow
def test_factors_are_searched_on_a_text_and_what_is_measured_is_not_measured_again(
    run: Run, succeeds: Run, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "extend model --to 64 --method longrope --search text.txt -o new.json"
    succeeds(line, "--generations", 0)
    before = json.loads((folder / "new.search.json").read_text())["measured"]
    measured, losses = [], factor_search.losses_in_windows
    monkeypatch.setattr(
        factor_search, "losses_in_windows", lambda *given, **also: measured.append(0) or losses(*given, **also)
    )
    found = json.loads(run(line, "--generations", 2, "--json").stdout)
    record = json.loads((folder / "new.search.json").read_text())["measured"]
    assert record[: len(before)] == before
    assert len(measured) == len(record) - len(before)
    best = min(record, key=lambda each: each["loss"])
    assert best["loss"] < before[0]["loss"], "the start"
    assert f"{before[0]['loss']:.4f} with those of YaRN's ramp, {best['loss']:.4f} with these" in found["notes"][0]
    assert best["factors"] == sorted(best["factors"])
    written = json.loads((folder / "new.json").read_text())
    scaling = Rotary.from_config(written).scaling
    assert isinstance(scaling, LongRoPE)
    assert [*scaling.long_factor] == best["factors"]
    assert loss_of_transformers(model, written, (folder / "text.txt").read_text()) == pytest.approx(
        best["loss"], abs=LOGITS
    )
    whole = json.loads((folder / "new.search.json").read_text())
    for damaged in ([], *({**whole, "measured": each} for each in ([5], [{}], [{"factors": "x", "loss": "y"}]))):
        (folder / "new.search.json").write_text(json.dumps(damaged))
        again = run(line)
        assert again.exit_code == 2
        assert "not the record of a search with this model" in again.stderr
    (folder / "new.search.json").write_text(json.dumps(whole))
    kept = {path: path.read_bytes() for path in (folder / "text.txt", *model.iterdir())}
    for change in (write_another_text, save_other_weights_in_place, save_another_tokenizer):
        change(folder)
        again = run(line)
        assert again.exit_code == 2, change.__name__
        assert "not the record of a search with this model" in again.stderr
        for path, content in kept.items():
            path.write_bytes(content)
    succeeds(line, "--generations", 0)


def write_another_text(folder: Path) -> None:
    (folder / "text.txt").write_text("another text altogether, " * 100)


@torch.no_grad()
def save_other_weights_in_place(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.lm_head.weight *= 1.5
    model.save_pretrained(folder / "model")


def save_another_tokenizer(folder: Path) -> None:
    locant.Tokenizer.train(["The dog saw both of them. " * 20], 280).save(folder / "model" / "tokenizer.json")


def loss_of_transformers(folder: Path, config: dict[str, Any], text: str) -> float:
    """With its own LongRoPE, in the first four windows of 64 tokens."""
    own = AutoModelForCausalLM.from_pretrained(folder, config=LlamaConfig(**config)).eval()
    ids = torch.tensor(locant.Tokenizer.load(str(folder)).encode(text).tolist())
    rows = torch.stack([ids[first : first + 65] for first in range(0, 4 * 64, 64)])
    with torch.no_grad():
        return F.cross_entropy(own(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).item()


test_what_cannot_be_searched_is_one_line = refused(
    "extend",
    ("model --to 64 --search text.txt", "--method longrope"),
    ("model --to 64 --method longrope --seed 1", "got --seed without a search"),
    ("model --to 64 --method longrope --search no.txt", "no.txt"),
    ("model --to 1000000 --method longrope --search text.txt", "too short for a window of 1,000,000"),
    ("mistral-7b --to 65536 --method longrope --search text.txt", "expected the folder of a model"),
    ("model --to 64 --method longrope --search text.txt -o no/x.json", "no folder no"),
    ("model --to 64 --method longrope --search text.txt -o model", "which is a folder"),
    fixtures=["model"],
)
