"""Pictures of the encodings made of waves and tables: sinusoidal, rotary, xPos and learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from locant.figures.canvas import ANGLES, LIGHT, SIGNED, Theme, add_legend, blank, dress, stroke
from locant.positions import Learned, Positions, Rotary, Sinusoidal, XPos

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["draw_learned", "draw_rotary", "draw_sinusoidal", "draw_xpos"]

NUM_CURVES = 5


def draw_sinusoidal(encoding: Sinusoidal, length: int, theme: Theme = LIGHT) -> Figure:
    """Every dimension of every position as a heat map, and a few dimensions as curves over the same positions."""
    vectors = encoding.vectors(Positions.arange(length))[0].numpy()
    figure = blank(9.5, 6.6, theme)
    (top, bottom), (side, key) = _rows_with_sides(figure, (3.0, 2.0))
    _bar(_map(top, vectors.T, SIGNED, -1.0, 1.0), side, theme, "added to the embedding")
    title = f"Sinusoidal positions, d_model {encoding.d_model}, base {encoding.base:g}"
    dress(top, theme, title=title, x="", y="dimension")
    for number, pair in enumerate(_spread((encoding.d_model + 1) // 2)):
        frequency = float(encoding.angles.frequencies[pair])
        _curve(bottom, vectors[:, 2 * pair], number, theme, f"{2 * pair}: every {_period(frequency)}")
    dress(bottom, theme, title="A few sine dimensions", x="position (tokens)", y="value", grid=True)
    _key(bottom, key, theme, "dimension: one wave in tokens")
    return figure


def draw_rotary(encoding: Rotary, length: int, theme: Theme = LIGHT) -> Figure:
    """The angle of every pair, its cosine, and the cosine of a few pairs as curves."""
    cos, sin = (part[0].numpy() for part in encoding.cos_sin(Positions.arange(length)))
    figure = blank(9.5, 8.8, theme)
    (top, middle, bottom), (side, middle_side, key) = _rows_with_sides(figure, (3.0, 3.0, 2.4))
    bar = _bar(_map(top, np.arctan2(sin, cos).T, ANGLES, -math.pi, math.pi), side, theme, "angle (radians)")
    bar.set_ticks([-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], labels=["−π", "−π/2", "0", "π/2", "π"])
    size = (
        f"{encoding.rotary_dim} of {encoding.head_dim} dimensions"
        if encoding.rotary_dim < encoding.head_dim
        else f"head_dim {encoding.head_dim}"
    )
    title = f"Rotary positions, {size}, base {encoding.base:g}: the angle by which each pair is turned"
    dress(top, theme, title=title, x="", y="pair")
    _bar(_map(middle, cos.T, SIGNED, -1.0, 1.0), middle_side, theme, "cosine")
    dress(middle, theme, title="Its cosine", x="", y="pair")
    for number, pair in enumerate(_spread(encoding.rotary_dim // 2)):
        _curve(
            bottom, cos[:, pair], number, theme, f"{pair}: every {_period(float(encoding.angles.frequencies[pair]))}"
        )
    dress(bottom, theme, title="The cosine of a few pairs", x="position (tokens)", y="cosine", grid=True)
    _key(bottom, key, theme, "pair: one turn in tokens")
    return figure


def draw_xpos(encoding: XPos, length: int, theme: Theme = LIGHT) -> Figure:
    """What is left of each pair's part of q . k at every distance: it turns, and it fades."""
    frequency = np.array([float(each) for each in encoding.angles.frequencies])[:, None]
    fading = encoding.fading.on(torch.device("cpu")).numpy()[:, None]
    distance = np.arange(length)
    product = np.cos(frequency * distance) * np.exp(fading * distance)
    figure = blank(9.5, 6.6, theme)
    (top, bottom), (side, key) = _rows_with_sides(figure, (3.0, 2.0))
    _bar(_map(top, product, SIGNED, -1.0, 1.0), side, theme, "share of the pair's product")
    title = f"xPos, head_dim {encoding.head_dim}, base {encoding.base:g}, scale base {encoding.scale_base:g}"
    dress(top, theme, title=title, x="", y="pair")
    for number, pair in enumerate(_spread(encoding.head_dim // 2)):
        keeps = math.exp(float(fading[pair, 0]) * length)
        _curve(bottom, product[pair], number, theme, f"{pair}: {keeps:.2f}")
    dress(bottom, theme, title="A few pairs", x="distance (tokens)", y="share", grid=True)
    _key(bottom, key, theme, f"pair: what is left at {length}")
    return figure


def draw_learned(encoding: Learned, length: int, theme: Theme = LIGHT) -> Figure:
    """The table, and how alike the rows of any two positions are."""
    rows = encoding.weight.detach().float()[encoding.offset :][:length]
    unit = torch.nn.functional.normalize(rows, dim=1)
    figure = blank(11.0, 4.7, theme)
    left, right = figure.subplots(1, 2)
    reach = max(float(rows.abs().quantile(0.995)) if rows.numel() < 2**24 else float(rows.abs().max()), 1e-12)
    left.set_box_aspect(1)
    right.set_box_aspect(1)
    _bar(_map(left, rows.numpy().T, SIGNED, -reach, reach), None, theme, "added to the embedding")
    title = f"Learned positions: {encoding.max_seq_len} rows of d_model {encoding.d_model}"
    dress(left, theme, title=title, x="position (tokens)", y="dimension")
    _bar(_map(right, (unit @ unit.T).numpy(), SIGNED, -1.0, 1.0), None, theme, "cosine")
    dress(right, theme, title="How alike two positions are", x="position (tokens)", y="position (tokens)")
    return figure


def _rows_with_sides(figure: Figure, heights: tuple[float, ...]) -> tuple[Sequence[Axes], Sequence[Axes]]:
    """Rows over one shared axis of positions, and beside each an empty place for its colour bar or legend."""
    grid = figure.subplots(len(heights), 2, sharex="col", height_ratios=heights, width_ratios=(1, 0.24))
    for side in grid[:, 1]:
        side.axis("off")
    return grid[:, 0], grid[:, 1]


def _map(axes: Axes, values: np.ndarray, colors: str, low: float, high: float) -> AxesImage:
    """A heat map whose pixels are centred on whole numbers, with row 0 at the top."""
    return axes.imshow(values, cmap=colors, vmin=low, vmax=high, aspect="auto", interpolation="nearest")


def _bar(image: AxesImage, side: Axes | None, theme: Theme, label: str) -> Colorbar:
    """The scale of a heat map: at the left edge of `side`, or taken from the map's own place."""
    place: dict[str, Any] = {"ax": image.axes, "pad": 0.02, "fraction": 0.05}
    if side is not None:
        place = {"cax": side.inset_axes((0.0, 0.0, 0.09, 1.0))}
    bar = image.axes.figure.colorbar(image, **place)
    bar.set_label(label, fontsize=9, color=theme.muted)
    bar.ax.tick_params(colors=theme.muted, labelsize=8.5)
    bar.outline.set_visible(False)
    return bar


def _curve(axes: Axes, values: np.ndarray, number: int, theme: Theme, label: str) -> None:
    look = stroke(number, theme)
    axes.plot(values, color=look.color, linestyle=look.linestyle, linewidth=1.6, label=label)


def _key(axes: Axes, side: Axes, theme: Theme, title: str) -> None:
    """The legend of `axes`, at the left edge of `side`."""
    handles, labels = axes.get_legend_handles_labels()
    add_legend(side, theme, title=title, handles=handles, labels=labels, loc="upper left", borderaxespad=0.0)


def _spread(count: int) -> list[int]:
    """A few numbers below `count`: the first, and others ever farther apart up to three quarters of the way.

    >>> _spread(64)
    [0, 8, 16, 24, 32]
    """
    return sorted({step * (count // 2) // (NUM_CURVES - 1) for step in range(NUM_CURVES)})


def _period(frequency: float) -> str:
    """The length of a wave in tokens, with three digits.

    >>> _period(1.0), _period(0.0001)
    ('6.28', '62,800')
    """
    period = 2 * math.pi / frequency
    return f"{period:.3g}" if period < 1000 else f"{round(period, 2 - math.floor(math.log10(period))):,.0f}"
