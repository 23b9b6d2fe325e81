"""Writing to a terminal, or as plain text without colours to where stdout is redirected."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from locant.files import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["BEST", "QUIET", "counted", "out", "print_json", "show", "table", "talk"]

BEST = "bold green"
QUIET = "dim"


def out() -> Console:
    """Where results go. Text is printed as it is: nothing in it is taken for markup, an emoji's name or a number."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def table(*, title: str | None = None) -> Table:
    """An empty table without vertical rules, whose cells fold and are never cut short."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def show(console: Console, what: Table | str = "") -> None:
    """Print a table or a line; into a file or pipe without the blanks that pad the lines of tables."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    console.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun, for people; `plural` where it is not the noun with an s.

    >>> counted(1, "shard"), counted(1200, "shard"), counted(0, "entry", "entries")
    ('1 shard', '1,200 shards', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def talk(line: str) -> None:
    """One line for the person who waits, on stderr."""
    sys.stderr.write(line + "\n")


def print_json(value: Any) -> None:
    """One JSON value on stdout, and nothing else; ASCII only, so that no terminal or pipe can spoil it."""
    sys.stdout.write(json_text(value))
