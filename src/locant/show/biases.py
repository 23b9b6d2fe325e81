"""Pictures of the encodings that add to the attention scores: ALiBi and T5's relative bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from locant.positions import ALiBi, PositionEncoding, Positions, T5Bias
from locant.show.canvas import LIGHT, MAGNITUDES, SIGNED, Theme, add_legend, blank, dress, stroke

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["draw_alibi", "draw_t5"]

NUM_MAPS = 4
NUM_CURVES = 8
WIDTHS = (1, 1.18)


def draw_alibi(encoding: ALiBi, length: int, theme: Theme = LIGHT) -> Figure:
    """The bias of every head by distance, and as query x key maps, each on a scale of its own."""
    bias = _bias(encoding, encoding.num_heads, length)
    names = [f"head {head}: slope {slope:.4g}" for head, slope in enumerate((-bias[:, 1, 0]).tolist())]
    figure = blank(11.5, 5.2, theme)
    left, right = _halves(figure)
    axes = left.subplots()
    _curves(axes, bias[:, -1, ::-1], names, theme)
    title = f"ALiBi: what {encoding.num_heads} heads add to the scores"
    dress(axes, theme, title=title, x="distance (tokens)", y="added to the score", grid=True)
    add_legend(axes, theme, loc="lower left")
    _maps(right, bias, theme, MAGNITUDES, None)
    return figure


def draw_t5(encoding: T5Bias, length: int, theme: Theme = LIGHT) -> Figure:
    """The bias of every head by distance, with its steps, and as query x key maps on one scale."""
    bias = _bias(encoding, encoding.num_heads, length)
    figure = blank(11.5, 5.2, theme)
    left, right = _halves(figure)
    axes = left.subplots()
    heads = _some(encoding.num_heads, NUM_MAPS)
    _curves(axes, bias[heads, -1, ::-1], [f"head {head}" for head in heads], theme, steps=True)
    title = f"T5 bias: {encoding.num_buckets} buckets, {encoding.num_heads} heads"
    dress(axes, theme, title=title, x="distance to an earlier token (tokens)", y="added to the score", grid=True)
    _scale_as_buckets(axes, encoding, length)
    if encoding.max_distance < length:
        axes.axvline(encoding.max_distance, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)))
        place = (encoding.max_distance, 1.0)
        axes.annotate(
            "one bucket\nfor all farther ",
            place,
            xycoords=("data", "axes fraction"),
            va="top",
            ha="right",
            fontsize=8.5,
            color=theme.muted,
        )
    add_legend(axes, theme, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=4, columnspacing=1.2)
    _maps(right, bias, theme, SIGNED, float(np.abs(bias).max()), hide_later=not encoding.bidirectional)
    return figure


def _halves(figure: Figure) -> tuple[SubFigure, SubFigure]:
    """Curves stand on the left, maps on the right."""
    left, right = cast("Sequence[SubFigure]", figure.subfigures(1, 2, width_ratios=WIDTHS))
    return left, right


def _bias(encoding: PositionEncoding, num_heads: int, length: int) -> np.ndarray:
    """The bias, heads x query x key; q and k are asked for their shapes only."""
    q = torch.zeros(1, num_heads, length, 1)
    with torch.no_grad():
        bias = encoding.bias(q, q, Positions.arange(length))
    return cast("Tensor", bias)[0].numpy()  # what is drawn here has this door


def _curves(axes: Axes, by_distance: np.ndarray, names: list[str], theme: Theme, *, steps: bool = False) -> None:
    for number, head in enumerate(_some(len(names), NUM_CURVES)):
        look = stroke(number, theme)
        style = {"color": look.color, "linestyle": look.linestyle, "label": names[head], "linewidth": 1.6}
        axes.plot(by_distance[head], drawstyle="steps-mid" if steps else "default", **style)  # type: ignore[arg-type]
    axes.margins(x=0.01)


def _scale_as_buckets(axes: Axes, encoding: T5Bias, length: int) -> None:
    """A distance axis on which all buckets are about equally wide: linear, and logarithmic where the buckets are."""
    one_sided = encoding.num_buckets // 2 if encoding.bidirectional else encoding.num_buckets
    exact = one_sided // 2
    if length > exact > 1:
        from matplotlib import ticker

        axes.set_xscale("symlog", linthresh=exact, linscale=math.log10(encoding.max_distance / exact))
        ticks = [0, exact // 2, *(exact * 2**step for step in range(16))]
        axes.set_xticks([tick for tick in ticks if tick < length], minor=False)
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlim(-0.5, length - 1)


def _maps(
    part: SubFigure, bias: np.ndarray, theme: Theme, colors: str, reach: float | None, *, hide_later: bool = True
) -> None:
    """Some heads as maps; what a causal mask hides is left blank. Without `reach`, each has a scale from 0 down."""
    heads = _some(len(bias), NUM_MAPS)
    hidden = np.triu(np.ones(bias.shape[1:], dtype=bool), 1) & hide_later
    rows, columns = (1, 1) if len(heads) == 1 else (1, 2) if len(heads) == 2 else (2, 2)
    grid = part.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(heads):
            axes.set_visible(False)
            continue
        head = heads[place]
        low, high = (float(bias[head].min()), 0.0) if reach is None else (-reach, reach)
        shown = np.ma.masked_array(bias[head], hidden)
        image = axes.imshow(shown, cmap=colors, vmin=low, vmax=high, interpolation="nearest")
        bar = part.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
        bar.ax.tick_params(colors=theme.muted, labelsize=8)
        bar.outline.set_visible(False)
        bottom, left = place + columns >= len(heads), place % columns == 0
        dress(axes, theme, title=f"head {head}", x="key position" if bottom else "", y="query position" if left else "")


def _some(count: int, most: int) -> list[int]:
    """At most this many of `count` heads, from the first to the last.

    >>> _some(4, 8), _some(16, 4)
    ([0, 1, 2, 3], [0, 5, 10, 15])
    """
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]
