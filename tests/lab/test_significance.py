"""The intervals of the lab, against the distribution in arbitrary precision and against simulated encodings."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from locant.lab.significance import LEVEL, Spread, student
from locant.lab.summary import Cell, Row, Summary
from tests.tolerances import QUANTILE


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 36, 1000, 50_000])
@pytest.mark.parametrize("tail", [0.025, 0.0025, 0.025 / 153])
def test_a_quantile_of_students_t_leaves_its_tail(freedom: int, tail: float) -> None:
    """The tail of t is half of the regularised incomplete beta function of v / (v + t^2), at v / 2 and 1/2."""
    end = freedom / (freedom + mpmath.mpf(student(1 - tail, freedom)) ** 2)
    left = mpmath.betainc(mpmath.mpf(freedom) / 2, 0.5, 0, end, regularized=True) / 2
    assert float(left) == pytest.approx(tail, rel=QUANTILE, abs=0)


def test_without_two_seeds_of_any_encoding_the_margin_is_infinite() -> None:
    assert Spread.of([(0.0, 1), (0.0, 1)]).margin((0.0, 1), (0.0, 1)) == math.inf


def test_a_single_seed_takes_the_spread_of_the_others() -> None:
    """Student's t with one degree of freedom is 12.706, and the variance is 0.01 * (1 + 1/2)."""
    margin = Spread.of([(0.0, 1), (0.1, 2)]).margin((0.0, 1), (0.1, 2))
    assert margin == pytest.approx(12.706 * 0.1 * math.sqrt(1.5), rel=QUANTILE, abs=0)


@pytest.mark.parametrize(("seeds", "of_seeds", "of_windows"), [(1, 0.0, 0.1), (2, 0.1, 0.01), (3, 0.1, 0.1)])
def test_of_equal_encodings_at_most_one_comparison_in_twenty_calls_any_loss_lower(
    seeds: int, of_seeds: float, of_windows: float
) -> None:
    """Four encodings, twelve windows that are harder or easier for all, and what each makes of a window by chance."""
    numbers, wrong, count = np.random.default_rng(0), 0, 300
    for _ in range(count):
        windows = numbers.normal(3.0, 0.5, 12)
        rows = [_row(f"{n}", windows + numbers.normal(0, of_windows, 12), of_seeds, seeds, numbers) for n in range(4)]
        summary = Summary(train_length=8, lengths=(8,), rows=tuple(rows), unigram_loss=None, bigram_loss=None)
        lowest = summary.rank_measured(8)[0]
        wrong += any(row.is_clear(8, lowest, 8, among=rows) for row in rows if row is not lowest)
        assert bool(summary.leaders(8)) == any(row.is_clear(8, lowest, 8, among=rows) for row in rows)
    chance = math.sqrt(LEVEL * (1 - LEVEL) / count)
    assert wrong / count <= LEVEL + 2 * chance


def _row(name: str, windows: np.ndarray, of_seeds: float, seeds: int, numbers: np.random.Generator) -> Row:
    losses = windows + numbers.normal(0, of_seeds, (seeds, 1))
    return Row(
        encoding=name, num_seeds=seeds, train_loss=None, by_position=(),
        by_length={8: Cell.of([float(each) for each in losses.mean(1)])},
        by_window={8: tuple(Cell.of([float(each) for each in window]) for window in losses.T)},
    )  # fmt: skip
