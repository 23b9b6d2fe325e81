"""The known bugs as data, read from the docstrings of their tests.

The docstring of the first test of an entry is the home of its facts, in four paragraphs:

1. the name of the bug, as one sentence;
2. the threads where it happened, a colon, and what happened, in at most two sentences;
3. ``Check:`` and a command or a call that shows the bug in other code;
4. ``Test:`` and what the test shows.

``python -m tests.known_bugs.catalog`` writes them into the README of this folder and into the file that the explorer
and the documentation read.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from locant.explore.screens.known_bugs import ENTRIES

__all__ = ["FOLDER", "README", "Entry", "as_json", "count", "docstrings", "entries", "entry", "with_entries"]

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
PARAGRAPHS = 4
MOST_SENTENCES = 2
THREAD = re.compile(r"([\w.-]+/[\w.-]+|(?<![\w/])[\w.-]+(?=#))?(?: ?(#\d+|`attacks/`))|(CVE-[\d-]+)")


class Entry(NamedTuple):
    """A known bug."""

    number: str
    title: str
    story: str
    sources: tuple[tuple[str, str], ...]
    """The name and the address of each thread. The address is empty if the owner of the repository is not known."""
    check: str
    shown: str
    test: str
    """The test, as pytest is called with it."""


def docstrings(folder: Path = FOLDER) -> list[tuple[str, str, str]]:
    """Return the number, the test and the docstring of every test of an entry, in the order of the files."""
    return [
        (named[1], f"{folder.parent.name}/{folder.name}/{path.name}::{node.name}", ast.get_docstring(node) or "")
        for path in sorted(folder.glob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_0*(\d+[a-m]?)_", node.name))
    ]


def entries(folder: Path = FOLDER) -> list[Entry]:
    """Return every known bug, by its number."""
    first = {number: (test, docstring) for number, test, docstring in reversed(docstrings(folder))}
    return [entry(number, *first[number]) for number in sorted(first, key=lambda number: (_digits(number), number))]


def count() -> int:
    """Return the number of known bugs."""
    return len(entries())


def entry(number: str, test: str, docstring: str) -> Entry:
    """Read the docstring of a test.

    >>> written = "It breaks.\\n\\na/b#7 and #8: It broke.\\n\\nCheck: call it.\\n\\nTest: one call."
    >>> entry("1", "t.py::test", written).sources
    (('a/b#7', 'https://github.com/a/b/issues/7'), ('a/b#8', 'https://github.com/a/b/issues/8'))
    """
    paragraphs = [" ".join(each.split()) for each in docstring.split("\n\n")]
    assert len(paragraphs) == PARAGRAPHS, f"entry {number}: {len(paragraphs)} paragraphs, not {PARAGRAPHS}"
    title, happened, check, shown = paragraphs
    head, _, story = happened.partition(": ")
    sources = _sources(head)
    assert sources, f"entry {number} names no thread"
    assert story, f"entry {number} does not state what happened"
    assert check.startswith("Check: "), f"entry {number} has no check"
    assert shown.startswith("Test: "), f"entry {number} does not state what its test shows"
    assert len(re.findall(r"[.!?](?: |$)", story)) <= MOST_SENTENCES, f"entry {number}: more than two sentences"
    return Entry(
        number, title.removesuffix("."), story, sources, check.removeprefix("Check: ").removesuffix("."),
        shown.removeprefix("Test: ").removesuffix("."), test,
    )  # fmt: skip


def _digits(number: str) -> int:
    return int(re.sub(r"\D", "", number))


def _sources(head: str) -> tuple[tuple[str, str], ...]:
    """Return a name and an address for each thread. A number alone belongs to the repository before it."""
    found, repository = list[tuple[str, str]](), ""
    for owner, number, cve in THREAD.findall(head):
        repository = owner or repository
        if cve:
            found.append((cve, f"https://www.cve.org/CVERecord?id={cve}"))
        elif "/" not in repository:
            found.append((f"{repository}{number}", ""))
        elif number == "`attacks/`":
            found.append((f"{repository}/attacks/", f"https://github.com/{repository}/tree/main/attacks"))
        else:
            found.append((f"{repository}{number}", f"https://github.com/{repository}/issues/{number[1:]}"))
    return tuple(found)


def as_json() -> list[dict[str, Any]]:
    """Return the facts that the package and the documentation read."""
    return [
        {"entry": each.number, "title": each.title, "story": each.story, "sources": [*map(list, each.sources)]}
        | {"check": each.check, "test": each.test}
        for each in entries()
    ]


def with_entries(readme: str) -> str:
    """Return the README with the number of entries and the table of them."""
    rows = [f"| {each.number} | {each.title} | {each.sources[0][0]} | {each.shown} |" for each in entries()]
    before, _, after = readme.partition("## Entries\n")
    after = re.sub(r"^\|.*\n", "", after, flags=re.MULTILINE).strip("\n")
    table = "\n".join(["| entry | bug | source | what the test shows |", "| --- | --- | --- | --- |", *rows])
    before = re.sub(r"\A# Known bugs: .*", f"# Known bugs: {count()}", before)
    return f"{before}## Entries\n\n{table}\n" + (f"\n{after}\n" if after else "")


if __name__ == "__main__":
    README.write_text(with_entries(README.read_text(encoding="utf-8")), encoding="utf-8")
    ENTRIES.write_text(json.dumps(as_json(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
