"""Side-by-side timing: contenders are timed alternately, so that a drift in speed affects all of them equally."""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["BUSY", "Row", "busy_processes", "measure"]

BUSY = 3
ENDLESS = "import numpy; a = numpy.ones(2**23); b = a.copy()\nwhile True: b[:] = a"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of one question."""

    question: str
    contender: str
    milliseconds: float | None
    """``None`` where time is not what was asked."""
    ratio: float
    """Its median time, or else its memory, over that of the first contender."""
    megabytes: float | None = None
    """Memory it took, where that is what was asked."""


def measure(
    question: str, contenders: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2,
    before: Callable[[], object] | None = None, once_above: float = math.inf,
) -> list[Row]:  # fmt: skip
    """Return the median times of `rounds` turns. The ratios are to the first contender.

    `before` is called before each contender, and its time does not count. A contender that takes more than `once_above`
    seconds is timed once.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warmup + rounds):
        for name, run in contenders.items():
            if times[name] and times[name][0] > once_above:
                continue
            if before is not None:
                before()
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


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    """`BUSY` of them, which copy memory without end: as busy as data loaders may be."""
    started = [subprocess.Popen([sys.executable, "-c", ENDLESS]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
