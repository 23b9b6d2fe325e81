"""A table of a report as a value. `locant.report.console` prints it in a terminal, and `locant.report.page` as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry with more than its text."""

    text: str
    spread: str = ""
    """The uncertainty of a number, after it or on a line of its own."""
    small: str = ""
    """Small print below, on a page. In a terminal, only headings have it."""
    look: Literal["", "best", "quiet"] = ""
    shade: float | None = None
    """How deep the background is on a page, from 0 to 1."""
    hint: str = ""
    """The text that a page shows when the mouse is over the cell."""


Row = Sequence[str | Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows whose first entry is their name."""

    head: Row
    rows: Sequence[Row]
    below: Sequence[Row] = ()
    """Rows about the columns, such as the number of windows."""
    title: str = ""
    """The title in a terminal. On a page the section has a heading."""
    note: str = ""
    """The explanation below, on a page."""
