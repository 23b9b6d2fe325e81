"""The report of a comparison: one HTML page that holds everything it needs and opens from disk without a network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from locant.figures.canvas import DARK, LIGHT, Theme, svg
from locant.report.comparison.curves import draw_loss_by_length, draw_loss_by_position
from locant.report.comparison.reading import read
from locant.report.comparison.reproduce import command
from locant.report.comparison.stylesheet import stylesheet
from locant.report.comparison.summary import Cell, Row, Summary, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["page"]


def page(results: Mapping[str, Any]) -> str:
    """The whole page, from ``Results.to_dict()`` or a ``results.json``."""
    summary = summarise(results)
    settings = results["settings"]
    title = f"Trained at {summary.train_length:,} tokens, read at {summary.lengths[-1]:,}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{escape(_facts(summary, settings))}</p>',
        *_section("What the numbers say", _list(read(summary))),
        *_section("Held-out loss by length", _losses(summary)),
        *_section("The two curves", _pictures(summary)),
        *_section("How it was made", _how(results)),
    ]
    return _document(f"locant: {title}", "\n".join(body))


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{stylesheet()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, *content: str) -> list[str]:
    return ["<section>", f"<h2>{escape(heading)}</h2>", *content, "</section>"]


def _list(sentences: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "\n</ul>"


def _facts(summary: Summary, settings: Mapping[str, Any]) -> str:
    """What was done, in one line under the title."""
    text = settings.get("text", {})
    facts = [
        f"{len(summary.rows)} encodings",
        f"{summary.num_seeds} {'seed' if summary.num_seeds == 1 else 'seeds'} each",
    ]
    if "num_steps" in settings:
        facts.append(f"{settings['num_steps']:,} steps")
    if text:
        facts += [str(text.get("source", "")), f"{text.get('tokens', 0):,} tokens, the last tenth held out"]
    return " · ".join(fact for fact in facts if fact)


def _losses(summary: Summary) -> str:
    """Mean and standard deviation of every encoding at every length, best first at the longest."""
    best = {length: row.encoding for length in summary.lengths if (row := summary.best(length))}
    head = "".join(
        f'<th scope="col">{length:,}<small>{length / summary.train_length:g}×</small></th>'
        for length in summary.lengths
    )
    rows = []
    for row in summary.ranked(summary.lengths[-1]):
        cells = [_loss(row, length, summary, marked=best.get(length) == row.encoding) for length in summary.lengths]
        rows.append(f'<tr><th scope="row">{escape(row.encoding)}</th>{"".join(cells)}</tr>')
    note = "Nats per token on held-out text, mean" + (
        " ± standard deviation over seeds" if summary.num_seeds > 1 else ""
    )
    note += f"; below, the ratio to the loss at {summary.base_length:,}. The lowest of each column is bold and marked."
    return (
        f'<div class="scroll"><table class="losses">\n<thead><tr><th scope="col">encoding</th>{head}</tr></thead>\n'
        "<tbody>\n" + "\n".join(rows) + f'\n</tbody>\n</table></div>\n<p class="note">{escape(note)}</p>'
    )


def _loss(row: Row, length: int, summary: Summary, *, marked: bool) -> str:
    cell = row.by_length.get(length)
    if cell is None:
        return '<td title="not finite, or not measured">–</td>'
    spread = f" ± {cell.deviation:.3f}" if row.num_seeds > 1 else ""
    ratio = row.ratio(length, summary.base_length)
    below = [f"×{ratio:.3f}" if ratio is not None else "", "best" if marked else ""]
    kind = ' class="best"' if marked else ""
    return f"<td{kind}>{cell.mean:.3f}{spread}<small>{' · '.join(part for part in below if part)}</small></td>"


def _pictures(summary: Summary) -> str:
    band = "The band goes from the lowest to the highest seed. " if summary.num_seeds > 1 else ""
    by_length = "Loss against the length of the window. " + band + "The dotted line is the training length."
    by_position = (
        f"Loss against the position within windows of {summary.lengths[-1]:,} tokens. {band}"
        "Right of the dotted line are positions that training never showed."
    )
    return _picture(draw_loss_by_length, summary, by_length) + _picture(draw_loss_by_position, summary, by_position)


def _picture(function: Callable[[Summary, Theme], Figure], summary: Summary, caption: str) -> str:
    """The picture for light and for dark paper; the browser shows the one that fits."""
    light, dark = (base64.b64encode(svg(function(summary, theme))).decode("ascii") for theme in (LIGHT, DARK))
    kind = "data:image/svg+xml;base64,"
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{kind}{dark}">'
        f'<img src="{kind}{light}" alt="{escape(caption)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def _how(results: Mapping[str, Any]) -> str:
    """The command, every setting, every version, every single run."""
    settings = {name: value for name, value in results["settings"].items() if name != "text"}
    text = {f"text: {name}": value for name, value in results["settings"].get("text", {}).items()}
    line = escape(command(results["settings"])).replace(" --", "</span> <span>--")  # lines may break there
    return (
        f"<p>To make it again:</p>\n<pre><span>{line}</span></pre>\n"
        f'<div class="pair">\n{_facts_table({**settings, **text})}\n{_facts_table(results["environment"])}\n</div>\n'
        f"<details><summary>Every run</summary>\n{_runs(results['records'])}\n</details>"
    )


def _facts_table(facts: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td>{escape(_plain(value))}</td></tr>'
        for name, value in facts.items()
    ]
    return '<table class="settings"><tbody>\n' + "\n".join(rows) + "\n</tbody></table>"


def _plain(value: object) -> str:
    if value is None or value in ("", [], ()):
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _runs(records: Iterable[Mapping[str, Any]]) -> str:
    """One row per training, with the losses as they were measured."""
    records = list(records)
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ["encoding", "seed", *(f"{length:,}" for length in lengths)]
    )
    rows = []
    for record in records:
        losses = [Cell.of([record["loss_by_length"].get(str(length))]) for length in lengths]
        cells = [
            escape(record["encoding"]),
            str(record["seed"]),
            *(f"{loss.mean:.4f}" if loss else "–" for loss in losses),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )
