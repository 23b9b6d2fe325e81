"""A self-contained HTML page, which opens from disk without a network, with its tables and two curves.

The curves are the loss against length and the loss against position, with the spread over seeds.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from locant.extras import install_command, is_installed
from locant.figures.canvas import DARK, LIGHT, Theme, save, svg
from locant.files import write_whole
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE
from locant.lab.summary import ENOUGH_WINDOWS, Cell, Row, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_BINS = 32
ASIDE = 1.03
"""The factor between encodings on a logarithmic axis, so that no whisker hides another."""
UNKNOWN = Cell(mean=np.nan, low=np.nan, high=np.nan, deviation=np.nan)

RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .35rem; text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
p, li { max-width: 46rem; }
li { margin: .3rem 0; }
.facts, .note, figcaption { color: var(--muted); }
.note, figcaption { font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
thead th { font-weight: 600; border-bottom: 2px solid var(--grid); white-space: nowrap; }
thead small, td small { display: block; font-weight: 400; color: var(--muted); font-size: .82rem; }
.losses { width: 100%; }
.losses th + th, .losses td { text-align: right; white-space: nowrap; }
tr > :first-child { padding-left: 0; }
.best { font-weight: 700; background: var(--mark); }
.best small { color: var(--ink); }
.grey { color: var(--muted); }
.settings th { font-weight: 400; color: var(--muted); white-space: nowrap; padding-right: 2rem; }
.settings td { overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1.5rem 3rem; align-items: start; }
.pair table { width: 100%; }
figure { margin: .4rem 0 1.4rem; }
figure img { width: 100%; height: auto; display: block; }
pre { background: var(--mark); padding: .9rem 1rem; border-radius: .4rem; white-space: pre-wrap; overflow-x: auto;
  font: .9rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre span { white-space: nowrap; }
summary { cursor: pointer; color: var(--muted); }
details table { margin-top: .8rem; }
@media (max-width: 40rem) { .pair { grid-template-columns: minmax(0, 1fr); } }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
"""


def write_page(page: str, summary: Summary | None, folder: Path) -> Path:
    """Write the page and, if there are losses, the two curves next to `results.json`. Return the path of the page."""
    if summary is not None:
        write_picture(functools.partial(draw_loss_by_length, summary), folder / BY_LENGTH)
        write_picture(functools.partial(draw_loss_by_position, summary), folder / BY_POSITION)
    write_whole(folder / PAGE, page)
    return folder / PAGE


def document(head: str, body: str) -> str:
    """Return an HTML page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}</head>\n<body>\n{body}</body>\n</html>\n"
    )


def report(title: str, facts: str, sections: Mapping[str, str]) -> str:
    """Return a page with a title, a line of facts and sections of finished HTML.

    It is light or dark like the reader's system, and fits phones, screens and paper.
    """
    light, dark = colors(LIGHT, mark="#eef4fb", good="#9ed8b5"), colors(DARK, mark="#222a35", good="#22643f")
    style = (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{RULES.strip()}\n"
    )
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    return document(
        f"<title>locant: {escape(title)}</title>\n<style>\n{style}</style>\n",
        f'<main>\n<h1>{escape(title)}</h1>\n<p class="facts">{escape(facts)}</p>\n{body}\n</main>\n',
    )


def colors(theme: Theme, **more: str) -> str:
    """Return the colours of a theme, and more colours, as CSS variables."""
    values = {**{name: getattr(theme, name) for name in ("paper", "ink", "muted", "grid")}, **more}
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of finished HTML. The first cell of a row is its name, and a cell can contain its tag."""

    def cells(row: Sequence[str]) -> str:
        data = (cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row[1:])
        return f'<tr><th scope="row">{row[0]}</th>{"".join(data)}</tr>'

    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    body = "\n".join(map(cells, rows))
    return f'<table class="{kind}">{above}<tbody>\n{body}\n</tbody></table>'


def bullets(sentences: Iterable[str]) -> str:
    """Return a list of plain sentences."""
    lines = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>\n{lines}\n</ul>"


def settings_table(facts: Mapping[str, str]) -> str:
    """Return a table of plain names and values."""
    return table((), ([escape(name), escape(value)] for name, value in facts.items()), "settings")


def scrolling(table: str) -> str:
    """Return a table that scrolls if it is wider than the page."""
    return f'<div class="scroll">{table}</div>'


def noted(head: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> str:
    """Return a table of numbers in finished HTML, with a plain note below it."""
    return f'{scrolling(table(head, rows, "losses"))}\n<p class="note">{escape(note)}</p>'


def curves(summary: Summary, by_length: str, by_position: str) -> str:
    """Return both curves with these captions, each for a light and a dark background."""
    captions = {draw_loss_by_length: by_length, draw_loss_by_position: by_position}
    return "".join(picture(functools.partial(draw, summary), caption) for draw, caption in captions.items())


def write_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Write a picture of a report, or without matplotlib remove the picture of an earlier report."""
    if is_installed("matplotlib"):
        save(draw(), path)
    else:
        path.unlink(missing_ok=True)


def picture(draw: Callable[[Theme], Figure], caption: str) -> str:
    """Return a picture with its caption, for a light and a dark background, or the command that installs matplotlib."""
    if not is_installed("matplotlib"):
        command = f"<code>{escape(install_command('matplotlib'))}</code>"
        return f'<p class="note">{escape(caption)} To draw it, install matplotlib: {command}</p>\n'
    light, dark = (base64.b64encode(svg(draw(theme))).decode("ascii") for theme in (LIGHT, DARK))
    kind = "data:image/svg+xml;base64,"
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{kind}{dark}">'
        f'<img src="{kind}{light}" alt="{escape(caption)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def draw_loss_by_length(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Draw the mean held-out loss at every length, and the training loss, with whiskers from best to worst seed."""
    figure, axes = _axes(f"Trained at {summary.train_length} tokens, read at more", "window (tokens)", theme)
    for row in summary.ranked(summary.lengths[-1]):
        aside = ASIDE ** (summary.rows.index(row) - (len(summary.rows) - 1) / 2)
        measured = {length * aside: cell for length, cell in row.by_length.items() if cell}
        color, marker = _curve(axes, [*measured], [*measured.values()], summary, row, theme, markersize=5.5)
        if row.train_loss:
            hollow = {"marker": marker, "markersize": 4.5, "markerfacecolor": "none", "linestyle": "none"}
            axes.plot([summary.train_length], [row.train_loss.mean], color=color, **hollow)  # type: ignore[arg-type]
    axes.set_xscale("log", base=2)
    names = [f"{length:,}\n{length / summary.train_length:g}×" for length in summary.lengths]
    axes.set_xticks(summary.lengths, names)
    axes.minorticks_off()
    _mark_training_length(axes, summary, theme)
    if few := [length for length in summary.lengths if not summary.has_enough(length)]:
        words = f"from {few[0]:,} tokens on, not enough text to tell: fewer than {ENOUGH_WINDOWS} windows"
        axes.text(0.99, 0.01, words, transform=axes.transAxes, ha="right", fontsize=8.5, color=theme.muted)
    theme.legend(axes, title=f"at {summary.lengths[-1]:,}, lowest first;\nhollow: training loss")
    return figure


def draw_loss_by_position(summary: Summary, theme: Theme = LIGHT) -> Figure:
    """Draw the mean held-out loss at the positions of the longest windows, averaged in bins."""
    longest = summary.lengths[-1]
    figure, axes = _axes(f"Within windows of {longest:,} tokens", "position (tokens)", theme)
    for row in summary.ranked(longest):
        _curve(axes, *_binned(row.by_position), summary, row, theme)
    axes.set_xlim(0, longest)
    if _mark_training_length(axes, summary, theme):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.07 * (high - low))  # room for the words above the curves
        words, place, ends = " not seen in training →", (summary.train_length, 0.985), ("data", "axes fraction")
        axes.annotate(words, place, xycoords=ends, va="top", fontsize=8.5, color=theme.muted)
    theme.legend(axes, title=f"at {longest:,}, lowest first")
    return figure


def _axes(title: str, x: str, theme: Theme) -> tuple[Figure, Axes]:
    figure = theme.blank(8.6, 4.6)
    axes = figure.subplots()
    theme.dress(axes, title=title, x=x, y="loss (nats per token)", grid=True)
    return figure, axes


def _curve(
    axes: Axes, x: Sequence[float], cells: Sequence[Cell], summary: Summary, row: Row, theme: Theme, **style: Any
) -> tuple[str, str]:
    """Draw a mean and whiskers, in the colour and marker that an encoding has in both pictures.

    If there are many points, only some have whiskers, which are shifted between encodings.
    """
    number, count = summary.rows.index(row), len(summary.rows)
    color, linestyle, marker = theme.stroke(number)
    mean, low, high = np.array([(cell.mean, cell.low, cell.high) for cell in cells]).reshape(-1, 3).T
    style = {"marker": marker, **style} if style else {}
    axes.plot(x, mean, color=color, linestyle=linestyle, linewidth=1.8, label=row.encoding, **style)
    every = (number, count) if len(x) > 2 * count else 1
    whiskers: dict[str, Any] = {"fmt": "none", "ecolor": color, "elinewidth": 1.2, "capsize": 3.0}
    axes.errorbar(x, mean, (mean - low, high - mean), errorevery=every, **whiskers)
    return color, marker


def _binned(cells: Sequence[Cell | None]) -> tuple[list[float], list[Cell]]:
    """Return the middles of at most `NUM_BINS` bins of positions, and their means. Gaps remain gaps."""
    values = np.array([(cell.mean, cell.low, cell.high) for cell in (each or UNKNOWN for each in cells)])
    bins = min(NUM_BINS, len(values))
    middles = [float(part.mean()) for part in np.array_split(np.arange(len(values), dtype=float), bins)]
    means = [part.mean(axis=0).tolist() for part in np.array_split(values, bins)]
    return middles, [Cell(mean=mean, low=low, high=high, deviation=0.0) for mean, low, high in means]


def _mark_training_length(axes: Axes, summary: Summary, theme: Theme) -> bool:
    """Draw a line at the training length if windows are longer, and return whether they are."""
    longer = summary.lengths[-1] > summary.train_length
    if longer:
        axes.axvline(summary.train_length, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
    return longer
