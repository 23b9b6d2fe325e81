"""The gradient of biases that were looked up by distance, on a GPU. Without atomics, every run gives the same bits.

The gradient of a score is ``P (dP - mean)``: the score's weight times the difference between the weight's gradient and
its mean over the row. The gradient of an entry is the sum over its pairs. No tensor of size query x key is stored:

1. `_means` computes the means, with a program for each block of queries that iterates over its keys. The means use the
   weights computed here, not attention's output, which was rounded. Otherwise distances would drift to the mean of the
   values.
2. For a table, if slots count as distances do, `_diagonals` has a program for each diagonal of blocks. It sums blocks
   in registers, and finally sums along their diagonals. Two adjacent diagonals of blocks share distances, so each
   diagonal writes its own sum. Otherwise (shards, gaps), `_entries` has a program for some entries, which iterates over
   all blocks that may contain one of their distances. A number on the device, which the host does not need to read,
   disables one of the two kernels.
3. For products of tokens, `_rows` has a program for a block of queries, or of keys, and some rows. If slots count as
   distances do, the distances of a row are contiguous, and their sum is the difference of two prefix sums. In blocks
   with gaps or with two documents it iterates over rows, and takes longer if a block has more rows.

Each of these kernels needs two matrix products for a pair of blocks. The backward pass of FlexAttention needs seven.
These kernels need Triton. They were run in Triton's interpreter and compiled for compute capabilities 8.0, 9.0 and
10.0, but not yet run or timed on a device. `benchmarks/NOTES.md` lists the register spills.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.kernels.distance_gradient import FLAGGED, Biases, Pairs, Tokens

BLOCKS = {2: 64, 4: 32}
"""The number of tokens in a block, for each size of a number in bytes."""
FAR = tl.constexpr(2**40)
"""A number greater than every distance."""
PADDING = tl.constexpr(-1)
"""The document of padding."""
SQUARE = tl.constexpr(FLAGGED)

# The functions behind tl.sum and similar reductions. The interpreter supports them but cannot call tl.sum.
ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]
MOST = tl.standard._elementwise_max  # pyright: ignore[reportPrivateUsage]
LEAST = tl.standard._elementwise_min  # pyright: ignore[reportPrivateUsage]


class Operands(NamedTuple):
    """The arguments of every kernel. Tensors are contiguous and have the shapes of `with_gradients`."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    means: Float[Tensor, "batch heads query"]
    of_query: Tensor | None
    of_key: Tensor | None
    row_of: Tensor | None
    heads: int
    group: int
    """The number of query heads that share a key head."""
    queries: int
    keys: int
    entries: int
    rows: int
    first: int
    offset: int
    scale: float
    softcap: float | None
    BLOCK: tl.constexpr
    WIDTH: tl.constexpr
    V_WIDTH: tl.constexpr
    PART: tl.constexpr
    """The number of dimensions of a head that are loaded at a time."""
    PRECISION: tl.constexpr
    q_tokens: Tensor | None = None
    """This field and the following fields are ``None`` if both sides count one by one."""
    k_tokens: Tensor | None = None
    q_bounds: Float[Tensor, "batch twice_blocks"] | None = None
    k_bounds: Float[Tensor, "batch twice_blocks"] | None = None
    counts: Int[Tensor, ""] | None = None
    """True if the slots of each document count as distances do."""
    some: Tensor | None = None


def gradients(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, biases: Biases, pairs: Pairs,
    scale: float, softcap: float | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the biases in float32, from the gradients of attention's output and log-sum-exp.

    The other arguments are the arguments of `with_gradients`, whose signature has the shapes.
    """
    bias_tensors = biases.of_query, biases.of_key
    if not all(x is None or x.numel() for x in (q, k, v, *bias_tensors)):
        of_query, of_key = (None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in bias_tensors)
        return of_query, of_key
    (batch, heads, queries, width), size = q.shape, q.element_size()
    block, means = BLOCKS[size], torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    widest = max(width, v.shape[3])
    part = 32 if size == 4 else 64 if widest <= 128 else 128  # the sizes with the fewest spills
    last_size = next(x.shape[-1] for x in bias_tensors if x is not None)
    rows = 0 if biases.row_of is None else last_size
    operands = Operands(
        grad=grad.contiguous(), q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), lse=lse.contiguous(), means=means,
        of_query=None if biases.of_query is None else biases.of_query.contiguous(),
        of_key=None if biases.of_key is None else biases.of_key.contiguous(),
        row_of=None if biases.row_of is None else biases.row_of.contiguous(),
        heads=heads, group=heads // k.shape[1], queries=queries, keys=k.shape[2],
        entries=last_size if biases.row_of is None else len(biases.row_of), rows=rows,
        first=pairs.first, offset=pairs.offset or 0, scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        BLOCK=tl.constexpr(block), WIDTH=tl.constexpr(width), V_WIDTH=tl.constexpr(v.shape[3]),
        PART=tl.constexpr(min(part, max(16, triton.next_power_of_2(widest)))),
        PRECISION=tl.constexpr("tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"),
        **_token_operands(pairs, q, block),
    )  # fmt: skip
    arguments = operands, max(pairs.low, -FAR.value), min(pairs.high, FAR.value)
    options: dict[str, Any] = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
    with torch.cuda.device_of(q):
        _means[triton.cdiv(queries, block), heads, batch](*arguments, **options)
        if grad_lse is not None:
            means.sub_(grad_lse)
        if biases.row_of is None:
            return _table_gradient(batch, pairs, *arguments, options), None
        ends = _ends(biases.row_of, pairs.first, rows)
        sums = [None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in bias_tensors]
        for of_keys, x in enumerate(sums):
            if x is not None:
                grid = triton.cdiv(x.shape[2], block) * triton.cdiv(rows, block), heads, batch
                _rows[grid](x, ends, *arguments, OF_KEYS=of_keys == 1, **options)
        return sums[0], sums[1]


def _table_gradient(
    batch: int, pairs: Pairs, operands: Operands, low: int, high: int, options: dict[str, Any]
) -> Float[Tensor, "heads distances"]:
    """Return the gradient of a table, in float32."""
    heads, distances, block = operands.heads, operands.entries, operands.BLOCK.value
    sums = torch.zeros(heads, distances, dtype=torch.float32, device=operands.q.device)
    if pairs.offset is not None or pairs.keys is None:
        first, last = _bands(pairs, operands.queries, operands.keys, block)
        parts = sums.new_empty(batch, heads, last - first + 1, 2 * block)
        _diagonals[last - first + 1, heads, batch](parts, first, operands, low, high, **options)
        lower, upper = (part.flatten(1) for part in parts.sum(0).split(block, dim=2))
        line = F.pad(lower, (0, block)) + F.pad(upper, (block, 0))  # adjacent diagonals of blocks share distances
        shift = (first - 1) * block + 1 + (pairs.offset or 0) - pairs.first
        start, stop = max(shift, 0), min(shift + line.shape[1], distances)
        if start < stop:
            sums[:, start:stop] = line[:, start - shift : stop - shift]
    if pairs.offset is None:
        _entries[triton.cdiv(distances, block), heads](sums, batch, operands, low, high, **options)
    return sums


def _bands(pairs: Pairs, queries: int, keys: int, block: int) -> tuple[int, int]:
    """Return the first and the last diagonal of blocks that may contain an allowed pair, at least one diagonal."""
    lowest, highest = 1 - triton.cdiv(keys, block), triton.cdiv(queries, block) - 1
    shift = pairs.offset or 0
    low, high = (pairs.low - shift) // block, -((shift - pairs.high) // block)  # a diagonal of blocks spans two blocks
    low, high = max(low, lowest), min(high, highest)
    return (low, high) if low <= high else (lowest, lowest)


def _ends(row_of: Int[Tensor, " distances"], first: int, rows: int) -> Int[Tensor, "2 rows"]:
    """Return the smallest and the largest distance of every row. In a row without distances, the largest is smaller."""
    far, row = FAR.value, row_of.long()
    distance = torch.arange(first, first + len(row), device=row.device)
    least, most = distance.clone(), distance.clone()
    least[:1], most[-1:] = -far, far  # the first and the last row include all farther distances
    nearest, farthest = (torch.full((rows,), x, dtype=row.dtype, device=row.device) for x in (far, -far))
    return torch.stack([nearest.scatter_reduce(0, row, least, "amin"), farthest.scatter_reduce(0, row, most, "amax")])


def _token_operands(pairs: Pairs, q: Tensor, block: int) -> dict[str, Tensor | None]:
    """Return the last fields of `Operands`, beginning with `q_tokens`."""
    queries = pairs.queries
    if queries is None:
        return {}
    counts = _counts_by_slot(queries) if pairs.keys is None else queries.new_zeros(())
    keys = queries if pairs.keys is None else pairs.keys
    operands = {
        "q_tokens": queries, "k_tokens": keys, "q_bounds": _bounds(queries, block), "k_bounds": _bounds(keys, block),
        "some": pairs.some,
    }  # fmt: skip
    expanded = {name: None if x is None else x.expand(len(q), -1, -1).contiguous() for name, x in operands.items()}
    return expanded | {"counts": counts.int()}


def _counts_by_slot(tokens: Tokens) -> Bool[Tensor, ""]:
    """Return whether the tokens of every document are contiguous and count one by one."""
    index, document, order = tokens.unbind(1)
    real, before = document[:, 1:] != PADDING.value, document[:, :-1]
    continues = (document[:, 1:] == before) & (index.diff() == 1)
    begins = document[:, 1:] > document.cummax(1).values[:, :-1]
    return (~real | continues | begins).all() & (order == index).all()


def _bounds(tokens: Tokens, block: int) -> Int[Tensor, "#batch twice_blocks 1"]:
    """Return the smallest index of every block, then the largest, without padding."""
    padded = F.pad(tokens, (0, -tokens.shape[2] % block), value=PADDING.value).unflatten(2, (-1, block))
    index, document, _ = padded.unbind(1)
    real = document != PADDING.value
    least, most = torch.where(real, index, FAR.value).amin(2), torch.where(real, index, -FAR.value).amax(2)
    return torch.cat([least, most], dim=1)[..., None]


# ---------------------------------------------------------------------- kernels


@triton.jit
@no_type_check
def _means(x, low: tl.int64, high: tl.int64):
    """Compute the weighted means of gradients for a block of queries of one head (one program)."""
    i_q, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_line = tl.arange(0, x.BLOCK)
    o_q = i_q * x.BLOCK + o_line
    b_mean, b_total = tl.full([x.BLOCK], 0.0, tl.float32), tl.full([x.BLOCK], 0.0, tl.float32)
    start, stop = 0, (x.keys + x.BLOCK - 1) // x.BLOCK
    if x.q_tokens is None:
        start = tl.maximum(i_q * x.BLOCK + x.offset - high, 0) // x.BLOCK
        stop = (tl.minimum(i_q * x.BLOCK + x.offset + x.BLOCK - 1 - low, x.keys - 1) + x.BLOCK) // x.BLOCK
    for i_k in range(start, stop):
        if _may_have_pair(x, i_b, i_q, i_k):
            m_pair, _, b_weight, b_of_weight = _pair_of_blocks(x, low, high, i_b, i_h, o_q, o_line + i_k * x.BLOCK)
            b_mean += tl.reduce(tl.where(m_pair, b_weight * b_of_weight, 0.0), 1, ADD)
            b_total += tl.reduce(b_weight, 1, ADD)
    p_mean = x.means + (i_b * x.heads + i_h) * x.queries + o_q
    tl.store(p_mean, b_mean / tl.where(b_total > 0, b_total, 1.0), mask=o_q < x.queries)


@triton.jit
@no_type_check
def _diagonals(parts, lowest, x, low: tl.int64, high: tl.int64):
    """Sum along the diagonals of all pairs of blocks that are equally far apart, for one head (one program)."""
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_band = tl.program_id(0) + lowest
    o_row = tl.arange(0, x.BLOCK)
    b_apart = i_band * x.BLOCK + o_row[:, None] - o_row[None, :] + x.offset
    m_apart = (b_apart >= low) & (b_apart <= high) & (b_apart >= x.first) & (b_apart < x.first + x.entries)
    p_bias = x.of_query + i_h.to(tl.int64) * x.entries + (b_apart - x.first)
    b_bias = tl.load(p_bias, mask=m_apart, other=float("-inf"))
    b_sum = tl.full([x.BLOCK, x.BLOCK], 0.0, tl.float32)
    stop = tl.minimum((x.queries + x.BLOCK - 1) // x.BLOCK, (x.keys + x.BLOCK - 1) // x.BLOCK + i_band)
    if x.q_tokens is not None:
        stop = tl.where(tl.load(x.counts) == 1, stop, 0)
    for i_q in range(tl.maximum(i_band, 0), stop):
        if _may_have_pair(x, i_b, i_q, i_q - i_band):
            o_q, o_k = o_row + i_q * x.BLOCK, o_row + (i_q - i_band) * x.BLOCK
            m_pair = m_apart & (o_k < x.keys)[None, :]
            if x.q_tokens is not None:
                m_pair &= _same_document(x, i_b, o_q, o_k)
            b_weight, b_of_weight = _weights(x, i_b, i_h, o_q, o_k, b_bias)
            b_sum += _score_gradients(x, i_b, i_h, o_q, m_pair, b_weight, b_of_weight)
    o_part = tl.arange(0, 2 * x.BLOCK)
    b_column_sums = _sum_along_columns(b_sum, o_row[:, None] - o_part[None, :] + x.BLOCK - 1, x.BLOCK)
    i_part = (i_b * x.heads + i_h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + i_part * (2 * x.BLOCK) + o_part, b_column_sums)


@triton.jit
@no_type_check
def _entries(sums, batch, x, low: tl.int64, high: tl.int64):
    """Sum the gradients of `BLOCK` entries of one head (one program)."""
    i_h = tl.program_id(1)
    o_row, o_entry = tl.arange(0, x.BLOCK), tl.arange(0, x.BLOCK)
    lowest = tl.program_id(0) * x.BLOCK
    nearest = lowest.to(tl.int64) + x.first
    q_blocks, k_blocks = (x.queries + x.BLOCK - 1) // x.BLOCK, (x.keys + x.BLOCK - 1) // x.BLOCK
    b_sum = tl.full([x.BLOCK], 0.0, tl.float32)
    is_needed = tl.load(x.counts) == 0
    stop = tl.where(is_needed, batch * q_blocks, 0)
    for i in range(stop):
        i_b, i_q = (i // q_blocks).to(tl.int64), i % q_blocks
        o_q = i_q * x.BLOCK + o_row
        for i_k in range(k_blocks):
            least, most = _distances(x, i_b, i_q, i_k)
            if (most >= nearest) & (least < nearest + x.BLOCK):  # noqa: SIM102  # Triton reads both sides of an `and`
                if _may_have_pair(x, i_b, i_q, i_k):
                    m_pair, b_entry, b_gradient = _gradient_of_blocks(
                        x, low, high, i_b, i_h, o_q, o_row + i_k * x.BLOCK
                    )
                    b_shift = b_entry - lowest - (o_row[:, None] - o_row[None, :])  # constant if slots count one by one
                    highest_shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, -4 * x.BLOCK), 1, MOST), 0, MOST)
                    lowest_shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, 4 * x.BLOCK), 1, LEAST), 0, LEAST)
                    if highest_shift == lowest_shift:
                        b_sum += _sum_along_columns(
                            b_gradient, o_row[:, None] - o_entry[None, :] + highest_shift, x.BLOCK
                        )
                    else:
                        for entry in range(x.BLOCK):
                            b_here = tl.where(b_entry - lowest == entry, b_gradient, 0.0)
                            b_total = tl.reduce(tl.reduce(b_here, 1, ADD, keep_dims=True), 0, ADD)  # a single number
                            b_sum += tl.where(o_entry == entry, b_total, 0.0)
    o_sum = lowest + o_entry
    tl.store(sums + i_h.to(tl.int64) * x.entries + o_sum, b_sum, mask=o_sum < tl.where(is_needed, x.entries, 0))


@triton.jit
@no_type_check
def _rows(sums, ends, x, low: tl.int64, high: tl.int64, OF_KEYS: tl.constexpr):
    """Sum the gradients of `BLOCK` rows for a block of queries, or of keys, of one head (one program)."""
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own_tokens, others = x.queries, x.keys
    if OF_KEYS:
        own_tokens, others = x.keys, x.queries
    own_blocks = (own_tokens + x.BLOCK - 1) // x.BLOCK
    i_own, lowest = tl.program_id(0) % own_blocks, tl.program_id(0) // own_blocks * x.BLOCK
    o_line = tl.arange(0, x.BLOCK)
    o_own, o_row = i_own * x.BLOCK + o_line, lowest + o_line
    b_nearest = tl.load(ends + o_row, mask=o_row < x.rows, other=FAR)
    b_farthest = tl.load(ends + x.rows + o_row, mask=o_row < x.rows, other=-FAR)
    nearest, farthest = tl.reduce(b_nearest, 0, LEAST), tl.reduce(b_farthest, 0, MOST)
    other_blocks = (others + x.BLOCK - 1) // x.BLOCK
    start, stop = 0, other_blocks
    if x.q_tokens is None:
        nearest, farthest = tl.maximum(nearest, low), tl.minimum(farthest, high)
        if OF_KEYS:
            least, most = i_own * x.BLOCK - x.offset + nearest, i_own * x.BLOCK - x.offset + x.BLOCK - 1 + farthest
        else:
            least, most = i_own * x.BLOCK + x.offset - farthest, i_own * x.BLOCK + x.offset + x.BLOCK - 1 - nearest
        start = (tl.maximum(least, 0) // x.BLOCK).to(tl.int32)
        stop = ((tl.minimum(most, others - 1) + x.BLOCK) // x.BLOCK).to(tl.int32)
    b_sum = tl.full([x.BLOCK, x.BLOCK], 0.0, tl.float32)
    before = i_own * other_blocks
    for i in range(before + start, before + stop):
        i_q, i_k = i // other_blocks, i % other_blocks  # values that depend on `i_own` would occupy registers longer
        if OF_KEYS:
            i_q, i_k = i % other_blocks, i // other_blocks
        is_near = nearest <= farthest
        if x.q_tokens is not None:
            least, most = _distances(x, i_b, i_q, i_k)
            is_near = (most >= nearest) & (least <= farthest)
        if is_near:  # noqa: SIM102  # Triton reads both sides of an `and`
            if _may_have_pair(x, i_b, i_q, i_k):
                o_q, o_k = i_q * x.BLOCK + o_line, i_k * x.BLOCK + o_line
                m_pair, b_entry, b_gradient = _gradient_of_blocks(x, low, high, i_b, i_h, o_q, o_k)
                if OF_KEYS:
                    b_gradient = tl.trans(b_gradient)
                if x.q_tokens is None:
                    shift = (i_q - i_k) * x.BLOCK + x.offset
                    b_sum += _sum_row_ranges(b_gradient, b_nearest, b_farthest, shift, x.BLOCK, OF_KEYS)
                else:
                    b_shift = b_entry + x.first - (o_line[:, None] - o_line[None, :])  # constant without gaps
                    shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, 2**30), 1, LEAST), 0, LEAST)
                    highest_shift = tl.reduce(tl.reduce(tl.where(m_pair, b_shift, -(2**30)), 1, MOST), 0, MOST)
                    if shift == highest_shift:
                        b_sum += _sum_row_ranges(b_gradient, b_nearest, b_farthest, shift, x.BLOCK, OF_KEYS)
                    else:
                        m_pair, b_entry = _allowed_pairs(x, low, high, i_b, o_q, o_k)
                        p_row = x.row_of + tl.minimum(tl.maximum(b_entry, 0), x.entries - 1)
                        b_row = tl.load(p_row, mask=m_pair, other=-1)
                        if OF_KEYS:
                            b_row = tl.trans(b_row)
                        begin = tl.reduce(tl.reduce(tl.where(b_row < 0, x.rows, b_row), 1, LEAST), 0, LEAST)
                        end = tl.reduce(tl.reduce(b_row, 1, MOST), 0, MOST)
                        for row in range(tl.maximum(begin, lowest), tl.minimum(end + 1, lowest + x.BLOCK)):
                            b_here = tl.reduce(tl.where(b_row == row, b_gradient, 0.0), 1, ADD, keep_dims=True)
                            b_sum += tl.where(o_row[None, :] == row, b_here, 0.0)
    p_sum = sums + ((i_b * x.heads + i_h) * own_tokens + o_own)[:, None] * x.rows + o_row[None, :]
    tl.store(p_sum, b_sum, mask=(o_own < own_tokens)[:, None] & (o_row < x.rows)[None, :])


# ---------------------------------------------------------------------- a block of queries and a block of keys


@triton.jit
@no_type_check
def _may_have_pair(x, i_b, i_q, i_k):
    """Return whether these blocks may contain an allowed pair. Flags are for squares of `SQUARE` tokens."""
    if x.some is not None:
        q_flags, k_flags = (x.queries + SQUARE - 1) // SQUARE, (x.keys + SQUARE - 1) // SQUARE
        i_flag = (i_b * q_flags + i_q // (SQUARE // x.BLOCK)) * k_flags + i_k // (SQUARE // x.BLOCK)
        return tl.load(x.some + i_flag) != 0
    else:  # noqa: RET505  # without `else`, Triton would compile both branches
        return tl.full([], 1, tl.int32) == 1


@triton.jit
@no_type_check
def _distances(x, i_b, i_q, i_k):
    """Return the smallest and the largest distance that a query of one block may have from a key of the other."""
    q_blocks, k_blocks = (x.queries + x.BLOCK - 1) // x.BLOCK, (x.keys + x.BLOCK - 1) // x.BLOCK
    p_q, p_k = x.q_bounds + i_b * 2 * q_blocks + i_q, x.k_bounds + i_b * 2 * k_blocks + i_k
    return tl.load(p_q) - tl.load(p_k + k_blocks), tl.load(p_q + q_blocks) - tl.load(p_k)


@triton.jit
@no_type_check
def _gradient_of_blocks(x, low, high, i_b, i_h, o_q, o_k):
    """Return the mask of allowed pairs, the entries of their distances, and the gradients of their scores."""
    m_pair, b_entry, b_weight, b_of_weight = _pair_of_blocks(x, low, high, i_b, i_h, o_q, o_k)
    return m_pair, b_entry, _score_gradients(x, i_b, i_h, o_q, m_pair, b_weight, b_of_weight)


@triton.jit
@no_type_check
def _score_gradients(x, i_b, i_h, o_q, m_pair, b_weight, b_of_weight):
    """Return the gradients of scores, and zero for pairs that are not allowed."""
    b_mean = tl.load(x.means + (i_b * x.heads + i_h) * x.queries + o_q, mask=o_q < x.queries, other=0.0)
    return tl.where(m_pair, b_weight * (b_of_weight - b_mean[:, None]), 0.0)


@triton.jit
@no_type_check
def _pair_of_blocks(x, low, high, i_b, i_h, o_q, o_k):
    """Return the mask of allowed pairs, the entries of their distances, their weights, and the weights' gradients."""
    m_pair, b_entry = _allowed_pairs(x, low, high, i_b, o_q, o_k)
    if x.row_of is not None:
        b_row = tl.load(x.row_of + tl.minimum(tl.maximum(b_entry, 0), x.entries - 1), mask=m_pair, other=0)
        b_bias, i_head = tl.where(m_pair, 0.0, float("-inf")), i_b * x.heads + i_h
        if x.of_query is not None:
            o_query = (i_head * x.queries + o_q) * x.rows
            b_bias += tl.load(x.of_query + o_query[:, None] + b_row, mask=m_pair, other=0.0)
        if x.of_key is not None:
            o_key = (i_head * x.keys + o_k) * x.rows
            b_bias += tl.load(x.of_key + o_key[None, :] + b_row, mask=m_pair, other=0.0)
    else:
        b_bias = tl.load(x.of_query + i_h.to(tl.int64) * x.entries + b_entry, mask=m_pair, other=float("-inf"))
    b_weight, b_of_weight = _weights(x, i_b, i_h, o_q, o_k, b_bias)
    return m_pair, b_entry, b_weight, b_of_weight


@triton.jit
@no_type_check
def _allowed_pairs(x, low, high, i_b, o_q, o_k):
    """Return the mask of allowed pairs, and the entries of their distances, which are correct for allowed pairs."""
    m_q, m_k = o_q < x.queries, o_k < x.keys
    if x.q_tokens is None:
        b_apart = o_q[:, None] - o_k[None, :] + x.offset
        m_pair = (b_apart >= low) & (b_apart <= high) & m_q[:, None] & m_k[None, :]
        return m_pair, b_apart - x.first
    else:  # noqa: RET505  # as above
        p_q, p_k = x.q_tokens + i_b * 3 * x.queries + o_q, x.k_tokens + i_b * 3 * x.keys + o_k
        b_q_order = tl.load(p_q + 2 * x.queries, mask=m_q, other=0)
        b_k_order = tl.load(p_k + 2 * x.keys, mask=m_k, other=0)
        m_pair = ((b_q_order - low)[:, None] >= b_k_order[None, :]) & (
            (b_q_order - high)[:, None] <= b_k_order[None, :]
        )
        m_pair &= _same_document(x, i_b, o_q, o_k)
        b_q_index = tl.load(p_q, mask=m_q, other=0).to(tl.int32)
        b_k_index = tl.load(p_k, mask=m_k, other=0).to(tl.int32)
        return m_pair, b_q_index[:, None] - b_k_index[None, :] - x.first


@triton.jit
@no_type_check
def _same_document(x, i_b, o_q, o_k):
    """Return the mask of queries and keys in one document, without padding."""
    b_q = tl.load(x.q_tokens + (i_b * 3 + 1) * x.queries + o_q, mask=o_q < x.queries, other=PADDING)
    b_k = tl.load(x.k_tokens + (i_b * 3 + 1) * x.keys + o_k, mask=o_k < x.keys, other=PADDING)
    return (b_q.to(tl.int32)[:, None] == b_k.to(tl.int32)[None, :]) & (b_q != PADDING)[:, None]


@triton.jit
@no_type_check
def _weights(x, i_b, i_h, o_q, o_k, b_bias):
    """Return the softmax weights and their gradients. The tanh uses only functions that the interpreter supports."""
    o_query = (i_b * x.heads + i_h) * x.queries + o_q
    o_key = (i_b * (x.heads // x.group) + i_h // x.group) * x.keys + o_k
    m_q, m_k = o_q < x.queries, o_k < x.keys
    b_score = x.scale * _products(x.q, x.k, o_query, o_key, m_q, m_k, x.WIDTH, x.BLOCK, x.PART, x.PRECISION)
    b_of_weight = _products(x.grad, x.v, o_query, o_key, m_q, m_k, x.V_WIDTH, x.BLOCK, x.PART, x.PRECISION)
    if x.softcap is not None:
        b_score = x.softcap - 2.0 * x.softcap / (tl.exp(2.0 / x.softcap * b_score) + 1.0)
    b_lse = tl.load(x.lse + o_query, mask=m_q, other=float("inf"))
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)  # a query without keys: all weights are zero
    return tl.exp(b_score + b_bias - b_lse[:, None]), b_of_weight


@triton.jit
@no_type_check
def _products(
    a, b, o_a, o_b, m_a, m_b, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the product of every row of a block with every row of another block, some dimensions at a time."""
    b_dots = tl.full([BLOCK, BLOCK], 0.0, tl.float32)
    for part in range(0, WIDTH, PART):
        o_column = part + tl.arange(0, PART)
        m_column = (o_column < WIDTH)[None, :]
        b_a = tl.load(a + o_a[:, None] * WIDTH + o_column[None, :], mask=m_a[:, None] & m_column, other=0.0)
        b_b = tl.load(b + o_b[:, None] * WIDTH + o_column[None, :], mask=m_b[:, None] & m_column, other=0.0)
        b_dots = tl.dot(b_a, tl.trans(b_b), b_dots, input_precision=PRECISION)
    return b_dots


@triton.jit
@no_type_check
def _sum_along_columns(b_x, b_column, BLOCK: tl.constexpr):
    """Return sums over rows of the values in the columns `b_column`. Columns outside of the block count as zero."""
    m_column = (b_column >= 0) & (b_column < BLOCK)
    b_value = tl.gather(b_x, tl.where(m_column, b_column, 0), 1)
    return tl.reduce(tl.where(m_column, b_value, 0.0), 0, ADD)


@triton.jit
@no_type_check
def _sum_row_ranges(b_x, b_nearest, b_farthest, shift, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Return sums over the distances of each row, for every line of a block. `shift` is the first tokens' distance."""
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
    b_sum = tl.where(b_from == b_to, tl.gather(b_x, b_last, 1), b_sum)  # a single distance needs no rounding
    return tl.where(m_some, b_sum, 0.0)
