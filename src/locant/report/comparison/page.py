"""The report of a comparison: one HTML page that holds everything it needs and opens from disk without a network."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.figures.canvas import DARK, LIGHT, Theme, save, svg
from locant.files import write_whole
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE, command
from locant.lab.summary import Row, Summary, summarise
from locant.report.comparison.curves import draw_loss_by_length, draw_loss_by_position
from locant.report.comparison.sentences import sentences
from locant.report.console import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["page", "picture", "stylesheet", "table", "write_report"]

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

MISSING = "–"


def write_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page beside `results.json`; returns where the page is."""
    summary = summarise(results)
    save(draw_loss_by_length(summary), folder / BY_LENGTH)
    save(draw_loss_by_position(summary), folder / BY_POSITION)
    write_whole(folder / PAGE, page(results))
    return folder / PAGE


def page(results: Mapping[str, Any]) -> str:
    """The whole page, from `Results.to_dict()` or a `results.json`."""
    summary = summarise(results)
    title = escape(f"Trained at {summary.train_length:,} tokens, read at {summary.lengths[-1]:,}")
    said = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(summary))
    sections = {
        "What the numbers say": f"<ul>\n{said}\n</ul>",
        "Loss by length": _losses(summary),
        "The two curves": _pictures(summary),
        "How it was made": _how(results),
    }
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>locant: {title}</title>\n<style>\n{stylesheet()}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{title}</h1>\n<p class="facts">{escape(_facts(summary, results["settings"]))}</p>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def stylesheet() -> str:
    """Light or dark as the reader's system is, on a phone, a screen or paper; it loads nothing."""

    def colors(theme: Theme, mark: str) -> str:
        names = ("paper", "ink", "muted", "grid")
        return " ".join([*(f"--{name}: {getattr(theme, name)};" for name in names), f"--mark: {mark};"])

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {colors(DARK, '#222a35')} }} }}"
    return f":root {{ color-scheme: light dark; {colors(LIGHT, '#eef4fb')} }}\n{dark}\n{RULES.strip()}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of finished HTML; a row's first cell names it, and a cell may bring its own tag."""

    def cells(row: Sequence[str]) -> str:
        data = (cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row[1:])
        return f'<tr><th scope="row">{row[0]}</th>{"".join(data)}</tr>'

    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    body = "\n".join(map(cells, rows))
    return f'<table class="{kind}">{above}<tbody>\n{body}\n</tbody></table>'


def _facts(summary: Summary, settings: Mapping[str, Any]) -> str:
    """What was done, in one line under the title."""
    text = settings["text"]
    read = f"trained on {text['train_tokens']:,} tokens, measured on the last {text['held_out_tokens']:,}"
    counts = [counted(len(summary.rows), "encoding"), f"{counted(summary.num_seeds, 'seed')} each"]
    return " · ".join([*counts, counted(settings["num_steps"], "step"), text["source"], read])


def _losses(summary: Summary) -> str:
    """Mean and standard deviation of every encoding at every length, the lowest at the longest first."""
    lengths = summary.lengths
    leaders = {length: summary.leaders(length) for length in lengths}
    multiples = [f"{length:,}<small>{length / summary.train_length:g}×</small>" for length in lengths]
    rows = []
    for row in summary.ranked(lengths[-1]):
        losses = [_loss(row, length, summary, marked=row in leaders[length]) for length in lengths]
        rows.append([escape(row.encoding), f"{row.train_loss.mean:.3f}" if row.train_loss else MISSING, *losses])
    rows.append(["windows", "", *(f"{summary.num_windows(length):,}" for length in lengths)])
    if summary.unigram_loss is not None:
        rows.append(["unigram", "", *[f"{summary.unigram_loss:.3f}"] * len(lengths)])
    spread = " ± standard deviation over seeds" if summary.num_seeds > 1 else ""
    note = (
        f"Nats per token, mean{spread}: over the last steps of training, and on held-out text in windows. "
        f"Below, half of the 95% interval over the windows, and the ratio to the loss at {summary.base_length:,}. "
    )
    if summary.unigram_loss is not None:
        note += "Unigram is the loss of a count: how often each token is in the training text. "
    if any(leaders.values()):
        note += "Best, and bold, are the lowest of a column and what is not clearly different from it."
    rows_of_losses = table(["encoding", "training", *multiples], rows, "losses")
    return f'<div class="scroll">{rows_of_losses}</div>\n<p class="note">{escape(note)}</p>'


def _loss(row: Row, length: int, summary: Summary, *, marked: bool) -> str:
    cell = row.by_length.get(length)
    if cell is None:
        return f'<td title="not finite, or not measured">{MISSING}</td>'
    spread = f" ± {cell.deviation:.3f}" if row.num_seeds > 1 else ""
    ratio, margin = row.ratio(length, summary.base_length), row.margin(length)
    below = ["" if margin is None else f"±{margin:.3f}", f"×{ratio:.3f}" if ratio else "", "best" if marked else ""]
    kind = ' class="best"' if marked else ""
    return f"<td{kind}>{cell.mean:.3f}{spread}<small>{' · '.join(filter(None, below))}</small></td>"


def _pictures(summary: Summary) -> str:
    """Both, each for light and for dark paper; the browser shows the one that fits."""
    band = "The band goes from the lowest to the highest seed. " if summary.num_seeds > 1 else ""
    captions = {
        draw_loss_by_length: f"Loss against the length of the window. {band}The dotted line is the training length; "
        "on it, the small hollow marks are the training losses.",
        draw_loss_by_position: "Loss against the position within windows of "
        f"{summary.lengths[-1]:,} tokens. {band}Right of the dotted line are positions that did not occur in training.",
    }
    return "".join(picture(functools.partial(draw, summary), caption) for draw, caption in captions.items())


def picture(draw: Callable[[Theme], Figure], caption: str) -> str:
    """One picture with its caption, for light and for dark paper."""
    light, dark = (base64.b64encode(svg(draw(theme))).decode("ascii") for theme in (LIGHT, DARK))
    kind = "data:image/svg+xml;base64,"
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{kind}{dark}">'
        f'<img src="{kind}{light}" alt="{escape(caption)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def _how(results: Mapping[str, Any]) -> str:
    """The command, every setting, every version, every single model."""
    text = {f"text: {name}": value for name, value in results["settings"]["text"].items()}
    settings = {name: value for name, value in results["settings"].items() if name != "text"}
    line = escape(command(results["settings"])).replace(" --", "</span> <span>--")  # lines may break there
    made = ""
    for facts in ({**settings, **text}, results["environment"]):
        rows = ([escape(name.replace("_", " ")), escape(_plain(value))] for name, value in facts.items())
        made += table((), rows, "settings")
    return (
        f'<p>To make it again:</p>\n<pre><span>{line}</span></pre>\n<div class="pair">\n{made}\n</div>\n'
        f"<details><summary>Every model</summary>\n{_models(results['records'])}\n</details>"
    )


def _plain(value: object) -> str:
    if value is None or value in ("", [], ()):
        return MISSING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _models(records: Sequence[Mapping[str, Any]]) -> str:
    """One row for each, with the losses as they were measured."""
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    rows = []
    for record in records:
        losses = [record["train_loss"], *(record["loss_by_length"].get(str(length)) for length in lengths)]
        shown = (MISSING if loss is None else f"{loss:.4f}" for loss in losses)
        rows.append([escape(record["encoding"]), str(record["seed"]), *shown])
    head = ["encoding", "seed", "training", *(f"{length:,}" for length in lengths)]
    return f'<div class="scroll">{table(head, rows)}</div>'
