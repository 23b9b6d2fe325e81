"""The pages cite locant as ``CITATION.cff`` does, in the form that BibTeX reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import locant
from docs.generator import reference

ROOT = Path(__file__).parents[2]
FACTS = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENTRY = re.compile(r"^@software\{(\w+),\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)


def fields(entry: str) -> dict[str, str]:
    """The fields of an entry, without the braces that keep capitals and names of groups together."""
    found = {name: value.removeprefix("{").removesuffix("}") for name, value in FIELD.findall(entry)}
    assert len(found) == entry.count(" = ")
    return found


def cited() -> dict[str, str]:
    return {
        "title": FACTS["title"],
        "author": " and ".join(author["name"] for author in FACTS["authors"]),
        "version": locant.__version__,
        "license": FACTS["license"],
    }


def test_the_entry_has_what_the_file_states() -> None:
    (entry,) = ENTRY.findall(reference.pages()["citation.txt"])
    assert entry[0] == "locant"
    assert fields(entry[1]) == cited()
    assert "```{include} reference/citation.txt\n" in (ROOT / "docs" / "citing.md").read_text(encoding="utf-8")


def test_an_entry_that_a_page_writes_out_is_the_same() -> None:
    entries = [entry for page in PAGES for _, entry in ENTRY.findall(page.read_text(encoding="utf-8"))]
    assert [entry for entry in entries if fields(entry) != cited()] == []


@pytest.mark.parametrize("wrong", ["title = {{another}}", "license = {MIT}"])
def test_another_entry_is_noticed(wrong: str) -> None:
    entry = ENTRY.findall(reference.pages()["citation.txt"])[0][1]
    name = wrong.partition(" ")[0]
    assert fields(re.sub(rf"{name} = .*", f"{wrong},", entry)) != cited()
