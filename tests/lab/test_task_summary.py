"""What the tasks say, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locant.lab.significance import LEVEL
from locant.lab.task_summary import Score, reciprocal_ranks, scores
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


def flat(share: float) -> dict[str, float]:
    return {"12": 1.0, "24": share, "48": share}


def score(*shares: float) -> Score:
    return scores(task_results({("copy", "any"): [flat(share) for share in shares]}))[0]


def test_a_difference_is_clear_beyond_the_spread_of_rows_for_all_pairs_at_once() -> None:
    """Of 128 rows at each of two lengths, half of the interval is z * sqrt(0.5 / 256): 0.0866 with z = 1.960.

    For the six pairs of four encodings, z is 2.638 and half of the interval 0.1166.
    """
    for others, limit in ((0, 0.0866), (2, 0.1166)):
        for factor, clear in ((0.99, False), (1.01, True)):
            mine, theirs = score(0.5, 0.5), score(*[0.5 + factor * limit] * 2)
            assert mine.is_clear(theirs, [mine, theirs, *[score(0.1, 0.1)] * others]) is clear
            assert others or mine.is_clear(theirs) is clear
    assert not score(0.5).is_clear(score(0.9)), "one seed tells nothing"


def test_a_difference_is_clear_beyond_the_spread_of_seeds_which_is_pooled() -> None:
    """By the tables of Student's t: 4.303 with the 2 degrees of freedom of two encodings of two seeds.

    With the 3 of three such encodings it is 4.857 for three pairs at once. Two shares that are 0.2 apart have a
    variance of 0.02, and two that are 0.05 apart one of 0.00125: pooled 0.010625.
    """
    mine, third = score(0.4, 0.6), score(-5.4, -5.2)
    for others, quantile, pooled in (([], 4.303, 0.010625), ([third], 4.857, (0.02 + 0.00125 + 0.02) / 3)):
        error = math.sqrt(0.02 / 2 + pooled / 2)  # the one that spreads more counts with its own variance
        for factor, clear in ((0.99, False), (1.01, True)):
            middle = 0.5 - factor * quantile * error  # the rule is of numbers, also below zero
            theirs = score(middle - 0.025, middle + 0.025)
            assert mine.is_clear(theirs, [mine, theirs, *others]) is clear


@pytest.mark.parametrize("seeds", [(2,), (3,), (5,), (2, 3)])
@pytest.mark.parametrize("encodings", [2, 6])
def test_of_equal_encodings_at_most_one_comparison_in_twenty_calls_any_better(
    encodings: int, seeds: tuple[int, ...]
) -> None:
    """Shares whose seeds spread by 0.2; some encodings may have been learned by fewer seeds."""
    numbers, wrong, count = np.random.default_rng(0), 0, 400
    for _ in range(count):
        each = [numbers.normal(0.5, 0.2, seeds[n % len(seeds)]).clip(0, 1) for n in range(encodings)]
        task = {("copy", f"{n}"): [flat(x) for x in shares] for n, shares in enumerate(each)}
        wrong += len(set(reciprocal_ranks(scores(task_results(task))).values())) > 1
    chance = math.sqrt(LEVEL * (1 - LEVEL) / count)  # the standard error of a share of 5 %
    assert wrong / count <= LEVEL + 2 * chance


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
