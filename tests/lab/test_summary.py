"""Means, spreads, ratios and ranks are those of the records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locant.errors import InputError
from locant.lab.summary import Cell, Row, summarise
from tests.lab.fabricated import LENGTHS, THE_FIELD, results
from tests.tolerances import FEW_ROUNDINGS, FORMULA


def test_every_cell_is_the_mean_and_spread_over_seeds() -> None:
    summary = summarise(results())
    for row in summary.rows:
        table = np.array(THE_FIELD[row.encoding])
        for place, length in enumerate(LENGTHS):
            cell = row.by_length[length]
            assert cell is not None
            assert cell.mean == pytest.approx(table[:, place].mean(), rel=FEW_ROUNDINGS, abs=0)
            assert cell.deviation == pytest.approx(table[:, place].std(ddof=1), rel=FORMULA, abs=0)
            assert (cell.low, cell.high) == (table[:, place].min(), table[:, place].max())


def test_encodings_and_lengths_keep_their_order_whatever_the_order_of_records() -> None:
    shuffled = results()
    shuffled["records"] = [shuffled["records"][number] for number in (4, 0, 3, 1, 5, 2)]
    summary = summarise(shuffled)
    assert [row.encoding for row in summary.rows] == ["alibi", "nope", "sinusoidal"]
    assert summary.lengths == LENGTHS
    assert all(row.num_seeds == 2 for row in summary.rows)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_one_seed_without_a_loss_leaves_no_mean_of_the_others(bad: float | None) -> None:
    assert Cell.of([2.0, bad, 2.0]) is None


def test_the_best_is_the_lowest_mean_and_a_missing_loss_never_wins() -> None:
    summary = summarise(results({"a": [(2.0, None)], "b": [(3.0, 9.0)]}, (8, 16)))
    assert [summary.best(length).encoding for length in (8, 16)] == ["a", "b"]  # type: ignore[union-attr]
    assert [row.encoding for row in summary.ranked(16)] == ["b", "a"]
    assert summarise(results({"a": [(2.0, None)]}, (8, 16))).best(16) is None


def test_ratios_are_to_the_training_length() -> None:
    row = summarise(results()).rows[1]
    assert row.ratio(512, 64) == pytest.approx((6.70 + 6.90) / (3.50 + 3.52), rel=FEW_ROUNDINGS, abs=0)
    assert row.ratio(1024, 64) is None


def test_a_comparison_cut_short_counts_the_fewest_seeds() -> None:
    assert summarise(results({"a": [(1.0, 2.0), (1.0, 2.0)], "b": [(1.0, 2.0)]}, (8, 16))).num_seeds == 1


def test_results_without_records_are_an_error() -> None:
    with pytest.raises(InputError, match="without a single record"):
        summarise({**results(), "records": []})


def test_one_of_many_comparisons_needs_a_larger_difference() -> None:
    """Of sixteen windows, by the tables of Student's t with 15 degrees of freedom: 2.13 for one, 3.29 for ten."""
    draw = np.random.default_rng(0).normal(size=16)
    spread = (draw - draw.mean()) / draw.std(ddof=1) * 4  # whose mean has a standard error of 1

    def is_clear(mean: float, comparisons: int) -> bool:
        rows = [
            Row(encoding="", num_seeds=1, train_loss=None, by_length={8: Cell.of([float(losses.mean())])},
                by_position=(), by_window={8: tuple(Cell.of([float(each)]) for each in losses)})
            for losses in (np.full(16, 9.0), 9 + mean + spread)
        ]  # fmt: skip
        return rows[0].is_clear(8, rows[1], 8, comparisons=comparisons)

    assert (is_clear(2.2, 1), is_clear(2.3, 1)) == (False, True)
    assert (is_clear(3.26, 10), is_clear(3.31, 10)) == (False, True)
