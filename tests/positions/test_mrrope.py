"""MrRoPE: against the paper's products of radices, and against YaRN where the two are the same."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest

from locant import RangeError, Rotary
from locant.positions.scaling import YaRN
from locant.scaling import MrRoPE
from tests.positions.test_scaling import TRAINED, cosines_are_exact, frequencies_are_the_formulas, plain
from tests.refusal import refuses

mpf = mpmath.mpf
FACTOR = 16.0


def by_radices(dim: int, base: float, form: str) -> list[mpf]:
    """Equations 13 to 16: every radix between the ends grows, and a pair's angle is divided by all radices before it.

    The ends are where the paper's code, as that of YaRN, has them: rounded outwards, of 32 turns and of one.
    """
    low, high = (dim * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    between, grown, scaled = high - low, mpf(1), []
    for pair, frequency in enumerate(plain(dim, base)):
        scaled.append(frequency / grown)
        if low <= pair < high:
            share = mpf(1) / between if form == "uniform" else mpf(2 * (1 + pair - low)) / ((1 + between) * between)
            grown *= mpf(FACTOR) ** share
    return scaled


@pytest.mark.parametrize("form", ["progressive", "uniform"])
def test_mrrope_is_the_product_of_radices(form: str) -> None:
    scaling = MrRoPE(factor=FACTOR, original_max_seq_len=TRAINED, form=form)
    for claim in (frequencies_are_the_formulas, cosines_are_exact):
        claim(lambda dim: scaling, partial(by_radices, form=form))


def test_the_ramp_and_the_temperature_of_mrrope_equal_yarn() -> None:
    yarn = YaRN(factor=8.0, original_max_seq_len=TRAINED)
    for form in ("progressive", "uniform"):
        scaling = MrRoPE(factor=8.0, original_max_seq_len=TRAINED, form=form)
        mine, its = (Rotary(64, scaling=each).inv_freq for each in (scaling, yarn))
        same = mine == its
        low, high = map(int, yarn.ramp_ends(64, 10_000.0))
        assert same[: low + 1].all()
        assert same[high:].all()
        assert not same[low + 1 : high].any()
        assert scaling.effective_attention_factor == yarn.effective_attention_factor
    assert MrRoPE(factor=8.0, original_max_seq_len=9, attention_factor=1.5).effective_attention_factor == 1.5
    assert MrRoPE(factor=0.5, original_max_seq_len=9).effective_attention_factor == 1.0


def test_a_length_of_a_few_tokens_leaves_the_fastest_pair_alone() -> None:
    """Where no pair comes round once, every other one is interpolated, as in the paper's code."""
    stretches = Rotary(8).inv_freq / Rotary(8, scaling=MrRoPE(factor=4.0, original_max_seq_len=2)).inv_freq
    assert stretches.tolist() == [1.0, 4.0, 4.0, 4.0]


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "MrRoPE's form", "'regressive'"):
        MrRoPE(factor=4.0, original_max_seq_len=4096, form="regressive")
    with refuses(RangeError, "beta_fast=1.0 below beta_slow=2.0"):
        MrRoPE(factor=4.0, original_max_seq_len=4096, beta_fast=1.0, beta_slow=2.0)
