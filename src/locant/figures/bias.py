"""Pictures of what is added to the attention scores, by distance and as maps of query and key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from locant.figures.canvas import ONE_SIGN, SIGNED, Theme, range_of, spread
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
"""Below minus this, the scale of the maps is logarithmic, or gentle heads would look like none at all."""


def draw_bias(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme, causal: bool | None = None) -> None:
    """What the last query's keys get from every head, by distance; and maps of query and key, all on one scale.

    A bias that depends on what the tokens are is drawn for random ones; tables that begin as zeros are
    drawn with random numbers in them. The title says so.
    """
    title = f"{type(encoding).__name__}: what is added to the scores"
    if not bias_map(encoding, length).any():
        encoding, title = with_random_tables(encoding), f"{title}, with random numbers in tables that begin as zeros"
    bias = bias_map(encoding, length)
    if (bias != bias_map(encoding, length, seed=1)).any():
        title = f"{title}, for random tokens"
    theme.entitle(part, title)
    left, right = part.subfigures(1, 2, squeeze=False, width_ratios=WIDTHS)[0]
    axes, linear, bucketed = left.subplots(), hasattr(encoding, "slopes"), has_buckets(encoding)
    style = "steps-mid" if bucketed else "default"
    for number, head in enumerate(spread(len(bias), NUM_CURVES if linear else NUM_MAPS)):
        slope = f": slope {-bias[head, 1, 0]:.4g}" if linear else ""
        theme.curve(axes, bias[head, -1, ::-1], number, label=f"head {head}{slope}", drawstyle=style)
    axes.margins(x=0.01)
    theme.dress(axes, title="By distance, from the last query back", x="distance (tokens)", y=ADDED, grid=True)
    theme.legend(axes, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2 if linear else 4, columnspacing=1.2)
    if bucketed:
        _scale_as_buckets(axes, encoding, length, theme)
    _maps(right, bias, theme, hide_later=not getattr(encoding, "bidirectional", False) if causal is None else causal)


def draw_offsets(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """What one query's keys get from some heads, as maps of the grid: a query in its middle, and one in its corner."""
    height, width = encoding.height, encoding.width
    title = f"{type(encoding).__name__}: what is added to the scores of one query on a grid of {height} x {width}"
    where = Positions.grid(height, width)
    bias, other = (bias_map(encoding, where.seq_len, seed, where) for seed in (0, 1))
    theme.entitle(part, title if (bias == other).all() else f"{title}, for random tokens")
    heads, places = spread(len(bias), NUM_MAPS), (height // 2 * width + width // 2, 0)
    shown = bias[np.ix_(heads, places)]
    scale = range_of(float(shown.min()), float(shown.max()))
    grid = part.subplots(2, len(heads), sharex=True, sharey=True, squeeze=False)
    for (down, across), axes in np.ndenumerate(grid):
        row, column = divmod(places[down], width)
        title, x = ("", "column of the key") if down else (f"head {heads[across]}", "")
        y, bar = "" if across else "row of the key", "" if down or across else ADDED
        values = shown[across, down].reshape(height, width)
        theme.heat_map(axes, values, *scale, title, x, y, bar, ax=grid, fraction=0.05, pad=0.03)
        axes.set_aspect("equal")
        axes.plot(column, row, marker="o", markersize=6, markerfacecolor="none", color=theme.ink)


def draw_nothing(part: Figure | SubFigure, encoding: PositionEncoding, length: int, theme: Theme) -> None:
    """The causal mask, all that is left to tell the order where an encoding does nothing."""
    name = "NoPE" if type(encoding) is PositionEncoding else type(encoding).__name__
    theme.entitle(part, f"{name} embeds, rotates and biases nothing")
    axes = part.subplots()
    axes.imshow(Positions.arange(length).mask()[0, 0].numpy(), cmap=ONE_SIGN, interpolation="nearest")
    title = "The causal mask alone tells the order:\na query attends to itself and earlier keys (bright)"
    theme.dress(axes, title=title, x="key position", y="query position")


def has_buckets(encoding: PositionEncoding) -> bool:
    """Whether distances share the entries of a table, in buckets that widen: those of T5."""
    return hasattr(encoding, "buckets") and hasattr(encoding, "bidirectional")


def _scale_as_buckets(axes: Axes, encoding: Any, length: int, theme: Theme) -> None:
    """A distance axis on which all buckets are about equally wide: linear, and logarithmic where the buckets are."""
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
        words, place, ends = f"one bucket \nfrom {last} on ", (last, 1.0), ("data", "axes fraction")
        axes.annotate(words, place, xycoords=ends, va="top", ha="right", fontsize=8.5, color=theme.muted)


def _maps(part: SubFigure, bias: np.ndarray, theme: Theme, *, hide_later: bool) -> None:
    """Some heads as maps on one scale; what a causal mask hides is left blank."""
    heads = spread(len(bias), NUM_MAPS)
    hidden = np.triu(np.ones(bias.shape[1:], dtype=bool), 1) & hide_later
    shown = np.ma.masked_array(bias, np.broadcast_to(hidden, bias.shape))
    scale = range_of(min(float(shown.min()), 0.0), max(float(shown.max()), 0.0))
    logarithmic = scale[1] < -STEEP and scale[0] != SIGNED
    rows, columns = (1, len(heads)) if len(heads) <= 2 else (2, 2)
    grid = part.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(heads):
            axes.set_visible(False)
            continue
        x = "key position" if place + columns >= len(heads) else ""
        y, bar = "" if place % columns else "query position", "" if place else ADDED
        words, beside = (f"head {heads[place]}", x, y, bar), {"ax": grid, "fraction": 0.05, "pad": 0.03}
        theme.heat_map(axes, shown[heads[place]], *scale, *words, logarithmic=logarithmic, **beside)
        axes.set_box_aspect(1)
