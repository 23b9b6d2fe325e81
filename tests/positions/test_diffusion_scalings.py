"""Scalings of models of pictures and video, against their authors' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import mpmath
import pytest

from locant import RangeError, Rotary
from locant.scaling import DyPE, RIFLEx
from tests.positions.test_scaling import Build, Formula, cosines_are_exact, frequencies_are_the_formulas, plain
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS

mpf = mpmath.mpf


def slowed(dim: int, base: float, pair: int, num_frames: int) -> list[mpf]:
    """One frequency of the list is replaced, as by the authors: ``freqs[k - 1] = 0.9 * 2 * pi / L``."""
    frequencies = plain(dim, base)
    frequencies[pair] = mpf(0.9) * 2 * mpmath.pi / num_frames
    return frequencies


@pytest.mark.parametrize("claim", [frequencies_are_the_formulas, cosines_are_exact])
@pytest.mark.parametrize("pair", [0, 2])
def test_riflex_slows_one_pair(pair: int, claim: Callable[[Build, Formula], None]) -> None:
    scaling = RIFLEx(num_frames=66, pair=pair)
    claim(lambda dim: scaling, partial(slowed, pair=pair, num_frames=66))


@pytest.mark.parametrize(("after", "dim", "base", "pair"), [(50, 16, 256.0, 3), (20, 16, 10_000.0, 1)])
def test_the_pair_that_repeats_is_the_authors(after: int, dim: int, base: float, pair: int) -> None:
    """HunyuanVideo's fourth and CogVideoX's second, by their periods in latent frames."""
    for near in (after - 1, after, after + 1):
        assert RIFLEx.pair_that_repeats(near, dim, base) == pair
    assert round(2 * math.pi / Rotary(dim, base=base).inv_freq[pair].item()) == after


def test_the_pair_fills_the_share_of_its_period() -> None:
    period = 2 * math.pi / Rotary(16, base=256.0, scaling=RIFLEx(num_frames=66, pair=3, share=1.0)).inv_freq[3].item()
    assert period == pytest.approx(66, rel=FEW_ROUNDINGS, abs=0)
    assert Rotary(16, scaling=RIFLEx(num_frames=66, pair=7)).inv_freq[6] == Rotary(16).inv_freq[6]
    with refuses(RangeError, "pair=8", "8 pairs"):
        Rotary(16, scaling=RIFLEx(num_frames=66, pair=8))


def larger_base(dim: int, base: float, power: float) -> list[mpf]:
    """The authors' ``ntk_factor = (s ** (d / (d - 2))) ** (2 * t ** 2)``, on the base."""
    return plain(dim, mpf(base) * mpmath.power(mpmath.power(mpf(4), mpf(dim) / (dim - 2)), mpf(power)))


@pytest.mark.parametrize("claim", [frequencies_are_the_formulas, cosines_are_exact])
@pytest.mark.parametrize("time", [1.0, 0.75, 0.5, 0.0])
def test_dype_has_a_larger_base_that_follows_the_time(time: float, claim: Callable[[Build, Formula], None]) -> None:
    scaling = DyPE(factor=4.0).at(time)
    claim(lambda dim: scaling, partial(larger_base, power=2 * time**2))


def test_dype_ends_with_the_frequencies_of_training() -> None:
    scaling = DyPE(factor=3.0)
    assert scaling.time == 1.0
    assert Rotary(64, scaling=scaling.at(0.0)).angles.frequencies == Rotary(64).angles.frequencies
    slowest = [Rotary(64, scaling=scaling.at(time)).inv_freq[-1].item() for time in (1.0, 0.6, 0.3, 0.0)]
    assert slowest == sorted(slowest)
    assert scaling.at(0.5).at(1.0) == scaling
    with refuses(RangeError, "time"):
        scaling.at(1.5)
