"""Pictures of what rotates queries and keys: angles, and what the rotation makes of their product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from locant.figures import SIZES
from locant.figures.canvas import ANGLES, SIGNED, Theme, heat_map
from locant.figures.scores import num_heads_of
from locant.positions import PositionEncoding, Positions, Rotary, XPos
from locant.positions.rotary_by_class import RotaryByClass, products

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["draw_by_class", "draw_rotary", "draw_rotated", "draw_xpos", "rotates", "wavelength_text"]

NUM_CURVES = 5


def draw_rotary(part: Figure | SubFigure, encoding: Rotary, length: int, theme: Theme) -> None:
    """The angle of every pair, its cosine, the cosine of a few pairs as curves, and the mean over all pairs."""
    cos, sin = (each[0].numpy() for each in encoding.cos_sin(Positions.arange(length)))
    (top, middle, bottom), (side, middle_side, key) = _rows_with_sides(part, (3.0, 3.0, 2.6))
    image = heat_map(top, np.arctan2(sin, cos).T, ANGLES, -math.pi, math.pi)
    bar = theme.color_bar(image, "angle (radians)", cax=_beside(side))
    bar.set_ticks([-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], labels=["−π", "−π/2", "0", "π/2", "π"])
    size = f"head_dim {encoding.head_dim}"
    if encoding.rotary_dim < encoding.head_dim:
        size = f"{encoding.rotary_dim} of {encoding.head_dim} dimensions"
    theme.entitle(part, f"Rotary positions (RoPE), {size}, base {encoding.base:g}")
    theme.dress(top, title="The angle by which each pair of dimensions is rotated", x="", y="pair")
    theme.color_bar(heat_map(middle, cos.T, SIGNED, -1.0, 1.0), "cosine", cax=_beside(middle_side))
    theme.dress(middle, title="Its cosine", x="", y="pair")
    _pairs(bottom, key, cos.T, encoding, theme, "position, or distance of query and key (tokens)", "cosine")


def draw_xpos(part: Figure | SubFigure, encoding: XPos, length: int, theme: Theme) -> None:
    """What is left of each pair's part of q . k at every distance: it oscillates, and it fades."""
    frequency = np.array([float(each) for each in encoding.angles.frequencies])[:, None]
    fading = encoding.fading.on(torch.device("cpu")).numpy()[:, None]
    distance = np.arange(length)
    product = np.cos(frequency * distance) * np.exp(fading * distance)
    (top, bottom), (side, key) = _rows_with_sides(part, (3.0, 2.6))
    sizes = f"head_dim {encoding.head_dim}, base {encoding.base:g}, scale base {encoding.scale_base:g}"
    theme.entitle(part, f"xPos, {sizes}")
    image = heat_map(top, product, SIGNED, -1.0, 1.0)
    theme.color_bar(image, "share of the pair's product", cax=_beside(side))
    theme.dress(top, title="What is left of each pair's product", x="", y="pair")
    _pairs(bottom, key, product, encoding, theme, "distance of query and key (tokens)", "share")


def draw_rotated(part: Figure | SubFigure, encoding: PositionEncoding, length: int, theme: Theme) -> None:
    """A query of ones, rotated to every position; and its product with a key of ones at every distance."""
    width = getattr(encoding, "head_dim", SIZES["head_dim"])
    ones = torch.ones(1, num_heads_of(encoding), length, width)  # of heads that differ, the first is drawn
    with torch.no_grad():
        q, k = (x[0, 0].float() for x in encoding.rotate(ones, ones.clone(), _read(encoding, length)))
    left, right = part.subplots(1, 2)
    reach = float(q.abs().max())
    theme.color_bar(heat_map(left, q.numpy().T, SIGNED, -reach, reach), "value")
    theme.dress(left, title="A query of ones, rotated", x="position (tokens)", y="dimension")
    theme.curve(right, (k.flip(0) @ q[-1] / width).numpy(), 0)
    theme.dress(right, title="Its product with a key of ones", x="distance (tokens)", y="q · k / head_dim", grid=True)
    theme.entitle(part, f"{type(encoding).__name__}, head_dim {width}")


def _read(encoding: PositionEncoding, length: int) -> Positions:
    """The first positions, with what is read of tokens of different contents."""
    generator = torch.Generator().manual_seed(0)
    return encoding.read(
        torch.randn(1, length, getattr(encoding, "d_model", 1), generator=generator), Positions.arange(length)
    )


def rotates(encoding: PositionEncoding) -> bool:
    """Whether queries and keys come out as anything else: Inkling's do not without a temperature."""
    q, k = torch.ones(2, 1, num_heads_of(encoding), 1, getattr(encoding, "head_dim", SIZES["head_dim"]))
    rotated = encoding.rotate(q, k, _read(encoding, 1))
    return rotated[0] is not q or rotated[1] is not k


def draw_by_class(part: Figure | SubFigure, encoding: RotaryByClass, length: int, theme: Theme) -> None:
    """The product of a query of ones with a key of ones, for every pair, and for the last query."""
    ones = torch.ones(1, 1, length, encoding.head_dim)
    with torch.no_grad():
        product = (
            products(encoding.pair_classes(Positions.arange(length)), ones, ones)[0, 0] / encoding.head_dim
        ).numpy()
    left, right = part.subplots(1, 2)
    theme.color_bar(heat_map(left, product, SIGNED, -1.0, 1.0), "q · k / head_dim")
    theme.dress(left, title="The product of ones, of every pair", x="key", y="query")
    theme.curve(right, product[-1, ::-1], 0)
    theme.dress(right, title="For the last query", x="distance (tokens)", y="q · k / head_dim", grid=True)
    theme.entitle(part, f"{type(encoding).__name__}, head_dim {encoding.head_dim}")


def _pairs(axes: Axes, key: Axes, by_pair: np.ndarray, encoding: Rotary | XPos, theme: Theme, x: str, y: str) -> None:
    """A few pairs as curves, and the mean of all: what is left of the product of two vectors of ones."""
    count = len(by_pair)
    for number, pair in enumerate(sorted({step * (count // 2) // (NUM_CURVES - 1) for step in range(NUM_CURVES)})):
        label = f"{pair}: {wavelength_text(float(encoding.angles.frequencies[pair]))}"
        theme.curve(axes, by_pair[pair], number, label=label)
    axes.plot(by_pair.mean(0), color=theme.ink, linewidth=2.6, label="all: mean")
    theme.dress(axes, title="A few pairs, and the mean of all", x=x, y=y, grid=True)
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "upper left", "borderaxespad": 0.0}
    theme.legend(key, title="pair: wavelength in tokens", handles=handles, labels=labels, **place)


def _rows_with_sides(part: Figure | SubFigure, heights: tuple[float, ...]) -> tuple[Sequence[Axes], Sequence[Axes]]:
    """Rows over one shared axis of positions, and beside each an empty place for its colour bar or legend."""
    grid = part.subplots(len(heights), 2, sharex="col", height_ratios=heights, width_ratios=(1, 0.24))
    for side in grid[:, 1]:
        side.axis("off")
    return grid[:, 0], grid[:, 1]


def _beside(side: Axes) -> Axes:
    return side.inset_axes((0.0, 0.0, 0.09, 1.0))


def wavelength_text(frequency: float) -> str:
    """The wavelength in tokens, with three digits."""
    if not frequency:
        return "endless"
    length = 2 * math.pi / frequency
    return f"{length:.3g}" if length < 1000 else f"{round(length, 2 - math.floor(math.log10(length))):,.0f}"
