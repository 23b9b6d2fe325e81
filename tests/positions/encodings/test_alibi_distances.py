"""ALiBi at the length of long contexts: slopes to the last bit, and a bias of its own for each of 131 072 distances."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from locant.positions.encodings.alibi import alibi_slopes
from tests.positions.claims import FAR, alibi_row, all_differ
from tests.positions.oracles_of_biases import alibi_slopes_of_the_paper


def test_slopes_for_1_to_256_heads_are_the_recipes() -> None:
    with mpmath.workdps(50):
        for num_heads in range(1, 257):
            slopes, expected = alibi_slopes(num_heads), alibi_slopes_of_the_paper(num_heads)
            assert len(slopes) == len(expected) == num_heads
            off = max(abs(mpmath.mpf(ours) / theirs - 1) for ours, theirs in zip(slopes, expected, strict=True))
            assert off <= 2.0**-52, f"{num_heads} heads: a slope is off by {float(off):.2g} of its size"


def test_slopes_of_powers_of_two_up_to_eight_heads_are_exact() -> None:
    """Their exponents are whole numbers."""
    for num_heads in (1, 2, 4, 8):
        assert alibi_slopes(num_heads) == [2.0 ** (-8 // num_heads * (head + 1)) for head in range(num_heads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("num_heads", [1, 8, 12, 71])
def test_131_072_distances_have_131_072_biases(num_heads: int, dtype: torch.dtype) -> None:
    biases = alibi_row(num_heads, dtype)
    assert biases.shape == (num_heads, FAR)
    all_differ(biases)
    assert len(biases[-1].unique()) == FAR


@pytest.mark.parametrize("rounded", [Tensor.bfloat16, Tensor.half])
def test_half_precision_would_be_noticed(rounded: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"head 0 has [0-9]+ biases for 131072 distances"):
        all_differ(rounded(alibi_row(1, torch.float32)).float())
