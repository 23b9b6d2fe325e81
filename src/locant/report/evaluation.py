"""What an evaluation of a model found: sentences, a table in the terminal, and a page."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from locant.figures.canvas import save
from locant.files import write_whole
from locant.lab.evaluation import interval_of_mean
from locant.lab.results import BY_LENGTH, BY_POSITION, PAGE
from locant.lab.summary import ENOUGH_WINDOWS, Summary, summarise
from locant.report.comparison.curves import draw_loss_by_length, draw_loss_by_position
from locant.report.comparison.page import picture, stylesheet, table
from locant.report.console import show
from locant.report.console import table as printed

__all__ = ["evaluation_sentences", "print_evaluation", "write_evaluation"]

TASKS = {"pass_keys": "pass keys", "key_values": "values of keys"}
MISSING = "–"
NOTE = "Nats per token; in brackets the 95% interval over windows, by a block bootstrap."
VISIBLE = 0.001
"""Nats per token: a smaller difference is not worth a word."""


def evaluation_sentences(results: Mapping[str, Any]) -> list[str]:
    """What follows from the numbers, and what does not: the first encoding is what the others are held against."""
    first, *others = results["records"]
    text, found = results["settings"]["text"], []
    few = [length for length, losses in first["loss_by_window"].items() if len(losses) < ENOUGH_WINDOWS]
    told = [length for length in first["loss_by_window"] if length not in few]
    if few:
        lengths = ", ".join(f"{int(length):,}" for length in few)
        found.append(f"Fewer than {ENOUGH_WINDOWS} windows of {lengths} tokens: nothing follows at that length.")
    if told:
        found += [
            f"{other['encoding']} against {first['encoding']}: {_differences(first, other, told)}." for other in others
        ]
    for task, name in TASKS.items():
        if asked := _asked(first, task):
            counts = (f"{each['encoding']} {_recalled(each, task)}" for each in results["records"])
            found.append(f"{name.capitalize()} recalled, of {asked}: {', '.join(counts)}.")
    found.append(
        f"One model and one text, {text['source']}: nothing follows for others. Loss says how well the next token is "
        "predicted, for which near tokens are mostly enough. Nothing was trained, and a short training may change the "
        "order."
    )
    return found


def _differences(first: Mapping[str, Any], other: Mapping[str, Any], lengths: Sequence[str]) -> str:
    """At each length, with the 95 % interval of the difference, window by window."""
    groups: dict[str, list[str]] = {}
    for length in lengths:
        word, span = _difference(first["loss_by_window"][length], other["loss_by_window"][length])
        groups.setdefault(word, []).append(f"{int(length):,}{span}")
    return "; ".join(f"{word} at {', '.join(places)} tokens" for word, places in groups.items())


def _difference(first: Sequence[float | None], other: Sequence[float | None]) -> tuple[str, str]:
    differences = [b - a for a, b in zip(first, other, strict=True) if a is not None and b is not None]
    interval = interval_of_mean(differences) if len(differences) == len(first) else None
    if interval is None:
        return "a loss that is not finite", ""
    low, high = interval
    if max(-low, high) < VISIBLE:
        return f"less than {VISIBLE} nats apart", ""
    word = "not clearly different" if low <= 0 <= high else "worse" if low > 0 else "better"
    return word, f" ({low:+.3f} to {high:+.3f} nats)"


def print_evaluation(results: Mapping[str, Any]) -> None:
    """The table of losses with their intervals, and the sentences."""
    lengths = [*results["records"][0]["loss_by_length"]]
    rows = printed(
        *(f"{int(length):,}" for length in lengths), *TASKS.values(), name="encoding", title="Loss (nats per token)"
    )
    for record in results["records"]:
        losses = (_loss(record, length).replace(" (", "\n(") for length in lengths)
        rows.add_row(record["encoding"], *losses, *(_share(record, task) for task in TASKS))
    show(rows, "\n".join(f"· {sentence}" for sentence in evaluation_sentences(results)))


def _loss(record: Mapping[str, Any], length: str) -> str:
    loss, interval = record["loss_by_length"][length], record["interval_by_length"][length]
    spread = "" if interval is None else f" ({interval[0]:.3f}–{interval[1]:.3f})"
    return MISSING if loss is None else f"{loss:.3f}{spread}"


def _asked(record: Mapping[str, Any], task: str) -> int:
    return sum(each["asked"] for each in record.get(task, ()))


def _recalled(record: Mapping[str, Any], task: str) -> int:
    return sum(each["recalled"] for each in record.get(task, ()))


def _share(record: Mapping[str, Any], task: str) -> str:
    asked = _asked(record, task)
    return f"{_recalled(record, task)}/{asked}" if asked else MISSING


def write_evaluation(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page beside `results.json`; returns where the page is."""
    summary = summarise(results)
    save(draw_loss_by_length(summary), folder / BY_LENGTH)
    save(draw_loss_by_position(summary), folder / BY_POSITION)
    write_whole(folder / PAGE, _page(results, summary))
    return folder / PAGE


def _page(results: Mapping[str, Any], summary: Summary) -> str:
    settings = results["settings"]
    text, lengths = settings["text"], [*results["records"][0]["loss_by_length"]]
    title = escape(f"{text['model']}, with {len(results['records'])} position encodings")
    said = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in evaluation_sentences(results))
    rows = [
        [
            escape(each["encoding"]),
            *(_loss(each, length) for length in lengths),
            *(_share(each, task) for task in TASKS),
        ]
        for each in results["records"]
    ]
    head = ["encoding", *(f"{int(length):,}" for length in lengths), *TASKS.values()]
    keys = [
        [
            escape(each["encoding"]),
            name,
            f"{one['length']:,}",
            f"{one['depth']:.0%}",
            f"{one['recalled']}/{one['asked']}",
        ]
        for each in results["records"]
        for task, name in TASKS.items()
        for one in each.get(task, ())
    ]
    sections = {
        "What follows, and what does not": f"<ul>\n{said}\n</ul>",
        "Loss by length": f'<div class="scroll">{table(head, rows, "losses")}</div>\n<p class="note">{NOTE}</p>',
        "The two curves": picture(
            functools.partial(draw_loss_by_length, summary),
            "Loss against the length of the window. The dotted line is the length that the model states.",
        )
        + picture(
            functools.partial(draw_loss_by_position, summary),
            f"Loss against the position within windows of {summary.lengths[-1]:,} tokens.",
        ),
        "Recall": table(["encoding", "what", "length", "depth", "recalled"], keys)
        if keys
        else "<p>None were asked for.</p>",
        "How it was made": f"<pre><span>{escape(_command(settings))}</span></pre>\n"
        + table((), [[escape(name), escape(str(value))] for name, value in results["environment"].items()], "settings"),
    }
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    facts = f"{text['source']} · {text['windows']} windows of {settings['lengths'][-1]:,} tokens · nothing was trained"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>locant: {title}</title>\n<style>\n{stylesheet()}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{title}</h1>\n<p class="facts">{escape(facts)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _command(settings: Mapping[str, Any]) -> str:
    text = settings["text"]
    words = ["locant", "evaluate", text["model"], *text["files"]]
    words += ["--lengths", ",".join(map(str, settings["lengths"])), "--with", ",".join(settings["ways"])]
    words += ["--windows", str(text["windows"]), "--keys", str(settings["keys"])]
    return shlex.join([*words, "--device", settings["device"], "--dtype", settings["dtype"]])
