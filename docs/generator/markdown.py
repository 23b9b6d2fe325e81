"""What generated pages are made of: tables, pictures in both themes, docstrings as Markdown, indexes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence

__all__ = ["card", "index", "linked_papers", "markdown", "opening", "picture", "rows", "summary", "table"]


def markdown(docstring: str) -> str:
    """The words of a docstring, which is written for autodoc, in Markdown.

    >>> markdown("``rope_theta`` of `Rotary` is in :math:`x^2`")
    '`rope_theta` of `Rotary` is in {math}`x^2`'
    """
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":math:(?=`[^`])", "{math}", docstring))


def summary(described: object) -> str:
    """The first sentence of a docstring, on one line.

    >>> summary(summary)
    'The first sentence of a docstring, on one line.'
    """
    paragraph = " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?\S(?<! al)[.](?= |$)", paragraph)
    return linked_papers(markdown(sentence[0] if sentence else paragraph))


def opening(described: object) -> str:
    r"""How a docstring begins: its first paragraph, its formula, and what the formula's letters mean.

    >>> words = "Adds one.\n\n.. math:: y = x +\n    1\n\nx is ``what`` comes in.\n\nIt is odd."
    >>> print(opening(type("Odd", (), {"__doc__": words})))
    Adds one.
    <BLANKLINE>
    $$
    y = x +
    1
    $$
    <BLANKLINE>
    x is `what` comes in.
    """
    first, *others = (inspect.getdoc(described) or "").split("\n\n")
    at = next((at for at, text in enumerate(others) if text.startswith(".. math::")), None)
    if at is None:
        return linked_papers(markdown(first))
    formula = [line.strip() for line in others[at].removeprefix(".. math::").splitlines()]
    letters = "" if re.match(r"[A-Z]\w+:", others[at + 1]) else others[at + 1]
    parts = (first, "\n".join(["$$", *formula, "$$"]), letters)
    return "\n\n".join(linked_papers(markdown(part)) for part in parts if part)


def linked_papers(text: str) -> str:
    """Every paper with its address.

    >>> linked_papers("Su 2021, arXiv 2104.09864")
    'Su 2021, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864)'
    """
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def rows(entries: Sequence[Sequence[str]]) -> str:
    """The rows of a table, without its head."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in entries)


def table(facts: Mapping[str, str]) -> str:
    """Two columns, without a head; what is empty is left out."""
    return "| | |\n|---|---|\n" + rows([(f"**{name}**", fact) for name, fact in facts.items() if fact])


def picture(path: str, words: str) -> str:
    """A picture for light and one for dark paper, of which the theme shows one."""
    return "\n".join(
        f"```{{image}} /reference/pictures/{path}-{theme}.svg\n:alt: {words}\n:class: only-{theme}\n```"
        for theme in ("light", "dark")
    )


def card(path: str, label: str, title: str, words: str) -> str:
    """A card with a picture and a sentence, which leads to a page."""
    return f""":::{{grid-item-card}} {title}
:link: {label}
:link-type: ref

{picture(path, f"The picture of {title}")}

{words}
:::"""


def index(label: str, title: str, words: str, cards: Sequence[str], members: Sequence[str] = ()) -> str:
    """A page of cards, and the place of its members in the table of contents."""
    shown, below = "\n\n".join(cards), "\n".join(members)
    contents = f"\n```{{toctree}}\n:hidden:\n\n{below}\n```\n" if members else ""
    return f"""({label})=
# {title}

{words}

::::{{grid}} 1 2 2 3
:gutter: 3

{shown}
::::
{contents}"""
