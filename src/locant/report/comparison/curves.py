"""The two curves of a comparison: loss against length, and loss against position, with the spread over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from locant.figures.canvas import LIGHT, Theme, add_legend, blank, dress, stroke
from locant.report.comparison.summary import Row, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_loss_by_length", "draw_loss_by_position"]

NUM_BINS = 32
BAND = 0.18


def draw_loss_by_length(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Mean held-out loss at every length; the band goes from the best to the worst seed."""
    figure = blank(8.6, 4.6, theme)
    axes = figure.subplots()
    for row in summary.ranked(summary.lengths[-1]):
        measured = {length: cell for length, cell in row.by_length.items() if cell}
        means = [cell.mean for cell in measured.values()]
        low, high = [cell.low for cell in measured.values()], [cell.high for cell in measured.values()]
        _curve(
            axes,
            [float(length) for length in measured],
            means,
            low,
            high,
            _number(summary, row),
            theme,
            row.encoding,
            marker=True,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(summary.lengths, [_length_name(length, summary.train_length) for length in summary.lengths])
    axes.minorticks_off()
    dress(
        axes,
        theme,
        title=f"Trained at {summary.train_length} tokens, read at more",
        x="window (tokens)",
        y="held-out loss (nats per token)",
        grid=True,
    )
    _mark_training_length(axes, summary, theme, words=False)
    add_legend(axes, theme, title=f"at {summary.lengths[-1]:,}, best first")
    return figure


def draw_loss_by_position(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Mean held-out loss at the positions of the longest windows, a few neighbours averaged."""
    figure = blank(8.6, 4.6, theme)
    axes = figure.subplots()
    for row in summary.ranked(summary.lengths[-1]):
        places, means, low, high = _binned(row)
        _curve(axes, places, means, low, high, _number(summary, row), theme, row.encoding, marker=False)
    dress(
        axes,
        theme,
        title=f"Within windows of {summary.lengths[-1]:,} tokens",
        x="position (tokens)",
        y="held-out loss (nats per token)",
        grid=True,
    )
    axes.set_xlim(0, summary.lengths[-1])
    _mark_training_length(axes, summary, theme, words=True)
    add_legend(axes, theme, title=f"at {summary.lengths[-1]:,}, best first")
    return figure


def _number(summary: Summary, row: Row) -> int:
    """An encoding has the same stroke in both pictures."""
    return [one.encoding for one in summary.rows].index(row.encoding)


def _curve(
    axes: Axes,
    x: list[float],
    mean: list[float],
    low: list[float],
    high: list[float],
    number: int,
    theme: Theme,
    label: str,
    *,
    marker: bool,
) -> None:
    look = stroke(number, theme)
    style = {"marker": look.marker, "markersize": 5.5} if marker else {}
    axes.plot(x, mean, color=look.color, linestyle=look.linestyle, linewidth=1.8, label=label, **style)  # type: ignore[arg-type]
    axes.fill_between(x, low, high, color=look.color, alpha=BAND, linewidth=0)


def _binned(row: Row) -> tuple[list[float], list[float], list[float], list[float]]:
    """The curve in at most `NUM_BINS` bins: the middle of each, and the means in it. Gaps stay gaps."""
    nothing = (np.nan, np.nan, np.nan)
    values = np.array([(cell.mean, cell.low, cell.high) if cell else nothing for cell in row.by_position])
    places = np.arange(len(values), dtype=float)
    bins = min(NUM_BINS, len(values))
    middles = [float(part.mean()) for part in np.array_split(places, bins)]
    mean, low, high = np.array([part.mean(axis=0) for part in np.array_split(values, bins)]).T
    return middles, mean.tolist(), low.tolist(), high.tolist()


def _mark_training_length(axes: Axes, summary: Summary, theme: Theme, *, words: bool) -> None:
    if summary.lengths[-1] <= summary.train_length:
        return
    axes.axvline(summary.train_length, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
    if words:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.07 * (high - low))  # room for the words above the curves
        axes.annotate(
            " never seen in training →",
            (summary.train_length, 0.985),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8.5,
            color=theme.muted,
        )


def _length_name(length: int, train_length: int) -> str:
    times = length / train_length
    return f"{length:,}\n{times:g}×"
