"""ALiBi at the length of long contexts: slopes to the last bit, and a bias of its own for each of 131 072 distances."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from locant import ALiBi, Positions
from locant.positions.encodings.alibi import alibi_slopes

FAR = 131_072


def recipe(num_heads: int) -> list[mpmath.mpf]:
    """Section 3 of the paper, with fifty digits.

    "For n heads, our set of slopes is the geometric sequence that starts at 2^(-8/n) and uses that same value as its
    ratio"; and its footnote for other n: the slopes of the closest smaller power of two, then every other one of twice
    that many.
    """

    def geometric(n: int) -> list[mpmath.mpf]:
        first = mpmath.power(2, mpmath.mpf(-8) / n)
        slopes = [first]
        while len(slopes) < n:
            slopes.append(slopes[-1] * first)
        return slopes

    closest = 1
    while 2 * closest <= num_heads:
        closest *= 2
    return geometric(closest) + geometric(2 * closest)[0::2][: num_heads - closest]


def test_slopes_for_1_to_256_heads_are_the_recipes() -> None:
    with mpmath.workdps(50):
        for num_heads in range(1, 257):
            slopes, expected = alibi_slopes(num_heads), recipe(num_heads)
            assert len(slopes) == len(expected) == num_heads
            off = max(abs(mpmath.mpf(ours) / theirs - 1) for ours, theirs in zip(slopes, expected, strict=True))
            assert off <= 2.0**-52, f"{num_heads} heads: a slope is off by {float(off):.2g} of its size"


def test_slopes_of_powers_of_two_up_to_eight_heads_are_exact() -> None:
    """Their exponents are whole numbers."""
    for num_heads in (1, 2, 4, 8):
        assert alibi_slopes(num_heads) == [2.0 ** (-8 // num_heads * (head + 1)) for head in range(num_heads)]


def row(num_heads: int, dtype: torch.dtype) -> Tensor:
    """The biases of one query and 131 072 keys, the nearest first."""
    q = torch.zeros(1, num_heads, 1, 1, dtype=dtype)
    k = torch.zeros(1, 1, FAR, 1, dtype=dtype)
    return ALiBi(num_heads).to(dtype).bias(q, k, Positions.after(FAR - 1, 1), Positions.arange(FAR))[0, :, 0].flip(-1)


def all_differ(biases: Tensor) -> None:
    """Raises unless each bias is smaller than the one before: all of them differ, and in the right order."""
    steps = biases.diff(dim=-1)
    same = (steps >= 0).sum(-1)
    assert not same.any(), f"head {int(same.argmax())} has {FAR - int(same.max())} biases for {FAR} distances"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("num_heads", [1, 8, 12, 71])
def test_131_072_distances_have_131_072_biases(num_heads: int, dtype: torch.dtype) -> None:
    biases = row(num_heads, dtype)
    assert biases.shape == (num_heads, FAR)
    all_differ(biases)
    assert len(biases[-1].unique()) == FAR


@pytest.mark.parametrize("rounded", [Tensor.bfloat16, Tensor.half])
def test_half_precision_would_be_noticed(rounded: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"head 0 has [0-9]+ biases for 131072 distances"):
        all_differ(rounded(row(1, torch.float32)).float())
