"""The Known bugs screen: right and wrong differ, all bugs are those of the tests, and its Python draws the same.

Run as a module, it writes what the tests say of every bug into the file that the screen reads.
"""

from __future__ import annotations

import ast
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locant.explore.screens.known_bugs import BUGS, ENTRIES
from tests.explore.screens import executed, numbers_of

MUSEUM = Path(__file__).parents[1] / "known_bugs"
SOURCES = re.compile(r"(?:(?:[\w.-]+/)?[\w.-]*#\d+(?: \([^)]*\))?|CVE-[\d-]+|[\w.-]+/[\w.-]+ attacks/|and|[, ])+[:.] ?")
OF_TESTS = re.compile(r"\btests/|^Here\b|\btwin\b|\bREADME\b|^We\b|\bours\b|^So entry")
"""Sentences that say how a test goes about it."""

numbers = partial(numbers_of, "known_bugs")


def told_by_tests() -> list[dict[str, Any]]:
    """What the docstring of the first test of every entry says, by the number of the entry."""
    functions = [
        (named[1], named[2], ast.get_docstring(node) or "")
        for path in sorted(MUSEUM.glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_0*(\d+[a-m]?)_(\w+)", node.name))
    ]
    told = {name: words for name, *words in reversed(functions)}
    return [
        entry(name, *told[name]) for name in sorted(told, key=lambda name: (int(name.rstrip("abcdefghijklm")), name))
    ]


def entry(name: str, claim: str, docstring: str) -> dict[str, Any]:
    words = " ".join(docstring.replace("`", "").split())
    head = SOURCES.match(words)
    assert head is not None, f"the docstring of entry {name} does not begin with its sources"
    sentences = [each for each in re.split(r"(?<=[.?]) (?=[A-Z0-9])", words[head.end() :]) if not OF_TESTS.search(each)]
    story = re.sub(r"^[a-z]+(?=[ ,])", lambda first: first[0].capitalize(), " ".join(sentences))
    claim = claim.replace("_", " ").capitalize()
    return {"entry": name, "claim": claim, "story": story, "sources": sources_in(head[0])}


def sources_in(head: str) -> list[list[str]]:
    """A name and an address for each; a number alone is of the repository before it."""
    found, repository = list[list[str]](), ""
    for owner, number, cve in re.findall(
        r"([\w.-]+/[\w.-]+|(?<![\w/])[\w.-]+(?=#))?(?: ?(#\d+|attacks/))|(CVE-[\d-]+)", head
    ):
        repository = owner or repository
        if cve:
            found.append([cve, f"https://www.cve.org/CVERecord?id={cve}"])
        elif "/" in repository:
            place = "tree/main/attacks" if number == "attacks/" else f"issues/{number[1:]}"
            found.append(
                [f"{repository}{number}".replace("attacks", "/attacks"), f"https://github.com/{repository}/{place}"]
            )
        else:
            found.append([f"{repository}{number}", ""])
    return found


def test_all_bugs_are_there_with_what_their_tests_say() -> None:
    assert json.loads(ENTRIES.read_text(encoding="utf-8")) == told_by_tests(), "python -m tests.explore.test_known_bugs"


def test_the_sources_are_those_of_the_readme() -> None:
    rows = re.findall(
        r"^\| (\d+[a-m]?) \| (\S+#\d+) \|", (MUSEUM / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = {each["entry"]: each["sources"] for each in numbers()["entries"]}
    assert len(shown) == len(told_by_tests())
    assert len(rows) > 100
    for name, source in rows:
        repository, _, number = source.partition("#")
        assert [source, f"https://github.com/{repository}/issues/{number}"] in shown[name]


def test_bugs_are_found_by_words_in_any_order() -> None:
    found = numbers(find="maximal mistral")["entries"]
    assert [each["entry"] for each in found] == ["4"]
    assert numbers(find="bfloat16 no such words")["entries"] == []
    assert [each["drawn"] for each in numbers(find="Modalities")["entries"]] == ["rounded-angles"]


@pytest.mark.parametrize("name", BUGS)
def test_the_mistake_can_be_seen_and_its_python_draws_it(name: str) -> None:
    shown = numbers(bug=name)
    assert not np.array_equal(shown["right"], shown["wrong"], equal_nan=True)
    made = executed(shown)
    for each in ("places", "right", "wrong"):
        np.testing.assert_array_equal(np.asarray(made[each], np.float64), shown[each])


def test_what_is_right_is_what_the_definitions_say() -> None:
    angles = numbers(bug="rounded-angles", position="4000")
    expected = np.cos(angles["places"] * 10_000.0 ** (-16 / 64))
    np.testing.assert_array_equal(angles["right"].astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(numbers(bug="padding-counted")["right"], [np.nan] * 5 + [*range(11)])
    np.testing.assert_array_equal(numbers(bug="cache-forgotten")["right"], -0.25 * np.arange(23, -1, -1))
    assert numbers(bug="ids-wrapped")["wrong"][32] == 0


if __name__ == "__main__":
    ENTRIES.write_text(json.dumps(told_by_tests(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
