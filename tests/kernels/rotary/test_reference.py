"""The rotation of pairs, against a block-diagonal matrix per token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant.kernels.rotary.reference import rotate_pairs as rotate
from tests import oracles
from tests.tolerances import ROTATED_TOKEN, TOLERANCES, assert_close

LAYOUTS = ["half", "interleaved"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def tables(seq_len: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random angles, of shape ``1 seq pairs``."""
    angle = torch.randn(1, seq_len, dim // 2, dtype=torch.float64) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def truth(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    as_arrays = (t.detach().double().numpy() for t in (x, cos[0], sin[0]))
    return torch.from_numpy(oracles.rotate(*as_arrays, layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 14), (1, 1, 1, 2), (3, 1, 7, 22), (1, 11, 2, 6)])
def test_every_pair_is_rotated_as_the_paper_says(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    cos, sin = tables(shape[2], shape[3], torch.promote_types(dtype, torch.float32))
    rotated = rotate(x, cos, sin, layout)
    assert (rotated.dtype, rotated.shape) == (dtype, x.shape)
    assert_close(rotated, truth(x, cos, sin, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_rounded_once(layout: str) -> None:
    """Not more than half a unit in the last place of the exact result away, and float32's own roundings."""
    x = torch.randn(2, 3, 5, 14).bfloat16()
    cos, sin = tables(5, 14, torch.float32)
    true = truth(x, cos, sin, layout)
    spacing = torch.from_numpy(np.ldexp(1.0, np.frexp(true.numpy())[1] - 8))
    assert bool(((rotate(x, cos, sin, layout).double() - true).abs() <= spacing / 2 + ROTATED_TOKEN).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [2, 4, 12])
def test_dimensions_past_the_rotary_ones_are_the_same_bits(layout: str, rotary_dim: int) -> None:
    x = torch.randn(2, 3, 5, 13)
    cos, sin = tables(5, rotary_dim, torch.float32)
    rotated = rotate(x, cos, sin, layout)
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(rotated[..., :rotary_dim], rotate(x[..., :rotary_dim], cos, sin, layout))
    assert_close(rotated, truth(x, cos, sin, layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [1, 2, 7, 32])
def test_permuted_interleaved_is_half_bit_for_bit(pairs: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 2 * pairs).to(dtype)
    cos, sin = tables(5, 2 * pairs, torch.promote_types(dtype, torch.float32))
    evens_then_odds = torch.cat([torch.arange(0, 2 * pairs, 2), torch.arange(1, 2 * pairs, 2)])
    interleaved = rotate(x, cos, sin, "interleaved")[..., evens_then_odds]
    assert torch.equal(interleaved, rotate(x[..., evens_then_odds], cos, sin, "half"))
    if pairs > 1:
        assert not torch.equal(rotate(x, cos, sin, "interleaved"), rotate(x, cos, sin, "half"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_rotation_backwards(layout: str) -> None:
    x = torch.randn(2, 3, 5, 17, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(5, 14, torch.float64)
    cotangent = torch.randn(2, 3, 5, 17, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(rotate(x, cos, sin, layout), x, cotangent)
    assert_close(gradient, truth(cotangent, cos, -sin, layout))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, layout), (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_laid_out_otherwise_gives_the_same_bits(layout: str) -> None:
    """Transposed, strided, repeated without copying (stride 0): values and gradients."""
    x = torch.randn(2, 5, 3, 14).transpose(1, 2)
    cos, sin = tables(5, 14, torch.float32)
    expected = rotate(x.contiguous(), cos, sin, layout)
    assert torch.equal(rotate(x, cos, sin, layout), expected)
    assert torch.equal(rotate(torch.stack([x, x], -1).flatten(-2)[..., ::2], cos, sin, layout), expected)
    one = x[:, :1].expand(2, 3, 5, 14)
    assert torch.equal(rotate(one, cos, sin, layout), rotate(one.contiguous(), cos, sin, layout))
    leaf = x.contiguous().requires_grad_()
    stride_0 = torch.randn(1, 1, 5, 1).expand(2, 3, 5, 14)
    gradients = [torch.autograd.grad(rotate(leaf, cos, sin, layout), leaf, c)[0] for c in (stride_0, stride_0.clone())]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(0, 3, 5, 14), (2, 0, 5, 14), (2, 3, 0, 14)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_gives_nothing_out(shape: tuple[int, ...], layout: str) -> None:
    x = torch.randn(shape, requires_grad=True)
    rotated = rotate(x, *tables(shape[2], 14, torch.float32), layout)
    assert rotated.shape == shape
    rotated.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_input_is_left_as_it_was(layout: str) -> None:
    x = torch.randn(2, 3, 5, 17)
    before, version = x.clone(), x._version
    rotate(x, *tables(5, 14, torch.float32), layout)
    assert torch.equal(x, before)
    assert x._version == version


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 3), st.sampled_from(LAYOUTS), st.sampled_from(DTYPES))
def test_the_norm_of_every_pair_is_kept(heads: int, pairs: int, rest: int, layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, heads, 5, 2 * pairs + rest).to(dtype)
    rotated = rotate(x, *tables(5, 2 * pairs, torch.promote_types(dtype, torch.float32)), layout)

    def norms(x: Tensor) -> Tensor:
        pair = x[..., : 2 * pairs].double()
        parted = (
            pair.unflatten(-1, (2, pairs)) if layout == "half" else pair.unflatten(-1, (pairs, 2)).transpose(-1, -2)
        )
        return parted.pow(2).sum(-2).sqrt()

    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(norms(rotated), norms(x), rtol=rtol, atol=atol)
