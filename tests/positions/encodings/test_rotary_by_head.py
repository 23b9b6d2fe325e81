"""Rotations that heads have for themselves, or learn: the formulas in NumPy, every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import Positions, RangeError, Rotary, ShapeError
from locant.positions import FoPE, MixedRotary, Pairs, RotaryByHead, StringRotary, UnequalAngles
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import DOUBLE, assert_close


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Dimension i with i + half, by an angle for each token and pair."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_mixed_angles_are_sums_over_the_axes_of_each_head(axes: int) -> None:
    encoding = claims.shaken(MixedRotary(10, 2, num_axes=axes)).double()
    index = torch.randint(-5, 40, (2, 7, axes))
    positions = Positions.of(index if axes > 1 else index[..., 0])
    q, k = torch.randn(2, 6, 7, 10, dtype=torch.float64), torch.randn(2, 2, 7, 10, dtype=torch.float64)
    frequencies = encoding.frequencies.detach().numpy()
    for x, got in zip((q, k), encoding.rotate(q, k, positions), strict=True):
        for head in range(x.shape[1]):
            of_head = frequencies[:, head * 2 // x.shape[1]]
            expected = turned(x[:, head].numpy(), index.double().numpy() @ of_head)
            assert_close(got[:, head].detach(), torch.from_numpy(expected))
    assert_close(encoding.unrotate(encoding.rotate_one(q, positions), positions), q)


def test_string_rotates_in_planes_of_an_orthogonal_matrix() -> None:
    encoding = claims.shaken(StringRotary(6)).double()
    weight = encoding.weight.detach().numpy()
    skew = weight - weight.T
    planes = (np.eye(6) - skew) @ np.linalg.inv(np.eye(6) + skew)
    np.testing.assert_allclose(planes @ planes.T, np.eye(6), rtol=0, atol=DOUBLE)
    x, index = torch.randn(1, 2, 5, 6, dtype=torch.float64), np.array([[3, 0, 9, -2, 40]])
    angle = index[..., None] * 10_000.0 ** (-np.arange(3) / 3)
    expected = turned(x.numpy() @ planes.T, angle[:, None])
    assert_close(encoding.rotate_one(x, Positions.of(index)).detach(), torch.from_numpy(expected))
    assert_close(encoding.unrotate(encoding.rotate_one(x, Positions.of(index)), Positions.of(index)), x)


def test_encodings_that_start_as_rotary_equal_rotary() -> None:
    q, where = torch.randn(2, 4, 5, 8), Positions.after(3, 5)
    expected = Rotary(8).rotate_one(q, where)
    assert_close(StringRotary(8).rotate_one(q, where).detach(), expected)
    assert_close(MixedRotary(8, 4).rotate_one(q, where).detach(), expected)


def test_each_group_of_heads_has_its_own_rotation() -> None:
    axes = [Rotary(6, pairs=Pairs(dims=[(0, 1), (2, 5)], axes=[a, a], num_axes=3)) for a in range(3)]
    encoding, positions = RotaryByHead(axes), Positions.of(torch.randint(0, 50, (2, 5, 3)))
    q, k = torch.randn(2, 6, 5, 6), torch.randn(2, 3, 5, 6)
    rotated_q, rotated_k = encoding.rotate(q, k, positions)
    for group, one in enumerate(axes):
        assert torch.equal(
            rotated_q[:, 2 * group : 2 * group + 2], one.rotate_one(q[:, 2 * group : 2 * group + 2], positions)
        )
        assert torch.equal(rotated_k[:, group : group + 1], one.rotate_one(k[:, group : group + 1], positions))
    assert_close(encoding.unrotate(rotated_q, positions), q)
    expected = rotated_q.clone()
    assert encoding.rotate(q, k, positions, inplace=True)[0] is q
    assert torch.equal(q, expected)


def test_each_head_mixes_the_frequencies_that_complete_a_turn_in_the_trained_length() -> None:
    encoding = claims.shaken(FoPE(10, 2, base=100.0, original_max_seq_len=64)).double()
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


def test_without_noise_fope_is_rotary_except_for_slow_pairs() -> None:
    q, where = torch.randn(1, 2, 6, 8), Positions.after(3, 6)
    whole = FoPE(8, 2, original_max_seq_len=100_000, noise=0.0)
    assert_close(whole.rotate(q, q, where)[0].detach(), Rotary(8).rotate_one(q, where))
    fast = FoPE(8, 2, original_max_seq_len=100, noise=0.0)  # of 1, 0.1, 0.01, 0.001 two come round
    slow = [2, 3, 6, 7]
    assert torch.equal(fast.rotate(q, q, where)[0][..., slow], q[..., slow])


def test_mistakes_are_named() -> None:
    where = Positions.arange(2)
    with refuses(RangeError, "num_heads"):
        MixedRotary(8, 0)
    with refuses(ShapeError, "num_axes=2"):
        MixedRotary(8, 1, num_axes=2).rotate_one(torch.zeros(1, 1, 2, 8), where)
    with refuses(ShapeError, "multiple of 2 heads"):
        MixedRotary(8, 2).rotate_one(torch.zeros(1, 3, 2, 8), where)
    with refuses(RangeError, "groups", "head_dim"):
        RotaryByHead([Rotary(8), Rotary(4)])
    with refuses(ShapeError, "3 heads", "2 groups"):
        RotaryByHead([Rotary(8), Rotary(8)]).rotate_one(torch.zeros(1, 3, 2, 8), where)
    with refuses(RangeError, "first and second"):
        UnequalAngles(Rotary(8), Rotary(8, layout="interleaved"))
    with refuses(RangeError, "original_max_seq_len=6"):
        FoPE(8, 1, original_max_seq_len=6)
    with refuses(RangeError, "noise"):
        FoPE(8, 1, original_max_seq_len=64, noise=-1)
    with refuses(ShapeError, "multiple of 2 heads"):
        FoPE(8, 2, original_max_seq_len=64).rotate(
            torch.zeros(1, 3, 1, 8), torch.zeros(1, 2, 1, 8), Positions.arange(1)
        )
