"""The norm and the rotation in one launch on a GPU, which can also append to a cache, and their backward.

The forward is the launch of `kernels/rotary/triton.py`, with the norm of a row while the row is in registers. It writes
the keys into any view, such as the new slots of a cache, and copies the values there, too. For a norm over all heads
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

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.norm_rotary.triton_backward import norm_and_rotate_backward
from locant.kernels.norm_rotary.triton_rows import (
    OPTIONS,
    Rows,
    inverse_rms_of_tokens,
    inverse_root,
    load_rows,
    load_weight,
    norm_settings,
    rounded_unit,
    row_addresses,
    row_constants,
    scaled,
    steps,
    store_rest,
    sum_of_squares,
)
from locant.kernels.rotary.reference import Layout, Tables
from locant.kernels.rotary.triton import (
    TILE,
    Grid,
    copy_dimensions,
    launch_again,
    launch_key,
    position_steps,
    programs_per_token,
    remember,
    rotate_heads,
    store_pairs,
    token_angles,
    unit,
)

__all__ = ["norm_and_rotate_", "norm_and_rotate_backward"]


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
    queries = Rows(q, out_q, q_weight, q.shape[1])
    keys = queries if k is None or out_k is None or not k.numel() else Rows(k, out_k, k_weight, k.shape[1])
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
    settings = tables.levels, tables.attention_factor, layout, *norm_settings(norm)
    key = ("norm and rotate", heads, absent, settings, *launch_key(tensors))
    if launch_again(key, tensors):
        return
    grid, numbers = _numbers(queries, keys, heads, values, slots, positions, tables, layout, norm)
    with torch.cuda.device_of(q):
        start: Any = _norm_and_rotate_kernel[grid]
        remember(key, start(*tensors, *numbers, **OPTIONS), grid, numbers)


def _numbers(
    queries: Rows, keys: Rows, heads: tuple[int, int], values: tuple[Tensor, Tensor] | None, slots: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
) -> tuple[Grid, tuple[Any, ...]]:  # fmt: skip
    """Return the grid, and the arguments of the kernel after the tensors, in order."""
    tensors = (queries.x, queries.out, keys.x, keys.out, *(values or (queries.x, queries.out)))
    row = row_constants(queries.x, max(heads), positions, tables, layout, norm, TILE // 2)
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
    strides = (stride // step_unit for x in tensors for stride in steps(x))
    dims = (x.stride(3) for x in tensors)
    weight_dims = queries.weight_or_any().stride(0), keys.weight_or_any().stride(0)
    constants = *row.values(), step_unit, *kinds, width, slots is not None, block_v
    numbers = (*sizes, *strides, *dims, *position_steps(positions), *_slot_steps(slots), *weight_dims, *constants)
    return (token_blocks * shares, 1, 1), numbers


def _movable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that every device can load. Not all devices know 8-bit floating-point numbers."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


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
            p_v = row_addresses(v, o_head, v_head, o_v, UNIT)
            p_out_v = row_addresses(out_v, o_head, out_v_head, o_out_v, UNIT)
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
        b_inverse = inverse_rms_of_tokens(
            x, o_x, x_head, x_dim, m_token, heads, dtype,
            PAIRS, REST, INTERLEAVED, EPS, COUNT, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
        )  # fmt: skip
        tl.debug_barrier()  # another thread may overwrite what this thread has still to read
    else:
        b_w_a, b_w_b, b_w_rest = load_weight(
            weight, weight_dim, tl.full([1], 0, tl.int64), last, dtype,
            PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R,
        )  # fmt: skip
    for i_head in range(first, last, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < last)[:, None, None] & m_token[None, :, None]
        p_x = row_addresses(x, o_head, x_head, o_x, UNIT)
        b_a, b_b, b_rest = load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
        if WEIGHT == "all heads":
            b_w_a, b_w_b, b_w_rest = load_weight(
                weight, weight_dim, o_head, last, dtype,
                PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R,
            )  # fmt: skip
        else:
            b_inverse = inverse_root(sum_of_squares(b_a, b_b, b_rest, REST, COUNT), m_row, 2 * PAIRS + REST, EPS)
        b_a = scaled(rounded_unit(b_a * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_a, x_dtype, WEIGHT)
        b_b = scaled(rounded_unit(b_b * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_b, x_dtype, WEIGHT)
        p_out = row_addresses(out, o_head, out_head, o_out, UNIT)
        b_first, b_second = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
        store_pairs(p_out, out_dim, m_row, b_first, b_second, PAIRS, INTERLEAVED, BLOCK_P)
        if REST > 0:
            b_rest = scaled(rounded_unit(b_rest * b_inverse, x_dtype, WEIGHT, ROUND_FIRST), b_w_rest, x_dtype, WEIGHT)
            store_rest(p_out, out_dim, m_row, b_rest, PAIRS, REST, BLOCK_R)
