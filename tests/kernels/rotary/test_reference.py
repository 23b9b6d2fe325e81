"""The rotation of pairs, against a block-diagonal matrix per token; kernels are compared with it in `test_cpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from locant.kernels.rotary.reference import rotate as rotate_at
from locant.kernels.rotary.reference import rotate_pairs as rotate
from tests import oracles
from tests.kernels.rotary.rotating import far_positions
from tests.kernels.rotary.rotating import tables as exact_tables
from tests.kernels.rotary.rotating import truth as truth_at
from tests.tolerances import ROTATED, ROTATED_TOKEN, assert_close

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
@pytest.mark.parametrize(("dim", "rotary_dim"), [(2, 2), (3, 2), (72, 40), (128, 128), (200, 50)])
def test_float32_is_as_close_as_a_rounded_cosine_and_three_operations_allow(
    dim: int, rotary_dim: int, layout: str
) -> None:
    """At positions near and far; what is not rotated is handed through."""
    x, index = torch.randn(2, 3, 63, dim), far_positions(2, 63)
    out, _ = rotate_at(x, None, index, exact_tables(rotary_dim), layout)  # type: ignore[arg-type]
    pairs = (2, rotary_dim // 2) if layout == "half" else (rotary_dim // 2, 2)
    off, before = (
        t[..., :rotary_dim].double().unflatten(-1, pairs).movedim(-2 if layout == "half" else -1, -1)
        for t in (out - truth_at(x, index, layout, rotary_dim), x)
    )
    assert (off.abs() / before.norm(dim=-1, keepdim=True)).max() <= ROTATED
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


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
