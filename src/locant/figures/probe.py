"""A picture of what `locant.probe` found: the frequency of each pair, and how wrong its angles are how far away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locant.errors import InputError
from locant.figures.canvas import LIGHT, Theme
from locant.probing.bias import BiasReport
from locant.probing.report import Report, RotationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_report"]

LEAST = 1e-9
"""What is drawn of no error at all, on a scale of powers of ten."""


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
