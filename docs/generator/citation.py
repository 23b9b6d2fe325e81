"""How to cite locant, from ``CITATION.cff``."""

from __future__ import annotations

from typing import Any

import yaml

from docs.generator.records import ROOT
from locant import __version__

__all__ = ["bibtex", "citation"]


def citation() -> str:
    """The entry and a sentence for a list of references, as two blocks."""
    facts = _facts()
    authors = ", ".join(author["name"] for author in facts["authors"])
    sentence = f"{authors}. {facts['title']}. Version {__version__}. Computer software, {facts['license']}."
    return f"```text\n{bibtex()}\n```\n\nAs a sentence:\n\n> {sentence}\n"


def bibtex() -> str:
    """The entry for BibTeX, in which names of groups are not split into first and last names."""
    facts = _facts()
    fields = {
        "title": f"{{{facts['title']}}}",
        "author": " and ".join(f"{{{author['name']}}}" for author in facts["authors"]),
        "version": __version__,
        "license": facts["license"],
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join(["@software{locant,", *lines, "}"])


def _facts() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
