"""Triton kernels with the mistakes of section E, a few lines each. They are only ever interpreted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_heads", "rotate_lanes"]


@triton.jit
def _copy_heads(x, out, stride, WIDTH: tl.constexpr):
    i_head = tl.program_id(0)
    o_head = (i_head.to(tl.int64) * stride).to(tl.int32)  # what a product of two 32-bit integers leaves on a device
    o_width = tl.arange(0, WIDTH)
    tl.store(out + i_head * WIDTH + o_width, tl.load(x + o_head + o_width))


def copy_heads(x: Tensor) -> Tensor:
    """Contiguous heads of one token, read at 32-bit offsets."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _copy_heads[(x.shape[1],)](x, out, x.stride(1), WIDTH=x.shape[3])
    return out


@triton.jit
def _rotate_lanes(x, cos, sin, PAIRS: tl.constexpr, LANES: tl.constexpr):
    o_row, o_pair = tl.program_id(0) * 2 * PAIRS, tl.arange(0, LANES)
    m_pair = o_pair < PAIRS
    b_cos, b_sin = tl.load(cos + o_pair), tl.load(sin + o_pair)  # every lane, also those past the last pair
    b_a = tl.load(x + o_row + o_pair, mask=m_pair)
    b_b = tl.load(x + o_row + PAIRS + o_pair, mask=m_pair)
    tl.store(x + o_row + o_pair, b_a * b_cos - b_b * b_sin, mask=m_pair)
    tl.store(x + o_row + PAIRS + o_pair, b_b * b_cos + b_a * b_sin, mask=m_pair)


def rotate_lanes(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rows rotated in place by one angle per pair, as many lanes at a time as the next power of two."""
    pairs = x.shape[-1] // 2
    _rotate_lanes[(x.numel() // x.shape[-1],)](x, cos, sin, PAIRS=pairs, LANES=triton.next_power_of_2(pairs))
