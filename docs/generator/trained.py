"""The page about trained models: lies that `locant audit` finds, one file in two programs, and learned rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_models.record import describe_versions
from docs.generator.markdown import picture
from docs.generator.records import ROOT
from locant.figures.canvas import SIGNED, THEMES

__all__ = ["audits", "draw_learned_rows", "engine_file", "learned_rows", "page", "pictures"]

RESULTS = ROOT / "benchmarks" / "results" / "real_models"
SHOWN = 2
"""The largest number of readings in a cell."""


def page(folder: Path = RESULTS) -> str:
    """The part of the page with a section for each part that was measured, and a sentence for each other part."""
    lines = list[str]()
    for part, (title, section) in SECTIONS.items():
        file = folder / f"{part}.json"
        lines += [f"## {title}", ""]
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if record.get("summary"):
            lines += [section(record["summary"]), "", _made(record), ""]
        else:
            lines += [f"Not measured yet: `make real PARTS={part}` measures it.", ""]
    return "\n".join(lines)


def _made(record: Mapping[str, Any]) -> str:
    made, models = record["environment"], record["weights"].values()
    named = "; ".join(f"{each['title']} (`{each['file']}`, sha256 `{each['sha256'][:16]}`)" for each in models)
    machine = f"{made['cpu_count']} cores ({made['machine']})"
    took = f"`{record['command']}`, {record['seconds'] / 60:.0f} minutes on {machine}"
    return f"{took}; {describe_versions(record)}. {named}."


def _table(head: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def audits(summary: Mapping[str, Any]) -> str:
    """The table of lies: what a copy claims, what `locant audit` answers, and what it read for that.

    >>> row = {"model": "smollm2", "sentence": "base 10,000", "truth": "base 100,000", "lengths": [128], "windows": 10}
    >>> row |= {"outcome": "found", "best": "base 100,000", "within_noise": [], "gain": 0.073, "seconds": 31.0}
    >>> found = {"counts": {"found": 1, "found among others": 0, "missed": 0}, "rows": {"one": row}, "checks": {}}
    >>> print(audits(found).splitlines()[-1])
    | smollm2 | base 10,000 | found | base 100,000 |  | 0.073 | 10 of 128 | 31 |
    """
    counts, rows = summary["counts"], summary["rows"].values()
    told = f"Of {sum(counts.values())} lies, `locant audit` finds {counts['found']}"
    told += f", and {counts['found among others']} among readings within noise. It misses {counts['missed']}."
    if summary["checks"]:
        largest = max(each["difference"] for each in summary["checks"].values())
        size = f"{largest:.5f}" if largest >= 1e-5 else "below 0.00001"
        told += f" `transformers` alone computes the same losses (largest difference {size} nats)."
    head = "model", "the copy claims", "outcome", "best reading", "within noise", "nats gained", "windows", "seconds"
    lines = (
        [
            row["model"], row["sentence"], row["outcome"], row["best"], _shorten(row["within_noise"]),
            f"{row['gain']:.3f}", f"{row['windows']} of {', '.join(f'{length:,}' for length in row['lengths'])}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    )  # fmt: skip
    return f"{told}\n\n{_table(head, lines)}"


def _shorten(readings: Sequence[str]) -> str:
    """Join readings. Of more than `SHOWN` name the first ones.

    >>> _shorten(["a", "b"]), _shorten(["a", "b", "c"])
    ('a; b', 'a; and 2 others')
    """
    if len(readings) <= SHOWN:
        return "; ".join(readings)
    return "; ".join([*readings[: SHOWN - 1], f"and {len(readings) - SHOWN + 1} others"])


def engine_file(summary: Mapping[str, Any]) -> str:
    """The table of readings of one file: the loss in llama.cpp and in transformers, and what a wrong flag costs."""
    return _table(
        ("model", "tokens", "flags or metadata", "llama.cpp", "transformers", "differs by token", "costs"),
        (_reading(row) for row in summary["rows"].values()),
    )


def _reading(row: Mapping[str, Any]) -> list[str]:
    said = f"`{row['flags']}`" if row["flags"] else "none"
    if row["metadata"]:
        key, value = row["metadata"]
        said = f"`{key}` {value:,}"
    second, costs = row.get("transformers"), "–"
    if "cost" in row:
        by_position = ", ".join(f"{begin:,}–{end:,}: {cost:+.2f}" for begin, end, cost in row["cost_by_position"])
        costs = f"{row['cost']:+.3f}" + (f" ({by_position})" if len(row["cost_by_position"]) > 1 else "")
        costs = costs.replace("-", "−")
    return [
        row["model"], f"{row['length']:,}", said, f"{row['loss']:.4f}", f"{second['loss']:.4f}" if second else "–",
        f"{second['difference']['mean']:.3f}" if second else "–", costs,
    ]  # fmt: skip


def learned_rows(summary: Mapping[str, Any]) -> str:
    """What the rows hold, and the table of similarities with other positions."""
    rows, long = summary["rows"], summary["long texts"]
    near = ", ".join(f"{by}: {cosine:.2f}".replace("-", "−") for by, cosine in rows["similarity"].items())
    dimensions = ", ".join(f"{share} of the variance in {count}" for share, count in rows["dimensions"].items())
    said = (
        f"The table has {rows['rows']} rows of {rows['width']} numbers. For {rows['nearest_is_neighbour']:.1%} of the "
        f"rows the most similar row is a neighbour. Mean similarity by distance: {near}. Dimensions: {dimensions}."
    )
    told = [
        said,
        "",
        picture("trained-minilm", "Similarity of rows, and the spectrum"),
        "",
        (
            f"With its own positions, the model finds a sentence with exchanged words nearer than one with nearly the "
            f"same meaning in {len(summary['texts']) - summary['readings']['own']['order seen']} of "
            f"{len(summary['texts'])} groups. Without rows, exchanged words give the same vector."
        ),
        "",
        _table(
            ("positions", "words exchanged", "same meaning", "to the own vector", "meaning is nearer"),
            (
                [name, f"{each['exchanged']:.3f}", f"{each['same meaning']:.3f}", f"{each['own']:.3f}",
                 f"{each['order seen']} of {len(summary['texts'])}"]
                for name, each in summary["readings"].items()
            ),
        ),
        "",
        _table(
            ("sentence", "words exchanged", "cosine", "nearly the same meaning", "cosine"),
            (
                [one, other, f"{each['exchanged']:.3f}", same, f"{each['same meaning']:.3f}"]
                for (one, other, same), each in zip(
                    summary["texts"].values(), summary["sentences"].values(), strict=True
                )
            ),
        ),
        "",
        _table(
            ("long text", "mean cosine to the mean of both halves", "lowest"),
            ([name, f"{each['mean']:.3f}", f"{each['lowest']:.3f}"] for name, each in long.items()),
        ),
        "",
        f"A second calculation by NumPy and `sentence-transformers` differs by {_at_most(summary['check'])}.",
    ]  # fmt: skip
    return "\n".join(told)


def _at_most(difference: float) -> str:
    """Return the bound of a difference that is recorded with five decimals.

    >>> _at_most(0.0), _at_most(0.00012)
    ('less than 0.00001', '0.00012 at most')
    """
    return f"{difference:.5f} at most" if difference else "less than 0.00001"


def pictures(folder: Path = RESULTS) -> dict[str, Callable[..., Any]]:
    """What draws the picture of the learned rows, if they were measured."""
    file = folder / "minilm.json"
    if not file.is_file():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["measured"]["rows"]["value"]
    return {"trained-minilm": partial(draw_learned_rows, rows)}


def draw_learned_rows(rows: Mapping[str, Any], theme: str) -> Any:
    """Draw the similarity of rows, their similarity by distance, and the spectrum."""
    style = THEMES[theme]
    figure = style.blank(10.5, 3.8)
    style.set_title(figure, f"{rows['rows']} learned positions of MiniLM, without the mean row")
    left, middle, right = figure.subplots(1, 3)
    image = style.heat_map(
        left, np.asarray(rows["map"]), SIGNED, -1.0, 1.0, "Similarity of two rows", "position", "position", "cosine"
    )
    image.set_extent((0, rows["rows"], rows["rows"], 0))
    left.set_box_aspect(1)
    distances = [int(by) for by in rows["similarity"]]
    color, _, marker = style.stroke(0)
    middle.plot(distances, [*rows["similarity"].values()], color=color, marker=marker, linewidth=1.6)
    middle.set_xscale("log", base=2)
    middle.set_xticks(distances, [*map(str, distances)])
    style.style_axes(middle, title="Mean similarity by distance", x="distance (tokens)", y="cosine", grid=True)
    shares = [*accumulate(rows["spectrum"])]
    right.plot(range(1, len(shares) + 1), shares, color=style.stroke(1)[0], linewidth=1.6)
    style.style_axes(right, title="Spectrum", x="number of dimensions", y="share of the variance", grid=True)
    return figure


SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "audit": ("Which lies does `locant audit` find?", audits),
    "engines": ("The same file in llama.cpp", engine_file),
    "minilm": ("What learned rows hold", learned_rows),
}
"""The title and the section of each part."""
