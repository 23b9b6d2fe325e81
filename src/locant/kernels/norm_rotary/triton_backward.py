"""The backward of `triton.py`, whose docstring describes it."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.norm_rotary.triton_rows import (
    ADD,
    OPTIONS,
    Rows,
    inverse_rms_of_tokens,
    inverse_root,
    load_rows,
    load_weight,
    rounded_unit,
    row_addresses,
    row_constants,
    steps,
    store_rest,
    sum_of_squares,
)
from locant.kernels.rotary.reference import Layout, Tables
from locant.kernels.rotary.triton import (
    PROGRAMS,
    TILE,
    position_steps,
    programs_per_token,
    store_pairs,
    token_angles,
    unit,
)


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
    rows = Rows(x, dx, weight, x.shape[1])
    kind, (batch, heads, seq, head_dim) = rows.weight_kind(), x.shape
    row = row_constants(x, heads, positions, tables, layout, norm, TILE // (4 if wide == torch.float64 else 2))
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
        *(stride // step_unit for each in tensors[:3] for stride in steps(each)),
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
    b_w_a, b_w_b, b_w_rest = load_weight(
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
            b_a, b_b, b_rest, b_g_a, b_g_b, b_g_rest = _load_rows_and_gradients(
                x, grad, o_head, x_head, grad_head, o_x, o_grad, x_dim, grad_dim, m_row, b_cos, b_sin, dtype,
                PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R, UNIT,
            )  # fmt: skip
            if WEIGHT != "all heads":
                b_inverse = inverse_root(sum_of_squares(b_a, b_b, b_rest, REST, COUNT), m_row, WIDTH, EPS)
            b_a, b_b = b_a * b_inverse, b_b * b_inverse
            b_m_a, b_m_b = b_g_a * b_w_a, b_g_b * b_w_b
            if REST > 0:
                b_rest = b_rest * b_inverse
                b_m_rest = b_g_rest * b_w_rest
                b_dw_rest += b_g_rest * rounded_unit(b_rest, x_dtype, WEIGHT, ROUND_FIRST)
            b_dw_a += b_g_a * rounded_unit(b_a, x_dtype, WEIGHT, ROUND_FIRST)
            b_dw_b += b_g_b * rounded_unit(b_b, x_dtype, WEIGHT, ROUND_FIRST)
            if WEIGHT != "all heads":
                b_mean = tl.reduce(b_m_a * b_a + b_m_b * b_b, 2, ADD, keep_dims=True)
                if REST > 0:
                    b_mean += tl.reduce(b_m_rest * b_rest, 2, ADD, keep_dims=True)
                b_mean = b_mean * tl.full([1, 1, 1], 1.0 / WIDTH, dtype)  # dividing takes registers
            p_dx = row_addresses(dx, o_head, dx_head, o_dx, UNIT)
            b_m_a, b_m_b = b_inverse * (b_m_a - b_a * b_mean), b_inverse * (b_m_b - b_b * b_mean)
            store_pairs(p_dx, dx_dim, m_row, b_m_a, b_m_b, PAIRS, INTERLEAVED, BLOCK_P)
            if REST > 0:
                b_m_rest = b_inverse * (b_m_rest - b_rest * b_mean)
                store_rest(p_dx, dx_dim, m_row, b_m_rest, PAIRS, REST, BLOCK_R)
    if WEIGHT != "none":
        b_dw_a, b_dw_b = _sum_of_rows(b_dw_a, WEIGHT), _sum_of_rows(b_dw_b, WEIGHT)
        ROWS: tl.constexpr = BLOCK_H if WEIGHT == "all heads" else 1
        p_part = parts + (i_program * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None] * WIDTH
        m_part = tl.full([ROWS, 1, 1], 1, tl.int1)
        store_pairs(p_part, 1, m_part, b_dw_a, b_dw_b, PAIRS, INTERLEAVED, BLOCK_P)
        if REST > 0:
            store_rest(p_part, 1, m_part, _sum_of_rows(b_dw_rest, WEIGHT), PAIRS, REST, BLOCK_R)


@triton.jit
@no_type_check
def _load_rows_and_gradients(
    x, grad, o_head, x_head, grad_head, o_x, o_grad, x_dim, grad_dim, m_row, b_cos, b_sin, dtype: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Return rows of x and of the gradient, which is rotated back: both halves of the pairs, and the rest."""
    p_x, p_grad = row_addresses(x, o_head, x_head, o_x, UNIT), row_addresses(grad, o_head, grad_head, o_grad, UNIT)
    b_a, b_b, b_rest = load_rows(p_x, x_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
    b_g_a, b_g_b, b_g_rest = load_rows(p_grad, grad_dim, m_row, dtype, PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R)
    b_g_a, b_g_b = b_g_a * b_cos + b_g_b * b_sin, b_g_b * b_cos - b_g_a * b_sin
    return b_a, b_b, b_rest, b_g_a, b_g_b, b_g_rest


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
    b_inverse = inverse_rms_of_tokens(
        x, o_x, x_head, x_dim, m_token, heads, dtype,
        PAIRS, REST, INTERLEAVED, EPS, COUNT, BLOCK_T, BLOCK_P, BLOCK_R, UNIT,
    )  # fmt: skip
    b_sum = tl.full([BLOCK_H, BLOCK_T, 1], 0.0, dtype)
    for i_head in range(0, heads, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < heads)[:, None, None] & m_token[None, :, None]
        b_a, b_b, b_rest, b_g_a, b_g_b, b_g_rest = _load_rows_and_gradients(
            x, grad, o_head, x_head, grad_head, o_x, o_grad, x_dim, grad_dim, m_row, b_cos, b_sin, dtype,
            PAIRS, REST, INTERLEAVED, BLOCK_P, BLOCK_R, UNIT,
        )  # fmt: skip
        b_w_a, b_w_b, b_w_rest = load_weight(
            weight, weight_dim, o_head, heads, dtype, PAIRS, REST, INTERLEAVED, WEIGHT, PLUS_ONE, BLOCK_P, BLOCK_R
        )
        b_sum += tl.reduce(b_g_a * b_w_a * b_a + b_g_b * b_w_b * b_b, 2, ADD, keep_dims=True)
        if REST > 0:
            b_sum += tl.reduce(b_g_rest * b_w_rest * b_rest, 2, ADD, keep_dims=True)
    b_mean = tl.reduce(b_sum, 0, ADD, keep_dims=True) * b_inverse / (heads * (2 * PAIRS + REST))
    tl.store(of_tokens + o_token, tl.reshape(b_inverse, [BLOCK_T]), mask=m_token)
    tl.store(of_tokens + num_tokens + o_token, tl.reshape(b_mean, [BLOCK_T]), mask=m_token)
