"""Draw the loss by position with bugs and without, and bring the costs in the README to what was measured.

The picture is ``docs/images/position_bugs.svg``. It shows the correct model, the most costly bugs and the most harmless
one, in windows of the longest length at which most bugs were measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.real_models.cost_of_bugs import BLOCK, CORRECT
from benchmarks.real_models.record import RESULTS, read
from locant.figures.canvas import DASHES, LIGHT, MARKERS, save
from locant.files import write_whole
from locant.position_costs import costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FILE", "chosen", "draw", "run", "with_costs"]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "images" / "position_bugs.svg"
MODEL, MOST_COSTLY = "smollm2", 5


def chosen(record: Mapping[str, Any], length: int) -> list[str]:
    """Return the most costly bugs in texts, the most costly first, and then the most harmless one."""
    rows = record["summary"]["rows"]
    costs = {
        key: row["costs"][MODEL][str(length)]["cost"] for key, row in rows.items()
        if row["scenario"] == "text" and str(length) in row["costs"].get(MODEL, {}) and key != "exact-angles"
    }  # fmt: skip
    ordered = sorted(costs, key=lambda key: -costs[key])
    return [*ordered[:MOST_COSTLY], min(costs, key=lambda key: abs(costs[key]))]


def _length(record: Mapping[str, Any]) -> int:
    """Return the longest length at which most bugs were measured."""
    rows = record["summary"]["rows"].values()
    measured = Counter(
        int(length) for row in rows if row["scenario"] == "text" for length in row["costs"].get(MODEL, {})
    )
    return max(measured, key=lambda length: (measured[length], length))


def _curve(record: Mapping[str, Any], key: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions, and the mean loss up to the next of them, in stretches that grow with the position."""
    windows = record["measured"][f"{MODEL}/{length}/{key}"]["value"]["windows"]
    losses = np.mean([window["blocks"] for window in windows], 0)
    ends = np.unique(np.round(np.geomspace(1, len(losses), 13)).astype(int))
    begins = np.concatenate([[0], ends[:-1]])
    means = [losses[begin:end].mean() for begin, end in zip(begins, ends, strict=True)]
    return (begins + ends) / 2 * BLOCK, np.array(means)


def draw(record: Mapping[str, Any], theme: Any = LIGHT) -> Figure:
    """Return the picture of a record."""
    length = _length(record)
    figure = theme.blank(9.6, 4.2)
    axes = figure.subplots()
    rows, keys = record["summary"]["rows"], chosen(record, length)
    for number, key in enumerate([*keys, f"{CORRECT} text"]):
        places, losses = _curve(record, key, length)
        is_correct = number == len(keys)
        label = "correct" if is_correct else f"{key}: +{max(rows[key]['costs'][MODEL][str(length)]['cost'], 0):.2f}"
        color = theme.ink if is_correct else theme.curves[number % len(theme.curves)]
        style = {
            "linestyle": DASHES[0 if is_correct else number % len(DASHES)],
            "marker": MARKERS[number % len(MARKERS)],
        }
        width = 2.4 if is_correct else 1.5
        axes.plot(
            places,
            losses,
            color=color,
            label=label,
            linewidth=width,
            markersize=4,
            zorder=1 if is_correct else 2,
            **style,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(BLOCK / 2, length)
    ticks = [2**power for power in range(6, length.bit_length()) if 2**power <= length]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(bottom=0)
    theme.style_axes(axes, title="", x="position in the text, tokens", y="loss, nats per token", grid=True)
    theme.set_title(
        figure, f"What position bugs cost: {record['weights'][MODEL]['title']}, a text of {length:,} tokens"
    )
    theme.legend(axes)
    return figure


def with_costs(text: str) -> str:
    """Return a page in whose shown warnings the sentences on costs are those of the record."""
    for cost in costs().values():
        text = re.sub(
            rf"This (?:hardly )?matters: if {re.escape(cost.mistake)}, .*", lambda _, cost=cost: str(cost), text
        )
    return text


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Draw the picture and write the sentences."""
    save(draw(read("bugs", folder)), FILE)
    costs.cache_clear()
    readme = ROOT / "README.md"
    write_whole(readme, with_costs(readme.read_text(encoding="utf-8")))
