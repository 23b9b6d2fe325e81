"""The README lists every entry, every entry has tests that name its source, and every encoding is looked at."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import torch

from locant import Convolutional, Positions
from locant.positions.base import reads_hidden_states
from locant.positions.registry import encodings
from tests.known_bugs.figures import README, table_under
from tests.known_bugs.subjects import EVERY, differences, queries, use

ENTRIES = [
    *map(str, range(1, 84)),
    *(f"84{letter}" for letter in "abcdefghijklm"),
    *map(str, range(97, 111)),
    *map(str, [111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121]),
]
Tests = list[tuple[str, str]]
"""Entry and docstring of each."""


def docstrings_in(folder: Path) -> Tests:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("test_*.py"))]
    return [
        (named[1].lstrip("0"), ast.get_docstring(node) or "")
        for node in itertools.chain.from_iterable(map(ast.walk, trees))
        if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_(\d{2,3}[a-m]?)_", node.name))
    ]


def disagreements(readme: str, tests: Tests) -> list[str]:
    """Every place where the README and the tests say different things."""
    rows = table_under("entries", readme)
    faults = [f"a row of {len(row)} cells: {row}" for row in rows if len(row) != 3 or not all(row)]
    faults += [] if [row[0] for row in rows] == ENTRIES else ["the rows are not the entries in their order"]
    for entry, source, *_ in rows:
        docstrings = [docstring for number, docstring in tests if number == entry]
        faults += [] if docstrings else [f"entry {entry} has no test"]
        faults += [f"a test of entry {entry} does not name {source}" for said in docstrings if source not in said]
    if not readme.startswith(f"# Known bugs: {len(rows)} of {len(ENTRIES)}\n"):
        faults.append(f"the headline does not say {len(rows)} of {len(ENTRIES)}")
    return faults


TEXT = README.read_text(encoding="utf-8")
TESTS = docstrings_in(README.parent)


def test_the_readme_and_the_tests_agree() -> None:
    assert len(ENTRIES) == 121
    assert disagreements(TEXT, TESTS) == []


def test_every_encoding_of_the_catalog_is_shown() -> None:
    shown = {type(build()) for build in EVERY.values()}
    assert {*encodings().values()} - shown == {Convolutional}, "whose documents have to be whole"


def test_every_subject_does_something_with_positions() -> None:
    for name, build in EVERY.items():
        encoding = build()
        x = queries(encoding, 6)
        moved = differences(use(encoding, x, Positions.after(100, 6)), use(encoding, x, Positions.after(103, 6)))
        relative = differences(
            use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([0, 2, 5, 9, 20, 50]))
        )
        # CoPE counts tokens that matter, and others sum what they read: of indices these look only at the order.
        order = differences(use(encoding, x, Positions.arange(6)), use(encoding, x, Positions.of([5, 3, 4, 0, 2, 1])))
        read = reads_hidden_states(encoding)
        assert name == "nope" or read or moved or relative or order, f"{name} is the same everywhere"
        assert name in ("nope", "cope") or read or moved or relative, f"{name} looks at nothing but the order"


def test_differences_sees_one_bit_and_one_dtype() -> None:
    ours = {"q": torch.tensor([1.0, 2.0]), "k": torch.tensor([3.0])}
    one_bit = {**ours, "q": torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0))}
    assert differences(ours, dict(ours)) == {}
    assert differences(ours, one_bit).keys() == {"q"}
    assert differences(ours, {**ours, "k": ours["k"].double()}) == {"k": float("inf")}
    assert differences({"q": torch.tensor(float("nan"))}, {"q": torch.tensor(float("nan"))}), "NaN is no agreement"
