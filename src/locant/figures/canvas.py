"""What every picture is drawn with: themes, a palette, heat maps, legends, and files that are written whole.

Colours are safe for colour-blind readers, and no meaning hangs on colour alone: curves also differ in dash and marker.
Values of one sign are cividis, signed values a diverging map centred on 0, angles a cyclic map. Only matplotlib's
object interface is used, never pyplot: no display, no global figure list.
"""

from __future__ import annotations

import functools
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from locant.errors import InputError
from locant.extras import require
from locant.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
CLIP_PATH = re.compile(rb"(?<=[\"#])p[0-9a-f]{10}(?=[\")])")

ONE_SIGN = "cividis"
SIGNED = "RdBu_r"
ANGLES = "twilight"

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)), (0, (10, 2, 2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

WRITTEN = 8
"""Tables of at most so many rows and columns have their numbers written in."""


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of paper and ink, and of curves that can be told apart on that paper; what is drawn in them."""

    paper: str
    ink: str
    muted: str
    grid: str
    curves: tuple[str, ...]

    def blank(self, width: float, height: float) -> Figure:
        """An empty figure, which a notebook shows without pyplot and without a magic word; sizes in inches."""
        require_matplotlib()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained", facecolor=self.paper)
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.05)  # type: ignore[union-attr]
        figure._repr_png_ = functools.partial(_rendered, figure, "png", dpi=100)  # type: ignore[attr-defined]
        return figure

    def entitle(self, part: Figure | SubFigure, title: str) -> None:
        """The title of a whole picture, which has its whole width."""
        part.suptitle(title, x=0.012, ha="left", fontsize=11.5, color=self.ink)

    def dress(self, axes: Axes, *, title: str, x: str, y: str, grid: bool = False) -> None:
        """Titles, axis labels and the theme's colours."""
        axes.set_title(title, loc="left", fontsize=10.5, color=self.ink, pad=7)
        axes.set_xlabel(x, fontsize=9.5, color=self.muted)
        axes.set_ylabel(y, fontsize=9.5, color=self.muted)
        axes.set_facecolor(self.paper)
        axes.tick_params(colors=self.muted, labelsize=8.5, which="both")
        for side, spine in axes.spines.items():
            spine.set_color(self.grid)
            spine.set_visible(side in ("left", "bottom") or not grid)
        if grid:
            axes.grid(color=self.grid, linewidth=0.8)
            axes.set_axisbelow(True)

    def legend(self, axes: Axes, *, title: str | None = None, **place: Any) -> None:
        """A legend to the right of the axes, where it hides nothing; or where `place` says."""
        place = place or {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
        style = {"frameon": False, "fontsize": 9, "labelcolor": self.ink, "handlelength": 3.2, "alignment": "left"}
        legend = axes.legend(title=title, **style, **place)
        legend.get_title().set(color=self.muted, fontsize=9)

    def heat_map(
        self, axes: Axes, values: np.ndarray, colors: str, low: float, high: float, title: str = "", x: str = "",
        y: str = "", bar: str = "", *, logarithmic: bool = False, **place: Any,
    ) -> AxesImage:  # fmt: skip
        """A map whose pixels are centred on whole numbers, with row 0 at the top; small ones with their numbers.

        `bar` says what the values are, beside the map or at `place`. A logarithmic scale is linear between -1 and 1.
        """
        from matplotlib.colors import Normalize, SymLogNorm

        norm = SymLogNorm(1.0, vmin=low, vmax=high) if logarithmic else Normalize(low, high)
        image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
        count_in_whole(axes.xaxis)
        count_in_whole(axes.yaxis)
        if max(values.shape) <= WRITTEN:
            _write_numbers(axes, image, values)
        if bar:
            scale = self.color_bar(image, f"{bar}; logarithmic below −1" if logarithmic else bar, **place)
            if logarithmic:  # of negative numbers, to the darkest
                scale.set_ticks([low, *(-(10.0**power) for power in range(9) if low < -2 * 10**power), 0.0])
        self.dress(axes, title=title, x=x, y=y)
        return image

    def color_bar(self, image: AxesImage, label: str, **place: Any) -> Colorbar:
        """The scale of a heat map: beside it, or where `place` says."""
        place = place or {"ax": image.axes, "pad": 0.02, "fraction": 0.05}
        bar = image.axes.figure.colorbar(image, format="{x:g}", **place)
        bar.set_label(label, fontsize=9, color=self.muted)
        bar.ax.tick_params(colors=self.muted, labelsize=8.5, which="both")
        bar.outline.set_visible(False)
        return bar

    def stroke(self, number: int) -> tuple[str, Any, str]:
        """Colour, dash and marker of the curve of this number: never colour alone."""
        place = number % len(self.curves)
        return self.curves[place], DASHES[place], MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]

    def curve(self, axes: Axes, values: Any, number: int, **options: Any) -> None:
        """The curve of this number, in its colour and dash."""
        color, linestyle, _ = self.stroke(number)
        axes.plot(values, color=color, linestyle=linestyle, linewidth=1.6, **options)
        count_in_whole(axes.xaxis)


# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), without its yellow, which white paper swallows; its
# black is the theme's ink, and its blue is too dark for dark paper.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ON_WHITE, ON_BLACK = (*OKABE_ITO, "#1c2127", "#8a939d"), ("#3d8fd1", *OKABE_ITO[1:], "#e6e9ed", "#7d8791")
LIGHT = Theme(paper="#ffffff", ink="#1c2127", muted="#59636e", grid="#e1e5ea", curves=ON_WHITE)
DARK = Theme(paper="#16191d", ink="#e6e9ed", muted="#a1abb6", grid="#31373f", curves=ON_BLACK)
THEMES = {"light": LIGHT, "dark": DARK}


def require_matplotlib() -> None:
    """Raise unless pictures can be drawn: matplotlib comes with an extra."""
    require("matplotlib", "drawing a picture")


def require_figure(path: Path | None) -> None:
    """Raise unless a picture can be written to `path`, where one is asked for."""
    if path is None:
        return
    require_matplotlib()
    if path.suffix.lower() not in SUFFIXES:
        expected = f"expected a picture's name ending in {', '.join(SUFFIXES)}"
        raise InputError(f"got {str(path)!r}, {expected}", str(path.with_suffix(".png")))


def range_of(low: float, high: float) -> tuple[str, float, float]:
    """The colours of values between these, and what they begin and end with: of both signs, 0 is in the middle."""
    return (SIGNED, -max(-low, high), max(-low, high)) if low < 0 < high else (ONE_SIGN, low, high)


def count_in_whole(axis: Axis) -> None:
    """Ticks at whole numbers alone, also where there are but four."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))


def _write_numbers(axes: Axes, image: AxesImage, values: np.ndarray) -> None:
    cell = 72 * axes.get_window_extent().width / axes.figure.get_dpi() / values.shape[1]
    for row, column in np.argwhere(~np.ma.getmaskarray(values)).tolist():
        value = float(values[row, column])
        light = (image.to_rgba(np.array([[value]]))[0, 0, :3] ** 2.2) @ (0.2126, 0.7152, 0.0722)  # as WCAG weighs it
        ink = "black" if light > 0.18 else "white"  # there both have the same contrast
        text = f"{value:.1g}" if value and not round(value, 2) else f"{value + 0.0:.2f}"
        axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=min(8.0, cell / 3.7))


def spread(count: int, most: int) -> list[int]:
    """At most this many numbers below `count`, from the first to the last."""
    return [round(step * (count - 1) / (most - 1)) for step in range(most)] if count > most else [*range(count)]


def save(figure: Figure, path: Path) -> None:
    """Write a picture as its suffix says; the file appears whole or not at all."""
    write_whole(path, _rendered(figure, path.suffix.lower()[1:]))


def svg(figure: Figure) -> bytes:
    """The picture as SVG, with a transparent ground, to be put into a page."""
    return _rendered(figure, "svg", transparent=True)


def _rendered(figure: Figure, kind: str, *, dpi: int = DOTS_PER_INCH, **options: Any) -> bytes:
    """Without dates and random ids, so that the same picture is the same file.

    Clip paths of SVG are numbered: their names are made from the last digits of the layout, which vary by chance.
    """
    from matplotlib import rc_context

    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
    page = io.BytesIO()
    with rc_context({"svg.hashsalt": "locant", "pdf.fonttype": 42}):
        figure.savefig(page, format=kind, dpi=dpi, metadata=undated, **options)
    if kind != "svg":
        return page.getvalue()
    names = {name: b"clip%d" % number for number, name in enumerate(dict.fromkeys(CLIP_PATH.findall(page.getvalue())))}
    return CLIP_PATH.sub(lambda found: names[found[0]], page.getvalue())
