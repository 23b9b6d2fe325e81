"""The two curves of a comparison: loss against length, and loss against position, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from locant.figures.canvas import LIGHT, Theme
from locant.lab.summary import ENOUGH_WINDOWS, Cell, Row, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_loss_by_length", "draw_loss_by_position"]

NUM_BINS = 32
BAND = 0.18
MISSING = Cell(mean=np.nan, low=np.nan, high=np.nan, deviation=np.nan)


def draw_loss_by_length(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Mean held-out loss at every length, and the training loss; the band goes from the best to the worst seed."""
    figure, axes = _axes(f"Trained at {summary.train_length} tokens, read at more", "window (tokens)", theme)
    for row in summary.ranked(summary.lengths[-1]):
        measured = {float(length): cell for length, cell in row.by_length.items() if cell}
        color, marker = _curve(axes, [*measured], [*measured.values()], summary, row, theme, markersize=5.5)
        if row.train_loss:
            hollow = {"marker": marker, "markersize": 4.5, "markerfacecolor": "none", "linestyle": "none"}
            axes.plot([summary.train_length], [row.train_loss.mean], color=color, **hollow)  # type: ignore[arg-type]
    axes.set_xscale("log", base=2)
    names = [f"{length:,}\n{length / summary.train_length:g}×" for length in summary.lengths]
    axes.set_xticks(summary.lengths, names)
    axes.minorticks_off()
    _mark_training_length(axes, summary, theme)
    if few := [length for length in summary.lengths if not summary.has_enough(length)]:
        words = f"from {few[0]:,} tokens on, not enough text to tell: fewer than {ENOUGH_WINDOWS} windows"
        axes.text(0.99, 0.01, words, transform=axes.transAxes, ha="right", fontsize=8.5, color=theme.muted)
    theme.legend(axes, title=f"at {summary.lengths[-1]:,}, lowest first;\nhollow: training loss")
    return figure


def draw_loss_by_position(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Mean held-out loss at the positions of the longest windows, a few neighbours averaged."""
    longest = summary.lengths[-1]
    figure, axes = _axes(f"Within windows of {longest:,} tokens", "position (tokens)", theme)
    for row in summary.ranked(longest):
        _curve(axes, *_binned(row.by_position), summary, row, theme)
    axes.set_xlim(0, longest)
    if _mark_training_length(axes, summary, theme):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.07 * (high - low))  # room for the words above the curves
        words, place, ends = " not seen in training →", (summary.train_length, 0.985), ("data", "axes fraction")
        axes.annotate(words, place, xycoords=ends, va="top", fontsize=8.5, color=theme.muted)
    theme.legend(axes, title=f"at {longest:,}, lowest first")
    return figure


def _axes(title: str, x: str, theme: Theme) -> tuple[Figure, Axes]:
    figure = theme.blank(8.6, 4.6)
    axes = figure.subplots()
    theme.dress(axes, title=title, x=x, y="loss (nats per token)", grid=True)
    return figure, axes


def _curve(
    axes: Axes, x: Sequence[float], cells: Sequence[Cell], summary: Summary, row: Row, theme: Theme, **style: Any
) -> tuple[str, str]:
    """Mean and band, in a colour and marker that an encoding has in both pictures."""
    color, linestyle, marker = theme.stroke(summary.rows.index(row))
    mean, low, high = ([getattr(cell, name) for cell in cells] for name in ("mean", "low", "high"))
    style = {"marker": marker, **style} if style else {}
    axes.plot(x, mean, color=color, linestyle=linestyle, linewidth=1.8, label=row.encoding, **style)
    axes.fill_between(x, low, high, color=color, alpha=BAND, linewidth=0)
    return color, marker


def _binned(cells: Sequence[Cell | None]) -> tuple[list[float], list[Cell]]:
    """The middles of at most `NUM_BINS` bins of positions, and the means in them; gaps stay gaps."""
    values = np.array([(cell.mean, cell.low, cell.high) for cell in (each or MISSING for each in cells)])
    bins = min(NUM_BINS, len(values))
    middles = [float(part.mean()) for part in np.array_split(np.arange(len(values), dtype=float), bins)]
    means = [part.mean(axis=0).tolist() for part in np.array_split(values, bins)]
    return middles, [Cell(mean=mean, low=low, high=high, deviation=0.0) for mean, low, high in means]


def _mark_training_length(axes: Axes, summary: Summary, theme: Theme) -> bool:
    """Draw a line at the training length, where windows are longer."""
    longer = summary.lengths[-1] > summary.train_length
    if longer:
        axes.axvline(summary.train_length, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
    return longer
