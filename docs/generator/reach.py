"""Parts of the pages "How far can a model read?" and "Reused keys in a real model", from the records of `make real`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.real_models.record import describe_versions, read
from locant.report.sentences import join_and, signed

__all__ = ["advice", "how_far", "reused_keys"]

CUT = "own, cut"
NAMES = {
    "own": "own positions", CUT: "own positions, text cut", "exact": "exact angles", "linear": "linear interpolation",
    "ntk": "NTK", "dynamic": "dynamic NTK", "yarn": "YaRN", "longrope": "LongRoPE", "self-extend": "Self-Extend",
    "longrope, searched": "LongRoPE with searched factors", "rerope": "ReRoPE", "dual-chunk": "dual chunk attention",
    "nope": "no positions", "drope": "no positions (DroPE)",
}  # fmt: skip
MATTERS = 0.01
"""The difference of losses, in nats per token, from which a sentence calls one of them better."""
ROUNDED = 1e-5
"""The last digit of recorded losses."""
NEW = "Not measured yet. Run `{command}`."


def name(way: str) -> str:
    """Return the name of an encoding as a sentence has it.

    >>> name("yarn:2"), name("rerope")
    ('YaRN by 2', 'ReRoPE')
    """
    kind, _, factor = way.partition(":")
    return NAMES.get(kind, kind) + (f" by {factor}" if factor else "")


def _number(value: int) -> str:
    return f"{value:,}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _change(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "–"
    interval = difference["interval"]
    return signed(difference["mean"]) + (f" ({signed(interval[0])} to {signed(interval[1])})" if interval else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------- how far


def _compared(summary: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return the longest length that was read with the model's own positions and in short windows, and its rows."""
    lengths = [int(length) for length, rows in summary["lengths"].items() if {"own", CUT} <= rows.keys()]
    longest = max((length for length in lengths if length > summary["trained"]), default=0)
    return longest, summary["lengths"].get(str(longest), {})


def advice(summary: Mapping[str, Any]) -> list[str]:
    """Return three sentences: which positions to use up to the trained length, beyond it, and after some training."""
    longest, rows = _compared(summary)
    stretched = {way: row for way, row in rows.items() if way not in ("own", CUT) and row["beyond"] is not None}
    if not stretched:
        return []
    best, *others = sorted(stretched, key=lambda way: stretched[way]["beyond"])
    return [
        _within(summary["trained"], rows, [best, *others[:2]]),
        _beyond(summary["trained"], longest, rows, best),
        _tuned(summary, rows, best),
    ]


def _within(trained: int, rows: Mapping[str, Any], ways: Sequence[str]) -> str:
    costs = {way: rows[way]["cost_within"] for way in ways}
    better = [way for way, cost in costs.items() if cost["interval"] and cost["interval"][1] < -MATTERS / 2]
    changes = join_and([f"{signed(cost['mean'])} with {name(way)}" for way, cost in costs.items()])
    recipe = f"use {name(better[0])}" if better else "keep the model's own positions"
    return f"Up to {_number(trained)} tokens, {recipe}: the loss per token changes by {changes} (in nats)."


def _beyond(trained: int, longest: int, rows: Mapping[str, Any], best: str) -> str:
    own, cut, row = rows["own"], rows[CUT], rows[best]
    losses = (
        f"the loss beyond {_number(trained)} is {_loss(row['beyond'])} with {name(best)}, {_loss(own['beyond'])} with "
        f"the model's own positions, and {_loss(cut['beyond'])} in windows of {_number(trained)} tokens"
    )
    far = max((way for way in rows if way not in ("own", CUT)), key=lambda way: rows[way]["found_far"])
    found = (
        f"of {row['asked_far']} numbers at least {_number(trained)} tokens back, {name(best)} finds {row['found_far']} "
        f"({_nats(row['nats_far'])} nats each) and the model's own positions find {own['found_far']} "
        f"({_nats(own['nats_far'])})"
    )
    if rows[far]["found_far"] > row["found_far"]:
        found += f", but {name(far)} finds {rows[far]['found_far']}"
    interval = (row["against_cut"] or {}).get("interval")
    if own["beyond"] <= row["beyond"]:
        recipe = "keep the model's own positions"
    elif interval and interval[1] < 0:
        recipe = f"use {name(best)}"
    else:
        recipe = f"cut the text into windows of {_number(trained)} tokens, since no encoding is clearly better"
    return f"Up to {_number(longest)} tokens without training, {recipe}: {losses}; {found}."


def _tuned(summary: Mapping[str, Any], rows: Mapping[str, Any], best: str) -> str:
    parts, is_better = list[str](), False
    for way, run in summary["tuned"].items():
        length = max(run["readings"], key=int)
        before, after = run["readings"][length]["before"], run["readings"][length]["after"]
        if int(length) > summary["trained"]:
            part, rival, other = "beyond", rows[best]["beyond"], f"{name(best)} and no training"
        else:
            own = summary["lengths"].get(length, {}).get("own", {})
            part, rival, other = "within", own.get("within"), "the model's own positions"
        if before is None or rival is None:
            continue
        is_worth = after[part] < rival - MATTERS
        is_better = is_better or is_worth
        is_close = abs(after[part] - rival) <= MATTERS
        compared = "better than" if is_worth else "hardly different from" if is_close else "worse than"
        parts.append(
            f"{run['steps']} steps of {_number(run['length'])} tokens take {name(way)} from {_loss(before[part])} to "
            f"{_loss(after[part])} at {_number(int(length))} tokens, which is {compared} {_loss(rival)} with {other}"
        )
    if not parts:
        return "No training is recorded."
    return f"{'Train if you can' if is_better else 'Do not train for so few steps'}: {'; '.join(parts)}."


def how_far(record: Mapping[str, Any] | None = None) -> str:
    """Return everything that the page shows of a record: three sentences, losses, numbers found, and what checks it."""
    record = read("reach") if record is None else record
    summary = record.get("summary")
    if not summary or not summary["lengths"]:
        return NEW.format(command="make real PARTS=reach")
    parts = ["\n".join(f"{number}. {sentence}" for number, sentence in enumerate(advice(summary), 1))]
    for length, rows in sorted(summary["lengths"].items(), key=lambda each: -int(each[0])):
        if rows:
            parts += [f"## Rows of {_number(int(length))} tokens", _rows(int(length), rows, summary["trained"])]
    if summary["tuned"]:
        parts += ["## After some training", _table(*_tunings(summary))]
    if angles := [*_angles(summary)]:
        parts += ["## Exact angles", *angles]
    parts += ["## How it was measured", _method(record, summary)]
    return "\n\n".join(part for part in parts if part)


def _rows(length: int, rows: Mapping[str, Any], trained: int) -> str:
    """Return the table of losses and the table of numbers found."""
    first, is_long = next(iter(rows.values())), length > trained
    against = "against_cut" if is_long else "against_own"
    is_compared = any(row.get(against) for row in rows.values())
    stretches = [f"{_number(begin)} to {_number(end)}" for begin, end, _ in first["by_position"]]
    losses = [
        [
            name(way), *(_loss(loss) for _, _, loss in row["by_position"]),
            *([_change(row.get(against))] if is_compared else []),
        ]
        for way, row in rows.items()
    ]  # fmt: skip
    answers = [
        [
            name(way), f"{row['found']} of {row['asked']}", _nats(row["nats"]),
            *([f"{row['found_far']} of {row['asked_far']}", _nats(row["nats_far"])] if is_long else []),
        ]
        for way, row in rows.items()
    ]  # fmt: skip
    far = [f"found, {_number(trained)} or more tokens back", "nats of such a number"] if is_long else []
    compared = [f"against own{', cut' if is_long else ''}"] if is_compared else []
    table = _table(["positions", *stretches, *compared], losses)
    return f"{table}\n\n{_table(['positions', 'numbers found', 'nats of a number', *far], answers)}"


def _tunings(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for way, run in summary["tuned"].items():
        for length, reading in run["readings"].items():
            for when in ("before", "after"):
                facts = reading[when]
                if facts is not None:
                    found = f"{facts['found']} of {facts['asked']}"
                    steps = f"{when} {run['steps']} steps of {_number(run['length'])} tokens"
                    lines.append(
                        [name(way), steps, _number(int(length)), _loss(facts["within"]), _loss(facts["beyond"]), found]
                    )
    trained = _number(summary["trained"])
    return ["positions", "training", "row", f"loss up to {trained}", f"loss beyond {trained}", "found"], lines


def _angles(summary: Mapping[str, Any]) -> Iterator[str]:
    for length, rows in summary["lengths"].items():
        if {"own", "exact"} <= rows.keys():
            change = _change(rows["exact"].get("against_own"))
            yield f"In rows of {_number(int(length))} tokens, exact angles change the loss by {change} nats per token."
    if not summary["offsets"]:
        return
    first = next((each for each in summary["offsets"] if abs(each["own"] - each["exact"]) >= MATTERS), None)
    if first is None:
        begin = f"Up to position {_number(summary['offsets'][-1]['position'])} they change it by less than"
    else:
        begin = f"At position {_number(first['position'])} they change it for the first time by at least"
    yield (
        "A short row whose first token is far from 0 has the same distances, so only the rounding of angles changes "
        f"its loss. {begin} {MATTERS} nats per token."
    )
    rows = [
        [_number(each["position"]), _loss(each["own"]), _loss(each["exact"]),
         f"{summary['angles'].get(str(each['position']), 0):.2g}"] for each in summary["offsets"]
    ]  # fmt: skip
    yield _table(["position of the first token", "loss, own", "loss, exact", "largest error of a float32 angle"], rows)


def _method(record: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    [weights] = record["weights"].values()
    trained = _number(summary["trained"])
    model = f"{weights['title']}, trained to {trained} tokens, {weights['file']} (sha256 `{weights['sha256'][:16]}…`)"
    took = f"`{record['command']}` took {record['seconds'] / 60:.0f} minutes"
    lines = [f"Model: {model}, read in float32 with {describe_versions(record)}. {took}."]
    if summary["search"]:
        lines.append(f"LongRoPE: {summary['search']}.")
    if summary["checks"]:
        largest = max(abs(each["first"] - each["second"]) for each in summary["checks"].values())
        keys = [key.partition("/") for key in summary["checks"]]
        checked = join_and([f"{name(way)} at {_number(int(length))}" for length, _, way in keys])
        lines.append(
            f"Calculated a second time with `transformers` and a hook, without this package: {checked}. The largest "
            f"difference of a mean loss is {_largest(largest)} nats."
        )
    return "\n\n".join(lines)


# ---------------------------------------------------------------------- reused keys


def reused_keys(record: Mapping[str, Any] | None = None) -> str:
    """Return everything that the page shows of a record: losses and numbers by move, the drift, and what checks it."""
    record = read("kv_reuse") if record is None else record
    summary = record.get("summary")
    if not summary or not summary["moves"]:
        return NEW.format(command="make real PARTS=kv_reuse")
    lines = [
        [_number(int(move)), way, _loss(row["loss"]), "–" if way == "anew" else _rise(row),
         f"{row['found']} of {row['asked']}", f"{row['nats']:.2f}"]
        for move, rows in summary["moves"].items() for way, row in rows.items()
    ]  # fmt: skip
    head = ["moved by", "the chunk is", "loss after it", "against anew", "found", "nats of a number"]
    parts = [_said(summary), _table(head, lines)]
    if summary["drift"]:
        parts += ["## Ten moves" if len(summary["steps"]) == 10 else "## Several moves", *_drifts(summary)]
    if summary["checks"]:
        both = [each for ways in summary["checks"].values() for each in ways.values()]
        largest = max(abs(each["first"] - each["second"]) for each in both)
        parts.append(
            "Calculated a second time with `transformers` alone, where the chunk is read at its new place instead of "
            f"moved: the largest difference of {len(both)} losses is {_largest(largest)} nats."
        )
    return "\n\n".join(parts)


def _largest(difference: float) -> str:
    return f"{difference:.0e}" if difference >= ROUNDED else f"below {ROUNDED:.0e}"


def _rise(row: Mapping[str, Any]) -> str:
    return _change({"mean": row["rise"], "interval": row["interval"]})


def _said(summary: Mapping[str, Any]) -> str:
    longest = max(summary["moves"], key=int)
    rows = summary["moves"][longest]
    moved, naive, anew, without = (rows[way] for way in ("moved", "not moved", "anew", "without the chunk"))
    worth = without["rise"]
    kept = f"{100 * (1 - moved['rise'] / worth):.0f} % of what the chunk is worth" if worth > 0 else "nothing"
    return (
        f"Moved by {_number(int(longest))} positions, a chunk costs {signed(moved['rise'])} nats per token against "
        f"reading anew, and {moved['found']} of {moved['asked']} numbers are found instead of {anew['found']}. Left at "
        f"its old positions it costs {signed(naive['rise'])}, with {naive['found']} numbers. Without the chunk it is "
        f"{signed(worth)}, so moving keeps {kept}."
    )


def _drifts(summary: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [dtype, *(_bits(drift["by_moves"][number - 1]) for number in _counts(drift)), _bits(drift["one_move"])]
        for dtype, drift in summary["drift"].items()
    ]
    counts = _counts(next(iter(summary["drift"].values())))
    yield "The relative error of all keys, against one rotation in float64 of the keys before the first move:"
    yield _table(["keys in", *(f"after {number}" for number in counts), "one move to the same place"], rows)


def _bits(error: float) -> str:
    return f"{error:.1e} ({-math.log2(error):.1f} bits)" if error else "none"


def _counts(drift: Mapping[str, Any]) -> list[int]:
    moves = len(drift["by_moves"])
    return sorted({1, 2, moves // 2, moves} - {0})
