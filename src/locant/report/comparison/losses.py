"""The results of a comparison in a terminal: a line for every finished training, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.report.comparison.reading import read
from locant.report.comparison.summary import Row, Summary
from locant.report.console import BEST, QUIET, out, show, table

__all__ = ["print_losses", "record_line"]


def record_line(record: Mapping[str, Any]) -> str:
    """One training in one line.

    >>> record_line({"encoding": "alibi", "seed": 0, "loss_by_length": {"64": 2.31, "128": None}, "seconds": 9.25})
    'alibi        seed 0   64: 2.310   128: –       9 s'
    """
    losses = [
        f"{length}: {'–' if loss is None else f'{loss:.3f}':<5}" for length, loss in record["loss_by_length"].items()
    ]
    return f"{record['encoding']:<12} seed {record['seed']:<3} {'   '.join(losses)}   {record['seconds']:.0f} s"


def print_losses(summary: Summary) -> None:
    """The table of loss against length, best first at the longest, and what it says."""
    from rich.text import Text

    console = out()
    lengths, longest = summary.lengths, summary.lengths[-1]
    between = " " if console.width >= 24 + 19 * len(lengths) else "\n"
    rows = table(
        title="Held-out loss (nats per token)" + (", mean ± deviation over seeds" if summary.num_seeds > 1 else "")
    )
    rows.add_column("encoding", no_wrap=True)
    for length in lengths:
        rows.add_column(f"{length:,} ({length / summary.train_length:g}×)", justify="right", overflow="fold")
    rows.add_column(f"{longest:,} : {summary.base_length:,}", justify="right", style=QUIET, overflow="fold")
    best = {length: row.encoding for length in lengths if (row := summary.best(length))}
    for row in summary.ranked(longest):
        marks = [best.get(length) == row.encoding for length in lengths]
        cells = [_loss(row, length, between, marked=mark) for length, mark in zip(lengths, marks, strict=True)]
        styled = [Text(cell, BEST if mark else "") for cell, mark in zip(cells, marks, strict=True)]
        ratio = row.ratio(longest, summary.base_length)
        rows.add_row(row.encoding, *styled, "–" if ratio is None else f"×{ratio:.2f}")
    show(console, rows)
    show(console)
    for sentence in read(summary):
        show(console, f"· {sentence}")


def _loss(row: Row, length: int, between: str, *, marked: bool) -> str:
    """The best is marked by a star too, for where there is no colour."""
    cell = row.by_length.get(length)
    if cell is None:
        return "–"
    return (
        ("* " if marked else "")
        + f"{cell.mean:.3f}"
        + (f"{between}± {cell.deviation:.3f}" if row.num_seeds > 1 else "")
    )
