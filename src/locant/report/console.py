"""Write to a terminal, or as plain text without colours if stdout is redirected."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from locant.files import json_text
from locant.report import tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NamedRows = Iterable[tuple[str, str | Iterable[str]]]

BEST = "bold green"
MISSING = "–"
QUIET = "dim"
LOOKS = {"": "", "best": BEST, "quiet": QUIET}
NARROWEST = 60
"""The smallest width of a table. In a narrower one, columns would lose text."""
UNKNOWN_WIDTH = 80
PATIENCE = 30.0
"""The seconds between two progress lines if no bar is shown."""


def out() -> Console:
    """Return the console for results. It prints text without interpreting markup, emoji names or numbers.

    ``COLUMNS=0`` means that the width is unknown, as in `shutil.get_terminal_size`.
    """
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, NARROWEST) if console.width else UNKNOWN_WIDTH
    return console


def table(*numbers: str, name: str = "", title: str | None = None, **look: Any) -> Table:
    """Return a table without vertical rules. It has a column for names, if `name` is given, and columns for numbers.

    Cells of numbers are never truncated. In a narrow terminal, they are broken into lines.
    """
    from rich import box
    from rich.table import Table

    look = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 2, 0, 0), **look}
    rows = Table(title=title, title_justify="left", title_style="bold", **look)
    if name:
        rows.add_column(name, no_wrap=True)
    for heading in numbers:
        rows.add_column(heading, justify="right", overflow="fold")
    return rows


def draw(value: tables.Table, between: str = " ") -> Table:
    """Return the table of a report for a terminal. Write `between` before the spread of a number.

    A star marks the best values, because some terminals have no colour.
    """
    from rich.text import Text

    def heading(cell: str | tables.Cell) -> str:
        return cell if isinstance(cell, str) else "\n".join(filter(None, (cell.text, cell.small)))

    def entry(cell: str | tables.Cell) -> Text:
        if isinstance(cell, str):
            return Text(cell)
        star = "*" if cell.look == "best" else ""
        return Text(f"{star}{between.join(filter(None, (cell.text, cell.spread)))}", LOOKS[cell.look])

    name, *head = map(heading, value.head)
    rows = table(*head, name=name, title=value.title)
    for row in value.rows:
        rows.add_row(*map(entry, row))
    if value.below:
        rows.add_section()
    for row in value.below:
        rows.add_row(*map(entry, row), style=QUIET)
    return rows


def fits(rows: Table) -> bool:
    """Return whether the table fits the console without breaking a cell."""
    console = out()
    return console.measure(rows, options=console.options.update(max_width=10**6)).maximum <= console.width


def named_rows(named: NamedRows) -> Table:
    """Return a table of names and values. If a name has several values, only the first row contains the name."""
    rows = table(box=None, show_header=False)
    rows.add_column(no_wrap=True, style=QUIET)
    rows.add_column(overflow="fold")
    for name, values in named:
        for number, value in enumerate([values] if isinstance(values, str) else values):
            rows.add_row("" if number else name, value)
    return rows


def show(*parts: Table | str) -> None:
    """Print tables and texts with empty lines between them. In a file or pipe, lines do not end with blanks."""
    console = out()
    spaced = [each for part in parts for each in ("", part)][1:]
    if console.is_terminal:
        for part in spaced:
            console.print(part)
        return
    with console.capture() as captured:
        for part in spaced:
            console.print(part)
    console.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def pluralize(number: int, noun: str) -> str:
    """Format a count with its noun, in the singular or plural.

    >>> pluralize(1, "shard"), pluralize(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape(sizes: Iterable[int]) -> str:
    """Format the shape of a tensor as torch does.

    >>> shape((8, 4, 256))
    '[8, 4, 256]'
    """
    return f"[{', '.join(map(str, sizes))}]"


def size(num_bytes: int) -> str:
    """Format a number of bytes with one decimal, in the largest unit in which it is at least 1.

    >>> size(12), size(1536), size(32_000 * 4_096 * 2)
    ('12 bytes', '1.5 KiB', '250.0 MiB')
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return (
        f"{num_bytes / 1024**power:,.1f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{num_bytes} bytes"
    )


def log_line(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(line + "\n")


@contextmanager
def progress_bar(unit: str = "B") -> Generator[Callable[..., None]]:
    """Show a progress bar on stderr, and yield a function that moves the bar and sets its note.

    `unit` is the unit of the numbers. If stderr is not a terminal, a line is written every `PATIENCE` seconds instead.
    After Ctrl-C, the notes of the interrupt, for example how to resume, are written to stderr.
    """
    from tqdm import tqdm

    try:
        with tqdm(disable=None, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True) as bar:
            began = last = time.monotonic()
            before: int | None = None

            def progress(done: int, total: int | None, said: str = "") -> None:
                nonlocal last, before
                if before is None:  # the rate excludes the work of an earlier run
                    before = bar.initial = bar.n = done
                bar.total = total
                if said:
                    bar.set_postfix_str(said, refresh=False)
                bar.update(done - bar.n)
                if bar.disable:
                    bar.n = done
                    if (now := time.monotonic()) - last >= PATIENCE:
                        last = now
                        log_line(_progress_line(done, total, before, now - began, unit, said))

            yield progress
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            log_line(note)
        raise


def _progress_line(done: int, total: int | None, before: int, seconds: float, unit: str, said: str) -> str:
    """Format the progress of a run that began at `before` and has taken this many seconds.

    >>> _progress_line(30, 120, 0, 60.0, "window", "base 10,000")
    'window 30 of 120, about 3:00 left: base 10,000'
    """
    parts = [f"{unit} {done:,}" if total is None else f"{unit} {done:,} of {total:,}"]
    if total is not None and done > before:
        left = round(seconds * (total - done) / (done - before))
        parts.append(f"about {left // 60}:{left % 60:02} left")
    return ", ".join(parts) + (f": {said}" if said else "")


def print_json(value: Any) -> None:
    """Print one JSON value on stdout, in ASCII, because every terminal and pipe can encode this."""
    sys.stdout.write(json_text(value))
