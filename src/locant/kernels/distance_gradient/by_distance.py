"""The gradient of a table of heads and distances, in which FlexAttention has looked up.

1. `_diagonals`, a program for each diagonal of blocks, where slots count as distances do: it adds up the gradients of
   blocks in registers, and at the end along their diagonals. Two neighbours share a distance, and each has a place.
2. `_entries`, a program for some entries of the table, where slots do not count so (shards, gaps): it goes over all
   blocks that may hold one of its distances, some of them twice, and is slower the more of them there are.

A number on the device, which the host need not read, tells 1 or 2 to do nothing. No spills but in `_entries`, which
keeps 90 to 740 bytes of a thread in memory.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.kernels.distance_gradient.pairs import Pairs
from locant.kernels.distance_gradient.tiles import (
    ADD,
    LEAST,
    MOST,
    along,
    dots,
    is_some,
    log_sums,
    pairs_of,
    same_document,
    weights,
)

__all__ = ["table_gradient"]


def table_gradient(
    of_query: Float[Tensor, "batch heads query distances"], keys: int, pairs: Pairs, given: tuple[Any, ...],
    constants: dict[str, Any],
) -> Float[Tensor, "heads distances"]:  # fmt: skip
    """In float32. `given` and `constants` are what every kernel takes; `of_query` is the table of every query."""
    (batch, heads, queries, distances), block = of_query.shape, constants["BLOCK"]
    sums = torch.zeros(heads, distances, dtype=torch.float32, device=of_query.device)
    if pairs.offset is not None or pairs.keys is None:
        low, high = _bands(pairs, queries, keys, block)
        parts = sums.new_empty(batch, heads, high - low + 1, 2 * block)
        _diagonals[high - low + 1, heads, batch](parts, low, *given, **constants)
        _put(parts.sum(0), sums, (low - 1) * block + 1 + (pairs.offset or 0) - pairs.first)
    if pairs.offset is None:
        _entries[triton.cdiv(distances, block), heads](sums, batch, *given, **constants)
    return sums


def _bands(pairs: Pairs, queries: int, keys: int, block: int) -> tuple[int, int]:
    """The first and the last diagonal of blocks that may hold an allowed pair; at least one."""
    lowest, highest = 1 - triton.cdiv(keys, block), triton.cdiv(queries, block) - 1
    shift = pairs.offset or 0
    low, high = (pairs.low - shift) // block, -((shift - pairs.high) // block)  # a band reaches a block to either side
    low, high = max(low, lowest), min(high, highest)
    return (low, high) if low <= high else (lowest, lowest)


def _put(bands: Float[Tensor, "heads bands twice_block"], sums: Float[Tensor, "heads distances"], at: int) -> None:
    """The sums of diagonals, of which neighbours are added to each other, to their entries from `at` on."""
    half = bands.shape[2] // 2
    lower, upper = (part.flatten(1) for part in bands.split(half, dim=2))
    line = F.pad(lower, (0, half)) + F.pad(upper, (half, 0))
    start, stop = max(at, 0), min(at + line.shape[1], sums.shape[1])
    if start < stop:
        sums[:, start:stop] = line[:, start - at : stop - at]


# ---------------------------------------------------------------------- kernels


@triton.jit
@no_type_check
def _diagonals(
    parts, lowest,
    grad, q, k, v, lse, onto_lse, means, of_query, of_key, row_of,
    q_tokens, k_tokens, some, q_bounds, k_bounds, counts,
    heads, group, queries, keys, entries, first, offset, low: tl.int64, high: tl.int64, scale, softcap,
    q_row, k_row, some_row, q_bounds_row, k_bounds_row,
    grad_b: tl.int64, grad_h: tl.int64, grad_n: tl.int64, q_b: tl.int64, q_h: tl.int64, q_n: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    of_query_b: tl.int64, of_query_h: tl.int64, of_query_n: tl.int64,
    of_key_b: tl.int64, of_key_h: tl.int64, of_key_n: tl.int64,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, OF_LSE: tl.constexpr, CAPPED: tl.constexpr, OF_QUERY: tl.constexpr,
    OF_KEY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    D: tl.constexpr, V_D: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the pairs of blocks that are as far apart, of one head; a sum for each of their diagonals."""
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_band = tl.program_id(0) + lowest
    o_row = tl.arange(0, BLOCK)
    b_apart = i_band * BLOCK + o_row[:, None] - o_row[None, :] + offset
    m_apart = (b_apart >= low) & (b_apart <= high) & (b_apart >= first) & (b_apart < first + entries)
    b_bias = tl.load(of_query + i_h * of_query_h + (b_apart - first), mask=m_apart, other=float("-inf"))
    p_q, p_grad = q + i_b * q_b + i_h * q_h, grad + i_b * grad_b + i_h * grad_h
    p_k, p_v = k + i_b * k_b + (i_h // group) * k_h, v + i_b * v_b + (i_h // group) * v_h
    b_sum = tl.full([BLOCK, BLOCK], 0.0, tl.float32)
    stop = tl.minimum((queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK + i_band)
    if not COUNTED:
        stop = tl.where(tl.load(counts) == 1, stop, 0)
    for i_q in range(tl.maximum(i_band, 0), stop):
        if is_some(some + i_b * some_row, i_q, i_q - i_band, keys, FLAGS, BLOCK):
            o_q, o_k = i_q * BLOCK + o_row, (i_q - i_band) * BLOCK + o_row
            m_pair = m_apart & (o_k < keys)[None, :]
            if not COUNTED:
                p_q_document, p_k_document = q_tokens + i_b * q_row + queries, k_tokens + i_b * k_row + keys
                m_pair &= same_document(p_q_document + o_q, p_k_document + o_k, o_q < queries, o_k < keys)
            p_row = (i_b * heads + i_h) * queries + o_q
            b_lse = log_sums(lse + p_row, o_q < queries)
            b_mean = tl.load(means + p_row, mask=o_q < queries, other=0.0)
            b_score = dots(p_q, p_k, o_q, o_k, queries, keys, q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION)
            b_of_weight = dots(p_grad, p_v, o_q, o_k, queries, keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION)
            b_weight = weights(b_score * scale, b_bias, b_lse, softcap, CAPPED)
            b_sum += tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)
    o_part = tl.arange(0, 2 * BLOCK)
    b_along = along(b_sum, o_row[:, None] - o_part[None, :] + BLOCK - 1, BLOCK)
    i_part = (i_b * heads + i_h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + i_part * (2 * BLOCK) + o_part, b_along)


@triton.jit
@no_type_check
def _entries(
    sums, batch,
    grad, q, k, v, lse, onto_lse, means, of_query, of_key, row_of,
    q_tokens, k_tokens, some, q_bounds, k_bounds, counts,
    heads, group, queries, keys, entries, first, offset, low: tl.int64, high: tl.int64, scale, softcap,
    q_row, k_row, some_row, q_bounds_row, k_bounds_row,
    grad_b: tl.int64, grad_h: tl.int64, grad_n: tl.int64, q_b: tl.int64, q_h: tl.int64, q_n: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    of_query_b: tl.int64, of_query_h: tl.int64, of_query_n: tl.int64,
    of_key_b: tl.int64, of_key_h: tl.int64, of_key_n: tl.int64,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, OF_LSE: tl.constexpr, CAPPED: tl.constexpr, OF_QUERY: tl.constexpr,
    OF_KEY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    D: tl.constexpr, V_D: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the distances of `BLOCK` entries, of one head."""
    i_h = tl.program_id(1)
    o_row, o_entry = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    lowest = tl.program_id(0) * BLOCK
    nearest = lowest.to(tl.int64) + first
    q_blocks, k_blocks = (queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK
    b_sum = tl.full([BLOCK], 0.0, tl.float32)
    is_needed = tl.load(counts) == 0
    stop = tl.where(is_needed, batch * q_blocks, 0)
    for i in range(stop):
        i_b, i_q = (i // q_blocks).to(tl.int64), i % q_blocks
        o_q = i_q * BLOCK + o_row
        p_row = (i_b * heads + i_h) * queries + o_q
        q_least = tl.load(q_bounds + i_b * q_bounds_row + i_q)
        q_most = tl.load(q_bounds + i_b * q_bounds_row + q_blocks + i_q)
        for i_k in range(k_blocks):
            k_least = tl.load(k_bounds + i_b * k_bounds_row + i_k)
            k_most = tl.load(k_bounds + i_b * k_bounds_row + k_blocks + i_k)
            is_near = (q_most - k_least >= nearest) & (q_least - k_most < nearest + BLOCK)
            if is_near:  # noqa: SIM102  # Triton reads both sides of an `and`
                if is_some(some + i_b * some_row, i_q, i_k, keys, FLAGS, BLOCK):
                    o_k = i_k * BLOCK + o_row
                    m_pair, b_entry = pairs_of(
                        q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low,
                        high, COUNTED,
                    )  # fmt: skip
                    b_bias = tl.load(of_query + i_h * of_query_h + b_entry, mask=m_pair, other=float("-inf"))
                    b_score = dots(
                        q + i_b * q_b + i_h * q_h, k + i_b * k_b + (i_h // group) * k_h, o_q, o_k, queries, keys,
                        q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION,
                    )  # fmt: skip
                    b_weight = weights(b_score * scale, b_bias, log_sums(lse + p_row, o_q < queries), softcap, CAPPED)
                    b_of_weight = dots(
                        grad + i_b * grad_b + i_h * grad_h, v + i_b * v_b + (i_h // group) * v_h, o_q, o_k, queries,
                        keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION,
                    )  # fmt: skip
                    b_mean = tl.load(means + p_row, mask=o_q < queries, other=0.0)
                    b_gradient = tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)
                    b_shift = b_entry - lowest - (o_row[:, None] - o_row[None, :])  # one if both blocks count by slot
                    most = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, -4 * BLOCK), 1, MOST), 0, MOST)
                    least = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, 4 * BLOCK), 1, LEAST), 0, LEAST)
                    if most == least:
                        b_sum += along(b_gradient, o_row[:, None] - o_entry[None, :] + most, BLOCK)
                    else:
                        for entry in range(BLOCK):
                            b_here = tl.where(b_entry - lowest == entry, b_gradient, 0.0)
                            b_total = tl.reduce(tl.reduce(b_here, 1, ADD, keep_dims=True), 0, ADD)  # of one number
                            b_sum += tl.where(o_entry == entry, b_total, 0.0)
    o_sum = lowest + o_entry
    tl.store(sums + i_h.to(tl.int64) * entries + o_sum, b_sum, mask=o_sum < tl.where(is_needed, entries, 0))
