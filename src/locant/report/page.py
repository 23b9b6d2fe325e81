"""Write a self-contained HTML page with tables and two curves. It opens from disk without a network.

The templates and the style sheet are in the folder `templates`. The curves show the loss by length and by position,
with the spread over seeds.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from locant.arguments import Real
from locant.extras import install_command, is_installed
from locant.figures.canvas import DARK, LIGHT, Theme, save, svg
from locant.files import write_whole
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE
from locant.lab.settings import ENOUGH_WINDOWS
from locant.lab.summary import Cell, Row, Summary
from locant.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
NUM_BINS = 32
OVERLAID = 6
"""The largest number of encodings that share a picture. More curves cannot be told apart by colour and dash."""
COLUMNS, SMALL_WIDTH, SMALL_HEIGHT = 6, 1.9, 1.75
"""The number of small pictures in a row, and their size in inches."""
UNKNOWN = Cell(mean=np.nan, low=np.nan, high=np.nan, deviation=np.nan)


def write_page(page: str, summary: Summary | None, folder: Path) -> Path:
    """Write the page and, if there are losses, the two curves next to `results.json`. Return the path of the page."""
    if summary is not None:
        write_picture(functools.partial(draw_loss_by_length, summary), folder / BY_LENGTH)
        write_picture(functools.partial(draw_loss_by_position, summary), folder / BY_POSITION)
    write_whole(folder / PAGE, page)
    return folder / PAGE


@functools.cache
def templates(folder: Path) -> Environment:
    """Return the templates in a folder. They escape every value, and raise an error for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """Return the page that a template makes from these values.

    The page is light or dark as in the reader's system settings. It fits phones, screens and paper.
    """
    light, dark = colors(LIGHT, mark="#eef4fb", good="#9ed8b5"), colors(DARK, mark="#222a35", good="#22643f")
    return templates(TEMPLATES).get_template(template).render(light=light, dark=dark, **values)


def html(table: Table) -> str:
    """Return one table of numbers as HTML, with its note below it."""
    parts: Any = templates(TEMPLATES).get_template("parts.html").module
    return parts.numbers(table)


def themed(picture: Picture) -> str:
    """Return a picture as HTML for the documentation, whose theme the reader chooses on the page."""
    parts: Any = templates(TEMPLATES).get_template("parts.html").module
    return parts.themed(picture)


def colors(theme: Theme, **more: str) -> str:
    """Return the colours of a theme, and more colours, as CSS variables."""
    values = {**{name: getattr(theme, name) for name in ("paper", "ink", "muted", "grid")}, **more}
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def curves(summary: Summary, by_length: str, by_position: str) -> list[Picture]:
    """Return the two curves with these captions."""
    captions = {draw_loss_by_length: by_length, draw_loss_by_position: by_position}
    return [picture(functools.partial(draw, summary), caption) for draw, caption in captions.items()]


def write_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Write a picture of a report. Without matplotlib, remove the picture of an earlier report."""
    if is_installed("matplotlib"):
        save(draw(), path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture as data URLs for a light and a dark background, or the command that installs matplotlib."""

    caption: str
    light: str = ""
    dark: str = ""
    install: str = ""


def picture(draw: Callable[[Theme], Figure], caption: str) -> Picture:
    """Draw a picture for the two themes if matplotlib is installed."""
    if not is_installed("matplotlib"):
        return Picture(caption=caption, install=install_command("matplotlib"))
    light, dark = (base64.b64encode(svg(draw(theme))).decode("ascii") for theme in (LIGHT, DARK))
    kind = "data:image/svg+xml;base64,"
    return Picture(caption=caption, light=kind + light, dark=kind + dark)


def draw_loss_by_length(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Draw the mean held-out loss at every length, with whiskers from best to worst seed, and the training loss.

    More than `OVERLAID` encodings get a small picture each, which shows the others in grey.
    """
    longest, titles = summary.lengths[-1], f"Trained at {summary.train_length} tokens, read at more"
    figure, parts = _parts(summary, titles, "window (tokens)", theme)
    curves = {row.encoding: [(length, cell) for length, cell in row.by_length.items() if cell] for row in summary.rows}
    for axes, rows in parts:
        for row in summary.rank(longest):
            x, cells = zip(*curves[row.encoding], strict=True) if curves[row.encoding] else ((), ())
            if row not in rows:
                _grey(axes, x, cells, theme)
                continue
            color, marker = _curve(axes, x, cells, summary, row, theme, markersize=5.5)
            if row.train_loss:
                hollow = {"marker": marker, "markersize": 4.5, "markerfacecolor": "none", "linestyle": "none"}
                axes.plot([summary.train_length], [row.train_loss.mean], color=color, **hollow)  # type: ignore[arg-type]
        axes.set_xscale("log", base=2)
        times = "" if len(parts) > 1 else "\n{:g}×"
        names = [f"{length:,}{times.format(length / summary.train_length)}" for length in summary.lengths]
        axes.set_xticks(summary.lengths, names)
        axes.minorticks_off()
        _mark_training_length(axes, summary, theme)
    if few := [length for length in summary.lengths if not summary.has_enough(length)]:
        words = f"from {few[0]:,} tokens on, not enough text to tell: fewer than {ENOUGH_WINDOWS} windows"
        last = parts[-1][0]
        last.text(0.99, 0.01, words, transform=last.transAxes, ha="right", fontsize=8.5, color=theme.muted)
    if len(parts) == 1:
        theme.legend(parts[0][0], title=f"at {longest:,}, lowest first;\nhollow: training loss")
    return figure


def draw_loss_by_position(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Draw the mean held-out loss at the positions of the longest windows, averaged in bins.

    More than `OVERLAID` encodings get a small picture each, which shows the others in grey.
    """
    longest = summary.lengths[-1]
    figure, parts = _parts(summary, f"Within windows of {longest:,} tokens", "position (tokens)", theme)
    curves = {row.encoding: _bin_means(row.by_position) for row in summary.rows}
    for axes, rows in parts:
        for row in summary.rank(longest):
            if row in rows:
                _curve(axes, *curves[row.encoding], summary, row, theme)
            else:
                _grey(axes, *curves[row.encoding], theme)
        axes.set_xlim(0, longest)
        _mark_training_length(axes, summary, theme)
    if len(parts) == 1:
        axes = parts[0][0]
        if longest > summary.train_length:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.07 * (high - low))  # room for the words above the curves
            words, place, ends = " not seen in training →", (summary.train_length, 0.985), ("data", "axes fraction")
            axes.annotate(words, place, xycoords=ends, va="top", fontsize=8.5, color=theme.muted)
        theme.legend(axes, title=f"at {longest:,}, lowest first")
    return figure


def _parts(summary: Summary, title: str, x: str, theme: Theme) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """Return a figure with its axes, each with the rows that it shows in colour."""
    ranked, longest, y = summary.rank(summary.lengths[-1]), summary.lengths[-1], "loss (nats per token)"
    if len(ranked) <= OVERLAID:
        figure = theme.blank(8.6, 4.6)
        axes = figure.subplots()
        theme.style_axes(axes, title=title, x=x, y=y, grid=True)
        return figure, [(axes, ranked)]
    words = f"{title}. Lowest loss at {longest:,} first, which is written below"
    figure, all_axes = small_axes(len(ranked), words, theme)
    for number, (axes, row) in enumerate(zip(all_axes, ranked, strict=True)):
        style_small(axes, number, len(ranked), row.encoding, x, y, theme)
        if cell := row.by_length.get(longest):
            place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
            axes.text(0.98, 0.03, f"{cell.mean:.2f}", fontsize=8, color=theme.muted, **place)
    return figure, [(axes, [row]) for axes, row in zip(all_axes, ranked, strict=True)]


def small_axes(count: int, title: str, theme: Theme) -> tuple[Figure, list[Axes]]:
    """Return a figure with small axes in rows, which share their limits."""
    lines = -(-count // COLUMNS)
    figure = theme.blank(SMALL_WIDTH * COLUMNS, SMALL_HEIGHT * lines + 0.3)
    theme.set_title(figure, title)
    all_axes = list[Any]()
    for number in range(count):
        shared = all_axes[0] if all_axes else None
        all_axes.append(figure.add_subplot(lines, COLUMNS, number + 1, sharex=shared, sharey=shared))
    return figure, all_axes


def style_small(axes: Axes, number: int, count: int, title: str, x: str, y: str, theme: Theme) -> None:
    """Style the axes of one small picture. Only those at the edge have labels."""
    is_left, is_below = number % COLUMNS == 0, number + COLUMNS >= count
    theme.style_axes(axes, title=title, x=x if is_below else "", y=y if is_left else "", grid=True)
    axes.set_title(title, loc="left", fontsize=8.5, color=theme.ink, pad=4)
    axes.tick_params(labelleft=is_left, labelbottom=is_below, labelsize=8)


def _grey(axes: Axes, x: Sequence[Real], cells: Sequence[Cell], theme: Theme) -> None:
    axes.plot(x, [cell.mean for cell in cells], color=theme.muted, alpha=0.3, linewidth=0.8, zorder=1)


def _curve(
    axes: Axes, x: Sequence[Real], cells: Sequence[Cell], summary: Summary, row: Row, theme: Theme, **style: Any
) -> tuple[str, str]:
    """Draw a mean and whiskers, in the colour and marker that an encoding has in both pictures.

    If there are many points, only some of them have whiskers, and other encodings have theirs at other points.
    """
    number, count = summary.rows.index(row), len(summary.rows)
    color, linestyle, marker = theme.stroke(number if count <= OVERLAID else 0)
    mean, low, high = np.array([(cell.mean, cell.low, cell.high) for cell in cells]).reshape(-1, 3).T
    style = {"marker": marker, **style} if style else {}
    axes.plot(x, mean, color=color, linestyle=linestyle, linewidth=1.8, label=row.encoding, **style)
    every = (number % OVERLAID, min(count, OVERLAID)) if len(x) > 2 * min(count, OVERLAID) else 1
    whiskers: dict[str, Any] = {"fmt": "none", "ecolor": color, "elinewidth": 1.2, "capsize": 3.0}
    axes.errorbar(x, mean, (mean - low, high - mean), errorevery=every, **whiskers)
    return color, marker


def _bin_means(cells: Sequence[Cell | None]) -> tuple[list[float], list[Cell]]:
    """Return the middles and the means of at most `NUM_BINS` bins of positions. Gaps remain gaps."""
    values = np.array([(cell.mean, cell.low, cell.high) for cell in (each or UNKNOWN for each in cells)])
    bins = min(NUM_BINS, len(values))
    middles = [float(part.mean()) for part in np.array_split(np.arange(len(values), dtype=float), bins)]
    means = [part.mean(axis=0).tolist() for part in np.array_split(values, bins)]
    return middles, [Cell(mean=mean, low=low, high=high, deviation=0.0) for mean, low, high in means]


def _mark_training_length(axes: Axes, summary: Summary, theme: Theme) -> None:
    """Draw a line at the training length if there are longer windows."""
    if summary.lengths[-1] > summary.train_length:
        axes.axvline(summary.train_length, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
