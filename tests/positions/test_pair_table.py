"""Tables of pairs: what each row says is done, at any dimensions, and the short ways write the same tables."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import LocantError, Positions, RangeError, Rotary, ShapeError
from locant.positions import Pairs
from locant.positions.scaling import (
    DynamicNTK,
    Unscaled,
    YaRN,
)
from tests.refusal import refuses
from tests.tolerances import TOLERANCES, assert_close

HEAD_DIM, HEADS, TOKENS = 22, 3, 7
BASE = 10_000.0

TABLES: dict[str, Pairs] = {
    "axes in turns": Pairs(dims=[(i, i + 9) for i in range(9)], axes=[i % 3 for i in range(9)]),
    "backwards": Pairs(dims=[(2 * i + 1, 2 * i) for i in range(11)]),
    "some backwards": Pairs(dims=[(i, i + 3) if i % 2 else (i + 3, i) for i in range(3)], axes=[1, 0, 1]),
    "trailing": Pairs(dims=[(10 + 2 * i, 11 + 2 * i) for i in range(6)]),
    "scattered": Pairs(
        dims=[(21, 0), (4, 17), (3, 2), (8, 20)], axes=[1, 0, 0, 1], rungs=[(8, 0), (8, 3), (5, 1), (6, 2)]
    ),
    "own frequencies": Pairs(dims=[(0, 5), (7, 6)], inv_freq=[0.25, -1.5]),
    "first head": Pairs(dims=[(2 * i, 2 * i + 1) for i in range(11)], num_heads=1),
    "first two heads, scattered": Pairs(dims=[(9, 1), (0, 12)], num_heads=2, axes=[0, 1]),
}  # fmt: skip
cases = pytest.mark.parametrize("name", TABLES)


def at(pairs: Pairs) -> Positions:
    """An index on each axis, apart from each other."""
    index = torch.randint(0, 60, (2, TOKENS, pairs.num_axes or 1), generator=torch.Generator().manual_seed(3))
    return Positions.of(index if pairs.num_axes != 1 else index[..., 0])


def heads(seed: int = 0, count: int = HEADS, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, TOKENS, HEAD_DIM, dtype=dtype, generator=generator)


def oracle(x: Tensor, pairs: Pairs, positions: Positions) -> Tensor:
    """Row by row, by the formula of a rotation, in float64."""
    given, rotated = x.detach().double().numpy(), x.detach().double().numpy().copy()
    index = positions.index.numpy().reshape(2, TOKENS, -1)
    for row, (i, j) in enumerate(pairs.dims):
        if pairs.rungs is None:
            frequency = float((pairs.inv_freq or ())[row])
        else:
            ladder, rung = pairs.rungs[row]
            frequency = BASE ** (-2 * rung / ladder)
        angle = index[..., (pairs.axes or ())[row]] * frequency
        for head in range(min(x.shape[1], pairs.num_heads or x.shape[1])):
            a, b = given[:, head, :, i], given[:, head, :, j]
            rotated[:, head, :, i] = a * np.cos(angle) - b * np.sin(angle)
            rotated[:, head, :, j] = b * np.cos(angle) + a * np.sin(angle)
    return torch.from_numpy(rotated)


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_is_rotated_as_its_row_says_and_nothing_else_is(name: str, dtype: torch.dtype) -> None:
    pairs, positions = TABLES[name], at(TABLES[name])
    q, k = heads(1, dtype=dtype), heads(2, 4, dtype=dtype)
    rotary = Rotary(HEAD_DIM, pairs=pairs)
    rtol, atol = TOLERANCES[dtype]
    for mine, x in zip((*rotary.rotate(q, k, positions), rotary.rotate_one(q, positions)), (q, k, q), strict=True):
        torch.testing.assert_close(mine.double(), oracle(x, pairs, positions), rtol=rtol, atol=atol)
        left = sorted({*range(HEAD_DIM)} - {*itertools.chain(*pairs.dims)})
        assert torch.equal(mine[..., left], x[..., left])
        assert mine.dtype == dtype


SHORT: dict[str, dict[str, Any]] = {
    "half": {},
    "interleaved": {"layout": "interleaved"},
    "partial": {"rotary_dim": 12},
    "sections": {"sections": (3, 5, 3), "layout": "interleaved"},
    "axial": {"sections": (4, 7), "axial": True},
}


@pytest.mark.parametrize("angles", ["exact", "float32"])
@pytest.mark.parametrize("name", SHORT)
def test_shorthand_options_equal_the_table_that_they_build(name: str, angles: Any) -> None:
    short = {"layout": "half", "rotary_dim": HEAD_DIM, "sections": None, "axial": False, **SHORT[name]}
    written = Pairs.of(short["rotary_dim"], **{key: value for key, value in short.items() if key != "rotary_dim"})
    one = Rotary(HEAD_DIM, angles=angles, **SHORT[name])
    other = Rotary(HEAD_DIM, angles=angles, pairs=written)
    assert one.pairs == other.pairs == written
    assert (one.has_named_layout, other.has_named_layout) == (True, False)
    x, positions = heads(dtype=torch.float32), at(written)
    assert torch.equal(one.rotate_one(x, positions), other.rotate_one(x, positions))


@cases
def test_gradients_are_rotated_back(name: str) -> None:
    pairs, positions = TABLES[name], at(TABLES[name])
    rotary = Rotary(HEAD_DIM, pairs=pairs)
    q, k = heads(1).requires_grad_(), heads(2).requires_grad_()
    cotangents = heads(3), heads(4)
    grads = torch.autograd.grad(rotary.rotate(q, k, positions), (q, k), cotangents)
    for x, grad, cotangent in zip((q, k), grads, cotangents, strict=True):
        direction = heads(5)
        forward = (oracle(direction, pairs, positions) * cotangent).sum()  # linear: <R d, c> = <d, R^T c>
        assert_close((grad * direction).sum(), forward)
        assert grad.shape == x.shape


@cases
def test_in_place_is_the_same_in_the_same_memory(name: str) -> None:
    rotary, positions = Rotary(HEAD_DIM, pairs=TABLES[name]), at(TABLES[name])
    later = Positions.of(positions.index + 11)
    q, k = heads(1, dtype=torch.float32), heads(2, dtype=torch.float32)
    expected = rotary.rotate(q, k, positions, later)
    got = rotary.rotate(q, k, positions, later, inplace=True)
    assert got[0] is q
    assert got[1] is k
    assert all(map(torch.equal, got, expected))


@cases
def test_one_token_alone_and_a_copy_of_the_encoding_give_the_same_rotation(name: str) -> None:
    rotary, positions = Rotary(HEAD_DIM, pairs=TABLES[name], angles="float32"), at(TABLES[name])
    x = heads(dtype=torch.float32)
    whole = rotary.rotate_one(x, positions)
    one = rotary.rotate_one(x[:, :, 4:5], Positions.of(positions.index[:, 4:5]))
    assert torch.equal(one, whole[:, :, 4:5])
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), rotary.replace()):  # noqa: S301
        assert torch.equal(other.rotate_one(x, positions), whole)
        assert repr(other) == repr(rotary)


def test_scaling_acts_on_the_ladder_and_cached_keys_move() -> None:
    scattered = Pairs(dims=[(0, 9), (3, 1), (20, 8)], axes=[0, 0, 0])
    plain = Pairs.of(6)
    for scaling in (YaRN(factor=4.0, original_max_seq_len=64), DynamicNTK(factor=2.0, original_max_seq_len=8192)):
        one = Rotary(HEAD_DIM, scaling=scaling, pairs=scattered).for_length(16_384)
        other = Rotary(HEAD_DIM, scaling=scaling, pairs=plain).for_length(16_384)
        assert torch.equal(one.inv_freq, other.inv_freq)
    k, positions = heads(), at(scattered)
    moved = one.rerotate(one.for_length(9_000).rotate_one(k, positions), positions, 9_000, 16_384)
    assert_close(moved, one.rotate_one(k, positions))


@pytest.mark.parametrize("angles", ["exact", "float32"])
def test_rungs_are_those_of_their_ladders_odd_ones_too(angles: Any) -> None:
    """Whose frequencies are in `test_scaling`; the last pair of an odd ladder is half empty."""
    scaling, rungs = YaRN(factor=4.0, original_max_seq_len=64), [(5, 2), (1, 0), (8, 3), (5, 0)]
    expected = [float(scaling.frequencies(ladder, BASE, None)[rung]) for ladder, rung in rungs]
    pairs = Pairs(dims=[(0, 3), (5, 1), (2, 4), (6, 7)], rungs=rungs)
    rotary = Rotary(8, scaling=scaling, pairs=pairs, angles=angles)
    assert_close(rotary.inv_freq, torch.tensor(expected, dtype=torch.float64))
    size = scaling.effective_attention_factor
    for one, angle in zip(rotary.cos_sin(Positions.of([1]))[1][0, 0].tolist(), expected, strict=True):
        assert_close(torch.tensor(one), torch.tensor(np.sin(angle) * size))
    assert Pairs.of(5, sections=(3,)) == Pairs.of(5)
    assert len(Pairs.of(21)) == 11


def test_the_largest_table_is_accepted() -> None:
    assert Pairs(dims=[(0, 2**18 - 1)], rungs=[(2**18, 2**17 - 1)], axes=[2**15 - 1]).num_axes == 2**15


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@cases
def test_the_default_dtype_does_not_reach_the_frequencies(name: str, default: torch.dtype) -> None:
    _, expected = TABLES[name].frequencies(Unscaled(), BASE, None)
    torch.set_default_dtype(default)
    try:
        _, rounded = TABLES[name].frequencies(Unscaled(), BASE, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rounded.dtype == expected.dtype == torch.float32
    assert torch.equal(rounded, expected)


def test_properties_of_a_table() -> None:
    assert TABLES["backwards"].layout == "interleaved"
    assert TABLES["axes in turns"].layout == "half"
    assert TABLES["scattered"].layout is None
    assert (TABLES["first head"].layout, TABLES["first head"].runs_as) == ("interleaved", None)
    assert repr(TABLES["scattered"]) == "<4 pairs, no layout, 2 axes, 3 ladders>"
    assert hash(Pairs.of(8)) == hash(Pairs.of(8))


REFUSED: dict[str, tuple[Callable[[], object], type[LocantError], str]] = {
    "a dimension twice": (lambda: Pairs(dims=[(0, 1), (1, 2)]), RangeError, "dims"),
    "no pair": (lambda: Pairs(dims=[]), RangeError, "dims"),
    "one dimension": (lambda: Pairs(dims=[(0,)]), RangeError, "dims"),  # type: ignore[list-item]
    "a negative dimension": (lambda: Pairs(dims=[(-1, 0)]), RangeError, "dims"),
    "axes of other pairs": (lambda: Pairs(dims=[(0, 1)], axes=[0, 1]), RangeError, "axes"),
    "fewer axes than are used": (lambda: Pairs(dims=[(0, 1)], axes=[2], num_axes=2), RangeError, "num_axes"),
    "rungs beside frequencies": (lambda: Pairs(dims=[(0, 1)], rungs=[(2, 0)], inv_freq=[1.0]), RangeError, "rungs"),
    "a rung beyond the ladder": (lambda: Pairs(dims=[(0, 1)], rungs=[(4, 2)]), RangeError, "rung 2"),
    "a ladder over nothing": (lambda: Pairs(dims=[(0, 1)], rungs=[(0, 0)]), RangeError, "rungs"),
    "a ladder too wide": (lambda: Pairs(dims=[(0, 1)], rungs=[(2**18 + 1, 0)]), RangeError, "rungs"),
    "an axis too many": (lambda: Pairs(dims=[(0, 1)], axes=[2**15]), RangeError, "axes"),
    "too many axes": (lambda: Pairs(dims=[(0, 1)], num_axes=2**15 + 1), RangeError, "num_axes"),
    "of no layout": (lambda: Pairs.of(4, layout="bogus"), RangeError, "layout"),  # type: ignore[arg-type]
    "of no width": (lambda: Pairs.of(0), RangeError, "rotary_dim"),
    "of half a dimension": (lambda: Pairs.of(2.5), RangeError, "rotary_dim"),  # type: ignore[arg-type]
    "of too many dimensions": (lambda: Pairs.of(2**18 + 1), RangeError, "rotary_dim"),
    "of a negative section": (lambda: Pairs.of(4, sections=(3, -1)), RangeError, "sections"),
    "of half a section": (lambda: Pairs.of(4, sections=(1.5, 0.5)), RangeError, "sections"),  # type: ignore[arg-type]
    "of sections of other pairs": (lambda: Pairs.of(4, sections=(1, 2)), RangeError, "sections"),
    "of no sections": (lambda: Pairs.of(4, sections=2), ShapeError, "sections"),  # type: ignore[arg-type]
    "of axial without sections": (lambda: Pairs.of(4, axial=True), RangeError, "axial"),
    "of axial no flag": (lambda: Pairs.of(4, sections=(1, 1), axial="no"), RangeError, "axial"),  # type: ignore[arg-type]
    "no heads": (lambda: Pairs(dims=[(0, 1)], num_heads=0), RangeError, "num_heads"),
    "not finite": (lambda: Pairs(dims=[(0, 1)], inv_freq=[float("nan")]), RangeError, "inv_freq"),
    "no table": (lambda: Rotary(8, pairs=[(0, 1)]), RangeError, "pairs"),  # type: ignore[arg-type]
    "beyond the head": (lambda: Rotary(8, pairs=Pairs(dims=[(0, 8)])), RangeError, "dimension 8"),
    "sections of NumPy beside": (
        lambda: Rotary(8, pairs=Pairs.of(8), sections=np.array([2, 2])),  # type: ignore[arg-type]
        RangeError,
        "sections",
    ),
    "a short way beside": (lambda: Rotary(8, pairs=Pairs.of(8), rotary_dim=8), RangeError, "rotary_dim"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_table_is_refused(case: str) -> None:
    make, kind, name = REFUSED[case]
    with refuses(kind, name):
        make()


def test_positions_have_the_axes_of_the_table() -> None:
    with refuses(ShapeError, "2 axes", "3 axes"):
        Rotary(HEAD_DIM, pairs=TABLES["axes in turns"]).rotate_one(heads(), at(TABLES["scattered"]))
