"""`locant extend`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant import Rotary
from locant.checkpoints.extension import METHODS
from locant.cli.extend import METHODS as OFFERED
from locant.positions.scaling import YaRN
from tests.cli.conftest import Complains, Run
from tests.positions.published import PRESETS
from tests.tolerances import FORMULA


def test_the_methods_on_offer_are_those_there_are() -> None:
    assert tuple(OFFERED) == tuple(METHODS)


NARROW = {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 10_000.0}
"""Heads of 8 dimensions, whose precision is soon measured."""


@pytest.fixture
def narrow(folder: Path) -> None:
    (folder / "narrow.json").write_text(json.dumps({**NARROW, "max_position_embeddings": 32_768}))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_configuration_that_can_be_read(run: Run, folder: Path, method: str) -> None:
    result = run("extend", "narrow.json", "--to", 131072, "--method", method, "-o", "new.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("new.json\n")
    written = json.loads((folder / "new.json").read_text())
    Rotary.from_config(written)
    assert {key: value for key, value in NARROW.items() if key != "rope_theta"}.items() <= written.items()
    if method != "dynamic":
        assert json.loads(run("explain", "new.json", "--json").stdout)["longest"] == 131072


def test_the_method_is_yarn_and_the_name_says_it_unless_something_else_is_asked_for(run: Run, folder: Path) -> None:
    result = run("extend", "qwen2.5-7b", "--to", 131072)
    assert result.exit_code == 0
    written = json.loads((folder / "qwen2.5-7b-yarn-131072.json").read_text())
    assert Rotary.from_config(written).scaling == YaRN(factor=4.0, original_max_seq_len=32768)
    said = " ".join(result.stdout.split())
    for words in ("32,768 to 131,072 positions, yarn", "max_position_embeddings: 32768 -> 131072", "24 (0-23) of 64"):
        assert words in said


@pytest.mark.usefixtures("narrow")
def test_json_says_what_changed(run: Run) -> None:
    result = run("extend", "narrow.json", "--to", 65536, "--method", "ntk", "-o", "n.json", "--json")
    facts = json.loads(result.stdout)
    assert facts["changed"]["max_position_embeddings"] == {"before": 32768, "after": 65536}
    assert facts["stretches"][0] == 1.0
    assert facts["stretches"][-1] == pytest.approx(2.0, rel=FORMULA, abs=0)
    assert facts["written"] == "n.json"


@pytest.mark.usefixtures("narrow")
def test_a_picture_before_and_after(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    result = run("extend", "narrow.json", "--to", 65536, "-o", "n.json", "--figure", "n.svg")
    assert result.stdout.splitlines()[-2:] == ["n.json", "n.svg"]
    assert (folder / "n.svg").read_bytes().startswith(b"<?xml")


def test_the_configuration_itself_is_not_overwritten(complains: Complains, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(PRESETS["mistral-7b"]))
    for source in ("config.json", "."):
        assert "the configuration itself" in complains("extend", source, "--to", 65536, "-o", "config.json")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mistral-7b", "--to", 1000), "expected more; try: --to 131072"),
        (("mistral-7b", "--to", 2**40), "got 1099511627776 for the new length, expected at most 2147483647"),
        (("llama-3.1-8b", "--to", 10**6), "stretches already"),
        (("gpt2", "--to", 4096), "rotary positions"),
        (("bloom-7b1", "--to", 4096), "rotary positions"),
        (("gpt-j-6b", "--to", 4096), "no scaling and no other base"),
        (("nothing", "--to", 4096), "none of the presets"),
        (("mistral-7b",), "missing option '--to'"),
        (("mistral-7b", "--to", 0), "0 is not in the range x>=1"),
        (("mistral-7b", "--to", 65536, "--method", "magic"), "'magic' is not one of"),
        (("narrow.json", "--to", 65536, "-o", "no/x.json"), "there is no folder no"),
        (("mistral-7b", "--to", 65536, "--figure", "x.gif"), "ending in .png"),
        (("narrow.json", "--to", 65536, "--figure", "no/x.png"), "there is no folder no"),
        ((), "missing argument 'CONFIG'; try: locant extend --help"),
    ],
)
def test_what_makes_no_sense_is_one_line(complains: Complains, words: tuple[object, ...], said: str) -> None:
    assert said in complains("extend", *words)
