"""Pictures of frequencies: what a scaling does to the wavelength of each pair; and what `locant.probe` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from locant.errors import InputError
from locant.figures.canvas import LIGHT, Theme
from locant.positions import Rotary
from locant.probing.bias import BiasReport
from locant.probing.report import Report, RotationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Wavelengths", "draw_report", "draw_scaled", "draw_wavelengths"]

LEAST = 1e-9
"""What is drawn of no error at all, on a scale of powers of ten."""

Lengths = list[float | None]


class Wavelengths(NamedTuple):
    """Wavelengths of all pairs, in positions; ``None`` for a pair that is not rotated. `marks` are lengths by name."""

    title: str
    before: Lengths
    after: Lengths
    marks: Mapping[str, int]


def draw_wavelengths(rows: Sequence[Wavelengths], *names: str) -> Figure:
    """For each row, the wavelengths before and after, called by these names, and the ratio of the two."""
    figure = LIGHT.blank(10.5, 0.6 + 3.6 * len(rows))
    for row, axes in zip(rows, figure.subplots(len(rows), 2, squeeze=False, width_ratios=(3, 2)), strict=True):
        _draw_row(row, axes, names, LIGHT)
    return figure


def draw_scaled(
    part: Figure | SubFigure, encoding: Rotary, length: int, theme: Theme, trained: int | None = None
) -> None:
    """A scaled rotary encoding beside the same without its scaling.

    Where frequencies depend on the length of the sequence, they are those at factor x trained length.
    """
    scaling, name = encoding.scaling, type(encoding.scaling).__name__
    factor = getattr(scaling, "factor", None)
    trained = getattr(scaling, "original_max_seq_len", trained)
    longest = encoding.seq_len or round((trained or 0) * (1.0 if factor is None else factor))
    plain = encoding.alike(scaling=None, seq_len=None)
    scaled = encoding if scaling.length_that_matters is None else encoding.for_length(max(longest, 1))
    before, after = (
        [2 * math.pi / float(each) if each else None for each in one.angles.frequencies] for one in (plain, scaled)
    )
    marks = {"trained": trained, "scaled to": longest}
    row = Wavelengths(
        "Wavelength of each pair of dimensions", before, after, {name: mark for name, mark in marks.items() if mark}
    )
    named = name if factor is None else f"{name}, factor {factor:g}"
    theme.entitle(part, f"RoPE, head_dim {encoding.head_dim}, base {encoding.base:g}: {named}")
    _draw_row(row, part.subplots(1, 2, width_ratios=(3, 2)), ("without the scaling", name), theme)


def _draw_row(row: Wavelengths, axes: Sequence[Axes], names: Sequence[str], theme: Theme) -> None:
    left, right = axes
    for number, (name, waves) in enumerate(zip(names, (row.before, row.after), strict=True)):
        if still := waves.count(None):
            name = f"{name}; {still} pairs are not rotated"
        theme.curve(left, [math.nan if wave is None else wave for wave in waves], number, label=name)
    left.set_yscale("log")
    theme.dress(left, title=row.title, x="pair of dimensions", y="wavelength (positions)", grid=True)
    for length, name in {length: name for name, length in row.marks.items()}.items():
        left.axhline(length, color=theme.muted, linewidth=1.0, linestyle=":")
        place = {"xytext": (2, 3), "textcoords": "offset points", "color": theme.muted, "fontsize": 8.5}
        left.annotate(f"{name} {length:,}", (0, length), **place)  # type: ignore[arg-type]
    theme.legend(left, loc="lower right")
    pairs = zip(row.before, row.after, strict=True)
    theme.curve(right, [after / before if before and after else math.nan for before, after in pairs], 1)
    right.set_ylim(bottom=0)
    right.set_xlim(left.get_xlim())
    theme.dress(right, title="Stretched by", x="pair of dimensions", y="factor", grid=True)


def draw_report(report: Report, theme: Theme = LIGHT) -> Figure:
    """Frequencies and errors of what rotates; the slopes of a linear bias."""
    if isinstance(report, BiasReport) and report.slopes is not None:
        figure = theme.blank(6.0, 3.8)
        _draw_slopes(figure.subplots(), report.slopes, theme)
    elif isinstance(report, RotationReport) and report.queries.blocks:
        figure = theme.blank(10.5, 4.2)
        left, right = figure.subplots(1, 2)
        _draw_frequencies(left, report, theme)
        _draw_errors(right, report, theme)
    else:
        got = f"got a report on {report.subject}, which neither turns pairs nor falls linearly with the distance"
        raise InputError(got, "print(report)")
    theme.entitle(figure, f"{report.subject}: {report.encoding or 'no encoding of locant'}")
    return figure


def _draw_frequencies(axes: Axes, report: RotationReport, theme: Theme) -> None:
    for axis in range(report.axes):
        rows = [(pair, abs(block.frequencies[axis])) for pair, block in enumerate(report.queries.blocks)]
        turning = [(pair, each) for pair, each in rows if each]
        if turning:
            color, _, marker = theme.stroke(axis)
            label = f"axis {axis}" if report.axes > 1 else "measured"
            axes.plot(*zip(*turning, strict=True), color=color, marker=marker, linestyle="", markersize=4, label=label)
    axes.set_yscale("log")
    theme.dress(axes, title="Frequency of each pair", x="pair of dimensions", y="radians per position", grid=True)
    theme.legend(axes, loc="upper right")


def _draw_errors(axes: Axes, report: RotationReport, theme: Theme) -> None:
    color, line, marker = theme.stroke(0)
    values = [max(error, LEAST) for error in report.errors.values()]
    axes.plot([*report.errors], values, color=color, linestyle=line, marker=marker, markersize=4, label="as it is")
    for number, (dtype, (error, _)) in enumerate(report.casts.items(), 1):
        color, line, _ = theme.stroke(number)
        axes.axhline(max(error, LEAST), color=color, linestyle=line, label=f"cast to {dtype}, up to 4,097")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    theme.dress(axes, title="Largest error of an angle", x="position", y="radians", grid=True)
    theme.legend(axes, loc="lower right")


def _draw_slopes(axes: Axes, slopes: tuple[float, ...], theme: Theme) -> None:
    color, _, marker = theme.stroke(0)
    axes.plot(range(len(slopes)), slopes, color=color, marker=marker)
    theme.dress(axes, title="Slope of each head", x="head", y="bias per token of distance", grid=True)
