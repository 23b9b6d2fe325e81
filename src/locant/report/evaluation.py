"""Report the evaluation of a model (sentences, a table and a page), a tuning run and an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from locant.lab.evaluation import interval_of_mean
from locant.lab.settings import ENOUGH_WINDOWS
from locant.lab.summary import summarise
from locant.report import console
from locant.report.commands import shell_line
from locant.report.comparison import context_table
from locant.report.console import MISSING, named_rows, show
from locant.report.page import curves, render, write_page
from locant.report.sentences import context_sentences, signed
from locant.report.tables import Cell, Table

TRAINED = {"all": "all weights", "new": "only the weights of the encoding", "lora": "low-rank adapters"}
TASKS = {"pass_keys": "pass keys", "key_values": "values of keys"}
NOTE = "Nats per token. Brackets: the 95% interval over windows, by a block bootstrap."
VISIBLE = 0.001
"""The smallest difference that is reported, in nats per token."""


def evaluation_sentences(results: Mapping[str, Any]) -> list[str]:
    """Return the conclusions and their limits. All other encodings are compared with the first encoding."""
    first, *others = results["records"]
    text, sentences = results["settings"]["text"], list[str]()
    few = [length for length, losses in first["loss_by_window"].items() if len(losses) < ENOUGH_WINDOWS]
    enough = [length for length in first["loss_by_window"] if length not in few]
    if few:
        lengths = ", ".join(f"{int(length):,}" for length in few)
        sentences.append(f"Fewer than {ENOUGH_WINDOWS} windows of {lengths} tokens: no conclusion at that length.")
    if enough:
        sentences += [
            f"{other['encoding']} compared with {first['encoding']}: {_differences(first, other, enough)}."
            for other in others
        ]
    for task, name in TASKS.items():
        if rows := _total(first, task, "asked"):
            counts = (f"{each['encoding']} {_total(each, task, 'recalled')}" for each in results["records"])
            sentences.append(f"{name.capitalize()} recalled, of {rows}: {', '.join(counts)}.")
        short = {one["length"] for one in first.get(task, ()) if one["asked"] < results["settings"].get("keys", 0)}
        if short:
            lengths = ", ".join(f"{length:,}" for length in sorted(short))
            sentences.append(f"At {lengths} tokens, not all {name} were asked for: some rows would have to be cut.")
    sentences += [*_ruler_sentences(results), *context_sentences(summarise(results))]
    sentences.append(
        "The loss measures how well the next token is predicted. Nearby tokens are usually enough for this."
    )
    sentences.append(
        f"These results are for one model and one text ({text['source']}), not for others. Nothing was trained, and a "
        "short training may change the order."
    )
    return sentences


def _ruler_sentences(results: Mapping[str, Any]) -> list[str]:
    """Return sentences about the scores in RULER's tasks, the missing cells, and the output for a score of zero."""
    records, sentences = results["records"], list[str]()
    for cells in zip(*(record.get("ruler", ()) for record in records), strict=True):
        named = [(record["encoding"], cell) for record, cell in zip(records, cells, strict=True)]
        place = f"{cells[0]['task']} at {cells[0]['length']:,} tokens"
        if not (tokens := cells[0]["tokens"]):
            sentences.append(f"{place} was not measured: its shortest row would have to be cut.")
            continue
        scores = ", ".join(f"{name} {cell['score']:.2f}" for name, cell in named)
        sentences.append(f"{place}, rows of {min(tokens):,} to {max(tokens):,}, read without cuts: {scores}.")
        for name, cell in named:
            if not cell["score"]:
                wrote = shorten(repr(cell["first"]["wrote"]), 60)
                sentences.append(f"{name} wrote {wrote} there, expected {', '.join(cell['first']['expected'])}.")
    if results["settings"]["text"].get("chat_template"):
        sentences.append("The model has a chat template. It was not used, which may reduce the scores.")
    return sentences


def _differences(first: Mapping[str, Any], other: Mapping[str, Any], lengths: Sequence[str]) -> str:
    """Describe the difference at each length, with its 95 % interval over the windows."""
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
    return word, f" ({signed(low)} to {signed(high)} nats)"


def print_evaluation(results: Mapping[str, Any]) -> None:
    """Print the table of losses with their intervals, and the sentences."""
    conclusions = "\n".join(f"· {sentence}" for sentence in evaluation_sentences(results))
    show(console.draw(_losses_table(results), "\n"), conclusions)


def _losses_table(results: Mapping[str, Any]) -> Table:
    """Return the losses of each encoding with their intervals, and the recall."""
    lengths = [*results["records"][0]["loss_by_length"]]
    tasks = [task for task in TASKS if results["records"][0].get(task)]
    rows = [
        [record["encoding"], *(_loss(record, length) for length in lengths), *(_share(record, task) for task in tasks)]
        for record in results["records"]
    ]
    head = ["encoding", *(f"{int(length):,}" for length in lengths), *(TASKS[task] for task in tasks)]
    return Table(title="Loss (nats per token)", head=head, rows=rows, note=NOTE)


def _loss(record: Mapping[str, Any], length: str) -> Cell:
    loss, interval = record["loss_by_length"][length], record["interval_by_length"][length]
    if loss is None:
        return Cell(text=MISSING)
    return Cell(text=f"{loss:.3f}", spread="" if interval is None else f"({interval[0]:.3f}–{interval[1]:.3f})")


def _total(record: Mapping[str, Any], task: str, count: str) -> int:
    return sum(each[count] for each in record.get(task, ()))


def _share(record: Mapping[str, Any], task: str) -> str:
    rows = _total(record, task, "asked")
    return f"{_total(record, task, 'recalled')}/{rows}" if rows else MISSING


def write_evaluation(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the pictures and the page next to `results.json`, and return the path of the page."""
    settings, summary = results["settings"], summarise(results)
    text, longest = settings["text"], summary.lengths[-1]
    page = render(
        "evaluation.html",
        title=f"{text['model']}, with {len(results['records'])} position encodings",
        facts=f"{text['source']} · {text['windows']} windows of {longest:,} tokens · nothing was trained",
        sentences=evaluation_sentences(results),
        table=_losses_table(results),
        context=context_table(summary),
        curves=curves(
            summary,
            "Loss by the length of the window. The dotted line is the length in the model's configuration.",
            f"Loss by the position within windows of {longest:,} tokens.",
        ),
        recall=_recall_table(results),
        command=_command(settings),
        versions=results["environment"],
    )
    return write_page(page, summary, folder)


def _recall_table(results: Mapping[str, Any]) -> Table:
    """Return the share that each encoding recalled, by task, length and depth."""
    rows = list[list[str]]()
    for record in results["records"]:
        name = record["encoding"]
        for task, what in TASKS.items():
            for one in record.get(task, ()):
                share = f"{one['recalled']}/{one['asked']}"
                rows.append([name, what, f"{one['length']:,}", f"{one['depth']:.0%}", share])
        for one in record.get("ruler", ()):
            share = f"{one['score']:.2f} of {one['asked']}" if one["asked"] else MISSING
            rows.append([name, one["task"], f"{one['length']:,}", MISSING, share])
    return Table(head=["encoding", "task", "length", "depth", "recalled"], rows=rows)


def _command(settings: Mapping[str, Any]) -> str:
    text, tasks = settings["text"], settings.get("tasks")
    options = {
        "lengths": settings["lengths"], "with": settings["ways"], "windows": text["windows"], "keys": settings["keys"],
        "tasks": tasks, "rows": settings["rows"] if tasks else None, "far": settings.get("far"),
        "device": settings["device"], "dtype": settings["dtype"],
    }  # fmt: skip
    return shell_line("evaluate", [text["model"], *text["files"]], options)


def print_tuning(record: Mapping[str, Any], output: Path) -> None:
    """Print the losses before and after, their difference with its interval, and how to load the result."""
    last = max(1, record["num_steps"] // 10)
    rows = {
        "training": _steps(record),
        "training loss": f"{np.mean(record['train_loss'][-last:]):.3f}",
        "held-out loss": _held_out(record),
        "difference": _change(record["before"], record["after"]),
    }
    show(named_rows(rows.items()))
    written = f"\nWritten to {output}. Load it with\n{_loading(record, output)}"
    console.out().print(written, soft_wrap=True)  # paths and code are copied, so they are not wrapped


def tuning_sentences(record: Mapping[str, Any]) -> list[str]:
    """Return the facts of a tuning run in sentences, without the folder."""
    settings = record["settings"]
    how = f"with {settings['way']}, {TRAINED[settings['train']]}, on {settings['text']['source']}"
    return [
        f"Trained {how}: {_steps(record)}.",
        f"Held-out loss: {_held_out(record)}, a difference of {_change(record['before'], record['after'])}.",
        "This is one training of one model on one text. `locant evaluate` measures the model at other lengths.",
    ]


def _steps(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    return f"{record['num_steps']:,} steps of {settings['batch_size']} x {settings['length']:,} tokens"


def _held_out(record: Mapping[str, Any]) -> str:
    return f"{np.mean(record['before']):.3f} before, {np.mean(record['after']):.3f} after"


def _change(before: list[float], after: list[float]) -> str:
    """Describe the mean difference over windows, with the 95 % interval of a block bootstrap."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    interval = interval_of_mean(differences)
    mean = signed(float(np.mean(differences)))
    if interval is None or len(differences) < ENOUGH_WINDOWS:
        return f"{mean} nats, over {len(differences)} windows: too few to conclude from"
    return f"{mean} nats ({signed(interval[0])} to {signed(interval[1])} over {len(differences)} windows)"


def _loading(record: Mapping[str, Any], output: Path) -> str:
    if record["settings"]["adapter"]:
        return f"peft.PeftModel.from_pretrained(model, {str(output)!r}), with that folder's config.json for the model"
    if record["swapped"]:
        return f"locant.checkpoints.load_swapped({str(output)!r})"
    return f"transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})"


def print_audit(facts: Mapping[str, Any]) -> None:
    """Print the verdict, and the loss under each hypothesis, the lowest first."""
    rows: dict[str, Any] = {"verdict": facts["sentence"]}
    if "losses" not in facts:
        return show(named_rows(rows.items()))
    rows["configuration"] = facts["configuration"]
    rows["text"] = f"{facts['windows']} windows of {facts['length']:,} tokens"
    rows["left out"] = [f"{name}: {reason}" for name, reason in facts["left_out"].items()]
    table = console.table("nats per token", "windows", name="hypothesis")
    for name, loss in facts["losses"].items():
        windows = facts["dropped"].get(name)
        table.add_row(name, f"{loss:.4f}" if windows is None else f"≈ {loss:.2f}", str(windows or facts["windows"]))
    table.add_row("counting words", f"{facts['unigram']:.4f}", MISSING)
    dropped = "≈ is an estimate: after a few windows, this hypothesis was clearly worse than the best, and was dropped."
    return show(named_rows(rows.items()), table, *([dropped] if facts["dropped"] else []))
