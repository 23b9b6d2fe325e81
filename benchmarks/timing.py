"""Side-by-side timing: contenders take turns, so that a machine whose speed drifts is unfair to nobody."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Row", "measure", "table"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of one question."""

    question: str
    contender: str
    milliseconds: float
    ratio: float
    """Its median time over that of the first contender."""


def measure(
    question: str, contenders: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> list[Row]:
    """Median times over `rounds` turns; the first contender is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if turn >= warmup:
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(medians.values()))
    return [
        Row(question=question, contender=name, milliseconds=round(1000 * median, 4), ratio=round(median / first, 3))
        for name, median in medians.items()
    ]


def table(rows: list[Row]) -> str:
    """The rows as text, ratios first."""
    lines, question = [], None
    for row in rows:
        if row.question != question:
            question = row.question
            lines.append(f"\n{question}")
        lines.append(f"  {row.ratio:9.2f} x  {row.milliseconds:11.3f} ms  {row.contender}")
    return "\n".join(lines)
