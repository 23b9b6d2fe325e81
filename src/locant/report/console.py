"""Writing to a terminal, or as plain text without colours to where stdout is redirected."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from locant.files import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NamedRows = Iterable[tuple[str, str | Iterable[str]]]

BEST = "bold green"
MISSING = "–"
QUIET = "dim"
PATIENCE = 30.0
"""Seconds between two lines that say how far a run is, where no bar is shown."""


def out() -> Console:
    """Where results go. Text is printed as it is: nothing in it is taken for markup, an emoji's name or a number."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def table(*numbers: str, name: str = "", title: str | None = None, **look: Any) -> Table:
    """A table without vertical rules, whose cells are never cut short; a column for names, and these for numbers."""
    from rich import box
    from rich.table import Table

    look = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 2, 0, 0), **look}
    rows = Table(title=title, title_justify="left", title_style="bold", **look)
    if name:
        rows.add_column(name, no_wrap=True)
    for heading in numbers:
        rows.add_column(heading, justify="right", no_wrap=True)
    return rows


def fits(rows: Table) -> bool:
    """Whether no cell is cut short."""
    console = out()
    return console.measure(rows, options=console.options.update(max_width=10**6)).minimum <= console.width


def named_rows(named: NamedRows) -> Table:
    """A table of names and what they hold; of several values each has a row, and the first of them the name."""
    rows = table(box=None, show_header=False)
    rows.add_column(no_wrap=True, style=QUIET)
    rows.add_column(overflow="fold")
    for name, values in named:
        for number, value in enumerate([values] if isinstance(values, str) else values):
            rows.add_row("" if number else name, value)
    return rows


def show(*parts: Table | str) -> None:
    """Print tables and texts, an empty line between two; into a file or pipe without the blanks that pad tables."""
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


def counted(number: int, noun: str) -> str:
    """A count with its noun, for people.

    >>> counted(1, "shard"), counted(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape(sizes: Iterable[int]) -> str:
    """The shape of a tensor, as torch prints it.

    >>> shape((8, 4, 256))
    '[8, 4, 256]'
    """
    return f"[{', '.join(map(str, sizes))}]"


def size(num_bytes: int) -> str:
    """Bytes with one digit after the point, in the largest unit that leaves one before it.

    >>> size(12), size(1536), size(32_000 * 4_096 * 2)
    ('12 bytes', '1.5 KiB', '250.0 MiB')
    """
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return (
        f"{num_bytes / 1024**power:,.1f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{num_bytes} bytes"
    )


def talk(line: str) -> None:
    """One line for the person who waits, on stderr."""
    sys.stderr.write(line + "\n")


@contextmanager
def progress_bar(unit: str = "B") -> Generator[Callable[..., None]]:
    """A bar on stderr, of bytes or another unit, and what moves it and says a word; after Ctrl-C, how to go on.

    Where stderr is not a terminal, a line is written every `PATIENCE` seconds instead.
    """
    from tqdm import tqdm

    try:
        with tqdm(disable=None, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True) as bar:
            began = last = time.monotonic()
            before: int | None = None

            def progress(done: int, total: int | None, said: str = "") -> None:
                nonlocal last, before
                if before is None:  # what an earlier run did is not part of this one's rate
                    before = bar.initial = bar.n = done
                bar.total = total
                if said:
                    bar.set_postfix_str(said, refresh=False)
                bar.update(done - bar.n)
                if bar.disable:
                    bar.n = done
                    if (now := time.monotonic()) - last >= PATIENCE:
                        last = now
                        talk(_progress_line(done, total, before, now - began, unit, said))

            yield progress
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            talk(note)
        raise


def _progress_line(done: int, total: int | None, before: int, seconds: float, unit: str, said: str) -> str:
    """How far a run is that began with so much done and has taken so many seconds.

    >>> _progress_line(30, 120, 0, 60.0, "window", "base 10,000")
    'window 30 of 120, about 3:00 left: base 10,000'
    """
    parts = [f"{unit} {done:,}" if total is None else f"{unit} {done:,} of {total:,}"]
    if total is not None and done > before:
        left = round(seconds * (total - done) / (done - before))
        parts.append(f"about {left // 60}:{left % 60:02} left")
    return ", ".join(parts) + (f": {said}" if said else "")


def print_json(value: Any) -> None:
    """One JSON value on stdout, and nothing else; ASCII only, so that no terminal or pipe can spoil it."""
    sys.stdout.write(json_text(value))
