"""The rotation on a CPU: against float64, against the reference bit for bit, and in memory that is full of NaN.

Everything here is asked of torch's loops and of the native kernel for each instruction set that this machine has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant.kernels import native as kernels
from locant.kernels.rotary import cpu, reference
from locant.kernels.rotary.reference import Tables
from tests.kernels.rotary.rotating import far_positions, tables, truth
from tests.threads import threads
from tests.tolerances import assert_close

LAYOUTS = ["half", "interleaved"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [2, 40, 72, 80, 96, 128, 192, 256]


@pytest.fixture(scope="module", autouse=True, params=["torch", *kernels.runnable()])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which code rotates, in all that is tested here."""
    of_library = kernels.function
    if request.param != "torch" and of_library(cpu.FUNCTION) is None:
        pytest.skip(f"native kernels are {kernels.status()}")

    def function(name: str) -> Any:
        return None if request.param == "torch" else of_library(name, request.param)

    with mock.patch.object(kernels, "function", function):
        yield request.param


def rotate_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None, index: Tensor, of: Tables, *how: Any
) -> None:
    """By the native kernel, if one is tested and it takes these tensors."""
    kernel = cpu.rotate_by_torch_ if cpu.why_not_native(q, index, of) else cpu.rotate_natively_
    kernel(q, k, out_q, out_k, index, of, *how)


def rotated(q: Tensor, k: Tensor | None, index: Tensor, of: Tables, layout: Any, inverse: bool = False) -> Any:
    """Into fresh memory full of NaN, and again in place: both have to be the same bits."""
    out = [None if x is None else torch.full_like(x, torch.nan) for x in (q, k)]
    rotate_(q, k, out[0], out[1], index, of, layout, inverse)
    same = [None if x is None else x.clone() for x in (q, k)]
    rotate_(*same, *same, index, of, layout, inverse)
    for fresh, overwritten in zip(out, same, strict=True):
        assert fresh is None or torch.equal(fresh, overwritten)
    return out


def assert_same_bits(
    q: Tensor, k: Tensor | None, index: Tensor, of: Tables, layout: Any, inverse: bool = False
) -> None:
    ours = rotated(q, k, index, of, layout, inverse)
    for x, expected in zip(ours, reference.rotate(q, k, index, of, layout, inverse), strict=True):
        assert (x is None) == (expected is None)
        assert x is None or torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_head_is_rotated_as_the_paper_says(layout: str, dtype: torch.dtype) -> None:
    for head_dim in SIZES:
        q, k = torch.randn(2, 3, 5, head_dim).to(dtype), torch.randn(2, 1, 5, head_dim).to(dtype)
        for index, sign in ((far_positions(2, 5), 1), (torch.arange(3, 8)[None], -1)):
            ours = rotated(q, k, index, tables(head_dim, attention_factor=1.25), layout, inverse=sign < 0)
            for x, before in zip(ours, (q, k), strict=True):
                assert_close(x, 1.25 * truth(before, index, layout, head_dim, sign))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [7, 16, 64])
@pytest.mark.parametrize("count", [1, 3])
def test_the_bits_are_those_of_the_reference(pairs: int, dtype: torch.dtype, layout: str, count: int) -> None:
    """Sizes of one vector and less, of many with some left over, and of more than one block, on several threads."""
    of = tables(2 * pairs, attention_factor=1.0 if pairs == 7 else 1.37)
    for batch, heads, seq in ((1, 2, 1), (2, 3, 67), (1, 5, 71 if count == 1 else 2_400)):
        q = torch.randn(batch, heads, seq, 2 * pairs).to(dtype)
        k = torch.randn(batch, seq, 3, 2 * pairs).to(dtype).transpose(1, 2)
        with threads(count):
            assert_same_bits(q, k, torch.randint(2**31, (batch, seq)), of, layout)
            assert_same_bits(q, None, torch.arange(seq)[None], of._replace(levels=2), layout, inverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_are_those_of_the_reference_whatever_the_number_of_threads(layout: str) -> None:
    for seq, pairs, dtype in itertools.product((15, 333, 2_049), (16, 48, 64), (torch.float32, torch.bfloat16)):
        q, k = torch.randn(2, 7, seq, 2 * pairs).to(dtype), torch.randn(2, 3, seq, 2 * pairs).to(dtype)
        index, of = torch.randint(2**31, (1, seq)), tables(2 * pairs)
        expected = reference.rotate(q, k, index, of, layout)
        for count in (1, 2, 3, 5, 7, 16):
            with threads(count):
                assert all(map(torch.equal, rotated(q, k, index, of, layout), expected)), (count, seq, pairs, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [0, 1, 255, 256, 65_200, 2**24 - 300, 2**31 - 600, -300, 1 - 2**31])
def test_tokens_that_follow_each_other_have_the_bits_of_each_alone(first: int, layout: str) -> None:
    """Across a change of every byte, from the first position to the last."""
    of = tables(64, attention_factor=1.37)
    index, q = torch.arange(first, first + 600)[None], torch.randn(1, 2, 600, 64)
    assert_same_bits(q, None, index, of, layout)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3),
    st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.booleans(),
)  # fmt: skip
def test_any_size_has_the_bits_of_the_reference(
    batch: int, heads: int, seq: int, pairs: int, rest: int, layout: str, dtype: torch.dtype, inverse: bool
) -> None:
    q = torch.randn(batch, heads, seq, 2 * pairs + rest).to(dtype)
    k = torch.randn(batch, seq, 1, 2 * pairs + rest).to(dtype).transpose(1, 2)
    index = torch.randint(-(2**31) + 1, 2**31, (batch, seq))
    assert_same_bits(q, k, index, tables(2 * pairs), layout, inverse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [7, 32])
def test_memory_laid_out_otherwise_gives_the_same_bits(pairs: int, dtype: torch.dtype, layout: str) -> None:
    """Part of a projection, every other element, an odd address, one head for all: read and written."""
    dim, of = 2 * pairs, tables(2 * pairs)
    index = torch.randint(2**31, (2, 5))
    projected = torch.randn(2, 5, 4 * dim + 1).to(dtype)
    q = projected[..., : 3 * dim].view(2, 5, 3, dim).transpose(1, 2)
    odd = projected[..., 1 : 3 * dim + 1].unflatten(-1, (3, dim)).transpose(1, 2)
    shifted = torch.randn(2, 3, 5, dim + 2).to(dtype)[..., 1 : dim + 1]  # even strides from an odd address on
    sparse = torch.randn(2, 3, 5, 2 * dim).to(dtype)[..., ::2]
    assert_same_bits(q, odd, index, of, layout)
    assert_same_bits(sparse, shifted, index, of, layout)
    one = q[:, :1].expand(2, 3, 5, dim)
    out = torch.full((2, 3, 5, dim), torch.nan, dtype=dtype)
    rotate_(one, None, out, None, index, of, layout, False)
    assert torch.equal(out, reference.rotate(one, None, index, of, layout)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_rotated_is_handed_through_and_what_lies_between_is_left_alone(
    layout: str, dtype: torch.dtype
) -> None:
    around = torch.full((2, 3, 5, 50), torch.nan, dtype=dtype)
    x = around[..., 3:48]
    x.copy_(torch.randn(2, 3, 5, 45))
    before, index, of = x.clone(), torch.arange(5)[None], tables(32)
    out = torch.full_like(before, torch.nan)
    rotate_(x, None, out, None, index, of, layout, False)
    assert torch.equal(out[..., 32:], before[..., 32:])
    assert torch.equal(x, before)
    rotate_(x, None, x, None, index, of, layout, False)
    assert torch.equal(x, out)
    assert bool(around[..., :3].isnan().all())
    assert bool(around[..., 48:].isnan().all())


@pytest.mark.parametrize("shape", [(0, 3, 5, 14), (2, 0, 5, 14), (2, 3, 0, 14)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_gives_nothing_out(shape: tuple[int, ...], layout: str) -> None:
    x, k = torch.randn(shape), torch.randn(2, 3, shape[2], 14)[: shape[0]]
    assert_same_bits(x, k, torch.arange(shape[2])[None], tables(14), layout)


@pytest.mark.parametrize("pairs", [7, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_axes_rotate_each_pair_by_its_own(layout: str, pairs: int) -> None:
    of, q = tables(2 * pairs), torch.randn(2, 3, 5, 2 * pairs)
    index = torch.randint(-(2**31) + 1, 2**31, (2, 5, 3))
    axis = torch.randint(3, (pairs,))
    ours = rotated(q, None, index, of._replace(axis_of_pair=axis), layout)[0]
    first, second = cpu._split_pairs(ours, layout)  # type: ignore[arg-type]
    for which in range(3):
        alone = rotated(q, None, index[..., which], of, layout)[0]
        for part, expected in zip((first, second), cpu._split_pairs(alone, layout), strict=True):  # type: ignore[arg-type]
            assert torch.equal(part[..., axis == which], expected[..., axis == which])
    assert_same_bits(q, None, index, of._replace(axis_of_pair=axis), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [7, 32])
def test_float32_angles_have_the_bits_of_the_reference(pairs: int, dtype: torch.dtype, layout: str) -> None:
    of = Tables(torch.rand(pairs), attention_factor=1.25)
    q = torch.randn(2, 3, 67, 2 * pairs).to(dtype)
    assert_same_bits(q, None, torch.randint(99_999, (2, 67)), of, layout)


def test_blocks_and_angles_cut_anywhere_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, index = torch.randn(3, 4, 41, 64), torch.randn(3, 2, 41, 64), torch.randint(2**31, (3, 41))
    of = tables(64)
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        expected = reference.rotate(q.to(dtype), k.to(dtype), index, of, layout)
        for angles, block in ((1, 1), (32 * 3 * 7, 64 * 41), (2**17, 64 * 41 * 4), (100, 2**19)):
            monkeypatch.setattr(cpu, "ANGLES", angles)
            monkeypatch.setattr(cpu, "BLOCK", max(block, 64 * 41))
            monkeypatch.setattr(cpu, "NATIVE_ANGLES", angles)
            for x, wanted in zip(rotated(q.to(dtype), k.to(dtype), index, of, layout), expected, strict=True):
                assert torch.equal(x, wanted)
