"""Every sentence follows from the numbers: other numbers, another sentence."""

from __future__ import annotations

import pytest

from locant.lab.summary import summarise
from locant.report import sentences as told
from tests.lab.fabricated import THE_FIELD, Losses, results


def sentences(*arguments: object, **options: object) -> list[str]:
    return told.sentences(summarise(results(*arguments, **options)))  # type: ignore[arg-type]


def one_with(words: str, among: list[str]) -> str:
    found = [sentence for sentence in among if words in sentence]
    assert len(found) == 1, among
    return found[0]


APART: Losses = {**THE_FIELD, "sinusoidal": [(3.20, 3.90, 5.10, 6.70), (3.22, 3.92, 5.12, 6.72)]}
"""Losses whose differences are clear beyond the spread of two seeds."""


def test_it_names_the_best_at_the_training_length_and_at_the_longest() -> None:
    said = sentences(APART)
    assert "sinusoidal has the lowest held-out loss: 3.210 nats" in one_with("At 64 tokens, the training length", said)
    assert "alibi has the lowest held-out loss: 3.520 nats" in one_with(
        "At 512 tokens, 8 times the training length", said
    )
    assert "(perplexity 33.8)" in one_with("At 512", said)


def test_other_numbers_make_another_winner() -> None:
    swapped: Losses = {**APART, "alibi": APART["sinusoidal"], "sinusoidal": APART["alibi"]}
    assert "alibi has the lowest" in one_with("At 64", sentences(swapped))
    assert "sinusoidal has the lowest" in one_with("At 512", sentences(swapped))


def test_those_within_the_spread_of_seeds_are_called_so() -> None:
    close: Losses = {"a": [(2.00,), (2.10,)], "b": [(2.05,), (2.11,)], "c": [(2.60,), (2.62,)]}
    assert ". b is within the spread of seeds and windows." in sentences(close, (8,))[0]
    assert "no encoding is clearly better: a has 2.050" in sentences({"a": close["a"], "b": close["b"]}, (8,))[0]
    apart: Losses = {"a": [(2.00,), (2.01,)], "b": [(2.20,), (2.21,)]}
    assert "within the spread" not in sentences(apart, (8,))[0]


def test_those_within_the_spread_of_windows_are_called_so() -> None:
    losses: Losses = {"a": [(2.0,)], "b": [(2.2,)]}
    alike, unlike = [1.0, -1.0] * 5, [-1.0, 1.0] * 5
    assert "no encoding is clearly better" in sentences(losses, (8,), windows={"a": alike, "b": unlike})[0]
    assert "a has the lowest held-out loss" in sentences(losses, (8,), windows={"a": alike, "b": alike})[0]


def test_nothing_is_concluded_from_too_few_windows() -> None:
    few = {name: [0.0] * 9 for name in "ab"}
    said = sentences({"a": [(2.0, 2.5)], "b": [(3.0, 3.0)]}, (8, 16), windows=few)
    assert said[0].startswith("There is not enough text for 8 and 16 tokens: 9 windows of 8 and 9 windows of 16")
    assert "text of 1,600 tokens" in said[0]
    assert not any("lowest" in sentence or "From 8 to 16" in sentence for sentence in said)
    assert not any("not enough text" in sentence for sentence in sentences())


def test_what_is_hardly_below_a_unigram_count_is_called_little() -> None:
    losses: Losses = {"a": [(5.0, 5.0)], "b": [(3.0, 3.0)]}
    said = one_with("Little was learned", sentences(losses, (8, 16), unigram_loss=5.39))
    assert "At 8 tokens a (5.000) is not 10% below the loss of a unigram count (5.390)" in said
    assert said.endswith("More steps may help.")
    assert not any("Little was" in sentence for sentence in sentences(losses, (8, 16), unigram_loss=5.6))
    assert not any("Little was" in sentence for sentence in sentences(losses, (8, 16)))
    overfitted = sentences(losses, (8, 16), unigram_loss=5.39, train_loss=1.0)
    assert "More steps" not in " ".join(overfitted), "fewer are advised"


def test_overfitting_is_told_from_training_loss_and_held_out_loss() -> None:
    said = sentences({"a": [(4.0, 4.0)]}, (8, 16), train_loss=2.0)
    assert "a (2.00 in training, 4.00 held out)" in one_with("Overfitted", said)
    assert not any("Overfitted" in sentence for sentence in sentences({"a": [(4.0, 4.0)]}, (8, 16), train_loss=3.5))


def test_a_change_that_seeds_do_not_agree_on_is_no_trend() -> None:
    noisy: Losses = {"a": [(2.0, 2.0), (2.0, 2.4)]}
    assert "a (×1.10)" in one_with("changes by no more than the spread", sentences(noisy, (8, 16)))


@pytest.mark.parametrize(
    ("at_longest", "words"),
    [
        (1.90, "falls"),
        (1.97, "stays within 2%"),
        (2.03, "stays within 2%"),
        (2.10, "rises somewhat"),
        (2.30, "rises a lot"),
    ],
)
def test_the_change_with_length_is_told_by_its_size(at_longest: float, words: str) -> None:
    trend = one_with("From 8 to 16 tokens", sentences({"a": [(2.0, at_longest)]}, (8, 16)))
    assert f", the loss {words} for a" in trend
    assert f"a (×{at_longest / 2:.2f})" in trend


def test_the_position_from_which_the_loss_stays_up_is_found() -> None:
    spike = [2.0] * 64 + [9.0] * 32 + [2.0] * 160 + [2.6] * 256
    said = one_with("By position", sentences({"a": [(2.0, 2.0, 2.0, 2.3)]}, by_position={"a": spike}))
    assert "a from about position 256" in said


@pytest.mark.parametrize("back", [[2.0] * 128 + [5.0] * 128 + [2.0] * 256, [2.0] * 480 + [5.0] * 32])
def test_no_position_is_named_where_the_loss_comes_down_again_or_hardly_goes_up(back: list[float]) -> None:
    assert not any(
        "By position" in sentence for sentence in sentences({"a": [(2.0, 2.0, 2.0, 2.3)]}, by_position={"a": back})
    )


def test_a_missing_loss_is_explained() -> None:
    said = sentences({"a": [(2.0, None)], "b": [(2.0, 2.0)]}, (8, 16))
    assert one_with("A dash means", said).endswith("not measured: a.")
    assert not any("A dash" in sentence for sentence in sentences())


def test_one_seed_is_reported_without_a_spread() -> None:
    assert one_with("One seed was trained", sentences({"a": [(2.0, 2.1)]}, (8, 16)))
    assert one_with("The spread is over 2 seeds", sentences())


def test_what_is_far_is_used_harmful_or_neither() -> None:
    def seeds(fewest: float, most: float, count: int = 16) -> list[dict[int, list[float]]]:
        return [{64: [fewest] * count, 512: [most] * count}] * 2

    losses = {name: [(3.0,) * 4] * 2 for name in ("a", "b", "c", "d")}
    stretches = {"a": seeds(3.0, 2.9), "b": seeds(3.0, 3.25), "c": seeds(3.0, 3.0), "d": seeds(3.0, 2.95)}
    said = sentences(losses, stretches=stretches)
    assert one_with("overlapping windows", said).endswith("the losses are a 2.900, b 3.250, c 3.000 and d 2.950.")
    uses = ["help a (-0.100) and d (-0.050)", "have no clear effect on c (0.000)", "hurt b (+0.250)"]
    found = [sentence for sentence in said if "Tokens more than" in sentence]
    assert found == [f"Tokens more than 64 back (up to 512) {words}." for words in uses]
    few = sentences(losses, stretches={name: seeds(3.0, 2.9, count=9) for name in losses})
    assert not any("Tokens more than" in sentence for sentence in few)
    assert not any("overlap" in sentence for sentence in sentences(losses))
    many = {f"e{number}": seeds(3.0, 2.5 + number / 10) for number in range(8)}
    said = sentences({name: [(3.0,) * 4] * 2 for name in many}, stretches=many)
    assert one_with("overlapping windows", said).endswith("the losses are between 2.500 (e0) and 3.200 (e7).")
    assert one_with("At 512 tokens", said).endswith("7 other encodings are within the spread of seeds and windows.")


def test_a_difference_that_rounds_to_zero_neither_helps_nor_hurts() -> None:
    ends = {"a": 2.9996, "b": 3.0004, "c": 2.9994}
    stretches = {name: [{64: [3.0] * 16, 512: [end] * 16}] * 2 for name, end in ends.items()}
    said = sentences({name: [(3.0,) * 4] * 2 for name in ends}, stretches=stretches)
    uses = ["help c (-0.001)", "have no clear effect on a (0.000) and b (0.000)"]
    found = [sentence for sentence in said if "Tokens more than" in sentence]
    assert found == [f"Tokens more than 64 back (up to 512) {words}." for words in uses]
    for other, words in ((2.0004, "no encoding is clearly better"), (2.0006, "a has the lowest held-out loss")):
        assert words in sentences({"a": [(2.0,)], "b": [(other,)]}, (8,))[0]


def test_who_is_not_below_a_bigram_count_is_said() -> None:
    losses = {"a": [(3.0,) * 4] * 2, "b": [(3.5,) * 4] * 2}
    known = "A bigram count, which uses only the previous token, has a loss of"
    assert f"{known} 3.200. At 64 tokens b is not below it." in sentences(losses, bigram_loss=3.2)
    assert f"{known} 2.000. At 64 tokens a and b are not below it." in sentences(losses, bigram_loss=2.0)
    assert f"{known} 4.000. At 64 tokens all are below it." in sentences(losses, bigram_loss=4.0)
    assert not any("bigram" in sentence for sentence in sentences(losses))
