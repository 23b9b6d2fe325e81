"""The rotation as one launch on a GPU: q and k together, forward or backward, in place or not.

Nothing as large as sequence times head is stored for the angles. A program takes some tokens, reads their positions,
forms each cosine and sine once from the rows of the byte tables (float64, as `Tables` says), and rotates with them the
heads of q and k, some at a time. The backward is the same compiled code with the sine negated.

Convention: see `op`. A program reads every element that it writes before it writes it, and no two programs share one,
so the outputs may be the inputs. Contraction into fused multiply-adds is switched off: the products are rounded as the
reference rounds them, whatever shape the kernel was compiled for, so a token alone gets the bits it gets in a batch.

Cost: each element of q and k is read and written once. Beside that a token reads 32 bytes per pair from the tables (64
beyond position 65 535), out of the L2 cache or nearer, however many heads there are. It is compiled per dtype, layout,
head and alignment of strides, once below position 65 536 and once above; never per length.

Needs Triton 3.4 or newer. Run through its interpreter and compiled for compute capabilities 8.0, 9.0 and 10.0; it has
not yet been run, nor timed, on a device.
"""

from __future__ import annotations

import functools
import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from locant.kernels.rotary.reference import Layout, Tables
from locant.spelling import dtype_name

TILE = 8_192
"""Bytes that a program of four warps has on their way at once: enough of them hide what a load takes."""

PROGRAMS = 1_024
"""Fewer than these leave a large GPU idle; the heads of a token are then shared out among several programs."""

MAX_LAUNCHES = 1_024
"""Launches that are kept; then all are forgotten. Every length of a prompt has its own."""

MAX_HEAD_DIM = 1_024
MAX_TOKENS = 2**31 - 2**16
"""Tokens are counted in 32 bits, whose division is fast; places in memory in 64."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unsupported(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Why this kernel cannot rotate these tensors, or None where it can; whatever fits q fits k."""
    if q.dtype not in DTYPES:
        return f"the Triton kernel has no arithmetic for {dtype_name(q.dtype)}"
    if q.shape[0] * q.shape[2] > MAX_TOKENS:
        return f"{q.shape[0] * q.shape[2]} tokens are more than the {MAX_TOKENS} that the Triton kernel counts to"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim={q.shape[-1]} is more than the {MAX_HEAD_DIM} that a program of the Triton kernel holds"
    if not q.is_cuda and not _interpreted():
        return f"the Triton kernel runs on CUDA devices, and q is on {q.device}"
    if q.is_cuda and _capability(q.device) < 8:
        return f"Triton compiles for compute capability 8.0 and newer, and {q.device} is older"
    if positions.device != q.device or tables.table.device != q.device:
        return f"positions are on {positions.device}, tables on {tables.table.device} and q on {q.device}"
    return None


def rotate_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool,
) -> None:  # fmt: skip
    """Writes the rotated q and k into `out_q` and `out_k`; the arguments are those that `op` describes."""
    work = [(x, out) for x, out in ((q, out_q), (k, out_k)) if x is not None and out is not None and x.numel()]
    if not work:
        return  # a grid of no programs cannot be launched
    first, second = work[0], work[-1]  # one stands in for the other, which has no heads
    axis_of_pair = positions if tables.axis_of_pair is None else tables.axis_of_pair
    tensors = (*first, *second, positions, tables.table, axis_of_pair)
    settings = (tables.levels, tables.attention_factor, axis_of_pair is positions, layout, inverse)
    key = (q.device, len(work), all(x is out for x, out in work), settings, *map(_kind, tensors))
    with torch.cuda.device_of(q):
        if key in _LAUNCHES:
            kernel, grid, numbers = _LAUNCHES[key]
            kernel[grid](*tensors, *numbers)
            return
        grid, numbers = _numbers(work, positions, tables, layout, inverse)
        start: Any = _rotate_kernel[grid]
        kernel = start(*tensors, *numbers, num_warps=4, enable_fp_fusion=False)
    if len(_LAUNCHES) >= MAX_LAUNCHES:
        _LAUNCHES.clear()
    if kernel is not None:  # the interpreter has none
        _LAUNCHES[key] = kernel, grid, numbers


_LAUNCHES: dict[tuple[object, ...], tuple[Any, tuple[int, int, int], tuple[Any, ...]]] = {}
"""Kernels with everything they are given beside tensors. The key is all that these depend on."""


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape, x.stride(), x.data_ptr() & 15


Work = list[tuple[Tensor, Tensor]]
"""q and where it goes, k and where it goes, or one of them."""


def _numbers(
    work: Work, positions: Tensor, tables: Tables, layout: Layout, inverse: bool
) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
    """The grid, and what the kernel is given after the tensors, in its order."""
    constants = _constants(work, positions, tables, layout)
    batch, _, seq, _ = work[0][0].shape
    heads = [x.shape[1] for x, _ in work] + [0] * (2 - len(work))
    blocks = triton.cdiv(batch * seq, constants["BLOCK_T"])
    shares = _shares(blocks, triton.cdiv(max(heads), constants["BLOCK_H"]))
    sizes = (batch * seq, seq, shares, *heads, *(triton.cdiv(n, shares) for n in heads), -1 if inverse else 1)
    tensors = [x for pair in (work[0], work[-1]) for x in pair]
    steps = (stride // constants["UNIT"] for x in tensors for stride in _strides(x)[:3])
    row, step, *axis = positions.stride()
    of_positions = 0 if positions.shape[0] == 1 else row, step, axis[0] if axis else 0
    dims = (x.stride(3) for x in tensors)
    return (blocks * shares, 1, 1), (*sizes, *steps, *dims, *of_positions, *constants.values())


def _constants(work: Work, positions: Tensor, tables: Tables, layout: Layout) -> dict[str, Any]:
    """What the kernel is compiled for, in its order; nothing here depends on how many tokens there are."""
    x = work[0][0]
    pairs = tables.pairs()
    rest = 0 if all(x is out for x, out in work) else x.shape[3] - 2 * pairs
    strides = (stride for pair in work for x in pair for stride in _strides(x)[:3])
    return {
        "PAIRS": pairs,
        "REST": rest,
        "INTERLEAVED": layout == "interleaved",
        "LEVELS": (2 if tables.levels <= 2 else 4) if tables.exact() else 0,
        "AXES": tables.axis_of_pair is not None and positions.ndim == 3,
        "ATTENTION_FACTOR": float(tables.attention_factor),
        "UNIT": math.gcd(16 // x.element_size(), *strides),
        **_blocks(pairs, rest, max(x.shape[1] for x, _ in work), x.element_size()),
    }


def _blocks(pairs: int, rest: int, heads: int, element_size: int) -> dict[str, int]:
    """Tile sizes, all powers of two: heads x tokens x pairs, `TILE` bytes together where one token has not more."""
    block_p = triton.next_power_of_2(pairs)
    block_r = min(triton.next_power_of_2(rest), max(2 * block_p, 128)) if rest else 1
    rows = max(1, TILE // element_size // max(2 * block_p, block_r))
    block_h = min(4, rows, triton.next_power_of_2(heads))
    block_t = min(rows // block_h, max(1, 1_024 // block_p))  # more angles than that do not fit into the registers
    return {"BLOCK_H": block_h, "BLOCK_T": block_t, "BLOCK_P": block_p, "BLOCK_R": block_r}


def _shares(token_blocks: int, head_blocks: int) -> int:
    """Among how many programs the heads of a token are shared out; each of them forms its angles anew."""
    wanted = min(head_blocks, triton.cdiv(PROGRAMS, token_blocks))
    return triton.cdiv(head_blocks, triton.cdiv(head_blocks, wanted))


def _strides(x: Tensor) -> tuple[int, ...]:
    """A dimension of one element is never stepped along, and what its stride says about alignment is void."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _interpreted() -> bool:
    return not isinstance(_rotate_kernel, triton.JITFunction)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "seq", "shares", "q_heads", "k_heads", "q_share", "k_share", "direction",
        "q_batch", "q_head", "q_seq", "out_q_batch", "out_q_head", "out_q_seq",
        "k_batch", "k_head", "k_seq", "out_k_batch", "out_k_head", "out_k_seq",
        "position_batch", "position_seq", "position_axis",
    ]
)  # fmt: skip
@no_type_check
def _rotate_kernel(
    q, out_q, k, out_k, positions, table, axis_of_pair,
    num_tokens, seq, shares, q_heads, k_heads, q_share, k_share, direction,
    q_batch: tl.int64, q_head: tl.int64, q_seq: tl.int64,
    out_q_batch: tl.int64, out_q_head: tl.int64, out_q_seq: tl.int64,
    k_batch: tl.int64, k_head: tl.int64, k_seq: tl.int64,
    out_k_batch: tl.int64, out_k_head: tl.int64, out_k_seq: tl.int64,
    q_dim, out_q_dim, k_dim, out_k_dim,
    position_batch: tl.int64, position_seq: tl.int64, position_axis: tl.int64,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK_T` tokens, counted through the rows of the batch, and its share of their heads."""
    i_program = tl.program_id(0)
    i_share, i_block = i_program % shares, i_program // shares
    o_token = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_token = o_token < num_tokens
    o_batch, o_seq = (o_token // seq).to(tl.int64), (o_token % seq).to(tl.int64)
    o_position = o_batch * position_batch + o_seq * position_seq
    if LEVELS == 0:
        b_cos, b_sin = _rounded_angles(
            positions, table, axis_of_pair, o_position, position_axis, m_token, PAIRS, AXES, ATTENTION_FACTOR, BLOCK_P
        )
    else:
        b_cos, b_sin = _exact_angles(
            positions, table, axis_of_pair, o_position, position_axis, m_token,
            PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
        )  # fmt: skip
    if q.dtype.element_ty == tl.float64:
        b_cos, b_sin = b_cos.to(tl.float64), b_sin.to(tl.float64)
    else:
        b_cos, b_sin = b_cos.to(tl.float32), b_sin.to(tl.float32)
    b_sin = b_sin * direction.to(b_sin.dtype)
    _rotate_heads(
        q, (o_batch * q_batch + o_seq * q_seq) * UNIT, q_head, q_dim,
        out_q, (o_batch * out_q_batch + o_seq * out_q_seq) * UNIT, out_q_head, out_q_dim,
        m_token, i_share * q_share, tl.minimum(q_heads, (i_share + 1) * q_share), b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, UNIT, BLOCK_H, BLOCK_T, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    _rotate_heads(
        k, (o_batch * k_batch + o_seq * k_seq) * UNIT, k_head, k_dim,
        out_k, (o_batch * out_k_batch + o_seq * out_k_seq) * UNIT, out_k_head, out_k_dim,
        m_token, i_share * k_share, tl.minimum(k_heads, (i_share + 1) * k_share), b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, UNIT, BLOCK_H, BLOCK_T, BLOCK_P, BLOCK_R,
    )  # fmt: skip


@triton.jit
@no_type_check
def _exact_angles(
    positions, table, axis_of_pair, o_position, position_axis, m_token,
    PAIRS: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr, ATTENTION_FACTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """float64 ``[BLOCK_T, BLOCK_P]``: the product of one row of the table for every byte of the position."""
    o_entry = tl.arange(0, 2 * BLOCK_P)
    m_entry = m_token[:, None] & (o_entry < 2 * PAIRS)[None, :]
    b_index = _indices(positions, axis_of_pair, o_position, position_axis, m_token, o_entry // 2, m_entry, PAIRS, AXES)
    o_row = (b_index & 255).to(tl.int32) * (2 * PAIRS)
    b_row = tl.load(table + o_row + o_entry[None, :], mask=m_entry, other=0.0)
    b_cos, b_sin = tl.split(tl.reshape(b_row, [BLOCK_T, BLOCK_P, 2]))
    for level in tl.static_range(1, LEVELS):
        o_row = (256 * level + ((b_index >> 8 * level) & 255).to(tl.int32)) * (2 * PAIRS)
        b_row = tl.load(table + o_row + o_entry[None, :], mask=m_entry, other=0.0)
        b_cos_step, b_sin_step = tl.split(tl.reshape(b_row, [BLOCK_T, BLOCK_P, 2]))
        b_rotated = b_cos * b_cos_step - b_sin * b_sin_step
        b_sin = b_sin * b_cos_step + b_cos * b_sin_step
        b_cos = b_rotated
    if ATTENTION_FACTOR != 1.0:
        b_size = tl.full([1, 1], ATTENTION_FACTOR, tl.float64)
        b_cos, b_sin = b_cos * b_size, b_sin * b_size
    return b_cos, b_sin


@triton.jit
@no_type_check
def _rounded_angles(
    positions, table, axis_of_pair, o_position, position_axis, m_token,
    PAIRS: tl.constexpr, AXES: tl.constexpr, ATTENTION_FACTOR: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """float32 ``[BLOCK_T, BLOCK_P]``: the cosine of a rounded position times a rounded frequency, rounded."""
    o_pair = tl.arange(0, BLOCK_P)
    m_pair = m_token[:, None] & (o_pair < PAIRS)[None, :]
    b_index = _indices(positions, axis_of_pair, o_position, position_axis, m_token, o_pair, m_pair, PAIRS, AXES)
    b_angle = b_index.to(tl.float32) * tl.load(table + o_pair, mask=o_pair < PAIRS, other=0.0)[None, :]
    b_cos, b_sin = tl.cos(b_angle), tl.sin(b_angle)
    if ATTENTION_FACTOR != 1.0:
        b_size = tl.full([1, 1], ATTENTION_FACTOR, tl.float32)
        b_cos, b_sin = b_cos * b_size, b_sin * b_size
    return b_cos, b_sin


@triton.jit
@no_type_check
def _indices(
    positions, axis_of_pair, o_position, position_axis, m_token, o_pair, m_pair,
    PAIRS: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """int64 ``[BLOCK_T, 1]``; with several axes one for each pair, of the axis that rotates it."""
    if AXES:
        b_axis = tl.load(axis_of_pair + o_pair, mask=o_pair < PAIRS, other=0).to(tl.int64)
        p_index = positions + o_position[:, None] + b_axis[None, :] * position_axis
        b_index = tl.load(p_index, mask=m_pair, other=0)
    else:
        b_index = tl.load(positions + o_position, mask=m_token, other=0)[:, None]
    return b_index.to(tl.int64)


@triton.jit
@no_type_check
def _rotate_heads(
    x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, m_token, first, last, b_cos, b_sin,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotates heads `first` to `last` of some tokens, and hands on what lies beyond the pairs."""
    b_cos, b_sin = b_cos[None, :, :], b_sin[None, :, :]
    o_pair = tl.arange(0, BLOCK_P).to(tl.int64)[None, None, :]
    o_entry = tl.arange(0, 2 * BLOCK_P).to(tl.int64)[None, None, :]
    x_step, out_step = x_head.to(tl.int64) * UNIT, out_head.to(tl.int64) * UNIT
    for i_head in range(first, last, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < last)[:, None, None] & m_token[None, :, None]
        p_x = x + o_head.to(tl.int64)[:, None, None] * x_step + o_x[None, :, None]
        p_out = out + o_head.to(tl.int64)[:, None, None] * out_step + o_out[None, :, None]
        if INTERLEAVED:
            m_entry = m_row & (o_entry < 2 * PAIRS)
            b_x = tl.load(p_x + o_entry * x_dim, mask=m_entry).to(b_cos.dtype)
            b_a, b_b = tl.split(tl.reshape(b_x, [BLOCK_H, BLOCK_T, BLOCK_P, 2]))
            b_rotated = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
            b_rotated = tl.reshape(b_rotated, [BLOCK_H, BLOCK_T, 2 * BLOCK_P])
            tl.store(p_out + o_entry * out_dim, b_rotated.to(out.dtype.element_ty), mask=m_entry)
        else:
            m_pair = m_row & (o_pair < PAIRS)
            b_a = tl.load(p_x + o_pair * x_dim, mask=m_pair).to(b_cos.dtype)
            b_b = tl.load(p_x + (o_pair + PAIRS) * x_dim, mask=m_pair).to(b_cos.dtype)
            b_first, b_second = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
            tl.store(p_out + o_pair * out_dim, b_first.to(out.dtype.element_ty), mask=m_pair)
            tl.store(p_out + (o_pair + PAIRS) * out_dim, b_second.to(out.dtype.element_ty), mask=m_pair)
        for i_rest in tl.static_range(0, REST, BLOCK_R):
            o_rest = i_rest + tl.arange(0, BLOCK_R).to(tl.int64)[None, None, :]
            m_rest = m_row & (o_rest < REST)
            b_rest = tl.load(p_x + (2 * PAIRS + o_rest) * x_dim, mask=m_rest)
            tl.store(p_out + (2 * PAIRS + o_rest) * out_dim, b_rest, mask=m_rest)
