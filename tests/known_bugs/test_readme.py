"""The README says what is tested, and the tests say so too."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.known_bugs.figures import README, table_under

STATUSES = ("tested", "gpu", "not applicable", "later")
ENTRIES = [*map(str, range(1, 84)), *(f"84{letter}" for letter in "abcdefghijklm")]


@dataclass(frozen=True)
class Test:
    """One test of a known bug."""

    __test__ = False

    name: str
    docstring: str
    needs_gpu: bool

    @property
    def entry(self) -> str:
        number, letter = re.match(r"test_(\d\d)([a-m]?)_", self.name).groups()  # type: ignore[union-attr]
        return f"{int(number)}{letter}"


def known_bugs_in(folder: Path) -> list[Test]:
    found = []
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and re.match(r"test_\d\d[a-m]?_", node.name):
                gpu = any("mark.gpu" in ast.unparse(decorator) for decorator in node.decorator_list)
                found.append(Test(node.name, ast.get_docstring(node) or "", gpu))
    return found


def disagreements(readme: str, tests: list[Test]) -> list[str]:
    """Every place where the README and the tests say different things."""
    rows = table_under("entries", readme)
    faults = [f"a row of {len(row)} cells: {row}" for row in rows if len(row) != 4]
    faults += [] if [row[0] for row in rows] == ENTRIES else ["the rows are not the 96 entries in their order"]
    for entry, source, status, shown in (row for row in rows if len(row) == 4):
        its = [test for test in tests if test.entry == entry]
        anywhere = [test for test in its if not test.needs_gpu]
        matches = {
            "tested": bool(anywhere),
            "gpu": bool(its) and not anywhere,
            "not applicable": not its,
            "later": not its,
        }
        if not matches.get(status, False):
            faults.append(f"entry {entry} is {status!r}, its tests are {[test.name for test in its]}")
        if not source or not shown:
            faults.append(f"entry {entry} has no source or no reason")
        faults += [f"{test.name} does not name {source}" for test in its if source not in test.docstring]
    count = sum(row[2] == "tested" for row in rows if len(row) == 4)
    if not readme.startswith(f"# Known bugs: {count} of {len(ENTRIES)}\n"):
        faults.append(f"the headline does not say {count} of {len(ENTRIES)}")
    return faults


TEXT = README.read_text(encoding="utf-8")
TESTS = known_bugs_in(README.parent)


def test_the_readme_and_the_tests_agree() -> None:
    assert len(ENTRIES) == 96
    assert disagreements(TEXT, TESTS) == []


ROW_36 = next(line for line in TEXT.splitlines() if line.startswith("| 36 |"))


@pytest.mark.parametrize(
    ("readme", "tests", "fault"),
    [
        (TEXT.replace(ROW_36 + "\n", ""), TESTS, "the rows are not the 96 entries"),
        (TEXT.replace(ROW_36, ROW_36.replace("| tested |", "| later |")), TESTS, "entry 36 is 'later', its tests are"),
        (TEXT.replace(ROW_36, ROW_36.replace("| tested |", "| done |")), TESTS, "entry 36 is 'done'"),
        (TEXT.replace(ROW_36, "| 36 | a/b#1 | tested | |"), TESTS, "entry 36 has no source or no reason"),
        (TEXT.replace(ROW_36, ROW_36.replace("#38", "#39")), TESTS, "does not name lucidrains"),
        (TEXT.replace(ROW_36, ROW_36 + " more |"), TESTS, "a row of 5 cells"),
        (TEXT, [test for test in TESTS if test.entry != "36"], "entry 36 is 'tested', its tests are []"),
        (TEXT, [Test(t.name, t.docstring, t.needs_gpu or t.entry == "36") for t in TESTS], "entry 36 is 'tested'"),
        (TEXT, [*TESTS, Test("test_36_more", "another thread", False)], "test_36_more does not name"),
        (TEXT.replace(" of 96", " and some of 96", 1), TESTS, "the headline does not say"),
    ],
)
def test_it_notices(readme: str, tests: list[Test], fault: str) -> None:
    assert any(fault in found for found in disagreements(readme, tests))
