"""The code that the forward and the backward of `triton.py` share: rows of heads, their weights, and the norm of a row.

Both read rows in the same way and add their squares in the same way, so a row has the same norm in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary.reference import Layout, Tables
from locant.kernels.rotary.triton import angle_constants, blocks, load_pairs

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

# The functions behind tl.sum and tl.max. The interpreter supports them but cannot call tl.sum.
ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]
MOST = tl.standard._elementwise_max  # pyright: ignore[reportPrivateUsage]


class Rows(NamedTuple):
    """Queries or keys, their output, and their weight."""

    x: Tensor
    out: Tensor
    weight: Tensor | None
    heads: int

    def weight_kind(self) -> str:
        """Return for which heads the weight has elements. They are also the heads of one norm."""
        if self.weight is None:
            return "none"
        return "each head" if self.weight.shape[0] == self.x.shape[3] else "all heads"

    def weight_or_any(self) -> Tensor:
        """Return the weight, or a tensor in its place, which the kernel does not read."""
        return self.x if self.weight is None else self.weight


def row_constants(
    x: Tensor, heads: int, positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None, tile: int
) -> dict[str, Any]:
    """Return the constants that all kernels share, in order. None depends on the number of tokens."""
    pairs, head_dim = tables.pairs(), x.shape[3]
    rest = head_dim - 2 * pairs
    block_r = triton.next_power_of_2(rest) if rest else 1  # the norm needs whole rows
    return {
        "PAIRS": pairs,
        "REST": rest,
        "INTERLEAVED": layout == "interleaved",
        **angle_constants(positions, tables),
        **dict(zip(("NORM", "EPS", "PLUS_ONE", "ROUND_FIRST"), norm_settings(norm), strict=True)),
        "COUNT": max(4, triton.next_power_of_2(head_dim)),
        **blocks(pairs, block_r, heads, tile // x.element_size()),
    }


def norm_settings(norm: HeadNorm | None) -> tuple[bool, float, bool, bool]:
    """Return whether there is a norm, and its settings, as constants of a kernel."""
    return (False, 0.0, False, False) if norm is None else (True, norm.eps, norm.plus_one, norm.round_before_weight)


def steps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, heads and tokens, with 0 for a dimension of one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


# ---------------------------------------------------------------------- in kernels


@triton.jit
@no_type_check
def row_addresses(x, o_head, x_head, o_x, UNIT: tl.constexpr):
    """Return the addresses of the rows ``[heads, tokens, 1]``. `x_head`: the stride of heads, in `UNIT` elements."""
    return x + o_head.to(tl.int64)[:, None, None] * (x_head.to(tl.int64) * UNIT) + o_x[None, :, None]


@triton.jit
@no_type_check
def load_rows(
    p_x, x_dim, m_row, dtype: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return both dimensions of every pair, and the dimensions after the pairs, with 0 where there is nothing."""
    b_a, b_b = load_pairs(p_x, x_dim, m_row, 0.0, dtype, PAIRS, INTERLEAVED, BLOCK_P)
    b_rest = b_a
    if REST > 0:
        o_rest = tl.arange(0, BLOCK_R).to(tl.int64)[None, None, :]
        b_rest = tl.load(p_x + (2 * PAIRS + o_rest) * x_dim, mask=m_row & (o_rest < REST), other=0.0).to(dtype)
    return b_a, b_b, b_rest


@triton.jit
@no_type_check
def store_rest(p_out, out_dim, m_row, b_rest, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr):
    """Store the dimensions after the pairs."""
    o_rest = tl.arange(0, BLOCK_R).to(tl.int64)[None, None, :]
    p_rest = p_out + (2 * PAIRS + o_rest) * out_dim
    tl.store(p_rest, b_rest.to(p_out.dtype.element_ty), mask=m_row & (o_rest < REST))


@triton.jit
@no_type_check
def load_weight(
    weight, weight_dim, o_head, last, dtype: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the factors of the rows of `load_rows`. `o_head`: the heads of the weight, or a single 0."""
    if WEIGHT == "none":
        b_one = tl.full([1, 1, 1], 1.0, dtype)
        return b_one, b_one, b_one
    else:  # noqa: RET505  # without `else`, Triton would compile both branches
        o_weight = o_head.to(tl.int64)[:, None, None] * (2 * PAIRS + REST)
        m_row = (o_head < last)[:, None, None] if WEIGHT == "all heads" else tl.full([1, 1, 1], 1, tl.int1)
        b_a, b_b, b_rest = load_rows(
            weight + o_weight * weight_dim, weight_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R
        )
        if PLUS_ONE:
            b_a, b_b, b_rest = b_a + 1.0, b_b + 1.0, b_rest + 1.0
        return b_a, b_b, b_rest


@triton.jit
@no_type_check
def rounded_unit(b_unit, x_dtype: tl.constexpr, WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Return the first factor of the product with the weight, which the norm may round to the dtype of x."""
    if ROUND_FIRST and WEIGHT != "none":
        return b_unit.to(x_dtype).to(b_unit.dtype)
    else:  # noqa: RET505  # as above
        return b_unit


@triton.jit
@no_type_check
def scaled(b_unit, b_weight, x_dtype: tl.constexpr, WEIGHT: tl.constexpr):
    """Return the product with the weight, rounded to the dtype of x."""
    b_product = b_unit if WEIGHT == "none" else b_unit * b_weight
    return b_product.to(x_dtype).to(b_unit.dtype)


@triton.jit
@no_type_check
def inverse_root(b_sum, m_row, width, EPS: tl.constexpr):
    """Return ``1 / sqrt(sum / width + eps)``. Every operation is rounded to the nearest number, as on a CPU."""
    b_one, b_eps = tl.full(b_sum.shape, 1.0, b_sum.dtype), tl.full(b_sum.shape, EPS, b_sum.dtype)
    b_sum, b_width = tl.where(m_row, b_sum, b_one), b_one * width  # a row that does not exist has no infinite inverse
    if b_sum.dtype == tl.float64:
        return b_one / tl.sqrt(b_sum / b_width + b_eps)
    else:  # noqa: RET505  # as above
        return tl.div_rn(b_one, tl.sqrt_rn(tl.div_rn(b_sum, b_width) + b_eps))


@triton.jit
@no_type_check
def sum_of_squares(b_a, b_b, b_rest, REST: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of the squares of every row, with the same bits in every order of addition.

    The largest square is below ``2 * b_most``, so `b_coarse` is above all squares and half of it is above all rounded
    sums. Adding and subtracting it rounds a square to a multiple of its last bit, and sums of such multiples are exact.
    The same holds for what the first rounding left, and `b_fine`.
    """
    b_a, b_b = b_a * b_a, b_b * b_b
    b_most = tl.reduce(tl.maximum(b_a, b_b), 2, MOST, keep_dims=True)
    if REST > 0:
        b_rest = b_rest * b_rest
        b_most = tl.maximum(b_most, tl.reduce(b_rest, 2, MOST, keep_dims=True))
    if b_a.dtype == tl.float64:
        b_power = (b_most.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
        b_coarse = tl.minimum(b_power * COUNT, tl.full([1, 1, 1], 2.0**1022, tl.float64))
        b_fine = b_coarse * (1.5 * COUNT * 2.0**-54)
    else:
        b_power = (b_most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        b_coarse = tl.minimum(b_power * COUNT, 2.0**126)
        b_fine = b_coarse * (1.5 * COUNT * 2.0**-25)
    b_high_a, b_high_b = _rounded(b_a, b_coarse), _rounded(b_b, b_coarse)
    b_low_a, b_low_b = _rounded(b_a - b_high_a, b_fine), _rounded(b_b - b_high_b, b_fine)
    b_high = tl.reduce(b_high_a + b_high_b, 2, ADD, keep_dims=True)
    b_low = tl.reduce(b_low_a + b_low_b, 2, ADD, keep_dims=True)
    if REST > 0:
        b_high_rest = _rounded(b_rest, b_coarse)
        b_high += tl.reduce(b_high_rest, 2, ADD, keep_dims=True)
        b_low += tl.reduce(_rounded(b_rest - b_high_rest, b_fine), 2, ADD, keep_dims=True)
    return tl.where(b_most == float("inf"), b_most, b_high + b_low)


@triton.jit
@no_type_check
def _rounded(b_x, b_unit):
    return (b_x + b_unit) - b_unit


@triton.jit
@no_type_check
def inverse_rms_of_tokens(
    x, o_x, x_head, x_dim, m_token, heads, dtype: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, EPS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return ``[1, BLOCK_T, 1]`` for rows that are all heads of a token. The sums of heads are added in their order."""
    b_sum = tl.full([1, BLOCK_T, 1], 0.0, dtype)
    for i_head in range(heads):
        p_x = row_addresses(x, i_head + tl.arange(0, 1), x_head, o_x, UNIT)
        m_row = m_token[None, :, None]
        b_a, b_b, b_rest = load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        b_sum += sum_of_squares(b_a, b_b, b_rest, REST, COUNT)
    return inverse_root(b_sum, m_token[None, :, None], heads * (2 * PAIRS + REST), EPS)
