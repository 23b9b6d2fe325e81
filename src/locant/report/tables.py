"""The data of a table in a report. `locant.report.console` prints it, and `locant.report.page` writes it as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An entry of a table that contains more than text."""

    text: str
    spread: str = ""
    """The uncertainty of a number, which is shown after it or on a separate line."""
    small: str = ""
    """Small print below the text. A terminal shows it only in headings."""
    look: Literal["", "best", "quiet"] = ""
    shade: float | None = None
    """The depth of the background colour on a page, from 0 to 1."""
    hint: str = ""
    """The text that a page shows when the mouse is over the cell."""


Row = Sequence[str | Cell]

CLEARLY = "Among equal encodings, the probability of any clear difference is at most 5%."
"""The meaning of the word in tables that compare encodings."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. The first entry of each row is the name of the row."""

    head: Row
    rows: Sequence[Row]
    below: Sequence[Row] = ()
    """Rows about the columns, such as the number of windows."""
    title: str = ""
    """The title in a terminal. A page shows the heading of the section instead."""
    note: str = ""
    """The caption below the table, in one or two sentences. Only a page shows it."""
    terms: Mapping[str, str] = field(default_factory=dict[str, str])
    """The meaning of the table's words, in one or two sentences each. A page shows them when the reader asks."""
