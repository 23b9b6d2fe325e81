"""Draw the loss by position with bugs and without, and bring the costs in the README to what was measured.

The picture is ``docs/images/position_bugs-light.svg``, with a dark twin. It shows the correct model, the most costly
bugs and the most harmless one, in windows of the longest length at which most bugs were measured. The moving picture of
the README is drawn, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.real_models.cost_of_bugs import BLOCK, CORRECT
from benchmarks.real_models.record import RESULTS, read
from locant.figures.canvas import DASHES, LIGHT, MARKERS, THEMES, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FOLDER", "MODEL", "ROOT", "chosen", "draw", "run"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
NAME = "position_bugs"
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


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Draw the pictures and write the parts of the README that are made from records."""
    from benchmarks.real_models import moving_picture  # which needs this file
    from docs.generator import readme

    record = read("bugs", folder)
    for name, theme in THEMES.items():
        save(draw(record, theme), FOLDER / f"{NAME}-{name}.svg")
    moving_picture.write(record)
    readme.write()
