"""Draw the common parts of all pictures, such as themes, heat maps and legends, and write files atomically.

Colours are safe for colour-blind readers. Curves never differ in colour alone, but also in dash and marker. Values of
one sign use cividis, signed values use a diverging map centred on 0, and angles use a cyclic map. This file uses only
matplotlib's object interface, never pyplot, so it does not need a display or a global list of figures.
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

MAX_NUMBERED_SIZE = 8
"""Heat maps with at most this number of rows and of columns also show their numbers."""


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of background, text and curves, with functions that use them."""

    paper: str
    ink: str
    muted: str
    grid: str
    curves: tuple[str, ...]

    def blank(self, width: float, height: float) -> Figure:
        """Return an empty figure with sizes in inches. A notebook shows it without pyplot or magic commands."""
        require_matplotlib()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained", facecolor=self.paper)
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.05)  # type: ignore[union-attr]
        figure._repr_png_ = functools.partial(_render, figure, "png", dpi=100)  # type: ignore[attr-defined]
        return figure

    def set_title(self, part: Figure | SubFigure, title: str) -> None:
        """Set the title of a whole picture."""
        part.suptitle(title, x=0.012, ha="left", fontsize=11.5, color=self.ink)

    def style_axes(self, axes: Axes, *, title: str, x: str, y: str, grid: bool = False) -> None:
        """Set title and axis labels, and apply the theme's colours."""
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
        """Draw a legend at `place`, or to the right of the axes, where it does not hide anything."""
        place = place or {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
        style = {"frameon": False, "fontsize": 9, "labelcolor": self.ink, "handlelength": 3.2, "alignment": "left"}
        legend = axes.legend(title=title, **style, **place)
        legend.get_title().set(color=self.muted, fontsize=9)

    def heat_map(
        self, axes: Axes, values: np.ndarray, colors: str, low: float, high: float, title: str = "", x: str = "",
        y: str = "", bar: str = "", *, logarithmic: bool = False, **place: Any,
    ) -> AxesImage:  # fmt: skip
        """Draw a map with pixels centred on integers, and with row 0 at the top. Small maps also show their numbers.

        `bar` is the label of the colour bar, which is next to the map or at `place`. A logarithmic scale is linear
        between -1 and 1.
        """
        from matplotlib.colors import Normalize, SymLogNorm

        norm = SymLogNorm(1.0, vmin=low, vmax=high) if logarithmic else Normalize(low, high)
        image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
        count_in_whole(axes.xaxis)
        count_in_whole(axes.yaxis)
        if max(values.shape) <= MAX_NUMBERED_SIZE:
            _write_numbers(axes, image, values)
        if bar:
            scale = self.color_bar(image, f"{bar}; logarithmic below −1" if logarithmic else bar, **place)
            if logarithmic:  # ticks at negative numbers, down to the darkest
                scale.set_ticks([low, *(-(10.0**power) for power in range(9) if low < -2 * 10**power), 0.0])
        self.style_axes(axes, title=title, x=x, y=y)
        return image

    def color_bar(self, image: AxesImage, label: str, **place: Any) -> Colorbar:
        """Draw the colour bar of a heat map, next to the map or at `place`."""
        place = place or {"ax": image.axes, "pad": 0.02, "fraction": 0.05}
        bar = image.axes.figure.colorbar(image, format="{x:g}", **place)
        bar.set_label(label, fontsize=9, color=self.muted)
        bar.ax.tick_params(colors=self.muted, labelsize=8.5, which="both")
        bar.outline.set_visible(False)
        return bar

    def stroke(self, number: int) -> tuple[str, Any, str]:
        """Return the colour, dash and marker of a curve. Curves never differ in colour alone."""
        index = number % len(self.curves)
        return self.curves[index], DASHES[index], MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]

    def curve(self, axes: Axes, values: Any, number: int, **options: Any) -> None:
        """Draw a curve with the colour and dash of this number."""
        color, linestyle, _ = self.stroke(number)
        axes.plot(values, color=color, linestyle=linestyle, linewidth=1.6, **options)
        count_in_whole(axes.xaxis)


# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), without its yellow, which is hard to see on white.
# The theme's ink replaces its black, and a lighter blue replaces its blue on a dark background.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ON_WHITE, ON_BLACK = (*OKABE_ITO, "#1c2127", "#8a939d"), ("#3d8fd1", *OKABE_ITO[1:], "#e6e9ed", "#7d8791")
LIGHT = Theme(paper="#ffffff", ink="#1c2127", muted="#59636e", grid="#e1e5ea", curves=ON_WHITE)
DARK = Theme(paper="#16191d", ink="#e6e9ed", muted="#a1abb6", grid="#31373f", curves=ON_BLACK)
THEMES = {"light": LIGHT, "dark": DARK}


def require_matplotlib() -> None:
    """Raise `InputError` unless matplotlib is installed. An extra of this package installs it."""
    require("matplotlib", "drawing a picture")


def require_figure(path: Path | None) -> None:
    """Raise `InputError` unless a picture can be written to `path`. ``None`` means no picture."""
    if path is None:
        return
    require_matplotlib()
    if path.suffix.lower() not in SUFFIXES:
        expected = f"expected a picture's name ending in {', '.join(SUFFIXES)}"
        raise InputError(f"got {str(path)!r}, {expected}", str(path.with_suffix(".png")))


def range_of(low: float, high: float) -> tuple[str, float, float]:
    """Return the colour map for values from `low` to `high`, and its limits. If signs differ, 0 is in the middle."""
    return (SIGNED, -max(-low, high), max(-low, high)) if low < 0 < high else (ONE_SIGN, low, high)


def count_in_whole(axis: Axis) -> None:
    """Set ticks only at integers, even if there are only four."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))


def _write_numbers(axes: Axes, image: AxesImage, values: np.ndarray) -> None:
    cell = 72 * axes.get_window_extent().width / axes.figure.get_dpi() / values.shape[1]
    for row, column in np.argwhere(~np.ma.getmaskarray(values)).tolist():
        value = float(values[row, column])
        luminance = (image.to_rgba(np.array([[value]]))[0, 0, :3] ** 2.2) @ (0.2126, 0.7152, 0.0722)  # as in WCAG
        ink = "black" if luminance > 0.18 else "white"  # at 0.18 black and white have the same contrast
        text = f"{value:.1g}" if value and not round(value, 2) else f"{value + 0.0:.2f}"
        axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=min(8.0, cell / 3.7))


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers from 0 to ``count - 1``."""
    return [round(step * (count - 1) / (most - 1)) for step in range(most)] if count > most else [*range(count)]


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its suffix. The file is written completely or not at all."""
    write_whole(path, _render(figure, path.suffix.lower()[1:]))


def svg(figure: Figure) -> bytes:
    """Return the picture as SVG with a transparent background, for a web page."""
    return _render(figure, "svg", transparent=True)


def _render(figure: Figure, kind: str, *, dpi: int = DOTS_PER_INCH, **options: Any) -> bytes:
    """Return the file of a picture without dates and random ids, so that equal pictures have equal files.

    Clip paths of SVG are numbered, because matplotlib derives their names from the last digits of the layout, which are
    random.
    """
    from matplotlib import rc_context

    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
    page = io.BytesIO()
    with rc_context({"svg.hashsalt": "locant", "pdf.fonttype": 42}):
        figure.savefig(page, format=kind, dpi=dpi, metadata=metadata, **options)
    if kind != "svg":
        return page.getvalue()
    names = {name: b"clip%d" % number for number, name in enumerate(dict.fromkeys(CLIP_PATH.findall(page.getvalue())))}
    return CLIP_PATH.sub(lambda found: names[found[0]], page.getvalue())
