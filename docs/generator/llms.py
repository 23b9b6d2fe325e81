"""Writes ``llms.txt`` beside the pages: what the site holds, for programs that read it (https://llmstxt.org)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

__all__ = ["listing", "setup"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the list when the pages are written."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def listing(title: str, claim: str, entries: list[tuple[str, str, str]]) -> str:
    """The file: title, claim, and a line for each page with its address, title and first sentence.

    >>> print(listing("locant", "Positions.", [("a.md.txt", "A page", "It says this.")]))
    # locant
    <BLANKLINE>
    > Positions.
    <BLANKLINE>
    ## Pages
    <BLANKLINE>
    - [A page](a.md.txt): It says this.
    <BLANKLINE>
    """
    lines = [f"- [{name}]({address}){f': {words}' if words else ''}" for address, name, words in entries]
    return "\n".join([f"# {title}", "", f"> {claim}", "", "## Pages", "", *lines, ""])


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        start = _first_words(app.env, app.config.root_doc)
        text = listing(app.config.project, start, list(_entries(app)))
        (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def _entries(app: Sphinx) -> Iterator[tuple[str, str, str]]:
    """Each page in the order of the table of contents: its source, which is Markdown."""
    for page in _in_order(app.env, app.config.root_doc):
        suffix = Path(app.env.doc2path(page)).suffix
        yield f"_sources/{page}{suffix}.txt", app.env.titles[page].astext(), _first_words(app.env, page)


def _in_order(env: BuildEnvironment, page: str) -> Iterator[str]:
    yield page
    for child in env.toctree_includes.get(page, []):
        yield from _in_order(env, child)


def _first_words(env: BuildEnvironment, page: str) -> str:
    """The first paragraph of a page, on one line."""
    paragraph = next(iter(env.get_doctree(page).findall(nodes.paragraph)), None)
    return "" if paragraph is None else " ".join(paragraph.astext().split())
