"""Figures of speed in the guides, from the recorded benchmarks of a CPU. A missing row gives its command instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.report.benchmarks import read_benchmarks

__all__ = [
    "attention_cost", "explorer_cost", "model_cost", "parts", "prepare_speed", "rotation_cost", "table_file_cost",
    "text_dependent_cost", "worker_cost",
]  # fmt: skip

Record = Mapping[str, Any]
FORWARD = "attention, forward, 8 heads of 64, 8192 tokens"
MACHINE = {"cpu_count": 2, "machine": "x86_64", "torch": "2.13.0"}
"""A machine for the examples below."""
TABLE_FILE = "benchmarks.ngram_table FOLDER --gigabytes 16 --steps 100 --record"
"""The module and its arguments, which is not one of ``python -m benchmarks`` because it needs a disk."""
TOKENS = 8192
"""The length in the benchmark of every encoding."""
PLAIN = "plain causal SDPA, without a bias"


def parts() -> dict[str, str]:
    """Return each part of a page by its path."""
    record = read_benchmarks()["cpu"]
    functions = (
        attention_cost,
        rotation_cost,
        prepare_speed,
        worker_cost,
        model_cost,
        table_file_cost,
        text_dependent_cost,
        explorer_cost,
    )
    return {f"speed/{function.__name__}.txt": function(record) for function in functions}


def attention_cost(record: Record) -> str:
    """Return time and memory of ALiBi by each method, and of what stands beside the softmax."""
    methods = {
        "ALiBi, locant auto": "`tiled` (chosen by `auto`)",
        "ALiBi, matrix through SDPA": "`sdpa` with a matrix",
        "ALiBi, x-transformers": "x-transformers' ALiBi",
    }
    rows = _rows(record, "attention", FORWARD)
    if PLAIN not in rows:
        return _missing("attention")
    table = "\n".join(
        f"| {name} | {_times(rows[contender])} | {_memory(rows[contender])} |"
        for contender, name in methods.items() if contender in rows
    )  # fmt: skip
    where, plain = _machine(record, "attention"), f"plain causal attention, which takes {_memory(rows[PLAIN])}"
    parts = [
        f"ALiBi with 8 heads of 64 at 8,192 tokens on {where}, relative to {plain}:",
        f"| method | time | memory |\n|---|---|---|\n{table}",
    ]
    beside = _rows(record, "attention", "attention beside the softmax")
    others = [f"{_times(row)} times with {name}" for name, row in beside.items() if name != PLAIN]
    if others:
        parts.append(f"Forward and backward, relative to plain causal attention: {_join(others)}.")
    return "\n\n".join(parts)


def rotation_cost(record: Record) -> str:
    """Return the time of a rotation relative to a copy.

    >>> row = {"question": "rotate in place, 4096, torch.bfloat16", "contender": "copy", "ratio": 1.0}
    >>> part = {"environment": MACHINE, "rows": [row, row | {"contender": "locant, half layout", "ratio": 0.79}]}
    >>> rotation_cost({"rotary": part}).partition(" on ")[0]
    'In place it takes 0.79 of the time of copying the tensors in bfloat16'
    """
    found = []
    for row in record.get("rotary", {"rows": []})["rows"]:
        if row["question"].startswith("rotate in place") and row["contender"] == "locant, half layout":
            dtype = row["question"].partition(" (")[0].rpartition(" ")[2].removeprefix("torch.")
            found.append(f"{row['ratio']:.2g} of the time of copying the tensors in {dtype}")
    if not found:
        return _missing("rotary")
    found = [found[0], *(each.replace(" of the time of copying the tensors", "") for each in found[1:])]
    return f"In place it takes {_join(found)} on {_machine(record, 'rotary')}."


def prepare_speed(record: Record) -> str:
    """Return how fast text becomes a store."""
    rows, memory = _rows(record, "prepare", "200 MB"), _rows(record, "prepare", "largest memory")
    peer = next((row for name, row in rows.items() if name.startswith("tokenizers")), None)
    if peer is None or "locant prepare, 2000 MB" not in memory:
        return _missing("prepare")
    seconds = rows["locant prepare"]["milliseconds"] / 1000
    gigabytes = memory["locant prepare, 2000 MB"]["megabytes"] / 1000
    return (
        f"With the fast engine (`pip install 'locant[fast]'`) {_machine(record, 'prepare')} make a store of 200 MB of "
        f"text in {seconds:.1f} s. This is {peer['ratio']:.0f} times as fast as `tokenizers` in one process. For 2 GB "
        f"of text all processes together used {gigabytes:.1f} GB of memory ([all measurements](#guide-benchmarks))."
    )


def worker_cost(record: Record) -> str:
    """Return the cost of a batch with and without worker processes.

    >>> question = "read 40 batches of 8, windows of 1024"
    >>> alone = {"question": question, "contender": "0 worker processes", "milliseconds": 2.4}
    >>> rows = [alone, {"question": question, "contender": "2 worker processes", "milliseconds": 68.0}]
    >>> worker_cost({"windows": {"environment": MACHINE, "rows": rows}}).partition(" (")[0]
    'A batch of 8 windows of 1,024 tokens takes 0.06 ms without worker processes, and 1.7 ms with two of them'
    """
    question = next((q for q in _questions(record, "windows") if q.endswith("windows of 1024")), None)
    rows = _rows(record, "windows", question or "?")
    if question is None or len(rows) != 2:
        return _missing("windows")
    batches = int(question.split()[1])
    alone, workers = (rows[f"{count} worker processes"]["milliseconds"] / batches for count in (0, 2))
    return (
        f"A batch of 8 windows of 1,024 tokens takes {alone:.2g} ms without worker processes, and {workers:.2g} ms "
        f"with two of them ({_machine(record, 'windows')})."
    )


def model_cost(record: Record) -> str:
    """Return the time of a whole small model by library, relative to plain torch."""
    titles = {"a training step": "training step", "a prompt": "prompt", "10 times": "one more token"}
    columns = {title: _rows(record, "whole_model", start) for start, title in titles.items()}
    names = [*next(iter(columns.values()))]
    if not names:
        return _missing("whole_model")
    cells = {name: " | ".join(f"{rows[name]['ratio']:.2f}" for rows in columns.values()) for name in names}
    lines = [f"| {name} | {ratios} |" for name, ratios in cells.items()]
    head = f"| library | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
    return f"Times relative to plain torch, on {_machine(record, 'whole_model')}:\n\n" + "\n".join([head, *lines])


def table_file_cost(record: Record) -> str:
    """Return what it costs to train and to read a table in a file, and that a killed training resumed with its bits."""
    if "ngram_table" not in record:
        return _missing("ngram_table").replace("benchmarks ngram_table", TABLE_FILE)
    made, rows = record["ngram_table"]["resumed"], record["ngram_table"]["rows"]
    lines = [f"| {row['contender']} | {row['ratio']:,.1f} |" for row in rows]
    head = f"| {rows[0]['question']} | time relative to the first |\n|---|---|"
    return (
        f"A table of {made['gigabytes']:.1f} GB ({made['rows']:,} rows) was trained in its file for {made['steps']} "
        f"steps on {_machine(record, 'ngram_table')}. Its undo file took up {made['undo_gigabytes']:.1f} GB. The same "
        f"training was killed after step {made['killed_after']} and resumed from its checkpoint of step "
        f"{made['resumed_from']}. At the end, all bytes of the table and of the model were those of the training "
        f"without interruption.\n\n{head}\n" + "\n".join(lines)
    )


def text_dependent_cost(record: Record) -> str:
    """Return the cost of the encodings that depend on the text: PaTH, and Selective RoPE relative to two others."""
    one, prompt = (_rows(record, "every_encoding", start) for start in ("one query over", "a prompt of"))
    names = ("1 of", f"{TOKENS} of")
    rotated = [_rows(record, "every_encoding", f"{name} {TOKENS} tokens read and rotated") for name in names]
    moving = "PaTH, locant, in a cache that moves its keys"
    if (
        moving not in one
        or "PaTH, locant" not in prompt
        or not all("Selective RoPE, as published" in r for r in rotated)
    ):
        return _missing("every_encoding")
    ours = [rows["Selective RoPE, locant"] for rows in rotated]
    theirs = [rows["Selective RoPE, as published"] for rows in rotated]
    to_theirs = [{"ratio": a["milliseconds"] / b["milliseconds"]} for a, b in zip(ours, theirs, strict=True)]
    return (
        f"On one thread of {_machine(record, 'every_encoding')}, relative to attention without a bias, PaTH takes "
        f"{_times(prompt['PaTH, locant'])} times as long for a prompt of {TOKENS:,} tokens, and {_times(one[moving])} "
        f"times for one more token. To rotate the queries and keys of such a prompt, Selective RoPE takes "
        f"{_times(ours[1])} times as long as rotary positions ({_times(to_theirs[1])} times as long as the authors' "
        f"operations in float32), and {_times(ours[0])} times ({_times(to_theirs[0])}) for one more token."
    )


def explorer_cost(record: Record) -> str:
    """Return how long a visitor of the explorer waits for a first picture, and after a slider was moved.

    >>> question, screens = "A slider's answer on the page", (("rows", 28.9), ("compare", 77.5))
    >>> rows = [{"question": question, "contender": screen, "milliseconds": time} for screen, time in screens]
    >>> rows += [row | {"question": "The first picture on the page", "milliseconds": 500.0} for row in rows]
    >>> print(explorer_cost({"explore": {"environment": MACHINE, "rows": rows}}).partition(") ")[2])
    a screen shows its first picture within 0.5 s. A moved slider is answered in 29 ms (rows) to 78 ms (compare).
    """
    first, moved = (
        sorted(_rows(record, "explore", start).items(), key=lambda row: row[1]["milliseconds"])
        for start in ("The first picture on", "A slider's answer on")
    )
    if not first or not moved:
        return _missing("explore")
    (fast, least), (slow, most) = moved[0], moved[-1]
    return (
        f"On {_machine(record, 'explore')} a screen shows its first picture within "
        f"{first[-1][1]['milliseconds'] / 1000:.1f} s. A moved slider is answered in {least['milliseconds']:.0f} ms "
        f"({fast}) to {most['milliseconds']:.0f} ms ({slow})."
    )


def _questions(record: Record, name: str) -> list[str]:
    return [*dict.fromkeys(row["question"] for row in record.get(name, {"rows": []})["rows"])]


def _rows(record: Record, name: str, start: str) -> dict[str, Any]:
    """Return the rows of the first question that begins like this, by contender."""
    question = next((each for each in _questions(record, name) if each.startswith(start)), None)
    return {} if question is None else {r["contender"]: r for r in record[name]["rows"] if r["question"] == question}


def _machine(record: Record, name: str) -> str:
    made = record[name]["environment"]
    return f"{made['cpu_count']} cores ({made['machine']}, torch {made['torch']})"


def _missing(name: str) -> str:
    return f"This has not been measured yet. Run `python -m benchmarks {name}`."


def _times(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.1f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"


def _memory(row: Mapping[str, Any]) -> str:
    size = row["megabytes"]
    return f"{size:.0f} MB" if size < 1000 else f"{size / 1000:.1f} GB"


def _join(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
