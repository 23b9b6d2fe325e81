"""`locant vocabulary` in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from locant.checkpoints.vocabulary import Change
from locant.report.console import named_rows, show

__all__ = ["print_change"]


def print_change(change: Change, files: Sequence[str]) -> None:
    """What was written, and what it costs these files in tokens."""
    rows = named_rows()
    rows.add_row("wrote", change.output)
    rows.add_row("rows", f"{change.before:,} → {change.rows:,}, for {change.tokens:,} tokens")
    rows.add_row("tensors", ", ".join(change.tensors))
    if change.corpus_before and change.corpus_after is not None:
        more = change.corpus_after / change.corpus_before - 1
        rows.add_row("texts", ", ".join(files))
        rows.add_row("their tokens", f"{change.corpus_before:,} → {change.corpus_after:,} ({more:+.1%})")
    if change.left_out:
        rows.add_row("left out", f"{', '.join(change.left_out)}: not of this vocabulary, or not known")
    show(rows)
