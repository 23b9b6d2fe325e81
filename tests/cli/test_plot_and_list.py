"""`locant plot` and `locant list`, as they are typed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from locant.positions.registry import encodings
from locant.report.listing import encoding_facts
from tests.cli.conftest import Complains, Run, refused
from tests.tolerances import FORMULA

pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")


def test_an_encoding_is_drawn_by_any_of_its_names(run: Run, folder: Path) -> None:
    result = run("plot rope --length 8 --head-dim 4")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "rotary.png\n", "")
    assert (folder / "rotary.png").read_bytes().startswith(b"\x89PNG")


def test_json_tells_what_was_drawn_and_the_suffix_chooses_the_kind(run: Run, folder: Path) -> None:
    result = run("plot rotary -o x.svg --head-dim 6 --base 50 --length 9 --json")
    facts = json.loads(result.stdout)
    assert (facts["encoding"], facts["figure"], facts["length"]) == ("rotary", "x.svg", 9)
    assert "head_dim=6, base=50" in facts["built"]
    assert (folder / "x.svg").read_bytes().startswith(b"<?xml")
    assert facts["numbers"]["inv_freq"] == pytest.approx([1, 50 ** (-1 / 3), 50 ** (-2 / 3)], rel=FORMULA, abs=0)


def test_a_scaling_is_drawn_and_its_numbers_told(run: Run) -> None:
    line = "plot rotary --scaling linear:2 --trained 10 --theme dark --head-dim 4 -o x.svg --json"
    facts = json.loads(run(line).stdout)
    assert "Linear(factor=2.0)" in facts["built"]
    assert facts["numbers"]["inv_freq"] == [0.5, 0.005]


def test_a_pair_that_is_not_rotated_has_no_wavelength(run: Run) -> None:
    facts = json.loads(run("plot rotary --scaling proportional:1 --head-dim 16 -o x.svg --json").stdout)
    assert facts["numbers"]["wavelengths"][2:] == [None] * 6


test_what_cannot_be_drawn_is_one_line = refused(
    "plot",
    ("rotery", "'rotary'"),
    ("yarn", "try: locant plot rotary --scaling yarn"),
    ("rotary --d-model 512", "got --d-model for rotary, which takes --head-dim, --base, --scaling"),
    ("rope --num-heads 4", "got --num-heads for rope"),
    ("rotary --scaling yran", "'yran'"),
    ("nope --base 4", "got --base for nope, which takes none of these"),
    ("alibi -o x.gif", "ending in .png, .svg, .pdf; try: x.png"),
    ("alibi -o x", "ending in .png, .svg, .pdf"),
    ("alibi -o no/x.png", "there is no folder no"),
    ("alibi --length 1", "1 is not in the range 2<=x<=4096"),
    ("alibi --num-heads 0", "0 is not in the range"),
    ("alibi --scaling yarn", "got --scaling for alibi, which takes --num-heads"),
    ("rotary --head-dim 7", "expected an even number"),
    ("rotary --base 0", "0.0 is not in the range x>0"),
    ("", "missing argument 'ENCODING'; try: locant plot --help"),
)


def test_without_matplotlib_the_extra_is_named(complains: Complains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "try: pip install 'locant[lab]'" in complains("plot alibi")


def test_the_list_says_of_every_encoding_what_it_is_and_costs(run: Run) -> None:
    result = run("list")
    assert result.exit_code == 0
    words = {*result.stdout.split()}
    for name, kind in encodings().items():
        info = kind.info
        for fact in (name, info.kind, info.cost_of_tokens, info.cost_of_pairs, info.paper, ", ".join(info.aliases)):
            assert {*fact.split()} <= words, (name, fact)


def test_the_list_as_json_is_the_registry(run: Run) -> None:
    facts = {fact["name"]: fact for fact in json.loads(run("list --json").stdout)}
    assert [*facts] == [*encodings()]
    for name, kind in encodings().items():
        assert facts[name]["used_by"] == kind.info.used_by
        assert facts[name]["kind"] == kind.info.kind
        assert "rope" in facts["rotary"]["aliases"]


def test_one_encoding_is_listed_with_its_numbers(run: Run, succeeds: Run) -> None:
    slopes = [2.0**-power for power in (2, 4, 6, 8)]
    facts = json.loads(run("list ALiBi --num-heads 4 --json").stdout)
    assert (facts["name"], facts["numbers"]) == ("alibi", {"slopes": slopes})
    text = run("list rope --head-dim 4").stdout.split()
    assert {"rope,", "Rotary(head_dim=4,", "0.01", "628.31853"} <= {*text}
    succeeds("list nope")


@pytest.mark.parametrize("name", encodings())
def test_the_types_of_options_are_in_words(name: str) -> None:
    """Not in Python's annotations, which are names of this package's own types or have quotes and brackets."""
    options = encoding_facts(name)["options"]
    for option in options:
        words = option.partition(" = ")[0].partition(": ")[2].split(" or ")
        assert all(re.fullmatch(r"(sequence of |iterable of )?[a-z0-9]+|Rotary|iterable of Rotary|Scaling|Pairs|"
                                r"Temperature", each) for each in words), option  # fmt: skip
    expected = {
        "selective_rope": "activation: silu or none = none", "rotary": "sections: sequence of int or none = none",
        "sinusoidal": "first: sine or cosine = sine", "t5": "num_buckets: int = 32",
    }  # fmt: skip
    assert expected.get(name) in (None, *options)


def test_a_broken_plug_in_is_named_and_the_rest_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locant.report.listing.broken_encodings", lambda: {"lost": "encoding 'lost' of x is broken"})
    result = run("list --json")
    assert result.exit_code == 0
    assert result.stderr == "left out: encoding 'lost' of x is broken\n"
    assert len(json.loads(result.stdout)) == len(encodings())


test_what_cannot_be_listed_is_one_line = refused(
    "list",
    ("rotery", "'rotary'"),
    ("alibi --d-model 8", "got --d-model for alibi, which takes --num-heads; try: locant list alibi"),
    ("--d-model 8", "got --d-model without the name of an encoding"),
)
