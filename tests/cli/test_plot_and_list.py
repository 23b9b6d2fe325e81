"""`locant plot` and `locant list`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant.figures import canvas
from locant.positions.registry import encodings
from tests.cli.conftest import Complains, Run

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")

BEGINNINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
BLANK = {"nope", "cope"}  # nothing to draw: no door, and a table that begins as zeros
DRAWN = [name for name in encodings() if name not in BLANK]


@pytest.mark.parametrize("name", DRAWN)
def test_every_encoding_with_something_to_show_is_drawn(run: Run, folder: Path, name: str) -> None:
    result = run("plot", name, "--length", 16)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{name}.png\n", "")
    assert (folder / f"{name}.png").read_bytes().startswith(BEGINNINGS[".png"])


@pytest.mark.parametrize("suffix", BEGINNINGS)
def test_the_suffix_chooses_the_kind(run: Run, folder: Path, suffix: str) -> None:
    assert run("plot", "alibi", "-o", f"x{suffix}", "--length", 8).exit_code == 0
    assert (folder / f"x{suffix}").read_bytes().startswith(BEGINNINGS[suffix])


def test_json_tells_what_was_drawn(run: Run) -> None:
    result = run("plot", "rotary", "-o", "x.svg", "--head-dim", 6, "--base", 50, "--length", 9, "--json")
    facts = json.loads(result.stdout)
    assert (facts["encoding"], facts["figure"], facts["length"]) == ("rotary", "x.svg", 9)
    assert "head_dim=6, base=50" in facts["built"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rotery",), "'rotary'"),
        (("nope",), "got nope, which has nothing to draw"),
        (("cope",), "Cope adds nothing before it is trained"),
        (("alibi", "-o", "x.gif"), "ending in .png, .svg, .pdf; try: x.png"),
        (("alibi", "-o", "x"), "ending in .png, .svg, .pdf"),
        (("alibi", "-o", "no/x.png"), "there is no folder no"),
        (("alibi", "--length", 1), "1 is not in the range 2<=x<=4096"),
        (("alibi", "--num-heads", 0), "0 is not in the range"),
        (("alibi", "--d-model", 8), "which takes num_heads"),
        (("rotary", "--head-dim", 7), "expected an even number"),
        (("rotary", "--base", 0), "0.0 is not in the range x>0"),
        ((), "missing argument 'ENCODING'; try: locant plot --help"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(complains: Complains, words: tuple[object, ...], said: str) -> None:
    assert said in complains("plot", *words)


def test_without_matplotlib_the_extra_is_named(complains: Complains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "find_spec", lambda name: None)
    for words in (("plot", "alibi"), ("compare", "text.txt")):
        assert "try: pip install 'locant[lab]'" in complains(*words)


def test_the_list_names_every_encoding(run: Run) -> None:
    result = run("list")
    assert result.exit_code == 0
    for kind in encodings().values():
        assert kind.info.paper in result.stdout


def test_the_list_as_json_is_the_catalog(run: Run) -> None:
    facts = json.loads(run("list", "--json").stdout)
    used_by = {name: kind.info.used_by for name, kind in encodings().items()}
    assert {fact["name"]: fact["used_by"] for fact in facts} == used_by
