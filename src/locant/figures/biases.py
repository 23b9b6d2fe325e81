"""Pictures of the encodings that add to the attention scores: ALiBi, T5's relative bias, and any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from locant.errors import InputError
from locant.figures.canvas import LIGHT, MAGNITUDES, SIGNED, Theme, add_legend, blank, dress, stroke
from locant.positions import ALiBi, PositionEncoding, Positions, T5Bias
from locant.positions.heads import Heads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["draw_alibi", "draw_any_bias", "draw_t5"]

NUM_MAPS = 4
NUM_CURVES = 8
FREE_HEADS = 4
WIDTHS = (1, 1.18)


def draw_alibi(encoding: ALiBi, length: int, theme: Theme = LIGHT) -> Figure:
    """The bias of every head by distance, and as query x key maps, each on a scale of its own."""
    bias = _bias(encoding, length)
    names = [f"head {head}: slope {slope:.4g}" for head, slope in enumerate((-bias[:, 1, 0]).tolist())]
    figure = blank(11.5, 5.2, theme)
    left, right = _halves(figure)
    axes = left.subplots()
    _curves(axes, bias[:, -1, ::-1], names, theme)
    title = f"ALiBi: what {len(bias)} heads add to the scores"
    dress(axes, theme, title=title, x="distance (tokens)", y="added to the score", grid=True)
    add_legend(axes, theme, loc="lower left")
    _maps(right, bias, theme, MAGNITUDES, None)
    return figure


def draw_t5(encoding: T5Bias, length: int, theme: Theme = LIGHT) -> Figure:
    """The bias of every head by distance, with its steps, and as query x key maps on one scale."""
    bias = _bias(encoding, length)
    figure = blank(11.5, 5.2, theme)
    left, right = _halves(figure)
    axes = left.subplots()
    heads = _some(len(bias), NUM_MAPS)
    _curves(axes, bias[heads, -1, ::-1], [f"head {head}" for head in heads], theme, steps=True)
    title = f"T5 bias: {encoding.num_buckets} buckets, {len(bias)} heads"
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


def draw_any_bias(encoding: PositionEncoding, length: int, theme: Theme = LIGHT) -> Figure:
    """What the last query of a window sees, by distance, and query x key maps.

    A bias that depends on what the tokens are is drawn for random queries and keys.
    """
    bias, other = (_bias(encoding, length, seed) for seed in (0, 1))
    name = type(encoding).__name__
    if not bias.any():
        raise InputError(f"{name} adds nothing before it is trained: its table begins as zeros", "a trained one")
    figure = blank(11.5, 5.2, theme)
    left, right = _halves(figure)
    axes = left.subplots()
    heads = _some(len(bias), NUM_MAPS)
    _curves(axes, bias[heads, -1, ::-1], [f"head {head}" for head in heads], theme)
    title = f"{name}: what is added to the scores" + ("" if (bias == other).all() else " of random queries and keys")
    dress(axes, theme, title=title, x="distance (tokens)", y="added to the score", grid=True)
    add_legend(axes, theme, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=4, columnspacing=1.2)
    signed = bias.min() < 0 < bias.max()
    _maps(right, bias, theme, SIGNED if signed else MAGNITUDES, float(np.abs(bias).max()) if signed else None)
    return figure


def _halves(figure: Figure) -> tuple[SubFigure, SubFigure]:
    """Curves stand on the left, maps on the right."""
    left, right = cast("Sequence[SubFigure]", figure.subfigures(1, 2, width_ratios=WIDTHS))
    return left, right


def _bias(encoding: PositionEncoding, length: int, seed: int = 0) -> np.ndarray:
    """The bias, heads x query x key, for random queries and keys: most encodings ask them for their shapes only."""
    heads = getattr(encoding, "heads", None)
    shape = (1, len(heads) if isinstance(heads, Heads) else FREE_HEADS, length, getattr(encoding, "head_dim", 1))
    q, k = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        bias = encoding.bias(q, k, Positions.arange(length))
    return cast("Tensor", bias).expand(1, shape[1], length, length)[0].numpy()


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
        low, high = (float(bias[head].min()), float(max(bias[head].max(), 0))) if reach is None else (-reach, reach)
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
