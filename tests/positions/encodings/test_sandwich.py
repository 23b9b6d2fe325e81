"""Sandwich against inner products of sinusoidal vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import Positions, Sandwich
from tests.positions.claims import zeros
from tests.positions.oracles_of_biases import sandwich
from tests.tolerances import FAR_SINES, assert_close


@pytest.mark.parametrize(
    ("dim", "heads", "dtype"), [(2, 8, torch.float32), (12, 3, torch.float64), (128, 1, torch.float32)]
)
def test_the_bias_is_the_inner_product(dim: int, heads: int, dtype: torch.dtype) -> None:
    queries, keys = [0, 1, 7, 40], [0, 1, 2, 30, 41, 99]
    q, k = (x.to(dtype) for x in zeros(heads, 4, 6))
    bias = Sandwich(heads, dim=dim).bias(q, k, Positions.of(queries), Positions.of(keys))
    assert bias.dtype == dtype
    assert_close(bias[0], torch.from_numpy(sandwich(queries, keys, heads, dim)))


def test_it_is_exact_where_float32_angles_are_noise() -> None:
    """Two pairs at one distance, one of them a billion tokens in; and distances beyond 2^24."""
    encoding = Sandwich(2, dim=64)
    near = encoding.bias(*zeros(2, 5, 5), Positions.arange(5))
    assert torch.equal(near, encoding.bias(*zeros(2, 5, 5), Positions.after(10**9, 5)))
    far = encoding.bias(*zeros(2, 1, 2), Positions.of([2**24 + 1]), Positions.of([0, 1]))
    truth = sandwich([2**24 + 1], [0, 1], 2, 64)
    assert np.abs(far[0].numpy() - truth).max() < FAR_SINES


def test_it_decays_and_is_symmetric() -> None:
    """It swings on its way down, so means over octaves of distance are compared."""
    bias = Sandwich(8).bias(*zeros(8, 64, 64), Positions.arange(64))
    assert torch.equal(bias, bias.transpose(2, 3))
    assert not bias.diagonal(dim1=2, dim2=3).any()
    octaves = torch.stack([bias[0, :, 2**n : 2 ** (n + 1), 0].mean(1) for n in range(6)])
    assert bool((octaves.diff(dim=0) < 0).all())


def test_unknown_bounds_change_no_bit() -> None:
    """Where a table of distances cannot be sized, or would be larger than the pairs, each pair is computed."""
    encoding, index = Sandwich(2, dim=16), torch.tensor([[0, 3, 4, 9]])
    known, unknown = Positions.of(index), Positions(index)
    q, k = zeros(2, 4, 4)
    assert encoding.bias(q, k, unknown).equal(encoding.bias(q, k, known))
    wide = Positions.of([0, 3, 4, 2**31 - 1])
    bias = encoding.bias(q, k, wide)
    assert torch.equal(bias[:, :, :3, :3], encoding.bias(q, k, known)[:, :, :3, :3])
    for positions in (unknown, wide):
        assert encoding.score_mod(q, k, positions) is None, "it would look the bias up in a matrix"
