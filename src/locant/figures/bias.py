"""Draw the bias on attention scores, by distance and as maps of query and key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from locant.figures.canvas import ONE_SIGN, SIGNED, Theme, evenly_spaced, range_of
from locant.figures.scores import bias_map, with_random_tables
from locant.positions import PositionEncoding, Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

ADDED = "added to the score"
NUM_MAPS = 4
NUM_CURVES = 8
WIDTHS = (1, 1.18)
STEEP = 10.0
"""Maps with values below minus this number have a logarithmic scale. On a linear scale, small biases would not be
visible.
"""


def draw_bias(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme, causal: bool | None = None) -> None:
    """Draw the bias of the last query's keys by distance, and maps of query and key on one scale.

    A bias that depends on the tokens is drawn for random tokens. If the whole bias is 0, tables that begin as zeros are
    filled with random numbers. The title states this.
    """
    title = f"{type(encoding).__name__}: bias on the scores"
    if not bias_map(encoding, length).any():
        encoding, title = with_random_tables(encoding), f"{title}, with random numbers in tables that begin as zeros"
    bias = bias_map(encoding, length)
    if (bias != bias_map(encoding, length, seed=1)).any():
        title = f"{title}, for random tokens"
    theme.set_title(part, title)
    left, right = part.subfigures(1, 2, squeeze=False, width_ratios=WIDTHS)[0]
    axes, linear, bucketed = left.subplots(), hasattr(encoding, "slopes"), has_buckets(encoding)
    style = "steps-mid" if bucketed else "default"
    for number, head in enumerate(evenly_spaced(len(bias), NUM_CURVES if linear else NUM_MAPS)):
        slope = f": slope {-bias[head, 1, 0]:.4g}" if linear else ""
        theme.curve(axes, bias[head, -1, ::-1], number, label=f"head {head}{slope}", drawstyle=style)
    axes.margins(x=0.01)
    theme.style_axes(axes, title="By distance, from the last query back", x="distance (tokens)", y=ADDED, grid=True)
    theme.legend(axes, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2 if linear else 4, columnspacing=1.2)
    if bucketed:
        _scale_as_buckets(axes, encoding, length, theme)
    _maps(right, bias, theme, hide_later=not getattr(encoding, "bidirectional", False) if causal is None else causal)


def draw_offsets(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the bias of a query in the middle and of a query in a corner as maps of the grid, for some heads."""
    height, width = encoding.height, encoding.width
    title = f"{type(encoding).__name__}: bias on the scores of one query on a grid of {height} x {width}"
    positions = Positions.grid(height, width)
    bias, other = (bias_map(encoding, positions.seq_len, seed, positions) for seed in (0, 1))
    theme.set_title(part, title if (bias == other).all() else f"{title}, for random tokens")
    heads, queries = evenly_spaced(len(bias), NUM_MAPS), (height // 2 * width + width // 2, 0)
    values = bias[np.ix_(heads, queries)]
    scale = range_of(float(values.min()), float(values.max()))
    grid = part.subplots(2, len(heads), sharex=True, sharey=True, squeeze=False)
    for (down, across), axes in np.ndenumerate(grid):
        row, column = divmod(queries[down], width)
        title, x = ("", "column of the key") if down else (f"head {heads[across]}", "")
        y, bar = "" if across else "row of the key", "" if down or across else ADDED
        cells = values[across, down].reshape(height, width)
        theme.heat_map(axes, cells, *scale, title, x, y, bar, ax=grid, fraction=0.05, pad=0.03)
        axes.set_aspect("equal")
        axes.plot(column, row, marker="o", markersize=6, markerfacecolor="none", color=theme.ink)


def draw_nothing(part: Figure | SubFigure, encoding: PositionEncoding, length: int, theme: Theme) -> None:
    """Draw the causal mask. If an encoding has no effect, only this mask shows the order of tokens."""
    name = "NoPE" if type(encoding) is PositionEncoding else type(encoding).__name__
    theme.set_title(part, f"{name} does not embed, rotate or bias")
    axes = part.subplots()
    axes.imshow(Positions.arange(length).mask()[0, 0].numpy(), cmap=ONE_SIGN, interpolation="nearest")
    title = "Only the causal mask shows the order:\na query attends to itself and earlier keys (bright)"
    theme.style_axes(axes, title=title, x="key position", y="query position")


def has_buckets(encoding: PositionEncoding) -> bool:
    """Return whether distances share entries of a table in buckets that grow with the distance, as in T5."""
    return hasattr(encoding, "buckets") and hasattr(encoding, "bidirectional")


def _scale_as_buckets(axes: Axes, encoding: Any, length: int, theme: Theme) -> None:
    """Make the distance axis linear, then logarithmic, so that all buckets have about the same width."""
    one_sided = encoding.num_buckets // 2 if encoding.bidirectional else encoding.num_buckets
    exact = one_sided // 2
    if length > exact > 1:
        axes.set_xscale("symlog", linthresh=exact, linscale=math.log10(encoding.max_distance / exact))
        axes.set_xlabel(f"{axes.get_xlabel()}; linear up to {exact}, then logarithmic")
        ticks = [0, exact // 2, *(exact * 2**step for step in range(16))]
        axes.set_xticks([tick for tick in ticks if tick < length], minor=False)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlim(-0.5, length - 1)
    buckets = encoding.buckets(torch.arange(encoding.max_distance + 1))
    last = int(torch.searchsorted(buckets, buckets[-1]))
    if last < length:
        axes.axvline(last, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)))
        text, point, units = f"one bucket \nfrom {last} on ", (last, 1.0), ("data", "axes fraction")
        axes.annotate(text, point, xycoords=units, va="top", ha="right", fontsize=8.5, color=theme.muted)


def _maps(part: SubFigure, bias: np.ndarray, theme: Theme, *, hide_later: bool) -> None:
    """Draw some heads as maps on one scale. Pairs that a causal mask hides stay blank."""
    heads = evenly_spaced(len(bias), NUM_MAPS)
    hidden = np.triu(np.ones(bias.shape[1:], dtype=bool), 1) & hide_later
    values = np.ma.masked_array(bias, np.broadcast_to(hidden, bias.shape))
    scale = range_of(min(float(values.min()), 0.0), max(float(values.max()), 0.0))
    logarithmic = scale[1] < -STEEP and scale[0] != SIGNED
    rows, columns = (1, len(heads)) if len(heads) <= 2 else (2, 2)
    grid = part.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(heads):
            axes.set_visible(False)
            continue
        x = "key position" if number + columns >= len(heads) else ""
        y, bar = "" if number % columns else "query position", "" if number else ADDED
        labels, bar_place = (f"head {heads[number]}", x, y, bar), {"ax": grid, "fraction": 0.05, "pad": 0.03}
        theme.heat_map(axes, values[heads[number]], *scale, *labels, logarithmic=logarithmic, **bar_place)
        axes.set_box_aspect(1)
