"""The same on a GPU: one launch forward, and backward one for the tokens and two for each table's gradient.

Forward, a program takes a few tokens, whole where there is a norm, else some columns of them: it reads their ids,
collects the rows of all tables, and has the sum, the norm and the dropped entries in registers until the result is
stored. Backward it collects the rows again, so that nothing as large as the result is kept in between, and stores the
gradient of the sum in float32; without norm and dropout that is the gradient it was given, read as it is.

The gradient of a table is added up without atomics. Tokens are sorted by id, stably, and cut into runs of equal
length; a program adds up the tokens of its run in their order, and stores what it has where the id changes. An id that
goes on in the next run is left in parts, one per run, which a second launch adds up. Every order is that of the sorted
tokens, so all runs of the program give the same bits, and thousands of tokens with one id are shared out among
programs. All sums are float32 (float64 for float64), rounded once to the dtype of the table.

Entries are dropped as `dropout` says, with random bits from Philox: its key is the seed, its counter the token and the
column, so nothing is stored, and the backward pass drops the same.

Ids without a row read nothing, give a row of NaN and no gradient, and leave the number of the first such token.

It needs Triton; `import locant` does not import it. Run through Triton's interpreter and compiled for compute
capabilities 8.0, 9.0 and 10.0, without spills but for normed float64; it has not yet been run, nor timed, on a device.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locant.kernels.input_embedding.operands import NO_FAULT, Operands

__all__ = ["backward", "forward", "kept"]

TILE = 2**14
"""Bytes, as float32 or float64, that a program of four warps holds."""

COLUMNS = 1_024
"""Those of a program, where it need not hold whole tokens: any width costs one short compilation."""

PROGRAMS = 1_056
"""The number of programs in the backward pass; the same on every GPU, so that sums are the same, too."""

RUN = 32
"""Sorted tokens that one program adds up."""

# As tl.sum has it: the interpreter knows this function, and cannot call tl.sum.
_ADD = tl.standard._sum_combine  # pyright: ignore[reportPrivateUsage]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    o: Operands,
) -> tuple[
    Float[Tensor, "batch seq d_model"], Float[Tensor, " tokens"], Float[Tensor, " tokens"], Int[Tensor, " tables"]
]:
    """The result, each token's mean and reciprocal deviation (empty without a norm), and each table's first fault."""
    y = o.token.new_empty(*o.ids.shape, o.width)
    normed = o.num_tokens if o.eps is not None else 0
    mean, rstd = (o.token.new_empty(normed, dtype=o.accumulator) for _ in range(2))
    fault = o.ids.new_full((3,), NO_FAULT)
    if y.numel():
        with torch.cuda.device_of(y):
            _forward[_grid(o)](y, mean, rstd, fault, *_tables(o), *_of_norm(o), *_sizes(o), **_constants(o))
    return y, mean, rstd, fault


def backward(
    grad: Float[Tensor, "batch seq d_model"],
    mean: Float[Tensor, " tokens"],
    rstd: Float[Tensor, " tokens"],
    o: Operands,
    needs: list[bool],
) -> Gradients:
    """What `grad` on the result means for every table and for the norm's weight and bias, where `needs` says so."""
    dx, of_norm = _through_norm(grad.contiguous(), mean, rstd, o)
    empty = o.token.new_empty(0)
    token, position, segment = empty, empty, empty
    if needs[0]:
        token = _summed(dx, o.ids, o.token, o.scale, o.padding_idx)
    if needs[1] and o.position is not None and o.position_index is not None:
        shared = o.position_index.numel() != o.num_tokens
        rows = dx.view(-1, *o.position_index.shape, o.width).sum(0, dtype=o.accumulator) if shared else dx
        position = _summed(rows, o.position_index, o.position)
    if needs[2] and o.segment is not None:
        segments = torch.zeros_like(o.ids) if o.segments is None else o.segments
        segment = _summed(dx, segments, o.segment)
    gamma, beta = (
        empty if table is None or not need else total.to(table.dtype)
        for table, need, total in zip((o.gamma, o.beta), needs[3:], of_norm, strict=True)
    )
    return token, position, segment, gamma, beta


def kept(o: Operands) -> Bool[Tensor, "batch seq d_model"]:
    """Which entries of the result dropout leaves."""
    ones = torch.ones(1, o.width, device=o.ids.device)
    return forward(Operands(ids=torch.zeros_like(o.ids), token=ones, seed=o.seed, p=o.p))[0] != 0


def _through_norm(
    grad: Tensor, mean: Tensor, rstd: Tensor, o: Operands
) -> tuple[Float[Tensor, "*tokens d_model"], tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"]]]:
    """The gradient of the sum, and those of the norm's weight and bias."""
    if o.eps is None and not o.dropping:
        return grad, (grad.new_empty(0), grad.new_empty(0))
    dx = grad.new_empty(o.num_tokens, o.width, dtype=o.accumulator)
    groups, columns = _grid(o)
    programs = min(PROGRAMS, groups) if dx.numel() else 0
    partial = dx.new_empty(2, programs if o.eps is not None else 0, o.width)
    if programs:
        with torch.cuda.device_of(dx):
            given = (grad, dx, partial, mean, rstd, *_tables(o), *_of_norm(o), *_sizes(o), programs)
            _backward[programs, columns](*given, **_constants(o))
    gamma, beta = partial.sum(1)
    return dx, (gamma, beta)


def _summed(
    rows: Float[Tensor, "*tokens d_model"],
    ids: Int[Tensor, "*batch"],
    table: Float[Tensor, "height d_model"],
    scale: float = 1.0,
    padding_idx: int | None = None,
) -> Float[Tensor, "height d_model"]:
    """The gradient of a table: for every id the sum of its rows, times `scale`."""
    grad = torch.zeros_like(table, memory_format=torch.contiguous_format)
    if not rows.numel():
        return grad
    found = torch.sort(ids.reshape(-1), stable=True)
    count, width = found.values.numel(), table.shape[1]
    runs = triton.cdiv(count, RUN)
    last = found.values[torch.arange(1, runs + 1, device=ids.device).mul_(RUN).clamp_(max=count) - 1]
    last_run = (torch.searchsorted(found.values, last, right=True) - 1) // RUN
    head, tail = rows.new_empty(2, runs, width, dtype=torch.promote_types(rows.dtype, torch.float32))
    block = min(triton.next_power_of_2(width), 512)
    grid = (runs, triton.cdiv(width, block))
    padding = -1 if padding_idx is None else padding_idx
    constants = {"WIDTH": width, "SCALE": scale, "RUN": RUN, "BLOCK": block, "enable_fp_fusion": True}
    with torch.cuda.device_of(ids):
        _add_runs[grid](
            rows, found.indices, found.values, head, tail, grad, count, table.shape[0], padding, **constants
        )
        _join_runs[grid](found.values, last_run, head, tail, grad, table.shape[0], padding, TOGETHER=8, **constants)
    return grad


# ---------------------------------------------------------------------- what the kernels are given


def _tables(o: Operands) -> tuple[Tensor, ...]:
    """Ids and rows; where there are none, others stand in that are never read."""
    position = o.token if o.position is None else o.position
    segment = o.token if o.segment is None else o.segment
    index = o.ids if o.position_index is None else o.position_index
    segments = o.ids if o.segments is None else o.segments
    ids = tuple(ids.contiguous() for ids in (o.ids, index, segments))
    return *ids, *(_with_unit_stride(table) for table in (o.token, position, segment))


def _with_unit_stride(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous()


def _of_norm(o: Operands) -> tuple[Tensor, ...]:
    gamma, beta = (o.token if table is None else table.contiguous() for table in (o.gamma, o.beta))
    return gamma, beta, o.ids if o.seed is None else o.seed


def _sizes(o: Operands) -> tuple[int, ...]:
    tables = _tables(o)
    period = tables[1].numel()  # positions of one row are those of all
    return o.num_tokens, period, *(t.shape[0] for t in tables[3:]), *(t.stride(0) for t in tables[3:])


def _grid(o: Operands) -> tuple[int, int]:
    """Programs for the groups of tokens, and for the blocks of columns."""
    constants = _constants(o)
    return triton.cdiv(o.num_tokens, constants["ROWS"]), triton.cdiv(o.width, constants["BLOCK"])


def _constants(o: Operands) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(o.width))
    block = block if o.eps is not None else min(block, COLUMNS)
    entries = TILE // o.accumulator.itemsize
    whole = int(o.p * 2**16)
    return {
        "POSITION": o.position is not None,
        "SEGMENT": 0 if o.segment is None else 1 if o.segments is None else 2,
        "NORM": o.eps is not None,
        "GAMMA": o.gamma is not None,
        "BETA": o.beta is not None,
        "DROP": o.dropping,
        "SCALE": float(o.scale),
        "EPS": 0.0 if o.eps is None else float(o.eps),
        "KEPT_SCALE": 1 / (1 - o.p),
        "WHOLE": whole,
        "FRACTION": int((o.p * 2**16 - whole) * 2**32),
        "WIDTH": o.width,
        "ROWS": min(max(1, entries // block), 16),  # more of them, narrow, need more registers than there are
        "BLOCK": block,
        "num_warps": min(16, max(4, 8 * block // entries)),
        "enable_fp_fusion": True,
    }


# ---------------------------------------------------------------------- kernels


@triton.jit
@no_type_check
def _forward(
    y, mean, rstd, fault, ids, index, segments, token, position, segment, gamma, beta, seed,
    num_tokens, period, vocab_size, num_positions, num_segments,
    token_step: tl.int64, position_step: tl.int64, segment_step: tl.int64,
    POSITION: tl.constexpr, SEGMENT: tl.constexpr, NORM: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    DROP: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr, KEPT_SCALE: tl.constexpr, WHOLE: tl.constexpr,
    FRACTION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` columns of `ROWS` tokens; all of them where there is a norm."""
    o_token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_token = o_token < num_tokens
    m_entry = m_token[:, None] & (o_column < WIDTH)[None, :]
    b_x, m_id, m_position, m_segment = _collect(
        ids, index, segments, token, position, segment, o_token, m_token, o_column, m_entry,
        period, vocab_size, num_positions, num_segments, token_step, position_step, segment_step,
        POSITION, SEGMENT, SCALE,
    )  # fmt: skip
    tl.atomic_min(fault + o_token * 0, o_token, mask=m_token & (m_id == 0))
    if POSITION:
        tl.atomic_min(fault + 1 + o_token * 0, o_token, mask=m_token & (m_position == 0))
    if SEGMENT == 2:
        tl.atomic_min(fault + 2 + o_token * 0, o_token, mask=m_token & (m_segment == 0))
    if NORM:
        b_mean = tl.reduce(b_x, 1, _ADD) / WIDTH
        b_x = tl.where(m_entry, b_x - b_mean[:, None], 0.0)
        b_variance = tl.reduce(b_x * b_x, 1, _ADD) / WIDTH
        b_rstd = 1.0 / tl.sqrt(b_variance + tl.full([1], EPS, b_x.dtype))
        tl.store(mean + o_token, b_mean, mask=m_token)
        tl.store(rstd + o_token, b_rstd, mask=m_token)
        b_x = b_x * b_rstd[:, None]
        if GAMMA:
            b_x = b_x * tl.load(gamma + o_column, mask=o_column < WIDTH, other=0.0).to(b_x.dtype)[None, :]
        if BETA:
            b_x = b_x + tl.load(beta + o_column, mask=o_column < WIDTH, other=0.0).to(b_x.dtype)[None, :]
    if DROP:
        b_keep = _kept(seed, o_token, WHOLE, FRACTION, ROWS, BLOCK)
        b_x = tl.where(b_keep, b_x * tl.full([1, 1], KEPT_SCALE, b_x.dtype), 0.0)
    m_good = (m_id & m_position & m_segment) != 0
    b_x = tl.where(m_good[:, None], b_x, float("nan"))
    tl.store(y + o_token[:, None] * WIDTH + o_column[None, :], b_x.to(y.dtype.element_ty), mask=m_entry)


@triton.jit
@no_type_check
def _collect(
    ids, index, segments, token, position, segment, o_token, m_token, o_column, m_entry,
    period, vocab_size, num_positions, num_segments, token_step, position_step, segment_step,
    POSITION: tl.constexpr, SEGMENT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """``[ROWS, BLOCK]``, and for every token and table 1 where it has a row, else 0."""
    b_id, m_id = _checked(ids, o_token, m_token, vocab_size)
    b_x = _look_up(token, b_id, token_step, o_column, m_entry)
    b_x = b_x * tl.full([1, 1], SCALE, b_x.dtype)
    m_position, m_segment = tl.full(m_id.shape, 1, tl.int32), tl.full(m_id.shape, 1, tl.int32)
    if SEGMENT == 1:
        b_x += _look_up(segment, b_id * 0, segment_step, o_column, m_entry).to(b_x.dtype)
    if SEGMENT == 2:
        b_id, m_segment = _checked(segments, o_token, m_token, num_segments)
        b_x += _look_up(segment, b_id, segment_step, o_column, m_entry).to(b_x.dtype)
    if POSITION:
        b_id, m_position = _checked(index, o_token % period, m_token, num_positions)
        b_x += _look_up(position, b_id, position_step, o_column, m_entry).to(b_x.dtype)
    return b_x, m_id, m_position, m_segment


@triton.jit
@no_type_check
def _checked(ids, o_id, m_token, height):
    """Ids that can be read, and whether they are those that were given."""
    b_id = tl.load(ids + o_id, mask=m_token, other=0)
    m_good = (b_id >= 0) & (b_id < height)
    return tl.where(m_good, b_id, 0), m_good.to(tl.int32)


@triton.jit
@no_type_check
def _look_up(table, b_id, step, o_column, m_entry):
    b_row = tl.load(table + b_id[:, None] * step + o_column[None, :], mask=m_entry, other=0.0)
    if table.dtype.element_ty == tl.float64:
        return b_row
    else:  # noqa: RET505  # what Triton would compile after a return has the dtype of float64 as well
        return b_row.to(tl.float32)


@triton.jit
@no_type_check
def _kept(seed, o_token, WHOLE: tl.constexpr, FRACTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``[ROWS, BLOCK]``: 16 random bits for every entry, against a threshold for every token."""
    b_seed = tl.load(seed).to(tl.uint64)
    b_low, b_high = (o_token & 0xFFFFFFFF).to(tl.uint32), (o_token >> 32).to(tl.uint32)
    b_zero = b_low * 0
    b_one_more, _, _, _ = _philox(b_seed, b_zero, b_low, b_high, b_zero + 1)
    b_threshold = WHOLE + (b_one_more.to(tl.int64) < FRACTION).to(tl.int32)
    b_group = tl.full([ROWS, BLOCK // 8], 0, tl.uint32)
    o_group = b_group + (tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)).to(tl.uint32)[None, :]
    b_0, b_1, b_2, b_3 = _philox(b_seed, o_group, b_group + b_low[:, None], b_group + b_high[:, None], b_group)
    b_words = tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))
    b_bits = tl.join(b_words & 0xFFFF, b_words >> 16)
    return tl.reshape(b_bits, [ROWS, BLOCK]).to(tl.int32) >= b_threshold[:, None]


@triton.jit
@no_type_check
def _philox(b_seed, b_0, b_1, b_2, b_3):
    """Philox-4x32-10 (Salmon et al. 2011): four random words from a key of two and a counter of four."""
    b_key_0, b_key_1 = (b_seed & 0xFFFFFFFF).to(tl.uint32), (b_seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        b_high_0, b_low_0 = _wide_product(b_0, 0xD2511F53)
        b_high_2, b_low_2 = _wide_product(b_2, 0xCD9E8D57)
        b_0, b_1, b_2, b_3 = b_high_2 ^ b_1 ^ b_key_0, b_low_2, b_high_0 ^ b_3 ^ b_key_1, b_low_0
        b_key_0, b_key_1 = _wrapped_sum(b_key_0, 0x9E3779B9), _wrapped_sum(b_key_1, 0xBB67AE85)
    return b_0, b_1, b_2, b_3


@triton.jit
@no_type_check
def _wide_product(b_x, FACTOR: tl.constexpr):
    """The upper and the lower half of a product of 32-bit words."""
    b_product = b_x.to(tl.uint64) * tl.full([1], FACTOR, tl.uint64)
    return (b_product >> 32).to(tl.uint32), (b_product & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
@no_type_check
def _wrapped_sum(b_x, STEP: tl.constexpr):
    return ((b_x.to(tl.uint64) + STEP) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
@no_type_check
def _backward(
    grad, dx, partial, mean, rstd, ids, index, segments, token, position, segment, gamma, beta, seed,
    num_tokens, period, vocab_size, num_positions, num_segments,
    token_step: tl.int64, position_step: tl.int64, segment_step: tl.int64, programs,
    POSITION: tl.constexpr, SEGMENT: tl.constexpr, NORM: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    DROP: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr, KEPT_SCALE: tl.constexpr, WHOLE: tl.constexpr,
    FRACTION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: every `programs`-th group of `ROWS` tokens, and its part of the gradients of the norm."""
    i_program = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_beta = tl.full([ROWS, BLOCK], 0.0, dx.dtype.element_ty)
    b_gamma = tl.full([ROWS, BLOCK], 0.0, dx.dtype.element_ty)
    for i_group in range(i_program, (num_tokens + ROWS - 1) // ROWS, programs):
        o_token = i_group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        m_token = o_token < num_tokens
        m_entry = m_token[:, None] & (o_column < WIDTH)[None, :]
        o_entry = o_token[:, None] * WIDTH + o_column[None, :]
        b_dy = tl.load(grad + o_entry, mask=m_entry, other=0.0).to(dx.dtype.element_ty)
        if DROP:
            b_keep = _kept(seed, o_token, WHOLE, FRACTION, ROWS, BLOCK)
            b_dy = tl.where(b_keep, b_dy * tl.full([1, 1], KEPT_SCALE, b_dy.dtype), 0.0)
        if NORM:
            b_x, _, _, _ = _collect(
                ids, index, segments, token, position, segment, o_token, m_token, o_column, m_entry,
                period, vocab_size, num_positions, num_segments, token_step, position_step, segment_step,
                POSITION, SEGMENT, SCALE,
            )  # fmt: skip
            b_mean = tl.load(mean + o_token, mask=m_token, other=0.0)
            b_rstd = tl.load(rstd + o_token, mask=m_token, other=0.0)
            b_x = tl.where(m_entry, (b_x - b_mean[:, None]) * b_rstd[:, None], 0.0)
            b_beta += b_dy
            b_gamma += b_dy * b_x
            if GAMMA:
                b_dy *= tl.load(gamma + o_column, mask=o_column < WIDTH, other=0.0).to(b_dy.dtype)[None, :]
            b_along = tl.reduce(b_dy * b_x, 1, _ADD) / WIDTH
            b_shift = tl.reduce(b_dy, 1, _ADD) / WIDTH
            b_dy = (b_dy - b_x * b_along[:, None] - b_shift[:, None]) * b_rstd[:, None]
        tl.store(dx + o_entry, b_dy, mask=m_entry)
    if NORM:
        o_partial = i_program * WIDTH + o_column
        tl.store(partial + o_partial, tl.reduce(b_gamma, 0, _ADD), mask=o_column < WIDTH)
        tl.store(partial + programs * WIDTH + o_partial, tl.reduce(b_beta, 0, _ADD), mask=o_column < WIDTH)


@triton.jit
@no_type_check
def _where(o_column, WIDTH: tl.constexpr, condition):
    """The columns of a token if the condition holds, else none."""
    return o_column < tl.where(condition, WIDTH, 0)


@triton.jit
@no_type_check
def _add_runs(
    rows, order, ids, head, tail, grad, count, height, padding,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some columns of a run of sorted tokens.

    Ids that lie in the run are done. What belongs to an id from an earlier run goes to `head`, and what goes on in
    the next run, and began in this one, to `tail`.
    """
    i_run = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = i_run * RUN
    b_before = tl.load(ids + first - 1, mask=first > 0, other=0)
    is_open = ((first > 0) & (b_before == tl.load(ids + first))).to(tl.int32)
    b_sum = tl.full([BLOCK], 0.0, head.dtype.element_ty)
    for i in range(RUN):
        o_sorted = first + i
        m_sorted = o_sorted < count
        b_id = tl.load(ids + o_sorted, mask=m_sorted, other=0)
        b_after = tl.load(ids + o_sorted + 1, mask=o_sorted + 1 < count, other=0)
        b_place = tl.load(order + o_sorted, mask=m_sorted, other=0)
        b_row = tl.load(rows + b_place * WIDTH + o_column, mask=_where(o_column, WIDTH, m_sorted), other=0.0)
        b_sum += b_row.to(b_sum.dtype)
        ends = m_sorted & ((o_sorted + 1 == count) | (b_after != b_id))
        has_row = (b_id >= 0) & (b_id < height) & (b_id != padding)
        b_scaled = (b_sum * tl.full([1], SCALE, b_sum.dtype)).to(grad.dtype.element_ty)
        tl.store(
            grad + b_id * WIDTH + o_column, b_scaled, mask=_where(o_column, WIDTH, ends & has_row & (is_open == 0))
        )
        tl.store(head + i_run * WIDTH + o_column, b_sum, mask=_where(o_column, WIDTH, ends & (is_open == 1)))
        b_sum = tl.where(ends, 0.0, b_sum)
        is_open = tl.where(ends, 0, is_open)
    last = tl.minimum(first + RUN, count) - 1
    b_after = tl.load(ids + last + 1, mask=last + 1 < count, other=0)
    goes_on = (last + 1 < count) & (b_after == tl.load(ids + last))
    tl.store(head + i_run * WIDTH + o_column, b_sum, mask=_where(o_column, WIDTH, goes_on & (is_open == 1)))
    tl.store(tail + i_run * WIDTH + o_column, b_sum, mask=_where(o_column, WIDTH, goes_on & (is_open == 0)))


@triton.jit
@no_type_check
def _join_runs(
    ids, last_run, head, tail, grad, height, padding,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the id with which a run ends, if it began there and goes on in the next."""
    i_run = tl.program_id(0).to(tl.int64)
    first = i_run * RUN
    i_last = tl.load(last_run + i_run)
    if i_last > i_run:
        o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        m_column = o_column < WIDTH
        b_id = tl.load(ids + first + RUN - 1)
        b_before = tl.load(ids + first - 1, mask=first > 0, other=0)
        begins = (first == 0) | (b_before != b_id)
        has_row = (b_id >= 0) & (b_id < height) & (b_id != padding)
        if begins & has_row:
            b_sum = tl.load(tail + i_run * WIDTH + o_column, mask=m_column, other=0.0)
            for i_head in range(i_run + 1, i_last + 1, TOGETHER):
                o_head = i_head + tl.arange(0, TOGETHER).to(tl.int64)
                m_head = (o_head <= i_last)[:, None] & m_column[None, :]
                b_heads = tl.load(head + o_head[:, None] * WIDTH + o_column[None, :], mask=m_head, other=0.0)
                b_sum += tl.reduce(b_heads, 0, _ADD)
            b_scaled = (b_sum * tl.full([1], SCALE, b_sum.dtype)).to(grad.dtype.element_ty)
            tl.store(grad + b_id * WIDTH + o_column, b_scaled, mask=m_column)
