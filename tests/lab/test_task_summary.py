"""What the tasks say, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locant.lab.task_summary import reciprocal_ranks, scores
from tests.lab.fabricated import task_results
from tests.tolerances import FEW_ROUNDINGS

RIGHT = {"12": 1.0, "15": 0.95, "18": 0.9, "24": 0.5, "36": 0.1, "48": 0.0}


def test_the_effective_length_is_the_last_up_to_which_nine_of_ten_rows_are_right() -> None:
    gap = {**RIGHT, "15": 0.89, "48": 1.0}
    [score] = scores(task_results({("copy", "rotary"): [RIGHT, gap, {**RIGHT, "24": 0.9}]}))
    assert score.effective_lengths == (18, 12, 24)
    assert score.effective_length == 18
    assert score.has_learned
    assert score.beyond == pytest.approx((2.45 / 5, 3.39 / 5, 2.85 / 5), rel=FEW_ROUNDINGS, abs=0)


def test_a_shorter_length_that_is_not_right_does_not_count() -> None:
    [score] = scores(task_results({("copy", "rotary"): [{"6": 0.5, **RIGHT}]}))
    assert score.effective_length == 18


@pytest.mark.parametrize(("learned", "seeds", "counts"), [(1, 1, True), (1, 2, False), (2, 3, True), (0, 1, False)])
def test_what_more_than_half_of_the_seeds_did_not_learn_says_nothing(learned: int, seeds: int, counts: bool) -> None:
    bad = {**RIGHT, "12": 0.89}
    [score] = scores(task_results({("copy", "rotary"): [RIGHT] * learned + [bad] * (seeds - learned)}))
    assert (score.num_learned, score.num_seeds, score.has_learned) == (learned, seeds, counts)
    assert score.effective_length == (18 if counts else None)
    assert reciprocal_ranks([score]) == ({"rotary": 1.0} if counts else {})


def test_a_difference_is_clear_beyond_the_spread_of_seeds_and_of_rows() -> None:
    """Of 128 rows at each of two lengths, half of the interval is 1.96 * sqrt(0.5 / 256) = 0.0866.

    Over two seeds each, Student's t with two degrees of freedom is 4.303, and of one of three comparisons 7.649.
    """

    def flat(share: float) -> dict[str, float]:
        return {"12": 1.0, "24": share, "48": share}

    def score(*shares: float):
        return scores(task_results({("copy", "any"): [flat(share) for share in shares]}))[0]

    assert score(0.5, 0.5).is_clear(score(0.59, 0.59))
    assert not score(0.5, 0.5).is_clear(score(0.58, 0.58))
    assert not score(0.5).is_clear(score(0.9)), "one seed tells nothing"
    error = math.sqrt(0.02 / 2 + 0.00125 / 2)  # of 0.4 and 0.6, and of two that are 0.05 apart
    for comparisons, quantile in ((1, 4.303), (3, 7.649)):
        for factor, clear in ((0.98, False), (1.02, True)):
            middle = 0.5 - factor * quantile * error  # the rule is of numbers, also below zero
            assert score(0.4, 0.6).is_clear(score(middle - 0.025, middle + 0.025), comparisons) is clear


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_of_equal_encodings_hardly_ever_one_is_called_better(seeds: int) -> None:
    """Six of them whose seeds spread by 0.2: in some one of ten comparisons any differs clearly from the best."""
    numbers, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        shares = numbers.normal(0.5, 0.2, (6, seeds)).clip(0, 1)
        task = {("copy", f"{n}"): [{"12": 1.0, "24": x, "48": x} for x in each] for n, each in enumerate(shares)}
        wrong += len(set(reciprocal_ranks(scores(task_results(task))).values())) > 1
    assert wrong <= 200 / 8


def test_the_mean_reciprocal_rank_is_over_the_tasks_that_an_encoding_learned() -> None:
    def seeds(share: float, trained: float = 1.0) -> list[dict[str, float]]:
        return [{"12": trained, "24": share, "48": share}] * 2

    copy = {"a": seeds(0.9), "b": seeds(0.5), "c": seeds(0.45), "d": seeds(0.1)}
    sort = {"a": seeds(0.1), "b": seeds(0.9), "c": seeds(0.99, trained=0.5), "d": seeds(0.4)}
    both = {"copy": copy, "sort": sort}
    found = scores(task_results({(task, name): its for task, of in both.items() for name, its in of.items()}))
    ranks = {"a": (1 + 1 / 3) / 2, "b": (1 / 2 + 1) / 2, "c": 1 / 2, "d": (1 / 4 + 1 / 2) / 2}
    assert reciprocal_ranks(found) == pytest.approx(ranks, rel=FEW_ROUNDINGS, abs=0)


def test_text_sweeps_and_other_seeds_are_no_part_of_it() -> None:
    results = task_results({("copy", "rotary"): [RIGHT, RIGHT]})
    record = results["records"][0]
    others = [{**record, "task": "text"}, {**record, "seed": 2**31 - 1}, {**record, "seed": 7}]
    results["records"] += others
    [score] = scores(results)
    assert score.num_seeds == 2


def test_a_training_that_failed_was_not_learned() -> None:
    results = task_results({("copy", "rotary"): [RIGHT]})
    results["records"].append({"task": "copy", "encoding": "rotary", "seed": 1, "rate": 1.0, "failed": "no memory"})
    results["settings"]["seeds"] = [0, 1]
    [score] = scores(results)
    assert (score.num_learned, score.num_seeds, score.failed, score.has_learned) == (1, 2, "no memory", False)
