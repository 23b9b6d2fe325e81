"""The records of a comparison, gathered: mean and spread over seeds, per encoding and length.

Reads the plain dictionaries of ``results.json``, so a report can be made again from the file alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locant.errors import InputError

__all__ = ["Cell", "Row", "Summary", "summarise"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number over all seeds: nats per token; the standard deviation is 0 where there is one seed."""

    mean: float
    low: float
    high: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Cell | None:
        """``None`` where any seed has no finite value: a mean over the lucky ones would flatter.

        >>> Cell.of([2.0, 3.0])
        Cell(mean=2.5, low=2.0, high=3.0, deviation=0.7071067811865476)
        """
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite or len(finite) < len(values):
            return None
        deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
        return cls(mean=statistics.fmean(finite), low=min(finite), high=max(finite), deviation=deviation)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One encoding."""

    encoding: str
    num_seeds: int
    by_length: dict[int, Cell | None]
    by_position: tuple[Cell | None, ...]

    def ratio(self, length: int, train_length: int) -> float | None:
        """The loss at `length` over the loss at the training length."""
        here, there = self.by_length.get(length), self.by_length.get(train_length)
        return here.mean / there.mean if here and there and there.mean > 0 else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All encodings, in the order in which they were first trained."""

    train_length: int
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def num_seeds(self) -> int:
        """The fewest seeds of any encoding: a comparison that was cut short may differ."""
        return min(row.num_seeds for row in self.rows)

    @property
    def base_length(self) -> int:
        """What losses are compared with: the training length, or the shortest that was measured."""
        return self.train_length if self.train_length in self.lengths else self.lengths[0]

    def best(self, length: int) -> Row | None:
        """The encoding with the lowest mean loss at this length."""
        measured = [row for row in self.rows if row.by_length.get(length)]
        return min(measured, key=lambda row: row.by_length[length].mean, default=None)  # type: ignore[union-attr]

    def ranked(self, length: int) -> list[Row]:
        """Best first; those without a finite loss last."""
        return sorted(self.rows, key=lambda row: cell.mean if (cell := row.by_length.get(length)) else math.inf)


def summarise(results: Mapping[str, Any]) -> Summary:
    """Gather the records of ``Results.to_dict()`` or of a ``results.json``."""
    records: Sequence[Mapping[str, Any]] = results["records"]
    if not records:
        raise InputError("got results without a single record", "a comparison that has finished at least one training")
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    names = dict.fromkeys(record["encoding"] for record in records)
    rows = [_row(name, [record for record in records if record["encoding"] == name], lengths) for name in names]
    return Summary(train_length=int(records[0]["train_length"]), lengths=tuple(lengths), rows=tuple(rows))


def _row(name: str, records: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Row:
    by_length = {
        length: Cell.of([record["loss_by_length"].get(str(length)) for record in records]) for length in lengths
    }
    positions = min(len(record["loss_by_position"]) for record in records)
    by_position = tuple(
        Cell.of([record["loss_by_position"][place] for record in records]) for place in range(positions)
    )
    return Row(encoding=name, num_seeds=len(records), by_length=by_length, by_position=by_position)
