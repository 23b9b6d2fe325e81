"""What an evaluation of a model found: sentences, a table, and a page; what a tuning did, and an audit found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from locant.lab.evaluation import interval_of_mean
from locant.lab.summary import ENOUGH_WINDOWS, summarise
from locant.report.commands import shell_line
from locant.report.comparison import context_section
from locant.report.console import MISSING, named_rows, show
from locant.report.console import table as printed
from locant.report.page import bullets, curves, noted, report, settings_table, table, write_page
from locant.report.sentences import context_sentences

TRAINED = {"all": "all weights", "new": "those of the encoding alone", "lora": "low-rank adapters"}
TASKS = {"pass_keys": "pass keys", "key_values": "values of keys"}
NOTE = "Nats per token; in brackets the 95% interval over windows, by a block bootstrap."
VISIBLE = 0.001
"""Nats per token: a smaller difference is not worth a word."""


def evaluation_sentences(results: Mapping[str, Any]) -> list[str]:
    """What follows from the numbers, and what does not: the first encoding is what the others are held against."""
    first, *others = results["records"]
    text, said = results["settings"]["text"], list[str]()
    few = [length for length, losses in first["loss_by_window"].items() if len(losses) < ENOUGH_WINDOWS]
    told = [length for length in first["loss_by_window"] if length not in few]
    if few:
        lengths = ", ".join(f"{int(length):,}" for length in few)
        said.append(f"Fewer than {ENOUGH_WINDOWS} windows of {lengths} tokens: nothing follows at that length.")
    if told:
        said += [
            f"{other['encoding']} against {first['encoding']}: {_differences(first, other, told)}." for other in others
        ]
    for task, name in TASKS.items():
        if asked := _sum_of(first, task, "asked"):
            counts = (f"{each['encoding']} {_sum_of(each, task, 'recalled')}" for each in results["records"])
            said.append(f"{name.capitalize()} recalled, of {asked}: {', '.join(counts)}.")
        short = {one["length"] for one in first.get(task, ()) if one["asked"] < results["settings"].get("keys", 0)}
        if short:
            lengths = ", ".join(f"{length:,}" for length in sorted(short))
            said.append(f"Not all {name} were asked for at {lengths} tokens, where the question does not fit uncut.")
    said += [*_ruler_sentences(results), *context_sentences(summarise(results))]
    said.append(
        f"One model and one text, {text['source']}: nothing follows for others. Loss says how well the next token is "
        "predicted, for which near tokens are mostly enough. Nothing was trained, and a short training may change the "
        "order."
    )
    return said


def _ruler_sentences(results: Mapping[str, Any]) -> list[str]:
    """The scores in RULER's tasks, what was not asked or not used, and what was written where a score is zero."""
    records, said = results["records"], list[str]()
    for cells in zip(*(record.get("ruler", ()) for record in records), strict=True):
        named = [(record["encoding"], cell) for record, cell in zip(records, cells, strict=True)]
        place = f"{cells[0]['task']} at {cells[0]['length']:,} tokens"
        if not (tokens := cells[0]["tokens"]):
            said.append(f"{place} was not asked: its shortest row does not fit uncut.")
            continue
        scores = ", ".join(f"{name} {cell['score']:.2f}" for name, cell in named)
        said.append(f"{place}, rows of {min(tokens):,} to {max(tokens):,}, all read whole: {scores}.")
        for name, cell in named:
            if not cell["score"]:
                wrote = shorten(repr(cell["first"]["wrote"]), 60)
                said.append(f"{name} wrote {wrote} there, for {', '.join(cell['first']['expected'])}.")
    if results["settings"]["text"].get("chat_template"):
        said.append("The model has a chat template. It was not used, which may cost answers.")
    return said


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
    (encoding, *head), *losses = _losses(results)
    rows = printed(*head, name=encoding, title="Loss (nats per token)")
    for name, *cells in losses:
        rows.add_row(name, *(cell.replace(" (", "\n(") for cell in cells))
    show(rows, "\n".join(f"· {sentence}" for sentence in evaluation_sentences(results)))


def _losses(results: Mapping[str, Any]) -> list[list[str]]:
    """Headings; and of each encoding its name, its losses with their intervals, and what it recalled."""
    lengths, rows = [*results["records"][0]["loss_by_length"]], list[list[str]]()
    tasks = [task for task in TASKS if results["records"][0].get(task)]
    for record in results["records"]:
        losses = (_loss(record, length) for length in lengths)
        rows.append([record["encoding"], *losses, *(_share(record, task) for task in tasks)])
    return [["encoding", *(f"{int(length):,}" for length in lengths), *(TASKS[task] for task in tasks)], *rows]


def _loss(record: Mapping[str, Any], length: str) -> str:
    loss, interval = record["loss_by_length"][length], record["interval_by_length"][length]
    spread = "" if interval is None else f" ({interval[0]:.3f}–{interval[1]:.3f})"
    return MISSING if loss is None else f"{loss:.3f}{spread}"


def _sum_of(record: Mapping[str, Any], task: str, count: str) -> int:
    return sum(each[count] for each in record.get(task, ()))


def _share(record: Mapping[str, Any], task: str) -> str:
    asked = _sum_of(record, task, "asked")
    return f"{_sum_of(record, task, 'recalled')}/{asked}" if asked else MISSING


def write_evaluation(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page beside `results.json`; returns where the page is."""
    settings, records, summary = results["settings"], results["records"], summarise(results)
    text, keys, (head, *losses) = settings["text"], list[list[str]](), _losses(results)
    for record in records:
        name = escape(record["encoding"])
        for task, what in TASKS.items():
            for one in record.get(task, ()):
                share = f"{one['recalled']}/{one['asked']}"
                keys.append([name, what, f"{one['length']:,}", f"{one['depth']:.0%}", share])
        for one in record.get("ruler", ()):
            share = f"{one['score']:.2f} of {one['asked']}" if one["asked"] else MISSING
            keys.append([name, one["task"], f"{one['length']:,}", MISSING, share])
    recall = table(["encoding", "what", "length", "depth", "recalled"], keys) if keys else "<p>None were asked for.</p>"
    versions = settings_table({name: str(value) for name, value in results["environment"].items()})
    sections = {
        "What follows, and what does not": bullets(evaluation_sentences(results)),
        "Loss by length": noted(head, [[escape(name), *cells] for name, *cells in losses], NOTE),
        **context_section(summary),
        "The two curves": curves(
            summary,
            "Loss against the length of the window. The dotted line is the length that the model states.",
            f"Loss against the position within windows of {summary.lengths[-1]:,} tokens.",
        ),
        "Recall": recall,
        "How it was made": f"<pre><span>{escape(_command(settings))}</span></pre>\n{versions}",
    }
    title = f"{text['model']}, with {len(records)} position encodings"
    facts = f"{text['source']} · {text['windows']} windows of {settings['lengths'][-1]:,} tokens · nothing was trained"
    return write_page(report(title, facts, sections), summary, folder)


def _command(settings: Mapping[str, Any]) -> str:
    text, tasks = settings["text"], settings.get("tasks")
    options = {
        "lengths": settings["lengths"], "with": settings["ways"], "windows": text["windows"], "keys": settings["keys"],
        "tasks": tasks, "rows": settings["rows"] if tasks else None, "far": settings.get("far"),
        "device": settings["device"], "dtype": settings["dtype"],
    }  # fmt: skip
    return shell_line("evaluate", [text["model"], *text["files"]], options)


def print_tuning(record: Mapping[str, Any], output: Path) -> None:
    """The losses before and after, the difference with its interval, and how to load what was written."""
    last = max(1, record["num_steps"] // 10)
    rows = {
        "training": _steps(record),
        "training loss": f"{np.mean(record['train_loss'][-last:]):.3f}",
        "held-out loss": _held_out(record),
        "difference": _change(record["before"], record["after"]),
        "written to": str(output),
        "load it with": _loading(record, output),
    }
    show(named_rows(rows.items()))


def tuning_sentences(record: Mapping[str, Any]) -> list[str]:
    """The same in sentences, without the folder."""
    settings = record["settings"]
    how = f"with {settings['way']}, {TRAINED[settings['train']]}, on {settings['text']['source']}"
    return [
        f"Trained {how}: {_steps(record)}.",
        f"Held-out loss: {_held_out(record)}; a difference of {_change(record['before'], record['after'])}.",
        "One training of one model on one text; locant evaluate says how the model reads other lengths.",
    ]


def _steps(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    return f"{record['num_steps']:,} steps of {settings['batch_size']} x {settings['length']:,} tokens"


def _held_out(record: Mapping[str, Any]) -> str:
    return f"{np.mean(record['before']):.3f} before, {np.mean(record['after']):.3f} after"


def _change(before: list[float], after: list[float]) -> str:
    """Window by window, with the 95 % interval of a block bootstrap."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    interval = interval_of_mean(differences)
    if interval is None or len(differences) < ENOUGH_WINDOWS:
        return f"{np.mean(differences):+.3f} nats, over {len(differences)} windows: too few to conclude from"
    return (
        f"{np.mean(differences):+.3f} nats ({interval[0]:+.3f} to {interval[1]:+.3f} over {len(differences)} windows)"
    )


def _loading(record: Mapping[str, Any], output: Path) -> str:
    if record["settings"]["adapter"]:
        return f"peft.PeftModel.from_pretrained(model, {str(output)!r}), the model with the config.json of that folder"
    if record["swapped"]:
        return f"locant.checkpoints.load_swapped({str(output)!r})"
    return f"transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})"


def print_audit(facts: Mapping[str, Any]) -> None:
    """Print what was found, and the loss under each reading, the lowest first."""
    rows: dict[str, Any] = {"verdict": facts["sentence"]}
    if "losses" not in facts:
        return show(named_rows(rows.items()))
    rows["configuration"] = facts["configuration"]
    rows["text"] = f"{facts['windows']} windows of {facts['length']:,} tokens"
    rows["left out"] = [f"{name}: {why}" for name, why in facts["left_out"].items()]
    readings = printed("nats per token", "windows", name="reading")
    for name, loss in facts["losses"].items():
        windows = facts["dropped"].get(name)
        readings.add_row(name, f"{loss:.4f}" if windows is None else f"≈ {loss:.2f}", str(windows or facts["windows"]))
    readings.add_row("counting words", f"{facts['unigram']:.4f}", MISSING)
    dropped = "≈ is an estimate: after a few windows, this reading was clearly worse than the best one and was dropped."
    return show(named_rows(rows.items()), readings, *([dropped] if facts["dropped"] else []))
