"""The page of known bugs has every entry with its facts, its costs are those of the record, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import locant
from docs.generator.known_bugs import FAMOUS, SUBJECTS, draw, entries, famous
from locant import Positions, Rotary
from locant.explore.screens.known_bugs import BUGS
from locant.figures.canvas import svg
from locant.position_costs import costs
from locant.scaling import DynamicNTK
from tests.known_bugs.catalog import count, docstrings
from tests.known_bugs.catalog import entries as catalog
from tests.tolerances import assert_close

ROOT = Path(__file__).parents[2]
PAGE = entries()
SECTIONS = dict(re.findall(r"\(known-bug-(\w+)\)=\n(#### .*?)(?=\n\(known-bug|\n### |\Z)", PAGE, flags=re.DOTALL))
LARGEST = 50_000
"""The largest picture, in bytes."""


def test_every_entry_has_its_facts() -> None:
    assert f"## All {count()} entries" in PAGE
    assert SECTIONS.keys() == {each.number for each in catalog()}
    for each in catalog():
        section = SECTIONS[each.number]
        facts = (f"#### {each.number}. {each.title}\n", each.story, each.check, f"`{each.test}`")
        assert [fact for fact in facts if fact not in section] == []
        assert [name for name, address in each.sources if name not in section or address not in section] == []


def test_every_file_of_entries_has_a_heading() -> None:
    files = {test.partition("test_")[2].partition(".py")[0] for _, test, _ in docstrings()}
    assert files == {*SUBJECTS}


def test_a_measured_cost_stands_in_its_entries_and_nowhere_else() -> None:
    from benchmarks.real_models.bugs import BUGS as MEASURED

    for key, cost in costs().items():
        shown = {number for number, section in SECTIONS.items() if f"If {cost.mistake}, the loss " in section}
        assert shown == (set() if key == "exact-angles" else {*MEASURED[key].entries}), key
        if cost.matters and shown:
            assert all(str(cost).partition(": if ")[2] in SECTIONS[number] for number in shown)


def test_every_entry_that_a_measured_bug_names_is_there() -> None:
    from benchmarks.real_models.bugs import BUGS as MEASURED

    assert {number for bug in MEASURED.values() for number in bug.entries} <= SECTIONS.keys()


def scope() -> dict[str, Any]:
    rotary = Rotary(8, scaling=DynamicNTK(factor=4.0, original_max_seq_len=4))
    keys = rotary.for_length(5).rotate_one(torch.ones(1, 1, 5, 8), Positions.arange(5))
    return {
        "torch": torch, "locant": locant, "x": torch.arange(8.0).bfloat16(), "seq_len": 600, "lengths": [5, 4, 9],
        "attention_mask": torch.tensor([[0, 0, 1, 1]]), "rotary": rotary, "n": 6, "keys": keys,
        "k": torch.ones(1, 1, 1, 8), "old": Positions.arange(5), "new": Positions.after(5, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMOUS)
def test_the_lines_of_a_famous_bug_and_of_its_fix_run_and_differ(name: str) -> None:
    results = []
    for code in (FAMOUS[name].code, FAMOUS[name].fix):
        names = scope()
        exec(code, names)  # noqa: S102  # the page's own lines
        result = next(names[each] for each in ("a", "positions", "keys") if each in names)
        results.append((result.index if isinstance(result, Positions) else result).double().flatten())
    assert not torch.equal(*results)


def test_the_fix_of_cached_keys_gives_the_keys_of_one_call() -> None:
    names = scope()
    exec(FAMOUS["mixed-frequencies"].fix, names)  # noqa: S102  # the page's own lines
    at_once = names["rotary"].for_length(6).rotate_one(torch.ones(1, 1, 6, 8), Positions.arange(6))
    assert_close(names["keys"], at_once)


@pytest.mark.parametrize("name", FAMOUS)
def test_a_picture_of_the_gallery_is_small_and_has_both_curves(name: str) -> None:
    page, drawn = famous(), draw(name, "dark")
    assert f"known_bugs/{name}-dark.svg" in page
    assert BUGS[name].title in page
    assert len(svg(drawn)) < LARGEST
    curves = sum(len(axes.lines) + len(axes.images) for axes in drawn.axes if axes.get_label() != "<colorbar>")
    assert curves == 2
