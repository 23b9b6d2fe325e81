"""Pictures of a scaling: the wavelength of each pair of dimensions, before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.figures.canvas import LIGHT, Theme, add_legend, blank, curve, dress, entitle
from locant.positions import Rotary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Wavelengths", "draw_scaled", "draw_wavelengths"]

Lengths = list[float | None]


@dataclass(frozen=True, kw_only=True)
class Wavelengths:
    """Wavelengths of all pairs, in positions; ``None`` for a pair that is not rotated. `marks` are lengths by name."""

    title: str
    before: Lengths
    after: Lengths
    marks: Mapping[str, int]


def draw_wavelengths(rows: Sequence[Wavelengths], names: tuple[str, str], theme: Theme = LIGHT) -> Figure:
    """For each row, the wavelengths before and after, called by these names, and the ratio of the two."""
    figure = blank(10.5, 0.6 + 3.6 * len(rows), theme)
    for row, axes in zip(rows, figure.subplots(len(rows), 2, squeeze=False, width_ratios=(3, 2)), strict=True):
        _draw_row(row, axes, names, theme)
    return figure


def draw_scaled(
    part: Figure | SubFigure, encoding: Rotary, length: int, theme: Theme, trained: int | None = None
) -> None:
    """A scaled rotary encoding beside the same without its scaling.

    Where frequencies depend on the length of the sequence, they are those at factor x trained length.
    """
    scaling = encoding.scaling
    trained = getattr(scaling, "original_max_seq_len", trained)
    longest = encoding.seq_len or round((trained or 0) * getattr(scaling, "factor", 1.0))
    plain = Rotary(
        encoding.head_dim, encoding.base,
        rotary_dim=encoding.rotary_dim, sections=encoding.sections, axial=encoding.axial,
    )  # fmt: skip
    scaled = encoding if scaling.length_that_matters is None else encoding.for_length(max(longest, 1))
    marks = {"trained": trained, "scaled to": longest}
    row = Wavelengths(
        title="Wavelength of each pair of dimensions",
        before=_wavelengths(plain.angles.frequencies),
        after=_wavelengths(scaled.angles.frequencies),
        marks={name: mark for name, mark in marks.items() if mark},
    )
    entitle(part, f"RoPE, head_dim {encoding.head_dim}, base {encoding.base:g}: {_named(scaling)}", theme)
    _draw_row(row, part.subplots(1, 2, width_ratios=(3, 2)), ("without the scaling", type(scaling).__name__), theme)


def _named(scaling: Any) -> str:
    factor = getattr(scaling, "factor", None)
    return type(scaling).__name__ + ("" if factor is None else f", factor {factor:g}")


def _wavelengths(frequencies: Iterable[Any]) -> Lengths:
    return [2 * math.pi / float(each) if each else None for each in frequencies]


def _draw_row(row: Wavelengths, axes: Sequence[Axes], names: tuple[str, str], theme: Theme) -> None:
    left, right = axes
    for number, (name, waves) in enumerate(zip(names, (row.before, row.after), strict=True)):
        if still := waves.count(None):
            name = f"{name}; {still} pairs are not rotated"
        curve(left, [math.nan if wave is None else wave for wave in waves], number, theme, label=name)
    left.set_yscale("log")
    dress(left, theme, title=row.title, x="pair of dimensions", y="wavelength (positions)", grid=True)
    for length, name in {length: name for name, length in row.marks.items()}.items():
        left.axhline(length, color=theme.muted, linewidth=1.0, linestyle=":")
        place = {"xytext": (2, 3), "textcoords": "offset points", "color": theme.muted, "fontsize": 8.5}
        left.annotate(f"{name} {length:,}", (0, length), **place)  # type: ignore[arg-type]
    add_legend(left, theme, loc="lower right")
    pairs = zip(row.before, row.after, strict=True)
    curve(right, [after / before if before and after else math.nan for before, after in pairs], 1, theme)
    right.set_ylim(bottom=0)
    right.set_xlim(left.get_xlim())
    dress(right, theme, title="Stretched by", x="pair of dimensions", y="factor", grid=True)
