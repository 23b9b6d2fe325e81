"""The norm and the rotation in one launch on a GPU, which can also append to a cache, and their backward.

The forward is the launch of `kernels/rotary/triton.py`, with the norm of a row while the row is in registers. It writes
the keys into any view, such as the new slots of a cache, and copies the values beside them. For a norm over all heads
of a token, a program has all heads, and reads them once more for the sum of their squares.

The bits of a row do not depend on other rows, on the number of heads or on strides. A device adds the squares of a row
in an order that depends on all of these. So the squares are first split into two parts that are multiples of two powers
of two, chosen for the largest square. Sums of such parts are exact in every order. In heads of up to 256 dimensions,
the parts lose less than 2^-25 of the sum, half a unit in its last place.

The backward has a launch for q and a launch for k. A program takes some tokens and their heads, then the next tokens,
and sums its part of the weight's gradient in registers. The parts of all programs are written, and torch sums them.
There are no atomics, and the order does not depend on the device. So every run has the same bits. For a norm over all
heads, a launch before it writes two numbers of every token, which belong to all heads: the inverse root of its mean
square, and the mean of the products in the gradient.

It needs Triton 3.4 or newer. It was run in Triton's interpreter and compiled for compute capabilities 8.0, 9.0 and
10.0, but not yet run or timed on a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary.reference import Layout, Tables
from locant.kernels.rotary.triton import (
    PROGRAMS,
    TILE,
    Grid,
    angle_constants,
    blocks,
    copy_dimensions,
    launch_again,
    launch_key,
    load_pairs,
    position_steps,
    programs_per_token,
    remember,
    rotate_heads,
    store_pairs,
    token_angles,
    unit,
)

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

# The functions behind tl.sum and tl.max. The interpreter supports them but cannot call tl.sum.
ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]
MOST = tl.standard._elementwise_max  # pyright: ignore[reportPrivateUsage]


class _Rows(NamedTuple):
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


# ---------------------------------------------------------------------- forward


def norm_and_rotate_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
    v: Tensor | None = None, out_v: Tensor | None = None, slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the norms of q and k, rotated, into `out_q` and `out_k`, and copy `v` into `out_v`.

    The package's docstring describes the arguments. With `slots` (int64 ``[batch or 1, seq]``), a token's key and value
    are written to this place along the third dimension of `out_k` and `out_v`, or nowhere if it is negative.
    """
    q_weight, k_weight = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    queries = _Rows(q, out_q, q_weight, q.shape[1])
    keys = queries if k is None or out_k is None or not k.numel() else _Rows(k, out_k, k_weight, k.shape[1])
    queries = queries if q.numel() else keys
    if not queries.x.numel():
        return  # a grid without programs cannot be launched
    heads = q.shape[1], 0 if k is None else k.shape[1]
    values = None if v is None or out_v is None or not v.numel() else (_movable(v), _movable(out_v))
    increment_version([x for x in (out_q, out_k, out_v) if x is not None])  # torch's graph does not see the launch
    axis_of_pair = positions if tables.axis_of_pair is None else tables.axis_of_pair
    tensors = (
        queries.x, queries.out, keys.x, keys.out, *(values or (queries.x, queries.out)), positions, tables.table,
        axis_of_pair, queries.weight_or_any(), keys.weight_or_any(), positions if slots is None else slots,
    )  # fmt: skip
    absent = values is None, slots is None, axis_of_pair is positions, q_weight is None, k_weight is None
    settings = tables.levels, tables.attention_factor, layout, *_norm_settings(norm)
    key = ("norm and rotate", heads, absent, settings, *launch_key(tensors))
    if launch_again(key, tensors):
        return
    grid, numbers = _numbers(queries, keys, heads, values, slots, positions, tables, layout, norm)
    with torch.cuda.device_of(q):
        start: Any = _norm_and_rotate_kernel[grid]
        remember(key, start(*tensors, *numbers, **OPTIONS), grid, numbers)


def _numbers(
    queries: _Rows, keys: _Rows, heads: tuple[int, int], values: tuple[Tensor, Tensor] | None, slots: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
) -> tuple[Grid, tuple[Any, ...]]:  # fmt: skip
    """Return the grid, and the arguments of the kernel after the tensors, in order."""
    tensors = (queries.x, queries.out, keys.x, keys.out, *(values or (queries.x, queries.out)))
    row = _row_constants(queries.x, max(heads), positions, tables, layout, norm, TILE // 2)
    kinds = queries.weight_kind(), keys.weight_kind()
    width = 0 if values is None else values[0].shape[3]
    block_v = min(triton.next_power_of_2(width), max(2 * row["BLOCK_P"], row["BLOCK_R"])) if width else 1
    batch, _, seq, _ = queries.x.shape
    token_blocks = triton.cdiv(batch * seq, row["BLOCK_T"])
    shares = programs_per_token(token_blocks, triton.cdiv(max(heads), row["BLOCK_H"]))
    if "all heads" in kinds:
        shares = 1  # programs that read all heads of a token may not overwrite a share of them
    sizes = batch * seq, seq, shares, *heads, *(triton.cdiv(n, shares) for n in heads)
    step_unit = unit(tensors)
    steps = (stride // step_unit for x in tensors for stride in _steps(x))
    dims = (x.stride(3) for x in tensors)
    weight_dims = queries.weight_or_any().stride(0), keys.weight_or_any().stride(0)
    constants = *row.values(), step_unit, *kinds, width, slots is not None, block_v
    numbers = (*sizes, *steps, *dims, *position_steps(positions), *_slot_steps(slots), *weight_dims, *constants)
    return (token_blocks * shares, 1, 1), numbers


def _row_constants(
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
        **dict(zip(("NORM", "EPS", "PLUS_ONE", "ROUND_FIRST"), _norm_settings(norm), strict=True)),
        "COUNT": max(4, triton.next_power_of_2(head_dim)),
        **blocks(pairs, block_r, heads, tile // x.element_size()),
    }


def _movable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that every device can load. Not all devices know 8-bit floating-point numbers."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _norm_settings(norm: HeadNorm | None) -> tuple[bool, float, bool, bool]:
    return (False, 0.0, False, False) if norm is None else (True, norm.eps, norm.plus_one, norm.round_before_weight)


def _steps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, heads and tokens, with 0 for a dimension of one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def _slot_steps(slots: Tensor | None) -> tuple[int, int]:
    return (0, 0) if slots is None else (0 if slots.shape[0] == 1 else slots.stride(0), slots.stride(1))


@triton.jit(
    do_not_specialize=[
        "num_tokens", "seq", "shares", "q_heads", "k_heads", "q_share", "k_share",
        "q_batch", "q_head", "q_seq", "out_q_batch", "out_q_head", "out_q_seq",
        "k_batch", "k_head", "k_seq", "out_k_batch", "out_k_head", "out_k_seq",
        "v_batch", "v_head", "v_seq", "out_v_batch", "out_v_head", "out_v_seq",
        "position_batch", "position_seq", "position_axis", "slot_batch", "slot_seq",
    ]
)  # fmt: skip
@no_type_check
def _norm_and_rotate_kernel(
    q, out_q, k, out_k, v, out_v, positions, table, axis_of_pair, q_weight, k_weight, slots,
    num_tokens, seq, shares, q_heads, k_heads, q_share, k_share,
    q_batch: tl.int64, q_head: tl.int64, q_seq: tl.int64,
    out_q_batch: tl.int64, out_q_head: tl.int64, out_q_seq: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_seq: tl.int64,
    out_k_batch: tl.int64, out_k_head: tl.int64, out_k_seq: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_seq: tl.int64,
    out_v_batch: tl.int64, out_v_head: tl.int64, out_v_seq: tl.int64,
    q_dim, out_q_dim, k_dim, out_k_dim, v_dim, out_v_dim,
    position_batch: tl.int64, position_seq: tl.int64, position_axis: tl.int64, slot_batch: tl.int64,
    slot_seq: tl.int64, q_weight_dim, k_weight_dim,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr,
    ROUND_FIRST: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr, VALUES: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Norm and rotate `BLOCK_T` tokens, counted over the rows of the batch, and a share of their heads (one program).

    The keys and values of a token go to its slot in their outputs.
    """
    i_program = tl.program_id(0)
    i_share, i_block = i_program % shares, i_program // shares
    o_token = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_token = o_token < num_tokens
    o_batch, o_seq = (o_token // seq).to(tl.int64), (o_token % seq).to(tl.int64)
    b_cos, b_sin = token_angles(
        q, positions, table, axis_of_pair, o_batch * position_batch + o_seq * position_seq, position_axis, m_token,
        PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
    )  # fmt: skip
    o_slot, m_slot = o_seq, m_token
    if SLOTS:
        o_slot = tl.load(slots + o_batch * slot_batch + o_seq * slot_seq, mask=m_token, other=-1).to(tl.int64)
        m_slot = m_token & (o_slot >= 0)
    _process_heads(
        q, (o_batch * q_batch + o_seq * q_seq) * UNIT, q_head, q_dim,
        out_q, (o_batch * out_q_batch + o_seq * out_q_seq) * UNIT, out_q_head, out_q_dim, q_weight, q_weight_dim,
        m_token, i_share * q_share, tl.minimum(q_heads, (i_share + 1) * q_share), q_heads, b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, NORM, EPS, PLUS_ONE, ROUND_FIRST, COUNT, BLOCK_H, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
        Q_WEIGHT,
    )  # fmt: skip
    k_first, k_last = i_share * k_share, tl.minimum(k_heads, (i_share + 1) * k_share)
    _process_heads(
        k, (o_batch * k_batch + o_seq * k_seq) * UNIT, k_head, k_dim,
        out_k, (o_batch * out_k_batch + o_slot * out_k_seq) * UNIT, out_k_head, out_k_dim, k_weight, k_weight_dim,
        m_slot, k_first, k_last, k_heads, b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, NORM, EPS, PLUS_ONE, ROUND_FIRST, COUNT, BLOCK_H, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
        K_WEIGHT,
    )  # fmt: skip
    if VALUES > 0:
        o_v = (o_batch * v_batch + o_seq * v_seq) * UNIT
        o_out_v = (o_batch * out_v_batch + o_slot * out_v_seq) * UNIT
        for i_head in range(k_first, k_last, BLOCK_H):
            o_head = i_head + tl.arange(0, BLOCK_H)
            m_row = (o_head < k_last)[:, None, None] & m_slot[None, :, None]
            p_v = _row_addresses(v, o_head, v_head, o_v, UNIT)
            p_out_v = _row_addresses(out_v, o_head, out_v_head, o_out_v, UNIT)
            copy_dimensions(p_v, v_dim, p_out_v, out_v_dim, m_row, 0, VALUES, BLOCK_V)


@triton.jit
@no_type_check
def _process_heads(
    x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, weight, weight_dim, m_token, first, last, heads,
    b_cos, b_sin,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    PLUS_ONE: tl.constexpr, ROUND_FIRST: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Rotate heads `first` to `last` of some tokens, after their norm if there is one."""
    if NORM:
        _norm_and_rotate_heads(
            x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, weight, weight_dim, m_token, first, last, heads,
            b_cos[None, :, :], b_sin[None, :, :],
            PAIRS, REST, INTERLEAVED, EPS, PLUS_ONE, ROUND_FIRST, COUNT, BLOCK_H, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
            WEIGHT,
        )  # fmt: skip
    else:
        rotate_heads(
            x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, m_token, first, last, b_cos, b_sin,
            PAIRS, REST, INTERLEAVED, UNIT, BLOCK_H, BLOCK_P, BLOCK_R,
        )  # fmt: skip


@triton.jit
@no_type_check
def _norm_and_rotate_heads(
    x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, weight, weight_dim, m_token, first, last, heads,
    b_cos, b_sin,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr,
    ROUND_FIRST: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = b_cos.dtype
    x_dtype: tl.constexpr = x.dtype.element_ty
    if WEIGHT == "all heads":
        b_inverse = _inverse_rms_of_tokens(
            x, o_x, x_head, x_dim, m_token, heads, dtype,
            PAIRS, REST, INTERLEAVED, EPS, COUNT, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
        )  # fmt: skip
        tl.debug_barrier()  # another thread may overwrite what this thread has still to read
    else:
        b_w_a, b_w_b, b_w_rest = _load_weight(
            weight, weight_dim, tl.full([1], 0, tl.int64), last, dtype,
            PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R,
        )  # fmt: skip
    for i_head in range(first, last, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < last)[:, None, None] & m_token[None, :, None]
        p_x = _row_addresses(x, o_head, x_head, o_x, UNIT)
        b_a, b_b, b_rest = _load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        if WEIGHT == "all heads":
            b_w_a, b_w_b, b_w_rest = _load_weight(
                weight, weight_dim, o_head, last, dtype,
                PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R,
            )  # fmt: skip
        else:
            b_inverse = _inverse_root(_sum_of_squares(b_a, b_b, b_rest, REST, COUNT), m_row, 2 * PAIRS + REST, EPS)
        b_a = _scaled(_rounded_unit(b_a * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_a, x_dtype, WEIGHT)
        b_b = _scaled(_rounded_unit(b_b * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_b, x_dtype, WEIGHT)
        p_out = _row_addresses(out, o_head, out_head, o_out, UNIT)
        b_first, b_second = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
        store_pairs(p_out, out_dim, m_row, b_first, b_second, PAIRS, INTERLEAVED, BLOCK_P)
        if REST > 0:
            b_rest = _scaled(_rounded_unit(b_rest * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_rest, x_dtype, WEIGHT)
            _store_rest(p_out, out_dim, m_row, b_rest, PAIRS, REST, BLOCK_R)


@triton.jit
@no_type_check
def _inverse_rms_of_tokens(
    x, o_x, x_head, x_dim, m_token, heads, dtype: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, EPS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return ``[1, BLOCK_T, 1]`` for rows that are all heads of a token. The sums of heads are added in their order."""
    b_sum = tl.full([1, BLOCK_T, 1], 0.0, dtype)
    for i_head in range(heads):
        p_x = _row_addresses(x, i_head + tl.arange(0, 1), x_head, o_x, UNIT)
        m_row = m_token[None, :, None]
        b_a, b_b, b_rest = _load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        b_sum += _sum_of_squares(b_a, b_b, b_rest, REST, COUNT)
    return _inverse_root(b_sum, m_token[None, :, None], heads * (2 * PAIRS + REST), EPS)


# ---------------------------------------------------------------------- rows


@triton.jit
@no_type_check
def _row_addresses(x, o_head, x_head, o_x, UNIT: tl.constexpr):
    """Return the addresses of the rows ``[heads, tokens, 1]``. `x_head`: the stride of heads, in `UNIT` elements."""
    return x + o_head.to(tl.int64)[:, None, None] * (x_head.to(tl.int64) * UNIT) + o_x[None, :, None]


@triton.jit
@no_type_check
def _load_rows(
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
def _store_rest(p_out, out_dim, m_row, b_rest, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr):
    o_rest = tl.arange(0, BLOCK_R).to(tl.int64)[None, None, :]
    p_rest = p_out + (2 * PAIRS + o_rest) * out_dim
    tl.store(p_rest, b_rest.to(p_out.dtype.element_ty), mask=m_row & (o_rest < REST))


@triton.jit
@no_type_check
def _load_weight(
    weight, weight_dim, o_head, last, dtype: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the factors of the rows of `_load_rows`. `o_head`: the heads of the weight, or a single 0."""
    if WEIGHT == "none":
        b_one = tl.full([1, 1, 1], 1.0, dtype)
        return b_one, b_one, b_one
    else:  # noqa: RET505  # without `else`, Triton would compile both branches
        o_weight = o_head.to(tl.int64)[:, None, None] * (2 * PAIRS + REST)
        m_row = (o_head < last)[:, None, None] if WEIGHT == "all heads" else tl.full([1, 1, 1], 1, tl.int1)
        b_a, b_b, b_rest = _load_rows(
            weight + o_weight * weight_dim, weight_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R
        )
        if PLUS_ONE:
            b_a, b_b, b_rest = b_a + 1.0, b_b + 1.0, b_rest + 1.0
        return b_a, b_b, b_rest


@triton.jit
@no_type_check
def _rounded_unit(b_unit, x_dtype: tl.constexpr, WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Return the first factor of the product with the weight, which the norm may round to the dtype of x."""
    if ROUND_FIRST and WEIGHT != "none":
        return b_unit.to(x_dtype).to(b_unit.dtype)
    else:  # noqa: RET505  # as above
        return b_unit


@triton.jit
@no_type_check
def _scaled(b_unit, b_weight, x_dtype: tl.constexpr, WEIGHT: tl.constexpr):
    """Return the product with the weight, rounded to the dtype of x."""
    b_product = b_unit if WEIGHT == "none" else b_unit * b_weight
    return b_product.to(x_dtype).to(b_unit.dtype)


@triton.jit
@no_type_check
def _inverse_root(b_sum, m_row, width, EPS: tl.constexpr):
    """Return ``1 / sqrt(sum / width + eps)``. Every operation is rounded to the nearest number, as on a CPU."""
    b_one, b_eps = tl.full(b_sum.shape, 1.0, b_sum.dtype), tl.full(b_sum.shape, EPS, b_sum.dtype)
    b_sum, b_width = tl.where(m_row, b_sum, b_one), b_one * width  # a row that does not exist has no infinite inverse
    if b_sum.dtype == tl.float64:
        return b_one / tl.sqrt(b_sum / b_width + b_eps)
    else:  # noqa: RET505  # as above
        return tl.div_rn(b_one, tl.sqrt_rn(tl.div_rn(b_sum, b_width) + b_eps))


@triton.jit
@no_type_check
def _sum_of_squares(b_a, b_b, b_rest, REST: tl.constexpr, COUNT: tl.constexpr):
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


# ---------------------------------------------------------------------- backward


def norm_and_rotate_backward(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, the weight of queries and the weight of keys. `q` and `k` are the inputs."""
    dq, dq_weight = _backward(grad_q, q, norm.q_weight, positions, tables, layout, norm)
    if k is None or grad_k is None:
        return dq, None, dq_weight, None
    dk, dk_weight = _backward(grad_k, k, norm.k_weight, positions, tables, layout, norm)
    return dq, dk, dq_weight, dk_weight


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x` and of its weight."""
    dx, wide = torch.empty_like(x), torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return dx, None if weight is None else torch.zeros_like(weight)
    rows = _Rows(x, dx, weight, x.shape[1])
    kind, (batch, heads, seq, head_dim) = rows.weight_kind(), x.shape
    row = _row_constants(x, heads, positions, tables, layout, norm, TILE // (4 if wide == torch.float64 else 2))
    block_h, over_heads = row["BLOCK_H"], kind == "all heads"
    token_blocks, head_blocks = triton.cdiv(batch * seq, row["BLOCK_T"]), triton.cdiv(heads, block_h)
    shares = head_blocks if over_heads else programs_per_token(token_blocks, head_blocks)
    share = block_h if over_heads else triton.cdiv(heads, shares)
    slices = min(token_blocks, max(1, PROGRAMS // shares))  # of the tokens. None depends on the device
    parts = x.new_empty(slices * shares, block_h if over_heads else 1, head_dim, dtype=wide)
    of_tokens = x.new_empty(2, batch * seq if over_heads else 1, dtype=wide)
    axis_of_pair = positions if tables.axis_of_pair is None else tables.axis_of_pair
    tensors = (grad, x, dx, positions, tables.table, axis_of_pair, rows.weight_or_any(), of_tokens, parts)
    step_unit = unit(tensors[:3])
    numbers = (
        batch * seq, seq, shares, slices, token_blocks, heads, share,
        *(stride // step_unit for each in tensors[:3] for stride in _steps(each)),
        *(each.stride(3) for each in tensors[:3]), *position_steps(positions), rows.weight_or_any().stride(0),
        *row.values(), step_unit, kind,
    )  # fmt: skip
    with torch.cuda.device_of(x):
        if over_heads:
            _token_means_kernel[token_blocks, 1, 1](*tensors, *numbers, **OPTIONS)
        _backward_kernel[slices * shares, 1, 1](*tensors, *numbers, **OPTIONS)
    if weight is None:
        return dx, None
    if over_heads:
        return dx, parts.view(slices, -1, head_dim).sum(0)[:heads].flatten().to(weight.dtype)
    return dx, parts.sum((0, 1)).to(weight.dtype)


NUMBERS = [
    "num_tokens", "seq", "shares", "slices", "token_blocks", "heads", "share",
    "grad_batch", "grad_head", "grad_seq", "x_batch", "x_head", "x_seq", "dx_batch", "dx_head", "dx_seq",
    "position_batch", "position_seq", "position_axis",
]  # fmt: skip
"""The arguments of the backward's kernels whose values do not cause a new compilation."""


@triton.jit(do_not_specialize=NUMBERS)
@no_type_check
def _backward_kernel(
    grad, x, dx, positions, table, axis_of_pair, weight, of_tokens, parts,
    num_tokens, seq, shares, slices, token_blocks, heads, share,
    grad_batch: tl.int64, grad_head: tl.int64, grad_seq: tl.int64,
    x_batch: tl.int64, x_head: tl.int64, x_seq: tl.int64, dx_batch: tl.int64, dx_head: tl.int64, dx_seq: tl.int64,
    grad_dim, x_dim, dx_dim,
    position_batch: tl.int64, position_seq: tl.int64, position_axis: tl.int64, weight_dim,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr,
    ROUND_FIRST: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x for a share of the heads of some tokens, and its part of the weight's gradient.

    The reference has the formulas. For a norm over all heads, a share is one block of heads.
    """
    i_program = tl.program_id(0)
    i_share, i_slice = i_program % shares, i_program // shares
    first, last = i_share * share, tl.minimum(heads, (i_share + 1) * share)
    dtype: tl.constexpr = parts.dtype.element_ty
    x_dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = 2 * PAIRS + REST
    o_own = first + tl.arange(0, BLOCK_H) if WEIGHT == "all heads" else tl.full([1], 0, tl.int32)
    b_w_a, b_w_b, b_w_rest = _load_weight(
        weight, weight_dim, o_own, last, dtype, PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R
    )
    b_dw_a = tl.full([BLOCK_H, BLOCK_T, BLOCK_P], 0.0, dtype)
    b_dw_b = tl.full([BLOCK_H, BLOCK_T, BLOCK_P], 0.0, dtype)
    b_dw_rest = tl.full([BLOCK_H, BLOCK_T, BLOCK_R], 0.0, dtype)
    for i_block in range(i_slice, token_blocks, slices):
        o_token = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
        m_token = o_token < num_tokens
        o_batch, o_seq = (o_token // seq).to(tl.int64), (o_token % seq).to(tl.int64)
        b_cos, b_sin = token_angles(
            x, positions, table, axis_of_pair, o_batch * position_batch + o_seq * position_seq, position_axis, m_token,
            PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
        )  # fmt: skip
        b_cos, b_sin = b_cos[None, :, :], b_sin[None, :, :]
        o_grad, o_x = (o_batch * grad_batch + o_seq * grad_seq) * UNIT, (o_batch * x_batch + o_seq * x_seq) * UNIT
        o_dx = (o_batch * dx_batch + o_seq * dx_seq) * UNIT
        if WEIGHT == "all heads":
            b_inverse = tl.load(of_tokens + o_token, mask=m_token, other=0.0)[None, :, None]
            b_mean = tl.load(of_tokens + num_tokens + o_token, mask=m_token, other=0.0)[None, :, None]
        for i_head in range(first, last, BLOCK_H):
            o_head = i_head + tl.arange(0, BLOCK_H)
            m_row = (o_head < last)[:, None, None] & m_token[None, :, None]
            p_x = _row_addresses(x, o_head, x_head, o_x, UNIT)
            p_grad = _row_addresses(grad, o_head, grad_head, o_grad, UNIT)
            b_a, b_b, b_rest = _load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
            b_g_a, b_g_b, b_g_rest = _load_rows(
                p_grad, grad_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R
            )
            b_g_a, b_g_b = b_g_a * b_cos + b_g_b * b_sin, b_g_b * b_cos - b_g_a * b_sin
            if WEIGHT != "all heads":
                b_inverse = _inverse_root(_sum_of_squares(b_a, b_b, b_rest, REST, COUNT), m_row, WIDTH, EPS)
            b_a, b_b = b_a * b_inverse, b_b * b_inverse
            b_m_a, b_m_b = b_g_a * b_w_a, b_g_b * b_w_b
            if REST > 0:
                b_rest = b_rest * b_inverse
                b_m_rest = b_g_rest * b_w_rest
                b_dw_rest += b_g_rest * _rounded_unit(b_rest, x_dtype, WEIGHT, ROUND_FIRST)
            b_dw_a += b_g_a * _rounded_unit(b_a, x_dtype, WEIGHT, ROUND_FIRST)
            b_dw_b += b_g_b * _rounded_unit(b_b, x_dtype, WEIGHT, ROUND_FIRST)
            if WEIGHT != "all heads":
                b_mean = tl.reduce(b_m_a * b_a + b_m_b * b_b, 2, ADD, keep_dims=True)
                if REST > 0:
                    b_mean += tl.reduce(b_m_rest * b_rest, 2, ADD, keep_dims=True)
                b_mean = b_mean * tl.full([1, 1, 1], 1.0 / WIDTH, dtype)  # dividing takes registers
            p_dx = _row_addresses(dx, o_head, dx_head, o_dx, UNIT)
            b_m_a, b_m_b = b_inverse * (b_m_a - b_a * b_mean), b_inverse * (b_m_b - b_b * b_mean)
            store_pairs(p_dx, dx_dim, m_row, b_m_a, b_m_b, PAIRS, INTERLEAVED, BLOCK_P)
            if REST > 0:
                b_m_rest = b_inverse * (b_m_rest - b_rest * b_mean)
                _store_rest(p_dx, dx_dim, m_row, b_m_rest, PAIRS, REST, BLOCK_R)
    if WEIGHT != "none":
        b_dw_a, b_dw_b = _sum_of_rows(b_dw_a, WEIGHT), _sum_of_rows(b_dw_b, WEIGHT)
        ROWS: tl.constexpr = BLOCK_H if WEIGHT == "all heads" else 1
        p_part = parts + (i_program * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None] * WIDTH
        m_part = tl.full([ROWS, 1, 1], 1, tl.int1)
        store_pairs(p_part, 1, m_part, b_dw_a, b_dw_b, PAIRS, INTERLEAVED, BLOCK_P)
        if REST > 0:
            _store_rest(p_part, 1, m_part, _sum_of_rows(b_dw_rest, WEIGHT), PAIRS, REST, BLOCK_R)


@triton.jit
@no_type_check
def _sum_of_rows(b_x, WEIGHT: tl.constexpr):
    """Return the sum over tokens, and over heads if the weight is for each head."""
    b_sum = tl.reduce(b_x, 1, ADD, keep_dims=True)
    if WEIGHT != "all heads":
        b_sum = tl.reduce(b_sum, 0, ADD, keep_dims=True)
    return b_sum


@triton.jit(do_not_specialize=NUMBERS)
@no_type_check
def _token_means_kernel(
    grad, x, dx, positions, table, axis_of_pair, weight, of_tokens, parts,
    num_tokens, seq, shares, slices, token_blocks, heads, share,
    grad_batch: tl.int64, grad_head: tl.int64, grad_seq: tl.int64,
    x_batch: tl.int64, x_head: tl.int64, x_seq: tl.int64, dx_batch: tl.int64, dx_head: tl.int64, dx_seq: tl.int64,
    grad_dim, x_dim, dx_dim,
    position_batch: tl.int64, position_seq: tl.int64, position_axis: tl.int64, weight_dim,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, PLUS_ONE: tl.constexpr,
    ROUND_FIRST: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write the inverse root mean square of every token, and its mean of ``gradient * weight * x / rms``."""
    dtype: tl.constexpr = parts.dtype.element_ty
    o_token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_token = o_token < num_tokens
    o_batch, o_seq = (o_token // seq).to(tl.int64), (o_token % seq).to(tl.int64)
    b_cos, b_sin = token_angles(
        x, positions, table, axis_of_pair, o_batch * position_batch + o_seq * position_seq, position_axis, m_token,
        PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
    )  # fmt: skip
    b_cos, b_sin = b_cos[None, :, :], b_sin[None, :, :]
    o_grad, o_x = (o_batch * grad_batch + o_seq * grad_seq) * UNIT, (o_batch * x_batch + o_seq * x_seq) * UNIT
    b_inverse = _inverse_rms_of_tokens(
        x, o_x, x_head, x_dim, m_token, heads, dtype,
        PAIRS, REST, INTERLEAVED, EPS, COUNT, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
    )  # fmt: skip
    b_sum = tl.full([BLOCK_H, BLOCK_T, 1], 0.0, dtype)
    for i_head in range(0, heads, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < heads)[:, None, None] & m_token[None, :, None]
        p_x = _row_addresses(x, o_head, x_head, o_x, UNIT)
        p_grad = _row_addresses(grad, o_head, grad_head, o_grad, UNIT)
        b_a, b_b, b_rest = _load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        b_g_a, b_g_b, b_g_rest = _load_rows(p_grad, grad_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        b_w_a, b_w_b, b_w_rest = _load_weight(
            weight, weight_dim, o_head, heads, dtype, PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R
        )
        b_g_a, b_g_b = b_g_a * b_cos + b_g_b * b_sin, b_g_b * b_cos - b_g_a * b_sin
        b_sum += tl.reduce(b_g_a * b_w_a * b_a + b_g_b * b_w_b * b_b, 2, ADD, keep_dims=True)
        if REST > 0:
            b_sum += tl.reduce(b_g_rest * b_w_rest * b_rest, 2, ADD, keep_dims=True)
    b_mean = tl.reduce(b_sum, 0, ADD, keep_dims=True) * b_inverse / (heads * (2 * PAIRS + REST))
    tl.store(of_tokens + o_token, tl.reshape(b_inverse, [BLOCK_T]), mask=m_token)
    tl.store(of_tokens + num_tokens + o_token, tl.reshape(b_mean, [BLOCK_T]), mask=m_token)
