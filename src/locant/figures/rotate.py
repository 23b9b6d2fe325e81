"""Draw rotations of queries and keys: angles, products by distance, scalings, and measurements of `probe`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from locant.errors import InputError
from locant.figures import SIZES
from locant.figures.canvas import ANGLES, LIGHT, SIGNED, Theme
from locant.figures.scores import num_heads_of
from locant.positions import PositionEncoding, Positions
from locant.positions.rotary_by_class import products
from locant.probing.bias import BiasReport
from locant.probing.report import Report, RotationReport
from locant.spelling import spell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MIN_ERROR = 1e-9
"""The value that is drawn on a logarithmic scale for an error of zero."""
Lengths = list[float | None]
NUM_CURVES = 5


def draw_rotary(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the angle of every pair, its cosine, the cosine of a few pairs as curves, and the mean over all pairs."""
    cos, sin = (each[0].numpy() for each in encoding.cos_sin(Positions.arange(length)))
    (top, middle, bottom), (side, middle_side, key) = _rows_with_sides(part, (3.0, 3.0, 2.6))
    title = "The angle by which each pair of dimensions is rotated"
    image = theme.heat_map(top, np.arctan2(sin, cos).T, ANGLES, -math.pi, math.pi, title=title, y="pair")
    bar = theme.color_bar(image, "angle (radians)", cax=side)
    bar.set_ticks([-math.pi, -math.pi / 2, 0, math.pi / 2, math.pi], labels=["−π", "−π/2", "0", "π/2", "π"])
    size = f"head_dim {encoding.head_dim}"
    if encoding.rotary_dim < encoding.head_dim:
        size = f"{encoding.rotary_dim} of {encoding.head_dim} dimensions"
    theme.set_title(part, f"Rotary positions (RoPE), {size}, base {spell(encoding.base, 10)}")
    theme.heat_map(middle, cos.T, SIGNED, -1.0, 1.0, "The cosine of the angle", "", "pair", "cosine", cax=middle_side)
    _pairs(bottom, key, cos.T, encoding, theme, "position, or distance of query and key (tokens)", "cosine")


def draw_xpos(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the product of each pair by distance. The products oscillate and fade."""
    frequency = np.array([float(each) for each in encoding.angles.frequencies])[:, None]
    fading = encoding.fading.on(torch.device("cpu")).numpy()[:, None]
    distance = np.arange(length)
    product = np.cos(frequency * distance) * np.exp(fading * distance)
    (top, bottom), (side, key) = _rows_with_sides(part, (3.0, 2.6))
    sizes = f"head_dim {encoding.head_dim}, base {spell(encoding.base, 10)}, scale base {spell(encoding.scale_base)}"
    theme.set_title(part, f"xPos, {sizes}")
    labels = "Each pair's product, relative to distance 0", "", "pair", "relative product"
    theme.heat_map(top, product, SIGNED, -1.0, 1.0, *labels, cax=side)
    _pairs(bottom, key, product, encoding, theme, "distance of query and key (tokens)", "relative product")


def draw_rotated(part: Figure | SubFigure, encoding: PositionEncoding, length: int, theme: Theme) -> None:
    """Draw a query of ones after its rotation to every position, and its product with a key of ones by distance."""
    width = getattr(encoding, "head_dim", SIZES["head_dim"])
    ones = torch.ones(1, num_heads_of(encoding), length, width)  # if heads differ, the first is drawn
    with torch.no_grad():
        q, k = (
            x[0, 0].float() for x in encoding.rotate(ones, ones.clone(), _positions_with_features(encoding, length))
        )
    left, right = part.subplots(1, 2)
    reach = float(q.abs().max())
    labels = "A query of ones, rotated", "position (tokens)", "dimension", "value"
    theme.heat_map(left, q.numpy().T, SIGNED, -reach, reach, *labels)
    theme.curve(right, (k.flip(0) @ q[-1] / width).numpy(), 0)
    theme.style_axes(
        right, title="Its product with a key of ones", x="distance (tokens)", y="q · k / head_dim", grid=True
    )
    theme.set_title(part, f"{type(encoding).__name__}, head_dim {width}")


def _positions_with_features(encoding: PositionEncoding, length: int) -> Positions:
    """Return the first `length` positions with the features of random tokens."""
    tokens = torch.randn(1, length, getattr(encoding, "d_model", 1), generator=torch.Generator().manual_seed(0))
    return encoding.read(tokens, Positions.arange(length))


def rotates(encoding: PositionEncoding) -> bool:
    """Return whether `rotate` changes queries or keys. Inkling's `rotate` does not, unless it has a temperature."""
    q, k = torch.ones(2, 1, num_heads_of(encoding), 1, getattr(encoding, "head_dim", SIZES["head_dim"]))
    rotated = encoding.rotate(q, k, _positions_with_features(encoding, 1))
    return rotated[0] is not q or rotated[1] is not k


def draw_by_class(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the product of a query of ones and a key of ones, for every pair of tokens and for the last query."""
    ones = torch.ones(1, 1, length, encoding.head_dim)
    with torch.no_grad():
        product = products(encoding.pair_classes(Positions.arange(length)), ones, ones)[0, 0].numpy()
    _draw_products(part, encoding, product / encoding.head_dim, theme)


def draw_between(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme) -> None:
    """Draw the product of a query of ones and a key of ones, with the matrices of random tokens between them."""
    ones = torch.ones(1, encoding.num_heads, length, encoding.head_dim)
    with torch.no_grad():
        tokens = _positions_with_features(encoding, length)
        product = encoding.pair_sets(ones, ones, ones, tokens, tokens).products(length)[0, 0].numpy()
    _draw_products(part, encoding, np.tril(product) / encoding.head_dim, theme)


def _draw_products(part: Figure | SubFigure, encoding: Any, product: np.ndarray, theme: Theme) -> None:
    left, right = part.subplots(1, 2)
    labels = "Product of a query and a key of ones", "key", "query", "q · k / head_dim"
    theme.heat_map(left, product, SIGNED, -1.0, 1.0, *labels)
    theme.curve(right, product[-1, ::-1], 0)
    theme.style_axes(right, title="For the last query", x="distance (tokens)", y="q · k / head_dim", grid=True)
    theme.set_title(part, f"{type(encoding).__name__}, head_dim {encoding.head_dim}")


def _pairs(axes: Axes, key: Axes, by_pair: np.ndarray, encoding: Any, theme: Theme, x: str, y: str) -> None:
    """Draw a few pairs as curves, and the mean of all pairs, which is the product of two vectors of ones."""
    count = len(by_pair)
    for number, pair in enumerate(sorted({step * (count // 2) // (NUM_CURVES - 1) for step in range(NUM_CURVES)})):
        label = f"{pair}: {wavelength_text(float(encoding.angles.frequencies[pair]))}"
        theme.curve(axes, by_pair[pair], number, label=label)
    axes.plot(by_pair.mean(0), color=theme.ink, linewidth=2.6, label="all: mean")
    theme.style_axes(axes, title="A few pairs, and the mean of all", x=x, y=y, grid=True)
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "upper left", "borderaxespad": 0.0, "handles": handles, "labels": labels}
    theme.legend(key, title="pair: wavelength in tokens", **place)


def _rows_with_sides(part: Figure | SubFigure, heights: tuple[float, ...]) -> tuple[Sequence[Axes], Sequence[Axes]]:
    """Return rows of axes with a shared axis of positions, and for each row the axes of its colour bar or legend."""
    grid = part.subplots(len(heights), 2, sharex="col", height_ratios=heights, width_ratios=(1, 0.24))
    for side in grid[:, 1]:
        side.axis("off")
    return grid[:, 0], [*(side.inset_axes((0.0, 0.0, 0.09, 1.0)) for side in grid[:-1, 1]), grid[-1, 1]]


def wavelength_text(frequency: float) -> str:
    """Return the wavelength in tokens, with three digits."""
    if not frequency:
        return "endless"
    length = 2 * math.pi / frequency
    return spell(length, 3) if length < 1000 else f"{round(length, 2 - math.floor(math.log10(length))):,.0f}"


class Wavelengths(NamedTuple):
    """The wavelengths of each pair in positions, or ``None`` if it is not rotated. `marks` are lengths by name."""

    title: str
    before: Lengths
    after: Lengths
    marks: Mapping[str, int]


def draw_wavelengths(rows: Sequence[Wavelengths], *names: str) -> Figure:
    """For each row, draw the wavelengths before and after, labelled with `names`, and their ratio."""
    figure = LIGHT.blank(10.5, 0.6 + 3.6 * len(rows))
    for row, axes in zip(rows, figure.subplots(len(rows), 2, squeeze=False, width_ratios=(3, 2)), strict=True):
        _draw_row(row, axes, names, LIGHT)
    return figure


def draw_scaled(part: Figure | SubFigure, encoding: Any, length: int, theme: Theme, trained: int | None = None) -> None:
    """Draw the wavelengths of a scaled rotary encoding and of the same encoding without scaling.

    Frequencies that depend on the length of the sequence are drawn for factor x trained length.
    """
    scaling, name = encoding.scaling, type(encoding.scaling).__name__
    factor = getattr(scaling, "factor", None)
    trained = getattr(scaling, "original_max_seq_len", trained)
    longest = encoding.seq_len or round((trained or 0) * (1.0 if factor is None else factor))
    plain = encoding.replace(scaling=None, seq_len=None)
    scaled = encoding if scaling.length_threshold is None else encoding.for_length(max(longest, 1))
    before, after = (
        [2 * math.pi / float(each) if each else None for each in one.angles.frequencies] for one in (plain, scaled)
    )
    marks = {name: mark for name, mark in (("trained", trained), ("scaled to", longest)) if mark}
    row = Wavelengths("Wavelength of each pair of dimensions", before, after, marks)
    description = name if factor is None else f"{name}, factor {spell(factor)}"
    theme.set_title(part, f"RoPE, head_dim {encoding.head_dim}, base {spell(encoding.base, 10)}: {description}")
    _draw_row(row, part.subplots(1, 2, width_ratios=(3, 2)), ("without scaling", name), theme)


def _draw_row(row: Wavelengths, axes: Sequence[Axes], names: Sequence[str], theme: Theme) -> None:
    left, right = axes
    for number, (name, waves) in enumerate(zip(names, (row.before, row.after), strict=True)):
        if num_fixed := waves.count(None):
            name = f"{name}; {num_fixed} pairs are not rotated"
        theme.curve(left, [math.nan if wave is None else wave for wave in waves], number, label=name)
    left.set_yscale("log")
    theme.style_axes(left, title=row.title, x="pair of dimensions", y="wavelength (positions)", grid=True)
    for length, name in {length: name for name, length in row.marks.items()}.items():
        left.axhline(length, color=theme.muted, linewidth=1.0, linestyle=":")
        place = {"xytext": (2, 3), "textcoords": "offset points", "color": theme.muted, "fontsize": 8.5}
        left.annotate(f"{name} {length:,}", (0, length), **place)  # type: ignore[arg-type]
    theme.legend(left, loc="lower right")
    pairs = zip(row.before, row.after, strict=True)
    theme.curve(right, [after / before if before and after else math.nan for before, after in pairs], 1)
    right.set_ylim(bottom=0)
    right.set_xlim(left.get_xlim())
    theme.style_axes(right, title="Stretched by", x="pair of dimensions", y="factor", grid=True)


def draw_report(report: Report, theme: Theme = LIGHT) -> Figure:
    """Draw the frequencies and errors of a rotation, or the slopes of a linear bias."""
    if isinstance(report, BiasReport) and report.slopes is not None:
        figure = theme.blank(6.0, 3.8)
        axes, (color, _, marker) = figure.subplots(), theme.stroke(0)
        axes.plot(range(len(report.slopes)), report.slopes, color=color, marker=marker)
        theme.style_axes(axes, title="Slope of each head", x="head", y="bias per token of distance", grid=True)
    elif isinstance(report, RotationReport) and report.queries.blocks:
        figure = theme.blank(10.5, 4.2)
        left, right = figure.subplots(1, 2)
        _draw_frequencies(left, report, theme)
        _draw_errors(right, report, theme)
    else:
        got = f"got a report on {report.subject}, which neither rotates pairs nor adds a linear bias"
        raise InputError(got, "print(report)")
    theme.set_title(figure, f"{report.subject}: {report.encoding or 'no encoding of locant'}")
    return figure


def _draw_frequencies(axes: Axes, report: RotationReport, theme: Theme) -> None:
    for axis in range(report.axes):
        blocks = enumerate(report.queries.blocks)
        if points := [(pair, abs(value)) for pair, block in blocks if (value := block.frequencies[axis])]:
            color, _, marker = theme.stroke(axis)
            label = f"axis {axis}" if report.axes > 1 else "measured"
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle="", markersize=4, label=label)
    axes.set_yscale("log")
    theme.style_axes(axes, title="Frequency of each pair", x="pair of dimensions", y="radians per position", grid=True)
    theme.legend(axes, loc="upper right")


def _draw_errors(axes: Axes, report: RotationReport, theme: Theme) -> None:
    color, line, marker = theme.stroke(0)
    values = [max(error, MIN_ERROR) for error in report.errors.values()]
    axes.plot(
        [*report.errors], values, color=color, linestyle=line, marker=marker, markersize=4, label="without a cast"
    )
    for number, (dtype, (error, _)) in enumerate(report.casts.items(), 1):
        color, line, _ = theme.stroke(number)
        axes.axhline(max(error, MIN_ERROR), color=color, linestyle=line, label=f"cast to {dtype}, up to 4,097")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    theme.style_axes(axes, title="Largest error of an angle", x="position", y="radians", grid=True)
    theme.legend(axes, loc="lower right")
