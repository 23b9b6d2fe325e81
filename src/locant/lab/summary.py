"""Summarise the records of a comparison: means, the spread over seeds and windows, and clear differences.

The input has the form of `results.json`, so this file is enough to repeat a report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from locant.errors import InputError
from locant.lab.settings import ENOUGH_WINDOWS
from locant.lab.significance import MIN_DIFFERENCE, Spread, margin_of_mean


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The mean, lowest and highest loss over all seeds, in nats per token. The standard deviation is 0 for one seed."""

    mean: float
    low: float
    high: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Cell | None:
        """Return a cell, or ``None`` if any value is not finite. The mean of the other values would look too good."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite or len(finite) < len(values):
            return None
        deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
        return cls(mean=statistics.fmean(finite), low=min(finite), high=max(finite), deviation=deviation)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The losses of one encoding. `by_window` contains a cell for each window of a length."""

    encoding: str
    num_seeds: int
    train_loss: Cell | None
    by_length: dict[int, Cell | None]
    by_position: tuple[Cell | None, ...]
    by_window: dict[int, tuple[Cell | None, ...]]
    by_stretch: dict[int, tuple[Cell | None, ...]] = field(default_factory=dict)
    """The losses of the same targets, by context length. See `locant.lab.text_learning.in_context`."""
    far: Cell | None = None
    """The loss with the longest context minus the loss with the shortest. Below 0, far tokens help."""

    def in_context(self, length: int) -> float | None:
        """Return the mean loss of targets with about `length` tokens before them, or ``None`` if it is not known."""
        losses = _means(self.by_stretch.get(length, ()))
        return None if losses is None else float(losses.mean())

    @property
    def far_is_clear(self) -> bool:
        """Return whether far tokens clearly change the loss.

        The change is at least `MIN_DIFFERENCE`, and 0 lies outside its 95 % intervals over stretches and, with several
        seeds, over seeds.
        """
        if self.far is None:
            return False
        fewest, most = (_means(self.by_stretch[length]) for length in (min(self.by_stretch), max(self.by_stretch)))
        if fewest is None or most is None or len(most) < ENOUGH_WINDOWS:
            return False
        over_seeds = margin_of_mean(self.far.deviation, self.num_seeds) if self.num_seeds > 1 else 0.0
        change = abs(self.far.mean)
        return change >= MIN_DIFFERENCE and change > max(over_seeds, _margin(fewest - most))

    def ratio(self, length: int, base_length: int) -> float | None:
        """Return the loss at one length divided by the loss at another, or ``None`` if one is missing."""
        loss, base = self.by_length.get(length), self.by_length.get(base_length)
        return loss.mean / base.mean if loss and base and base.mean > 0 else None

    def margin(self, length: int) -> float | None:
        """Return the half-width of the 95 % interval of the mean loss, or ``None`` if there are too few windows."""
        losses = self._segments(length, length)
        return _margin(losses) if losses is not None and len(losses) >= ENOUGH_WINDOWS else None

    def rises_from(self, train_length: int, share: float) -> int | None:
        """Return the position from which the loss stays a `share` above its trained level, or ``None`` if it does not.

        After this position, every stretch of ``train_length / 4`` tokens is above that level. A rise that is shorter
        than the trained length does not count, because a few hard tokens can cause it.
        """
        losses = [cell.mean if cell else math.nan for cell in self.by_position]
        level = statistics.fmean(losses[train_length // 2 : train_length])
        step = max(4, train_length // 4)
        starts = range(train_length, len(losses) - step + 1, step)
        above = [statistics.fmean(losses[start : start + step]) > level * (1 + share) for start in starts]
        if not above or not above[-1]:
            return None
        below = [number for number, is_above in enumerate(above) if not is_above]
        place = starts[below[-1] + 1 if below else 0]
        return place if len(losses) - place >= train_length else None

    def is_clear(
        self, length: int, other: Row, other_length: int, *, among: Sequence[Row] = (), comparisons: int | None = None
    ) -> bool:
        """Return whether the losses of two rows differ by more than chance. All reports use this rule.

        There must be at least `ENOUGH_WINDOWS` windows, and a difference of at least `MIN_DIFFERENCE`. The difference
        must exceed the half-width of its 95 % interval over seeds, unless no row has two seeds. It must also exceed the
        half-width of its 95 % interval over windows. This interval is computed from the differences in each window,
        because all models read the same windows. If the lengths differ, the shorter windows within each longer window
        are averaged.

        Args:
            among: all rows that are compared with one another at `length`. The intervals hold for all pairs at once.
            comparisons: the number of intervals over windows that hold at once. Default: the number of all pairs.
        """
        longer = max(length, other_length)
        losses, other_losses = self._segments(length, longer), other._segments(other_length, longer)
        cell, other_cell = self.by_length.get(length), other.by_length.get(other_length)
        if losses is None or other_losses is None or not cell or not other_cell:
            return False
        both = min(len(losses), len(other_losses))  # the other length may have no window in the last segment
        differences = losses[:both] - other_losses[:both]
        pair = (cell.deviation, self.num_seeds), (other_cell.deviation, other.num_seeds)
        spread = Spread.of(
            [(each.deviation, row.num_seeds) for row in among if (each := row.by_length.get(length))] or pair
        )
        difference = abs(differences.mean())
        if both < ENOUGH_WINDOWS or difference < MIN_DIFFERENCE:
            return False
        if difference <= _margin(differences, comparisons or spread.comparisons):
            return False
        return not spread.freedom or abs(cell.mean - other_cell.mean) > spread.margin(*pair)

    def _segments(self, length: int, longer: int) -> np.ndarray | None:
        """Return the mean loss of the windows in each segment of `longer` tokens, or ``None`` if one is missing."""
        losses = _means(self.by_window.get(length, ()))
        if losses is None:
            return None
        segment = np.arange(len(losses)) * length // longer
        return np.bincount(segment, losses) / np.bincount(segment)


def _means(cells: Sequence[Cell | None]) -> np.ndarray | None:
    """Return the means of cells, or ``None`` if a cell is missing or if there are no cells."""
    means = [cell.mean for cell in cells if cell]
    return np.array(means) if means and len(means) == len(cells) else None


def _margin(values: np.ndarray, comparisons: int = 1) -> float:
    return margin_of_mean(float(values.std(ddof=1)), len(values), comparisons)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows of all encodings, in the order in which they were first trained."""

    train_length: int
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    unigram_loss: float | None
    bigram_loss: float | None
    """The losses from `locant.lab.text_learning.count`, or ``None`` if they were not computed."""

    @property
    def num_seeds(self) -> int:
        """The smallest number of seeds of an encoding. After an interruption, encodings may differ in this number."""
        return min(row.num_seeds for row in self.rows)

    @property
    def base_length(self) -> int:
        """The length that other lengths are compared with: the trained length if measured, else the shortest length."""
        return self.train_length if self.train_length in self.lengths else self.lengths[0]

    def num_windows(self, length: int) -> int:
        """Return the number of held-out windows of this length."""
        return len(self.rows[0].by_window.get(length, ()))

    def has_enough(self, length: int) -> bool:
        """Return whether there is enough text for a conclusion about this length."""
        return self.num_windows(length) >= ENOUGH_WINDOWS

    def best(self, length: int) -> Row | None:
        """Return the row with the lowest mean loss at this length, or ``None`` if no loss is finite."""
        return next(iter(self.rank_measured(length)), None)

    def rank_measured(self, length: int) -> list[Row]:
        """Return the rows with a finite loss at this length, the lowest loss first."""
        return [row for row in self.rank(length) if row.by_length.get(length)]

    def leaders(self, length: int) -> list[Row]:
        """Return the row with the lowest loss, and all rows that do not clearly differ from it.

        The list is empty if it would contain all rows, or if there is not enough text.
        """
        measured = self.rank_measured(length)
        if not self.has_enough(length):
            return []
        best = measured[0]
        leaders = [row for row in measured if row is best or not row.is_clear(length, best, length, among=measured)]
        return leaders if len(leaders) < len(measured) else []

    def rank(self, length: int) -> list[Row]:
        """Return all rows, the lowest loss first. Rows without a finite loss are last."""
        return sorted(self.rows, key=lambda row: cell.mean if (cell := row.by_length.get(length)) else math.inf)


def summarise(results: Mapping[str, Any]) -> Summary:
    """Summarise the records of `Results.to_dict()` or of a `results.json`."""
    seeds = results["settings"].get("seeds")
    records = [each for each in results["records"] if "loss_by_length" in each and (not seeds or each["seed"] in seeds)]
    if not records:
        raise InputError("got results without a single record", "finish at least one training of the comparison")
    lengths = sorted({int(length) for record in records for length in record["loss_by_length"]})
    names = dict.fromkeys(record["encoding"] for record in records)
    rows = [_row(name, [record for record in records if record["encoding"] == name], lengths) for name in names]
    return Summary(
        train_length=int(records[0]["train_length"]),
        lengths=tuple(lengths),
        rows=tuple(rows),
        unigram_loss=results["settings"]["text"].get("unigram_loss"),
        bigram_loss=results["settings"]["text"].get("bigram_loss"),
    )


def _row(name: str, records: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Row:
    def over_seeds(lists: Iterable[Sequence[float | None]]) -> tuple[Cell | None, ...]:
        return tuple(map(Cell.of, zip(*lists, strict=False)))

    def at(length: int, kind: str, missing: Any = None) -> list[Any]:
        return [record[kind].get(str(length), missing) for record in records]

    stretches = [record.get("context_loss_by_stretch", {}) for record in records]
    contexts = stretches[0] if all(stretches) else {}  # older results have no contexts
    return Row(
        encoding=name,
        num_seeds=len(records),
        train_loss=Cell.of([record["train_loss"] for record in records]),
        by_length={length: Cell.of(at(length, "loss_by_length")) for length in lengths},
        by_position=over_seeds(record["loss_by_position"] for record in records),
        by_window={length: over_seeds(at(length, "loss_by_window", [])) for length in lengths},
        by_stretch={int(length): over_seeds(each[length] for each in stretches) for length in contexts},
        far=Cell.of([_far(each) for each in stretches]) if len(contexts) > 1 else None,
    )


def _far(stretches: Mapping[str, Sequence[float | None]]) -> float | None:
    fewest, most = (stretches[pick(stretches, key=int)] for pick in (min, max))
    differences = [many - few for few, many in zip(fewest, most, strict=True) if few is not None and many is not None]
    return statistics.fmean(differences) if len(differences) == len(most) else None
