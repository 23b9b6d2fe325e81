"""What all kernels of this folder compute of a block of queries and a block of keys."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

__all__ = [
    "ADD", "FAR", "LEAST", "MOST", "PADDING", "along", "biases_of", "dots", "is_some", "log_sums", "pairs_of",
    "same_document", "weights",
]  # fmt: skip

FAR = tl.constexpr(2**40)
"""Beyond every distance."""
PADDING = tl.constexpr(-1)
"""The document of padding."""

# As tl.sum and the like have them: the interpreter knows these functions, and cannot call tl.sum.
ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]
MOST = tl.standard._elementwise_max  # pyright: ignore[reportPrivateUsage]
LEAST = tl.standard._elementwise_min  # pyright: ignore[reportPrivateUsage]


@triton.jit
@no_type_check
def is_some(some, i_q, i_k, keys, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether there is an allowed pair in these blocks; flags are for squares of `FLAGS` of them."""
    if FLAGS:
        there = (keys + FLAGS * BLOCK - 1) // (FLAGS * BLOCK)
        return tl.load(some + (i_q // FLAGS) * there + i_k // FLAGS) != 0
    else:  # noqa: RET505  # Triton would compile both
        return tl.full([], 1, tl.int32) == 1


@triton.jit
@no_type_check
def pairs_of(q_tokens, k_tokens, o_q, o_k, queries, keys, first, offset, low, high, COUNTED: tl.constexpr):
    """Which queries attend to which keys of a block, and the entries of their distances, which are right for those."""
    m_q, m_k = o_q < queries, o_k < keys
    if COUNTED:
        b_apart = o_q[:, None] - o_k[None, :] + offset
        m_pair = (b_apart >= low) & (b_apart <= high) & m_q[:, None] & m_k[None, :]
        return m_pair, b_apart - first
    else:  # noqa: RET505  # as above
        b_q_order = tl.load(q_tokens + 2 * queries + o_q, mask=m_q, other=0)
        b_k_order = tl.load(k_tokens + 2 * keys + o_k, mask=m_k, other=0)
        m_pair = ((b_q_order - low)[:, None] >= b_k_order[None, :]) & (
            (b_q_order - high)[:, None] <= b_k_order[None, :]
        )
        m_pair &= same_document(q_tokens + queries + o_q, k_tokens + keys + o_k, m_q, m_k)
        b_q_index = tl.load(q_tokens + o_q, mask=m_q, other=0).to(tl.int32)
        b_k_index = tl.load(k_tokens + o_k, mask=m_k, other=0).to(tl.int32)
        return m_pair, b_q_index[:, None] - b_k_index[None, :] - first


@triton.jit
@no_type_check
def same_document(q_document, k_document, m_q, m_k):
    """Which queries and keys are of one document, and no padding."""
    b_q, b_k = tl.load(q_document, mask=m_q, other=PADDING), tl.load(k_document, mask=m_k, other=PADDING)
    return (b_q.to(tl.int32)[:, None] == b_k.to(tl.int32)[None, :]) & (b_q != PADDING)[:, None]


@triton.jit
@no_type_check
def biases_of(
    of_query, of_key, row_of, o_q, o_k, b_entry, m_pair, entries, of_query_n, of_key_n,
    OF_QUERY: tl.constexpr, OF_KEY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What is added to the scores of these pairs."""
    if ROWS:
        b_row = tl.load(row_of + tl.minimum(tl.maximum(b_entry, 0), entries - 1), mask=m_pair, other=0)
        b_bias = tl.where(m_pair, 0.0, float("-inf"))
        if OF_QUERY:
            b_bias += tl.load(of_query + (o_q.to(tl.int64) * of_query_n)[:, None] + b_row, mask=m_pair, other=0.0)
        if OF_KEY:
            b_bias += tl.load(of_key + (o_k.to(tl.int64) * of_key_n)[None, :] + b_row, mask=m_pair, other=0.0)
        return b_bias
    else:  # noqa: RET505  # as above
        return tl.load(of_query + b_entry, mask=m_pair, other=float("-inf"))


@triton.jit
@no_type_check
def log_sums(lse, m_row):
    """Log-sum-exps; infinite where there is no key, so that all weights are zero."""
    b_lse = tl.load(lse, mask=m_row, other=float("inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
@no_type_check
def dots(
    a, b, o_a, o_b, a_rows, b_rows, a_n, b_n,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of every row of a block with every row of another, some dimensions at a time."""
    LANES: tl.constexpr = D if D < PART else PART  # noqa: FURB136  # no function of Triton
    b_dots = tl.full([BLOCK, BLOCK], 0.0, tl.float32)
    for part in range(0, D, LANES):
        o_column = part + tl.arange(0, LANES)
        m_a = (o_a < a_rows)[:, None] & (o_column < WIDTH)[None, :]
        m_b = (o_b < b_rows)[:, None] & (o_column < WIDTH)[None, :]
        b_a = tl.load(a + o_a.to(tl.int64)[:, None] * a_n + o_column[None, :], mask=m_a, other=0.0)
        b_b = tl.load(b + o_b.to(tl.int64)[:, None] * b_n + o_column[None, :], mask=m_b, other=0.0)
        b_dots = tl.dot(b_a, tl.trans(b_b), b_dots, input_precision=PRECISION)
    return b_dots


@triton.jit
@no_type_check
def weights(b_score, b_bias, b_lse, softcap, CAPPED: tl.constexpr):
    """What scores are in the softmax; the hyperbolic tangent is made of what the interpreter has."""
    if CAPPED:
        b_score = softcap - 2.0 * softcap / (tl.exp(2.0 / softcap * b_score) + 1.0)
    return tl.exp(b_score + b_bias - b_lse[:, None])


@triton.jit
@no_type_check
def along(b_x, b_column, BLOCK: tl.constexpr):
    """For each place the sum over rows, each at a column of its own; columns outside of the block have nothing."""
    m_column = (b_column >= 0) & (b_column < BLOCK)
    b_there = tl.gather(b_x, tl.where(m_column, b_column, 0), 1)
    return tl.reduce(tl.where(m_column, b_there, 0.0), 0, ADD)
