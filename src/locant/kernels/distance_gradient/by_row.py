"""The gradient of products of tokens with the rows of a table, of which FlexAttention has looked up a row a distance.

`_rows`, a program for a block of queries, or of keys, and some rows: it goes over the blocks of tokens that may be at
one of their distances. Where slots count as distances do, those of a row are neighbours: their sum is the difference
of two prefix sums, at the ends of what the block has of the row. Else, in blocks with gaps, or of two documents, it
goes from row to row, and is slower the more of them a block has. What is computed of a pair of blocks is computed
again for every block of rows that it has distances of: once where all are far, and twice where each has its own row.

Counted positions fit into registers. Packed and padded rows keep up to 232 bytes of a thread in memory with Triton 3.9,
with heads of 256 dimensions 576; with Triton 3.6 for capability 10.0 it is 592 with heads of 128.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.distance_gradient.pairs import Biases
from locant.kernels.distance_gradient.tiles import (
    ADD,
    FAR,
    LEAST,
    MOST,
    biases_of,
    dots,
    is_some,
    log_sums,
    pairs_of,
    weights,
)

__all__ = ["product_gradients"]


def product_gradients(
    biases: Biases, row_of: Int[Tensor, " distances"], first: int, given: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Of queries and of keys, in float32. `given` and `constants` are what every kernel takes."""
    rows = next(x.shape[3] for x in (biases.of_query, biases.of_key) if x is not None)
    numbers = _ends(row_of, first, rows), rows, *given
    of_query = None if biases.of_query is None else _summed(biases.of_query, numbers, constants | {"OF_KEYS": False})
    of_key = None if biases.of_key is None else _summed(biases.of_key, numbers, constants | {"OF_KEYS": True})
    return of_query, of_key


def _summed(
    products: Tensor, numbers: tuple[Any, ...], constants: dict[str, Any]
) -> Float[Tensor, "batch heads n rows"]:
    (batch, heads, tokens, rows), block = products.shape, constants["BLOCK"]
    sums = torch.empty(products.shape, dtype=torch.float32, device=products.device)
    _rows[triton.cdiv(tokens, block) * triton.cdiv(rows, block), heads, batch](sums, *numbers, **constants)
    return sums


def _ends(row_of: Int[Tensor, " distances"], first: int, rows: int) -> Int[Tensor, "2 rows"]:
    """The least and the greatest distance of every row; of one that no distance has, the greatest is the less."""
    far, row = FAR.value, row_of.long()
    distance = torch.arange(first, first + len(row), device=row.device)
    least, most = distance.clone(), distance.clone()
    least[:1], most[-1:] = -far, far  # as far as there are tokens
    nearest, farthest = (torch.full((rows,), x, dtype=row.dtype, device=row.device) for x in (far, -far))
    return torch.stack([nearest.scatter_reduce(0, row, least, "amin"), farthest.scatter_reduce(0, row, most, "amax")])


# ---------------------------------------------------------------------- kernels


@triton.jit
@no_type_check
def _rows(
    sums, ends, rows,
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
    OF_KEYS: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries, or of keys, and `BLOCK` rows, of one head."""
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own, others = queries, keys
    if OF_KEYS:
        own, others = keys, queries
    own_blocks = (own + BLOCK - 1) // BLOCK
    i_own, lowest = tl.program_id(0) % own_blocks, tl.program_id(0) // own_blocks * BLOCK
    o_line = tl.arange(0, BLOCK)
    o_own, o_row = i_own * BLOCK + o_line, lowest + o_line
    b_nearest = tl.load(ends + o_row, mask=o_row < rows, other=FAR)
    b_farthest = tl.load(ends + rows + o_row, mask=o_row < rows, other=-FAR)
    nearest, farthest = tl.reduce(b_nearest, 0, LEAST), tl.reduce(b_farthest, 0, MOST)
    other_blocks = (others + BLOCK - 1) // BLOCK
    start, stop = 0, other_blocks
    if COUNTED:
        nearest, farthest = tl.maximum(nearest, low), tl.minimum(farthest, high)
        if OF_KEYS:
            least, most = i_own * BLOCK - offset + nearest, i_own * BLOCK - offset + BLOCK - 1 + farthest
        else:
            least, most = i_own * BLOCK + offset - farthest, i_own * BLOCK + offset + BLOCK - 1 - nearest
        start = (tl.maximum(least, 0) // BLOCK).to(tl.int32)
        stop = ((tl.minimum(most, others - 1) + BLOCK) // BLOCK).to(tl.int32)
    b_sum = tl.full([BLOCK, BLOCK], 0.0, tl.float32)
    before = i_own * other_blocks
    for i in range(before + start, before + stop):
        i_q, i_k = i // other_blocks, i % other_blocks  # else what `i_own` leads to would fill the registers all along
        if OF_KEYS:
            i_q, i_k = i % other_blocks, i // other_blocks
        is_near = nearest <= farthest
        if not COUNTED:
            q_blocks, k_blocks = (queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK
            q_least = tl.load(q_bounds + i_b * q_bounds_row + i_q)
            q_most = tl.load(q_bounds + i_b * q_bounds_row + q_blocks + i_q)
            k_least = tl.load(k_bounds + i_b * k_bounds_row + i_k)
            k_most = tl.load(k_bounds + i_b * k_bounds_row + k_blocks + i_k)
            is_near = (q_most - k_least >= nearest) & (q_least - k_most <= farthest)
        if is_near:  # noqa: SIM102  # Triton reads both sides of an `and`
            if is_some(some + i_b * some_row, i_q, i_k, keys, FLAGS, BLOCK):
                o_q, o_k = i_q * BLOCK + o_line, i_k * BLOCK + o_line
                m_pair, b_entry = pairs_of(
                    q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low, high,
                    COUNTED,
                )  # fmt: skip
                shift, highest_shift = (i_q - i_k) * BLOCK + offset, 0
                if not COUNTED:
                    b_shift = b_entry + first - (o_line[:, None] - o_line[None, :])  # one if both count by slot
                    shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, 2**30), 1, LEAST), 0, LEAST)
                    highest_shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, -(2**30)), 1, MOST), 0, MOST)
                b_bias = biases_of(
                    of_query + i_b * of_query_b + i_h * of_query_h, of_key + i_b * of_key_b + i_h * of_key_h, row_of,
                    o_q, o_k, b_entry, m_pair, entries, of_query_n, of_key_n, OF_QUERY, OF_KEY, ROWS,
                )  # fmt: skip
                b_score = dots(
                    q + i_b * q_b + i_h * q_h, k + i_b * k_b + (i_h // group) * k_h, o_q, o_k, queries, keys,
                    q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION,
                )  # fmt: skip
                p_row = (i_b * heads + i_h) * queries + o_q
                b_weight = weights(b_score * scale, b_bias, log_sums(lse + p_row, o_q < queries), softcap, CAPPED)
                b_of_weight = dots(
                    grad + i_b * grad_b + i_h * grad_h, v + i_b * v_b + (i_h // group) * v_h, o_q, o_k, queries,
                    keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION,
                )  # fmt: skip
                b_mean = tl.load(means + p_row, mask=o_q < queries, other=0.0)
                b_gradient = tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)
                if OF_KEYS:
                    b_gradient = tl.trans(b_gradient)
                if COUNTED:  # noqa: SIM114  # as above
                    b_sum += _between(b_gradient, b_nearest, b_farthest, shift, BLOCK, OF_KEYS)
                elif shift == highest_shift:
                    b_sum += _between(b_gradient, b_nearest, b_farthest, shift, BLOCK, OF_KEYS)
                else:
                    m_pair, b_entry = pairs_of(
                        q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low,
                        high, COUNTED,
                    )  # fmt: skip
                    b_row = tl.load(row_of + tl.minimum(tl.maximum(b_entry, 0), entries - 1), mask=m_pair, other=-1)
                    if OF_KEYS:
                        b_row = tl.trans(b_row)
                    begin = tl.reduce(tl.reduce(tl.where(b_row < 0, rows, b_row), 1, LEAST), 0, LEAST)
                    end = tl.reduce(tl.reduce(b_row, 1, MOST), 0, MOST)
                    for row in range(tl.maximum(begin, lowest), tl.minimum(end + 1, lowest + BLOCK)):
                        b_here = tl.reduce(tl.where(b_row == row, b_gradient, 0.0), 1, ADD, keep_dims=True)
                        b_sum += tl.where(o_row[None, :] == row, b_here, 0.0)
    p_sum = sums + ((i_b * heads + i_h) * own + o_own)[:, None] * rows + o_row[None, :]
    tl.store(p_sum, b_sum, mask=(o_own < own)[:, None] & (o_row < rows)[None, :])


@triton.jit
@no_type_check
def _between(b_x, b_nearest, b_farthest, shift, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """For every line of a block the sums over the distances of each row; `shift` is that of the two first tokens."""
    o_line = tl.arange(0, BLOCK)[:, None]
    b_least = tl.maximum(tl.minimum(b_nearest - shift, BLOCK), -BLOCK).to(tl.int32)[None, :]
    b_most = tl.maximum(tl.minimum(b_farthest - shift, BLOCK), -BLOCK).to(tl.int32)[None, :]
    b_from, b_to = o_line - b_most, o_line - b_least
    if OF_KEYS:
        b_from, b_to = o_line + b_least, o_line + b_most
    b_from, b_to = tl.maximum(b_from, 0), tl.minimum(b_to, BLOCK - 1)
    m_some = b_from <= b_to
    b_last, b_before = tl.where(m_some, b_to, 0), tl.where(m_some & (b_from > 0), b_from - 1, 0)
    b_until = tl.associative_scan(b_x, 1, ADD)
    b_sum = tl.gather(b_until, b_last, 1) - tl.where(b_from > 0, tl.gather(b_until, b_before, 1), 0.0)
    b_sum = tl.where(b_from == b_to, tl.gather(b_x, b_last, 1), b_sum)  # of one distance nothing is rounded
    return tl.where(m_some, b_sum, 0.0)
