"""The gradient of a table of heads and distances on a GPU, without atomics: the same bits in every run.

The gradient of a score is ``P (dP - mean)``: its weight times the gradient of that weight less the mean over the row.
An entry of the table gets the sum over all pairs at its distance. Nothing of the size query x key is held:

1. `_means`, a program for each block of queries, goes along its keys for the means. They are made of the weights that
   are here, not of attention's output, which was rounded: or distances would be drawn to the mean of the values.
2. `_diagonals`, a program for each diagonal of blocks, where slots count as distances do: it adds up the gradients of
   blocks in registers, and at the end along their diagonals. Two neighbours share a distance, and each has a place.
3. `_entries`, a program for some entries of the table, where slots do not count so (shards, gaps): it goes over all
   blocks that may hold one of its distances, some of them twice, and is slower the more of them there are.

A number on the device, which the host need not read, tells 2 or 3 to do nothing. A pair of blocks costs `_means` and
`_diagonals` two matrix products each, and the backward pass of FlexAttention seven.

It needs Triton; `import locant` does not import it. Run through Triton's interpreter and compiled for compute
capabilities 8.0, 9.0 and 10.0, without spills but in `_entries` and, on 8.0, for packed heads of 128; it has not
yet been run, nor timed, on a device.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.kernels.distance_gradient.pairs import FLAGGED, Pairs, Tokens

__all__ = ["table_gradient"]

BLOCKS = {2: 64, 4: 32}
"""Tokens of a block, by the bytes of a number."""
PARTS = {2: 128, 4: 32}
"""Dimensions of a head that are multiplied at a time."""
FAR = 2**40
"""Beyond every distance."""
PADDING = tl.constexpr(-1)
"""The document of padding."""

# As tl.sum and the like have them: the interpreter knows these functions, and cannot call tl.sum.
_ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]
_MOST = tl.standard._elementwise_max  # pyright: ignore[reportPrivateUsage]
_LEAST = tl.standard._elementwise_min  # pyright: ignore[reportPrivateUsage]


def table_gradient(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, table: Tensor, pairs: Pairs,
    scale: float, softcap: float | None,
) -> Float[Tensor, "heads distances"]:  # fmt: skip
    """What `grad` on attention's output, and `grad_lse` on its log-sum-exp, mean for the table; in float32.

    The others are what `with_table_gradient` was given, in whose signature are the shapes.
    """
    sums = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    if not (q.numel() and k.numel() and v.numel() and table.numel()):
        return sums
    batch, heads, queries, width = q.shape
    keys, v_width = k.shape[2], v.shape[3]
    block = BLOCKS[q.element_size()]
    grad, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v))
    lse, onto_lse = lse.contiguous(), (lse if grad_lse is None else grad_lse).contiguous()
    means, table = torch.empty_like(lse), table.contiguous()
    facts, rows = _facts(pairs, q, block)
    given = (
        grad, q, k, v, lse, onto_lse, means, table, *facts, heads, heads // k.shape[1], queries, keys, table.shape[1],
        pairs.first, pairs.offset or 0, max(pairs.low, -FAR), min(pairs.high, FAR), float(scale), float(softcap or 1.0),
        *rows, *(stride for x in (grad, q, k, v) for stride in x.stride()[:3]),
    )  # fmt: skip
    counted = pairs.offset is not None
    constants: dict[str, Any] = {
        "COUNTED": counted, "FLAGS": 0 if pairs.some is None else FLAGGED // block, "OF_LSE": grad_lse is not None,
        "CAPPED": softcap is not None, "BLOCK": block, "WIDTH": width, "V_WIDTH": v_width,
        "D": _padded(width), "V_D": _padded(v_width), "PART": PARTS[q.element_size()],
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": 8, "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        _means[triton.cdiv(queries, block), heads, batch](*given, **constants)
        if counted or pairs.keys is None:
            low, high = _bands(pairs, queries, keys, block)
            parts = sums.new_empty(batch, heads, high - low + 1, 2 * block)
            _diagonals[high - low + 1, heads, batch](parts, low, *given, **constants)
            _put(parts.sum(0), sums, (low - 1) * block + 1 + (pairs.offset or 0) - pairs.first)
        if not counted:
            _entries[triton.cdiv(table.shape[1], block), heads](sums, batch, *given, **constants)
    return sums


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


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
    return torch.stack([torch.where(real, index, FAR).amin(2), torch.where(real, index, -FAR).amax(2)], dim=1)


# ---------------------------------------------------------------------- kernels


@triton.jit
@no_type_check
def _means(
    grad, q, k, v, lse, onto_lse, means, table, q_tokens, k_tokens, some, q_bounds, k_bounds, counts,
    heads, group, queries, keys, entries, first, offset, low: tl.int64, high: tl.int64, scale, softcap,
    q_row, k_row, some_row, q_bounds_row, k_bounds_row,
    grad_b: tl.int64, grad_h: tl.int64, grad_n: tl.int64, q_b: tl.int64, q_h: tl.int64, q_n: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, OF_LSE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head; their weighted means, less what comes by the log-sum-exp."""
    i_q, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_q = i_q * BLOCK + tl.arange(0, BLOCK)
    p_q, p_grad = q + i_b * q_b + i_h * q_h, grad + i_b * grad_b + i_h * grad_h
    p_k, p_v = k + i_b * k_b + (i_h // group) * k_h, v + i_b * v_b + (i_h // group) * v_h
    p_row = (i_b * heads + i_h) * queries + o_q
    b_lse = _sums(lse + p_row, o_q < queries)
    b_mean, b_total = tl.full([BLOCK], 0.0, tl.float32), tl.full([BLOCK], 0.0, tl.float32)
    start, stop = 0, (keys + BLOCK - 1) // BLOCK
    if COUNTED:
        start = tl.maximum(i_q * BLOCK + offset - high, 0) // BLOCK
        stop = (tl.minimum(i_q * BLOCK + offset + BLOCK - 1 - low, keys - 1) + BLOCK) // BLOCK
    for i_k in range(start, stop):
        if _is_some(some + i_b * some_row, i_q, i_k, keys, FLAGS, BLOCK):
            o_k = i_k * BLOCK + tl.arange(0, BLOCK)
            m_pair, b_entry = _pairs(
                q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low, high,
                COUNTED,
            )  # fmt: skip
            b_bias = tl.load(table + i_h.to(tl.int64) * entries + b_entry, mask=m_pair, other=float("-inf"))
            b_score = _dots(p_q, p_k, o_q, o_k, queries, keys, q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION)
            b_of_weight = _dots(p_grad, p_v, o_q, o_k, queries, keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION)
            b_weight = _weights(b_score * scale, b_bias, b_lse, softcap, CAPPED)
            b_mean += tl.reduce(tl.where(m_pair, b_weight * b_of_weight, 0.0), 1, _ADD)
            b_total += tl.reduce(b_weight, 1, _ADD)
    b_mean = b_mean / tl.where(b_total > 0, b_total, 1.0)
    if OF_LSE:
        b_mean -= tl.load(onto_lse + p_row, mask=o_q < queries, other=0.0)
    tl.store(means + p_row, b_mean, mask=o_q < queries)


@triton.jit
@no_type_check
def _diagonals(
    parts, lowest,
    grad, q, k, v, lse, onto_lse, means, table, q_tokens, k_tokens, some, q_bounds, k_bounds, counts,
    heads, group, queries, keys, entries, first, offset, low: tl.int64, high: tl.int64, scale, softcap,
    q_row, k_row, some_row, q_bounds_row, k_bounds_row,
    grad_b: tl.int64, grad_h: tl.int64, grad_n: tl.int64, q_b: tl.int64, q_h: tl.int64, q_n: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, OF_LSE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the pairs of blocks that are as far apart, of one head; a sum for each of their diagonals."""
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_band = tl.program_id(0) + lowest
    o_row = tl.arange(0, BLOCK)
    b_apart = i_band * BLOCK + o_row[:, None] - o_row[None, :] + offset
    m_apart = (b_apart >= low) & (b_apart <= high) & (b_apart >= first) & (b_apart < first + entries)
    b_bias = tl.load(table + i_h.to(tl.int64) * entries + (b_apart - first), mask=m_apart, other=float("-inf"))
    p_q, p_grad = q + i_b * q_b + i_h * q_h, grad + i_b * grad_b + i_h * grad_h
    p_k, p_v = k + i_b * k_b + (i_h // group) * k_h, v + i_b * v_b + (i_h // group) * v_h
    b_sum = tl.full([BLOCK, BLOCK], 0.0, tl.float32)
    stop = tl.minimum((queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK + i_band)
    if not COUNTED:
        stop = tl.where(tl.load(counts) == 1, stop, 0)
    for i_q in range(tl.maximum(i_band, 0), stop):
        if _is_some(some + i_b * some_row, i_q, i_q - i_band, keys, FLAGS, BLOCK):
            o_q, o_k = i_q * BLOCK + o_row, (i_q - i_band) * BLOCK + o_row
            m_pair = m_apart & (o_k < keys)[None, :]
            if not COUNTED:
                p_q_document, p_k_document = q_tokens + i_b * q_row + queries, k_tokens + i_b * k_row + keys
                m_pair &= _same_document(p_q_document + o_q, p_k_document + o_k, o_q < queries, o_k < keys)
            p_row = (i_b * heads + i_h) * queries + o_q
            b_lse = _sums(lse + p_row, o_q < queries)
            b_mean = tl.load(means + p_row, mask=o_q < queries, other=0.0)
            b_score = _dots(p_q, p_k, o_q, o_k, queries, keys, q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION)
            b_of_weight = _dots(p_grad, p_v, o_q, o_k, queries, keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION)
            b_weight = _weights(b_score * scale, b_bias, b_lse, softcap, CAPPED)
            b_sum += tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)
    o_part = tl.arange(0, 2 * BLOCK)
    b_along = _along(b_sum, o_row[:, None] - o_part[None, :] + BLOCK - 1, BLOCK)
    i_part = (i_b * heads + i_h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + i_part * (2 * BLOCK) + o_part, b_along)


@triton.jit
@no_type_check
def _entries(
    sums, batch,
    grad, q, k, v, lse, onto_lse, means, table, q_tokens, k_tokens, some, q_bounds, k_bounds, counts,
    heads, group, queries, keys, entries, first, offset, low: tl.int64, high: tl.int64, scale, softcap,
    q_row, k_row, some_row, q_bounds_row, k_bounds_row,
    grad_b: tl.int64, grad_h: tl.int64, grad_n: tl.int64, q_b: tl.int64, q_h: tl.int64, q_n: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, v_b: tl.int64, v_h: tl.int64, v_n: tl.int64,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, OF_LSE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
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
                if _is_some(some + i_b * some_row, i_q, i_k, keys, FLAGS, BLOCK):
                    o_k = i_k * BLOCK + o_row
                    m_pair, b_entry = _pairs(
                        q_tokens + i_b * q_row, k_tokens + i_b * k_row, o_q, o_k, queries, keys, first, offset, low,
                        high, COUNTED,
                    )  # fmt: skip
                    b_bias = tl.load(table + i_h.to(tl.int64) * entries + b_entry, mask=m_pair, other=float("-inf"))
                    b_score = _dots(
                        q + i_b * q_b + i_h * q_h, k + i_b * k_b + (i_h // group) * k_h, o_q, o_k, queries, keys,
                        q_n, k_n, BLOCK, WIDTH, D, PART, PRECISION,
                    )  # fmt: skip
                    b_weight = _weights(b_score * scale, b_bias, _sums(lse + p_row, o_q < queries), softcap, CAPPED)
                    b_of_weight = _dots(
                        grad + i_b * grad_b + i_h * grad_h, v + i_b * v_b + (i_h // group) * v_h, o_q, o_k, queries,
                        keys, grad_n, v_n, BLOCK, V_WIDTH, V_D, PART, PRECISION,
                    )  # fmt: skip
                    b_mean = tl.load(means + p_row, mask=o_q < queries, other=0.0)
                    b_gradient = tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)
                    b_shift = b_entry - lowest - (o_row[:, None] - o_row[None, :])  # one if both blocks count by slot
                    most = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, -4 * BLOCK), 1, _MOST), 0, _MOST)
                    least = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, 4 * BLOCK), 1, _LEAST), 0, _LEAST)
                    if most == least:
                        b_sum += _along(b_gradient, o_row[:, None] - o_entry[None, :] + most, BLOCK)
                    else:
                        for entry in range(BLOCK):
                            b_here = tl.where(b_entry - lowest == entry, b_gradient, 0.0)
                            b_total = tl.reduce(tl.reduce(b_here, 1, _ADD, keep_dims=True), 0, _ADD)  # of one number
                            b_sum += tl.where(o_entry == entry, b_total, 0.0)
    o_sum = lowest + o_entry
    tl.store(sums + i_h.to(tl.int64) * entries + o_sum, b_sum, mask=o_sum < tl.where(is_needed, entries, 0))


@triton.jit
@no_type_check
def _is_some(some, i_q, i_k, keys, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether there is an allowed pair in these blocks; flags are for squares of `FLAGS` of them."""
    if FLAGS:
        there = (keys + FLAGS * BLOCK - 1) // (FLAGS * BLOCK)
        return tl.load(some + (i_q // FLAGS) * there + i_k // FLAGS) != 0
    else:  # noqa: RET505  # Triton would compile both
        return tl.full([], 1, tl.int32) == 1


@triton.jit
@no_type_check
def _pairs(q_tokens, k_tokens, o_q, o_k, queries, keys, first, offset, low, high, COUNTED: tl.constexpr):
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
        m_pair &= _same_document(q_tokens + queries + o_q, k_tokens + keys + o_k, m_q, m_k)
        b_q_index = tl.load(q_tokens + o_q, mask=m_q, other=0).to(tl.int32)
        b_k_index = tl.load(k_tokens + o_k, mask=m_k, other=0).to(tl.int32)
        return m_pair, b_q_index[:, None] - b_k_index[None, :] - first


@triton.jit
@no_type_check
def _same_document(q_document, k_document, m_q, m_k):
    b_q, b_k = tl.load(q_document, mask=m_q, other=PADDING), tl.load(k_document, mask=m_k, other=PADDING)
    return (b_q.to(tl.int32)[:, None] == b_k.to(tl.int32)[None, :]) & (b_q != PADDING)[:, None]


@triton.jit
@no_type_check
def _sums(lse, m_row):
    """Log-sum-exps; infinite where there is no key, so that all weights are zero."""
    b_lse = tl.load(lse, mask=m_row, other=float("inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
@no_type_check
def _dots(
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
def _weights(b_score, b_bias, b_lse, softcap, CAPPED: tl.constexpr):
    """What scores are in the softmax; the hyperbolic tangent is made of what the interpreter has."""
    if CAPPED:
        b_score = softcap - 2.0 * softcap / (tl.exp(2.0 / softcap * b_score) + 1.0)
    return tl.exp(b_score + b_bias - b_lse[:, None])


@triton.jit
@no_type_check
def _along(b_x, b_column, BLOCK: tl.constexpr):
    """For each place the sum over rows, each at a column of its own; columns outside of the block have nothing."""
    m_column = (b_column >= 0) & (b_column < BLOCK)
    b_there = tl.gather(b_x, tl.where(m_column, b_column, 0), 1)
    return tl.reduce(tl.where(m_column, b_there, 0.0), 0, _ADD)
