"""Angles: exact at every position, from tables that layers share."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locant import Positions, Rotary
from locant.positions import angles
from locant.positions.frequencies import inverse_frequencies
from tests import oracles
from tests.tolerances import ANGLE, ANGLE_IN_DOUBLE, FORMULA

BASES = [1e4, 5e5, 1e6, 1e7]
EDGES = oracles.edge_positions()


def spread(count: int, seed: int = 0) -> np.ndarray:
    """`count` positions below 2^31: every edge, a run from 0, and the rest at random on all scales."""
    rng = np.random.default_rng(seed)
    chosen = (2.0 ** rng.uniform(0, 31, size=count)).astype(np.int64)
    chosen[::2] = rng.integers(2**31, size=len(chosen[::2]))
    run = min(4096, count // 4)
    chosen[:run] = np.arange(run)
    chosen[run : run + len(EDGES)] = EDGES
    return chosen


def worst(rotary: Rotary, positions: np.ndarray, dim: int, base: float) -> float:
    """The largest error of any cosine or sine of these positions."""
    error = 0.0
    for chunk in np.array_split(positions, -(-len(positions) * dim // 2**21)):
        cos, sin = oracles.angles(chunk, dim, base)
        ours_cos, ours_sin = rotary.cos_sin(Positions.of(torch.from_numpy(chunk)))
        assert ours_cos.dtype == ours_sin.dtype == torch.float32
        off_cos, off_sin = ours_cos[0].double().numpy() - cos, ours_sin[0].double().numpy() - sin
        error = max(error, float(np.abs(off_cos).max()), float(np.abs(off_sin).max()))
    return error


@pytest.mark.parametrize(("base", "dim"), [(1e4, 64), (1e7, 10)])
def test_the_fast_oracle_agrees_with_sixty_digits(dim: int, base: float) -> None:
    sample = np.array([*EDGES[::3], *spread(300)[150:200], 2**31 - 1])
    for fast, slow in zip(
        oracles.angles(sample, dim, base), oracles.true_angles(sample.tolist(), dim, base), strict=True
    ):
        assert np.abs(fast - slow).max() < FORMULA


def test_bounds_that_begin_right_below_zero_leave_no_byte_out() -> None:
    index = np.arange(-1, 2)
    angle = index[:, None] * np.array([1.0, 0.001])
    frequencies = angles.Angles([Decimal(1), Decimal("0.001")])
    found = frequencies.cos_sin(torch.from_numpy(index), max_index=1, min_index=-1)
    for ours, expected in zip(found, (np.cos(angle), np.sin(angle)), strict=True):
        assert np.abs(ours.double().numpy() - expected).max() < ANGLE


@pytest.mark.parametrize(("base", "dim"), list(zip(BASES, (16, 6, 2, 10), strict=True)))
def test_a_hundred_thousand_positions_have_exact_angles(dim: int, base: float) -> None:
    positions = spread(140_000, seed=dim)
    assert len(np.unique(positions)) >= 100_000
    assert worst(Rotary(dim, base=base), positions, dim, base) <= ANGLE


@pytest.mark.parametrize("base", BASES)
def test_wide_heads_have_exact_angles(base: float) -> None:
    assert worst(Rotary(128, base=base), spread(4_000), 128, base) <= ANGLE


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_very_many_positions_of_wide_heads_have_exact_angles(base: float) -> None:
    """512 wide: the frequencies of 128 and 256 are among them."""
    assert worst(Rotary(512, base=base), spread(20_000, seed=512), 512, base) <= ANGLE


@pytest.mark.parametrize("last", [2**k + step for k in (8, 16, 17, 24, 25) for step in (-1, 0, 1)])
def test_angles_are_exact_for_every_largest_position(last: int) -> None:
    """How much of a position is read depends on the largest of them."""
    positions = np.array([p for p in EDGES if p < last] + [last])
    assert Positions.of(torch.from_numpy(positions)).max_index == last
    assert worst(Rotary(64), positions, 64, 1e4) <= ANGLE


def test_angles_in_float64_are_exact_to_fifteen_digits() -> None:
    sample = np.array([*EDGES, *spread(500)])
    cos, sin = oracles.angles(sample, 96, 1e4)
    ours = Rotary(96).cos_sin(Positions.of(torch.from_numpy(sample)), torch.float64)
    assert np.abs(ours[0][0].numpy() - cos).max() < ANGLE_IN_DOUBLE
    assert np.abs(ours[1][0].numpy() - sin).max() < ANGLE_IN_DOUBLE


def test_negative_positions_rotate_the_other_way() -> None:
    there, back = Positions.of(EDGES), Positions.of([-p for p in EDGES])
    (cos, sin), (cos_back, sin_back) = (Rotary(64, base=5e5).cos_sin(where, torch.float64) for where in (there, back))
    assert float((cos - cos_back).abs().max()) < ANGLE_IN_DOUBLE
    assert float((sin + sin_back).abs().max()) < ANGLE_IN_DOUBLE


def test_known_bounds_change_no_bit() -> None:
    """Bytes of the index that are known to be zero are skipped; not knowing must cost time only."""
    index = torch.tensor([[0, 1, 255, 256, 65_535]])
    known, unknown = Positions.of(index), Positions(index)
    assert (known.min_index, known.max_index, unknown.min_index, unknown.max_index) == (0, 65_535, None, None)
    far = Positions.of(torch.cat([index, torch.tensor([[2**31 - 1]])], dim=1))
    for rotary in (Rotary(62), Rotary(62, base=1e7)):
        for ours, other, third in zip(*(rotary.cos_sin(p) for p in (known, unknown, far)), strict=True):
            assert torch.equal(ours, other)
            assert torch.equal(ours, third[:, :-1])


def test_layers_with_the_same_frequencies_share_tables() -> None:
    with torch.inference_mode():
        first = Rotary(36, base=321.0)  # of no other test, so that the tables are made here
    with FakeTensorMode():
        fake = Rotary(36, base=321.5)
    others = [Rotary(36, base=321.0, layout="interleaved"), Rotary(36, base=321.5)]
    tables = [each.angles.tables(torch.device("cpu")).table for each in (first, *others, fake)]
    assert tables[0] is tables[1]
    assert tables[1] is not tables[2]
    for each, table in zip(others, tables[1:3], strict=True):
        assert type(table) is Tensor
        assert not table.is_inference()
        q = torch.randn(1, 1, 3, 36, requires_grad=True)
        each.rotate_one(q, Positions.arange(3)).sum().backward()


def test_layers_that_threads_build_at_once_share_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    make, both = angles._byte_tables, Barrier(2)

    def made_while_the_other_does(frequencies: Sequence[Decimal]) -> Tensor:
        both.wait(60)
        return make(frequencies)

    monkeypatch.setattr(angles, "_byte_tables", made_while_the_other_does)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda base: Rotary(36, base=base), (323.0, 323.0))  # of no other test
    host = torch.device("cpu")
    assert first.angles.tables(host).table is second.angles.tables(host).table


def test_the_first_layer_may_be_built_inside_a_transform() -> None:
    made: list[Rotary] = []

    def loss(x: Tensor) -> Tensor:
        made.append(Rotary(36, base=322.0))  # of no other test
        return made[0].rotate_one(x, Positions.arange(3)).sum()

    x = torch.randn(1, 1, 3, 36)
    torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
    later, again = Rotary(36, base=322.0), pickle.loads(pickle.dumps(Rotary(36, base=322.0)))  # noqa: S301
    assert later.angles.tables(torch.device("cpu")).table is made[0].angles.tables(torch.device("cpu")).table
    assert torch.equal(later.rotate_one(x, Positions.arange(3)), again.rotate_one(x, Positions.arange(3)))


def test_frequencies_have_fifty_digits() -> None:
    for dim, base in ((64, 1e4), (7, 5e5), (2, 1e7)):
        with oracles.mpmath.workdps(60):
            for i, frequency in enumerate(inverse_frequencies(dim, base)):
                true = oracles.mpmath.power(oracles.mpmath.mpf(base), oracles.mpmath.mpf(-2 * i) / dim)
                assert abs(oracles.mpmath.mpf(str(frequency)) / true - 1) < oracles.mpmath.mpf(10) ** -48
