"""The gradient of biases that were looked up by distance, on a GPU and without atomics: the same bits in every run.

The gradient of a score is ``P (dP - mean)``: its weight times the gradient of that weight less the mean over the row.
An entry that was looked up gets the sum over its pairs. Nothing of the size query x key is held:

1. `_means`, a program for each block of queries, goes along its keys for the means. They are made of the weights that
   are here, not of attention's output, which was rounded: or distances would be drawn to the mean of the values.
2. The sums: of a table by `by_distance.py`, of products of tokens by `by_row.py`.

A pair of blocks costs each of these kernels two matrix products, and the backward pass of FlexAttention seven.

It needs Triton; `import locant` does not import it. Run through Triton's interpreter and compiled for compute
capabilities 8.0, 9.0 and 10.0; it has not yet been run, nor timed, on a device.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from locant.kernels.distance_gradient.by_distance import table_gradient
from locant.kernels.distance_gradient.by_row import product_gradients
from locant.kernels.distance_gradient.pairs import FLAGGED, Biases, Pairs, Tokens
from locant.kernels.distance_gradient.tiles import (
    ADD,
    FAR,
    PADDING,
    biases_of,
    dots,
    is_some,
    log_sums,
    pairs_of,
    weights,
)

__all__ = ["gradients"]

BLOCKS = {2: 64, 4: 32}
"""Tokens of a block, by the bytes of a number."""


def gradients(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, biases: Biases, pairs: Pairs,
    scale: float, softcap: float | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """What `grad` on attention's output, and `grad_lse` on its log-sum-exp, mean for what was looked up; in float32.

    The others are what `with_gradients` was given, in whose signature are the shapes.
    """
    looked_up = biases.of_query, biases.of_key
    if not all(x is None or x.numel() for x in (q, k, v, *looked_up)):
        of_query, of_key = (None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in looked_up)
        return of_query, of_key
    batch, heads, queries, width = q.shape
    block, v_width = BLOCKS[q.element_size()], v.shape[3]
    grad, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v))
    lse, onto_lse = lse.contiguous(), (lse if grad_lse is None else grad_lse).contiguous()
    of_query, of_key = (q if x is None else _of_tokens(x, q) for x in looked_up)
    row_of, distances = (q, of_query.shape[3]) if biases.row_of is None else (biases.row_of, len(biases.row_of))
    facts, rows = _facts(pairs, q, block)
    given = (
        grad, q, k, v, lse, onto_lse, torch.empty_like(lse), of_query, of_key, row_of, *facts,
        heads, heads // k.shape[1], queries, k.shape[2], distances, pairs.first, pairs.offset or 0,
        max(pairs.low, -FAR.value), min(pairs.high, FAR.value), float(scale), float(softcap or 1.0),
        *rows, *(stride for x in (grad, q, k, v, of_query, of_key) for stride in x.stride()[:3]),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "COUNTED": pairs.offset is not None, "FLAGS": 0 if pairs.some is None else FLAGGED // block,
        "OF_LSE": grad_lse is not None, "CAPPED": softcap is not None, "OF_QUERY": biases.of_query is not None,
        "OF_KEY": biases.of_key is not None, "ROWS": biases.row_of is not None, "BLOCK": block,
        "WIDTH": width, "V_WIDTH": v_width, "D": _padded(width), "V_D": _padded(v_width),
        "PART": _part(q.element_size(), max(width, v_width)),
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": 8, "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        _means[triton.cdiv(queries, block), heads, batch](*given, **constants)
        if biases.row_of is not None:
            return product_gradients(biases, biases.row_of, pairs.first, given, constants)
        return table_gradient(of_query, k.shape[2], pairs, given, constants), None


def _of_tokens(x: Tensor, q: Tensor) -> Tensor:
    """What each token of each row looks up in: a table is that of all of them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.ndim == 4 else x[None, :, None].expand(q.shape[0], -1, q.shape[2], -1)


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _part(size: int, width: int) -> int:
    """How many dimensions of heads are multiplied at a time, by the bytes of a number: those with the fewest spills."""
    return 32 if size == 4 else 64 if width <= 128 else 128


def _facts(pairs: Pairs, stand_in: Tensor, block: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tokens, flags, whether slots count as distances do, and the least and largest index of blocks; steps of rows."""
    queries, some = pairs.queries, pairs.some
    if queries is None:
        return (stand_in,) * 6, (0,) * 5
    counts = _counts_by_slot(queries) if pairs.keys is None else queries.new_zeros(())
    keys, some = (queries if x is None else x for x in (pairs.keys, some))
    facts = *(x.contiguous() for x in (queries, keys, some)), _bounds(queries, block), _bounds(keys, block)
    rows = (0 if x.shape[0] == 1 else x[0].numel() for x in facts)
    return (*facts, counts.int()), tuple(rows)


def _counts_by_slot(tokens: Tokens) -> Bool[Tensor, ""]:
    """Whether the tokens of every document are neighbours, and count one by one."""
    index, document, order = tokens.unbind(1)
    real, before = document[:, 1:] != PADDING.value, document[:, :-1]
    goes_on = (document[:, 1:] == before) & (index.diff() == 1)
    begins = document[:, 1:] > document.cummax(1).values[:, :-1]
    return (~real | goes_on | begins).all() & (order == index).all()


def _bounds(tokens: Tokens, block: int) -> Int[Tensor, "#batch 2 blocks"]:
    """The least and the largest index of every block, padding left out."""
    padded = F.pad(tokens, (0, -tokens.shape[2] % block), value=PADDING.value).unflatten(2, (-1, block))
    index, document, _ = padded.unbind(1)
    real = document != PADDING.value
    least, most = torch.where(real, index, FAR.value).amin(2), torch.where(real, index, -FAR.value).amax(2)
    return torch.stack([least, most], dim=1)


# ---------------------------------------------------------------------- the kernel


@triton.jit
@no_type_check
def _means(
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
    """One program: a block of queries of one head; their weighted means, less what comes by the log-sum-exp."""
    i_q, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_q = i_q * BLOCK + tl.arange(0, BLOCK)
    p_q, p_grad = q + i_b * q_b + i_h * q_h, grad + i_b * grad_b + i_h * grad_h
    p_k, p_v = k + i_b * k_b + (i_h // group) * k_h, v + i_b * v_b + (i_h // group) * v_h
    p_row = (i_b * heads + i_h) * queries + o_q
    b_lse = log_sums(lse + p_row, o_q < queries)
    b_mean, b_total = tl.full([BLOCK], 0.0, tl.float32), tl.full([BLOCK], 0.0, tl.float32)
    start, stop = 0, (keys + BLOCK - 1) // BLOCK
    if COUNTED:
        start = tl.maximum(i_q * BLOCK + offset - high, 0) // BLOCK
        stop = (tl.minimum(i_q * BLOCK + offset + BLOCK - 1 - low, keys - 1) + BLOCK) // BLOCK
    for i_k in range(start, stop):
        if is_some(some + i_b * some_row, i_q, i_k, keys, FLAGS, BLOCK):
            o_k = i_k * BLOCK + tl.arange(0, BLOCK)
            m_pair, b_entry = pairs_of(
                q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low, high,
                COUNTED,
            )  # fmt: skip
            b_bias = biases_of(
                of_query + i_b * of_query_b + i_h * of_query_h, of_key + i_b * of_key_b + i_h * of_key_h, row_of,
                o_q, o_k, b_entry, m_pair, entries, of_query_n, of_key_n, OF_QUERY, OF_KEY, ROWS,
            )  # fmt: skip
            b_score = dots(p_q, p_k, o_q, o_k, queries, keys, q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION)
            b_of_weight = dots(p_grad, p_v, o_q, o_k, queries, keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION)
            b_weight = weights(b_score * scale, b_bias, b_lse, softcap, CAPPED)
            b_mean += tl.reduce(tl.where(m_pair, b_weight * b_of_weight, 0.0), 1, ADD)
            b_total += tl.reduce(b_weight, 1, ADD)
    b_mean = b_mean / tl.where(b_total > 0, b_total, 1.0)
    if OF_LSE:
        b_mean -= tl.load(onto_lse + p_row, mask=o_q < queries, other=0.0)
    tl.store(means + p_row, b_mean, mask=o_q < queries)
