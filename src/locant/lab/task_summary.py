"""Summarise the records of tasks: the effective length of each encoding, and clear differences between encodings.

A model that has not learned the trained length allows no conclusion. The effective length of a training run is the
largest measured length up to which at least nine of ten rows are correct at every length beyond the trained length. The
term is from Hsieh et al. 2024 (arXiv 2404.06654). The mean reciprocal rank over tasks is a summary from Kazemnejad et
al. 2023 (arXiv 2305.19466). It is 1 for an encoding that is the best in each task.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locant.lab.settings import TEXT
from locant.lab.significance import Seeds, Spread, tail
from locant.lab.task_learning import ROWS

RIGHT = 0.9
"""The share of rows that must be correct for a length to count."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The results of one encoding on one task, over the seeds that learned the task."""

    task: str
    encoding: str
    num_seeds: int
    train_length: int
    by_length: Mapping[int, tuple[float, ...]]
    """For each length, the share of correct rows for each seed that learned the task."""
    steps: tuple[int, ...]
    """The number of training steps for each seed that learned the task."""
    failed: str = ""
    """The reason why a training run failed, or an empty string."""

    @property
    def num_learned(self) -> int:
        return len(self.steps)

    @property
    def has_learned(self) -> bool:
        """Return whether more than half of the seeds learned the task. If not, longer rows allow no conclusion."""
        return 2 * self.num_learned > self.num_seeds

    @property
    def effective_lengths(self) -> tuple[int, ...]:
        """The effective length for each seed that learned the task."""
        return tuple(self._effective(number) for number in range(self.num_learned))

    @property
    def effective_length(self) -> float | None:
        """The median effective length over the seeds that learned the task, or ``None`` if not `has_learned`."""
        return float(statistics.median(self.effective_lengths)) if self.has_learned else None

    @property
    def beyond(self) -> tuple[float, ...]:
        """For each seed that learned the task, the mean share of correct rows beyond the trained length."""
        longer = [shares for length, shares in self.by_length.items() if length > self.train_length]
        return tuple(map(statistics.fmean, zip(*longer, strict=True)))

    def is_clear(self, other: Score, among: Sequence[Score] = ()) -> bool:
        """Return whether two scores differ beyond the trained length by more than chance.

        The difference between the means must exceed the half-width of its 95 % interval over seeds. It must also exceed
        the largest possible half-width for shares of `ROWS` rows per length. These intervals hold at once for all pairs
        of the encodings in `among`, from which the two were chosen (`locant.lab.significance`). No difference is clear
        if fewer than two seeds of an encoding learned the task.
        """
        if min(self.num_learned, other.num_learned) < 2:
            return False
        spread = Spread.of([score._over_seeds for score in among or (self, other)])
        over_seeds = spread.margin(self._over_seeds, other._over_seeds)
        lengths = sum(length > self.train_length for length in self.by_length)
        over_rows = statistics.NormalDist().inv_cdf(1 - tail(spread.comparisons)) * math.sqrt(0.5 / ROWS / lengths)
        return abs(statistics.fmean(self.beyond) - statistics.fmean(other.beyond)) > max(over_seeds, over_rows)

    @property
    def _over_seeds(self) -> Seeds:
        """The standard deviation of `beyond`, and the number of seeds."""
        return (statistics.stdev(self.beyond) if self.num_learned > 1 else 0.0), self.num_learned

    def _effective(self, seed: int) -> int:
        lengths = sorted(length for length in self.by_length if length > self.train_length)
        right = itertools.takewhile(lambda length: self.by_length[length][seed] >= RIGHT, lengths)
        return max(right, default=self.train_length)


def scores(results: Mapping[str, Any]) -> list[Score]:
    """Return a score for each task and encoding in a `results.json`, in the order of its records."""
    by_task: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in results["records"]:
        if record.get("task", TEXT) != TEXT and record["seed"] in results["settings"]["seeds"]:
            by_task.setdefault((record["task"], record["encoding"]), []).append(record)
    return [_score(task, encoding, records) for (task, encoding), records in by_task.items()]


def _score(task: str, encoding: str, records: Sequence[Mapping[str, Any]]) -> Score:
    learned = [record for record in records if record.get("learned")]
    lengths = [int(length) for length in learned[0]["accuracy_by_length"]] if learned else []
    return Score(
        task=task,
        encoding=encoding,
        num_seeds=len(records),
        train_length=learned[0]["train_length"] if learned else 0,
        by_length={
            length: tuple(record["accuracy_by_length"][str(length)] for record in learned) for length in lengths
        },
        steps=tuple(record["steps"] for record in learned),
        failed=next((record["failed"] for record in records if "failed" in record), ""),
    )


def reciprocal_ranks(all_scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean reciprocal rank of each encoding over the tasks that it learned.

    In each task, encodings share a rank if they do not clearly differ from the first encoding of this rank.
    """
    ranks: dict[str, list[float]] = {}
    for task in dict.fromkeys(score.task for score in all_scores):
        learned = [score for score in all_scores if score.task == task and score.has_learned]
        ordered = sorted(learned, key=lambda score: -statistics.fmean(score.beyond))
        rank, first = 1, None
        for place, score in enumerate(ordered, 1):
            if first is None or score.is_clear(first, ordered):
                rank, first = place, score
            ranks.setdefault(score.encoding, []).append(1 / rank)
    return {name: statistics.fmean(each) for name, each in ranks.items()}
