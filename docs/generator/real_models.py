"""What position bugs cost: the tables of the page, from the record of ``make real``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.generator.records import ROOT
from locant.position_costs import SMALL

__all__ = ["position_bugs"]

RECORD = ROOT / "benchmarks" / "results" / "real_models" / "bugs.json"
USUAL, LONG = "2048", "8192"
HIDDEN, PLAIN = 0.05, 0.3
"""A bug hides in short texts if it costs less than the first number in them, and more than the second in long ones."""
MOST_WORDS = 300
"""The longest warning that is shown whole, in characters."""


def position_bugs(record: Mapping[str, Any] | None = None) -> str:
    """Return the findings and the tables, for a page that is written by hand."""
    if record is None:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    summary, weights = record["summary"], record["weights"]
    rows = summary["rows"]
    parts = ["\n".join(f"- {sentence}" for sentence in _findings(rows, weights))]
    for model, facts in weights.items():
        measured = [(key, row) for key, row in rows.items() if row["costs"].get(model)]
        if measured:
            parts.append(f"## {facts['title']}\n\n{_correct(summary['correct'], model)}")
            parts.append(_table(model, sorted(measured, key=lambda each: -_worst(each[1]["costs"][model]))))
    parts.append("## Where they happened, and what finds them\n\n" + _tools(rows))
    return "\n\n".join(parts)


def _worst(by_length: Mapping[str, Any]) -> float:
    return max(each["cost"] for each in by_length.values())


def _findings(rows: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences that follow from the numbers."""
    for model, facts in weights.items():
        title = facts["title"]
        costs = {key: row["costs"][model] for key, row in rows.items() if row["costs"].get(model)}
        if not costs:
            yield f"{title} is not measured yet: run `make real PARTS=bugs`."
            continue
        worst = sorted((key for key in costs if _worst(costs[key]) > SMALL), key=lambda key: -_worst(costs[key]))
        harmless = [key for key in costs if max(abs(each["cost"]) for each in costs[key].values()) < SMALL]
        if worst:
            yield f"**{title}**: of {len(costs)} changes the most costly are {_named(worst[:5], costs)}."
        if harmless:
            yield f"In {title}, {len(harmless)} cost less than {SMALL} nats at every length: {_keys(harmless)}."
        hidden = [
            key for key, each in costs.items()
            if {USUAL, LONG} <= each.keys() and each[USUAL]["cost"] < HIDDEN and each[LONG]["cost"] > PLAIN
        ]  # fmt: skip
        if hidden:
            yield (
                f"In {title}, a test of 2,048 tokens does not see {_keys(hidden)}. The cost is below {HIDDEN} nats "
                f"there, and above {PLAIN} at 8,192."
            )


def _keys(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _named(keys: list[str], costs: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` (+{_worst(costs[key]):.1f} nats)" for key in keys)


def _correct(correct: Mapping[str, Any], model: str) -> str:
    losses = [
        f"{each['loss']:.3f} at {int(key.split('/')[1]):,} tokens"
        for key, each in sorted(correct.items(), key=lambda item: item[0].split("/")[1].zfill(6))
        if key.startswith(f"{model}/") and key.endswith(" text") and "loss" in each
    ]
    return f"The loss of the correct model is {', '.join(losses)}." if losses else ""


def _table(model: str, measured: list[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the costs by length with their intervals, the cost in the last half of the longest, and the recall."""
    lengths = sorted({int(length) for _, row in measured for length in row["costs"][model]})
    asked = any(row["recall"].get(model) for _, row in measured)
    head = ["bug", *(f"{length:,} tokens" for length in lengths), *(["one key", "many keys"] if asked else [])]
    lines = [f"| {' | '.join(head)} |", f"|{len(head) * '---|'}"]
    for key, row in measured:
        costs, recall = row["costs"][model], row["recall"].get(model)
        cells = [f"**`{key}`**: {row['sentence']}", *(_cost(costs.get(str(length))) for length in lengths)]
        if asked:
            cells += [f"{each['found']} of {each['asked']}" for each in recall.values()] if recall else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cost(each: Mapping[str, Any] | None) -> str:
    """Return a cost with its interval.

    >>> _cost({"cost": 1.024, "interval": [0.91, 1.17]}), _cost({"cost": 0.00004, "interval": None}), _cost(None)
    ('+1.02 (0.91 to 1.17)', '0.000', '')
    """
    if each is None:
        return ""
    digits = 3 if abs(each["cost"]) < 0.1 else 2
    numbers = [each["cost"], *(each["interval"] or [])]
    cost, *ends = [f"{number:.{digits}f}".replace("-0.000", "0.000") for number in numbers]
    cost = f"+{cost}" if float(cost) > 0 else cost.replace("-", "−")
    return f"{cost} ({' to '.join(ends)})".replace("-", "−") if ends else cost


def _tools(rows: Mapping[str, Any]) -> str:
    lines = [":::{list-table}\n:header-rows: 1\n", "* - bug\n  - happened in\n  - entries\n  - what the tools say"]
    for key, row in rows.items():
        thread = row["source"].replace("#", "/issues/")
        link = f"[{row['source']}](https://github.com/{thread})" if thread else "–"
        said = next(iter(row["warnings"].values()), {})
        entries = ", ".join(f"[{number}](#known-bug-{number})" for number in row["entries"]) or "–"
        lines.append(f"* - `{key}`\n  - {link}\n  - {entries}")
        lines += [*_said(said)]
    return "\n".join([*lines, ":::"])


def _said(said: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the first warning of each tool, without the sentence on costs, which stand in the tables."""
    cells = []
    for tool, warnings in said.items():
        first = warnings[0].partition(" This ")[0].partition(". This ")[0] if warnings else "nothing"
        first = first if len(first) <= MOST_WORDS else f"{first[:MOST_WORDS].rpartition(' ')[0]} …"
        more = f" (and {len(warnings) - 1} more)" if len(warnings) > 1 else ""
        cells.append(f"`{tool}`: {first}{more}".replace("|", "\\|"))
    for number, cell in enumerate(cells or ["–"]):
        yield f"  {' ' if number else '-'} - {cell}" if len(cells) > 1 else f"  - {cell}"
