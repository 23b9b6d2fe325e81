"""Fourier positions: mixtures of cosines and of sines are the formula, for each head, and slow pairs stand still."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import PositionEncoding, Positions, RangeError, Rotary, ShapeError
from locant.positions import FoPE
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import assert_close


def build(heads: int, width: int) -> PositionEncoding:
    return FoPE(width, 2 if heads % 2 == 0 else 1, 100.0, original_max_seq_len=64)


@pytest.mark.parametrize("dtype", claims.DTYPES, ids=str)
def test_every_row_gets_what_it_gets_alone(dtype: torch.dtype) -> None:
    claims.agrees_with_itself_alone(build, dtype)


@pytest.mark.unchecked
@pytest.mark.slow
def test_sizes_state_gradients_and_graphs() -> None:
    claims.handles_every_size(lambda heads, width: build(1, width))
    claims.has_no_state_but_parameters(build)
    claims.compiles_at_most_twice(build)
    claims.passes_gradcheck(build(1, 4), 2, 4)


def test_each_head_mixes_the_frequencies_that_come_round_within_the_trained_length() -> None:
    encoding = claims.shaken(FoPE(10, 2, 100.0, original_max_seq_len=64)).double()
    frequencies = 100.0 ** (-np.arange(5) / 5)
    heard = frequencies[frequencies * 64 >= 2 * np.pi]
    assert 0 < len(heard) < 5
    index = torch.tensor([[0, 3, 64, 1000], [5, 5, 6, 70_000]])
    q, k = torch.randn(2, 4, 4, 10, dtype=torch.float64), torch.randn(2, 2, 4, 10, dtype=torch.float64)
    angle = index.numpy()[..., None] * heard
    for x, got in zip((q, k), encoding.rotate(q, k, Positions.of(index)), strict=True):
        for head in range(x.shape[1]):
            group = head * 2 // x.shape[1]
            cos, sin = np.ones((2, 4, 5)), np.zeros((2, 4, 5))
            cos[..., : len(heard)] = np.cos(angle) @ encoding.cosines[group].detach().numpy()
            sin[..., : len(heard)] = np.sin(angle) @ encoding.sines[group].detach().numpy()
            a, b = np.split(x[:, head].numpy(), 2, axis=-1)
            expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
            assert_close(got[:, head].detach(), torch.from_numpy(expected), torch.float32)


def test_without_noise_it_is_rotary_but_for_slow_pairs() -> None:
    q, where = torch.randn(1, 2, 6, 8), Positions.after(3, 6)
    whole = FoPE(8, 2, original_max_seq_len=100_000, noise=0.0)
    assert_close(whole.rotate(q, q, where)[0].detach(), Rotary(8).rotate_one(q, where))
    fast = FoPE(8, 2, original_max_seq_len=100, noise=0.0)  # of 1, 0.1, 0.01, 0.001 two come round
    slow = [2, 3, 6, 7]
    assert torch.equal(fast.rotate(q, q, where)[0][..., slow], q[..., slow])


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "original_max_seq_len=6"):
        FoPE(8, 1, original_max_seq_len=6)
    with refuses(RangeError, "noise"):
        FoPE(8, 1, original_max_seq_len=64, noise=-1)
    with refuses(ShapeError, "multiple of 2 heads"):
        FoPE(8, 2, original_max_seq_len=64).rotate(
            torch.zeros(1, 3, 1, 8), torch.zeros(1, 2, 1, 8), Positions.arange(1)
        )
