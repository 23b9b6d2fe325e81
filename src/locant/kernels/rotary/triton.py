"""The rotation in one launch on a GPU: q and k together, forward or backward, in place or not.

No tensor of size sequence times head is stored for the angles. A program takes some tokens, reads their positions,
computes each cosine and sine once from the rows of the byte tables (float64, see `Tables`), and rotates the heads of q
and k with them, some heads at a time. The backward is the same compiled code with the sine negated.

`op` describes the arguments. A program reads every element before it writes it, and no two programs share an element,
so the outputs may be the inputs. Fused multiply-adds are disabled, and products are rounded as in the reference for
every shape. So a single token has the same bits as in a batch.

Cost: each element of q and k is read and written once. In addition 32 bytes per token and pair are read from the tables
(64 beyond position 65,535), for any number of heads. They come from the L2 cache or nearer. The kernel is compiled for
each dtype, layout, head and alignment of strides, once below position 65,536 and once above, but not for each length.

It needs Triton 3.4 or newer. It was run in Triton's interpreter and compiled for compute capabilities 8.0, 9.0 and
10.0, but not yet run or timed on a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels.rotary.reference import Layout, Tables
from locant.spelling import dtype_name

TILE = 8_192
"""Bytes that a program of four warps loads at once. This many bytes hide the latency of a load."""

PROGRAMS = 1_024
"""The number of programs that a large GPU needs. With fewer programs, several of them share the heads of a token."""

MAX_LAUNCHES = 1_024
"""The number of launches to keep before all are removed. Every length of a prompt has its own launch."""

MAX_HEAD_DIM = 1_024
MAX_TOKENS = 2**31 - 2**16
"""Token indices have 32 bits, whose division is fast. Memory offsets have 64 bits."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Key = tuple[object, ...]
Grid = tuple[int, int, int]


def why_not_triton(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Return the reason why this kernel does not support these tensors, or ``None``. For k, the answer is the same."""
    if q.dtype not in DTYPES:
        return f"the Triton kernel has no arithmetic for {dtype_name(q.dtype)}"
    if q.shape[0] * q.shape[2] > MAX_TOKENS:
        return f"{q.shape[0] * q.shape[2]} tokens are more than the {MAX_TOKENS} that the Triton kernel supports"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim={q.shape[-1]} is more than the {MAX_HEAD_DIM} that the Triton kernel supports"
    if not q.is_cuda and not _is_interpreted():
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
    """Write the rotated q and k into `out_q` and `out_k`. `op` describes the arguments."""
    work = [(x, out) for x, out in ((q, out_q), (k, out_k)) if x is not None and out is not None and x.numel()]
    if not work:
        return  # a grid without programs cannot be launched
    if out_q is q:
        increment_version([x for x, _ in work])  # torch's graph does not see that the kernel writes to them
    first, second = work[0], work[-1]  # a single tensor is also the second, with 0 heads
    axis_of_pair = positions if tables.axis_of_pair is None else tables.axis_of_pair
    tensors = (*first, *second, positions, tables.table, axis_of_pair)
    settings = (tables.levels, tables.attention_factor, axis_of_pair is positions, layout, inverse)
    key = ("rotate", len(work), all(x is out for x, out in work), settings, *launch_key(tensors))
    if launch_again(key, tensors):
        return
    grid, numbers = _numbers(work, positions, tables, layout, inverse)
    with torch.cuda.device_of(q):
        start: Any = _rotate_kernel[grid]
        remember(key, start(*tensors, *numbers, num_warps=4, enable_fp_fusion=False), grid, numbers)


def launch_key(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return everything of the tensors on which a launch depends."""
    return tensors[0].device, *[(x.dtype, x.shape, x.stride(), x.data_ptr() & 15) for x in tensors]


def launch_again(key: Key, tensors: Sequence[Tensor]) -> bool:
    """Launch the kernel of an equal earlier launch, if it is kept, with these tensors. Return whether it is kept."""
    launch = _LAUNCHES.get(key)
    if launch is None:
        return False
    kernel, grid, numbers = launch
    with torch.cuda.device_of(tensors[0]):
        kernel[grid](*tensors, *numbers)
    return True


def remember(key: Key, kernel: Any, grid: Grid, numbers: tuple[Any, ...]) -> None:
    """Keep a launch for `launch_again`: the compiled kernel, its grid, and all its arguments after the tensors."""
    if len(_LAUNCHES) >= MAX_LAUNCHES:
        _LAUNCHES.clear()
    if kernel is not None:  # the interpreter has no compiled kernel
        _LAUNCHES[key] = kernel, grid, numbers


_LAUNCHES: dict[Key, tuple[Any, Grid, tuple[Any, ...]]] = {}
"""Kernels with their grids and all arguments except tensors. The key contains everything on which these depend."""

Work = list[tuple[Tensor, Tensor]]
"""q and its output, k and its output, or one of the two."""


def _numbers(
    work: Work, positions: Tensor, tables: Tables, layout: Layout, inverse: bool
) -> tuple[Grid, tuple[Any, ...]]:
    """Return the grid, and the arguments of the kernel after the tensors, in order."""
    constants = _constants(work, positions, tables, layout)
    batch, _, seq, _ = work[0][0].shape
    heads = [x.shape[1] for x, _ in work] + [0] * (2 - len(work))
    token_blocks = triton.cdiv(batch * seq, constants["BLOCK_T"])
    shares = programs_per_token(token_blocks, triton.cdiv(max(heads), constants["BLOCK_H"]))
    sizes = (batch * seq, seq, shares, *heads, *(triton.cdiv(n, shares) for n in heads), -1 if inverse else 1)
    tensors = [x for pair in (work[0], work[-1]) for x in pair]
    steps = (stride // constants["UNIT"] for x in tensors for stride in _strides(x)[:3])
    dims = (x.stride(3) for x in tensors)
    return (token_blocks * shares, 1, 1), (*sizes, *steps, *dims, *position_steps(positions), *constants.values())


def position_steps(positions: Tensor) -> tuple[int, int, int]:
    """Return the strides of positions along batch, seq and axes. One row is for every row of the batch."""
    row, step, *axis = positions.stride()
    return 0 if positions.shape[0] == 1 else row, step, axis[0] if axis else 0


def _constants(work: Work, positions: Tensor, tables: Tables, layout: Layout) -> dict[str, Any]:
    """Return the constants for which the kernel is compiled, in order. None depends on the number of tokens."""
    x = work[0][0]
    pairs = tables.pairs()
    rest = 0 if all(x is out for x, out in work) else x.shape[3] - 2 * pairs
    block_r = min(triton.next_power_of_2(rest), max(2 * triton.next_power_of_2(pairs), 128)) if rest else 1
    return {
        "PAIRS": pairs,
        "REST": rest,
        "INTERLEAVED": layout == "interleaved",
        **angle_constants(positions, tables),
        "UNIT": unit([x for pair in work for x in pair]),
        **blocks(pairs, block_r, max(x.shape[1] for x, _ in work), TILE // x.element_size()),
    }


def angle_constants(positions: Tensor, tables: Tables) -> dict[str, Any]:
    """Return the constants of `token_angles`, in order."""
    return {
        "LEVELS": (2 if tables.levels <= 2 else 4) if tables.exact() else 0,
        "AXES": tables.axis_of_pair is not None and positions.ndim == 3,
        "ATTENTION_FACTOR": float(tables.attention_factor),
    }


def unit(tensors: Sequence[Tensor]) -> int:
    """Return the largest number of elements, up to 16 bytes, that divides every stride between heads and tokens."""
    strides = (stride for x in tensors for stride in _strides(x)[:3])
    return math.gcd(16 // max(x.element_size() for x in tensors), *strides)


def blocks(pairs: int, block_r: int, heads: int, elements: int) -> dict[str, int]:
    """Return tile sizes, all powers of two: heads x tokens x pairs with so many elements, or one token with more."""
    block_p = triton.next_power_of_2(pairs)
    rows = max(1, elements // max(2 * block_p, block_r))
    block_h = min(4, rows, triton.next_power_of_2(heads))
    block_t = min(rows // block_h, max(1, 1_024 // block_p))  # more angles do not fit into the registers
    return {"BLOCK_H": block_h, "BLOCK_T": block_t, "BLOCK_P": block_p, "BLOCK_R": block_r}


def programs_per_token(token_blocks: int, head_blocks: int) -> int:
    """Return the number of programs that share the heads of a token. Each of them computes the angles again."""
    programs = min(head_blocks, triton.cdiv(PROGRAMS, token_blocks))
    return triton.cdiv(head_blocks, triton.cdiv(head_blocks, programs))


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, with 0 for dimensions of one element, whose strides do not matter for alignment."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _is_interpreted() -> bool:
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
    """Rotate `BLOCK_T` tokens, counted over the rows of the batch, and a share of their heads (one program)."""
    i_program = tl.program_id(0)
    i_share, i_block = i_program % shares, i_program // shares
    o_token = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    m_token = o_token < num_tokens
    o_batch, o_seq = (o_token // seq).to(tl.int64), (o_token % seq).to(tl.int64)
    b_cos, b_sin = token_angles(
        q, positions, table, axis_of_pair, o_batch * position_batch + o_seq * position_seq, position_axis, m_token,
        PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
    )  # fmt: skip
    b_sin = b_sin * direction.to(b_sin.dtype)
    rotate_heads(
        q, (o_batch * q_batch + o_seq * q_seq) * UNIT, q_head, q_dim,
        out_q, (o_batch * out_q_batch + o_seq * out_q_seq) * UNIT, out_q_head, out_q_dim,
        m_token, i_share * q_share, tl.minimum(q_heads, (i_share + 1) * q_share), b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, UNIT, BLOCK_H, BLOCK_P, BLOCK_R,
    )  # fmt: skip
    rotate_heads(
        k, (o_batch * k_batch + o_seq * k_seq) * UNIT, k_head, k_dim,
        out_k, (o_batch * out_k_batch + o_seq * out_k_seq) * UNIT, out_k_head, out_k_dim,
        m_token, i_share * k_share, tl.minimum(k_heads, (i_share + 1) * k_share), b_cos, b_sin,
        PAIRS, REST, INTERLEAVED, UNIT, BLOCK_H, BLOCK_P, BLOCK_R,
    )  # fmt: skip


@triton.jit
@no_type_check
def token_angles(
    x, positions, table, axis_of_pair, o_position, position_axis, m_token,
    PAIRS: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr, ATTENTION_FACTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Return the cosine and sine ``[BLOCK_T, BLOCK_P]`` in float32, or in float64 for float64 `x`."""
    if LEVELS == 0:
        b_cos, b_sin = _rounded_angles(
            positions, table, axis_of_pair, o_position, position_axis, m_token, PAIRS, AXES, ATTENTION_FACTOR, BLOCK_P
        )
    else:
        b_cos, b_sin = _exact_angles(
            positions, table, axis_of_pair, o_position, position_axis, m_token,
            PAIRS, LEVELS, AXES, ATTENTION_FACTOR, BLOCK_T, BLOCK_P,
        )  # fmt: skip
    if x.dtype.element_ty == tl.float64:
        b_cos, b_sin = b_cos.to(tl.float64), b_sin.to(tl.float64)
    else:
        b_cos, b_sin = b_cos.to(tl.float32), b_sin.to(tl.float32)
    return b_cos, b_sin


@triton.jit
@no_type_check
def _exact_angles(
    positions, table, axis_of_pair, o_position, position_axis, m_token,
    PAIRS: tl.constexpr, LEVELS: tl.constexpr, AXES: tl.constexpr, ATTENTION_FACTOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Return float64 ``[BLOCK_T, BLOCK_P]``: the product of one row of the table for every byte of the position."""
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
    """Return float32 ``[BLOCK_T, BLOCK_P]``: cosine and sine of the rounded position times frequency, rounded."""
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
    """Return int64 indices ``[BLOCK_T, 1]``. With several axes, return one for each pair, from the axis of the pair."""
    if AXES:
        b_axis = tl.load(axis_of_pair + o_pair, mask=o_pair < PAIRS, other=0).to(tl.int64)
        p_index = positions + o_position[:, None] + b_axis[None, :] * position_axis
        b_index = tl.load(p_index, mask=m_pair, other=0)
    else:
        b_index = tl.load(positions + o_position, mask=m_token, other=0)[:, None]
    return b_index.to(tl.int64)


@triton.jit
@no_type_check
def rotate_heads(
    x, o_x, x_head, x_dim, out, o_out, out_head, out_dim, m_token, first, last, b_cos, b_sin,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotate heads `first` to `last` of some tokens, and copy the dimensions after the pairs."""
    b_cos, b_sin = b_cos[None, :, :], b_sin[None, :, :]
    x_step, out_step = x_head.to(tl.int64) * UNIT, out_head.to(tl.int64) * UNIT
    for i_head in range(first, last, BLOCK_H):
        o_head = i_head + tl.arange(0, BLOCK_H)
        m_row = (o_head < last)[:, None, None] & m_token[None, :, None]
        p_x = x + o_head.to(tl.int64)[:, None, None] * x_step + o_x[None, :, None]
        p_out = out + o_head.to(tl.int64)[:, None, None] * out_step + o_out[None, :, None]
        b_a, b_b = load_pairs(p_x, x_dim, m_row, None, b_cos.dtype, PAIRS, INTERLEAVED, BLOCK_P)
        b_first, b_second = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
        store_pairs(p_out, out_dim, m_row, b_first, b_second, PAIRS, INTERLEAVED, BLOCK_P)
        copy_dimensions(p_x, x_dim, p_out, out_dim, m_row, 2 * PAIRS, REST, BLOCK_R)


@triton.jit
@no_type_check
def load_pairs(
    p_x, x_dim, m_row, other, dtype: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Return the first and the second dimension of every pair of some rows, as two blocks. `p_x`: their addresses."""
    if INTERLEAVED:
        o_entry = tl.arange(0, 2 * BLOCK_P).to(tl.int64)[None, None, :]
        b_x = tl.load(p_x + o_entry * x_dim, mask=m_row & (o_entry < 2 * PAIRS), other=other).to(dtype)
        return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1], BLOCK_P, 2]))
    else:  # noqa: RET505  # without `else`, Triton would compile both branches
        o_pair = tl.arange(0, BLOCK_P).to(tl.int64)[None, None, :]
        m_pair = m_row & (o_pair < PAIRS)
        b_a = tl.load(p_x + o_pair * x_dim, mask=m_pair, other=other).to(dtype)
        return b_a, tl.load(p_x + (o_pair + PAIRS) * x_dim, mask=m_pair, other=other).to(dtype)


@triton.jit
@no_type_check
def store_pairs(p_out, out_dim, m_row, b_a, b_b, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """Store what `load_pairs` returns for rows at the addresses `p_out`."""
    dtype: tl.constexpr = p_out.dtype.element_ty
    if INTERLEAVED:
        o_entry = tl.arange(0, 2 * BLOCK_P).to(tl.int64)[None, None, :]
        b_x = tl.reshape(tl.join(b_a, b_b), [b_a.shape[0], b_a.shape[1], 2 * BLOCK_P])
        tl.store(p_out + o_entry * out_dim, b_x.to(dtype), mask=m_row & (o_entry < 2 * PAIRS))
    else:
        o_pair = tl.arange(0, BLOCK_P).to(tl.int64)[None, None, :]
        m_pair = m_row & (o_pair < PAIRS)
        tl.store(p_out + o_pair * out_dim, b_a.to(dtype), mask=m_pair)
        tl.store(p_out + (o_pair + PAIRS) * out_dim, b_b.to(dtype), mask=m_pair)


@triton.jit
@no_type_check
def copy_dimensions(p_x, x_dim, p_out, out_dim, m_row, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `COUNT` dimensions of some rows, from the dimension `FIRST` on."""
    for i_dim in tl.static_range(0, COUNT, BLOCK):
        o_dim = i_dim + tl.arange(0, BLOCK).to(tl.int64)[None, None, :]
        m_dim = m_row & (o_dim < COUNT)
        b_x = tl.load(p_x + (FIRST + o_dim) * x_dim, mask=m_dim)
        tl.store(p_out + (FIRST + o_dim) * out_dim, b_x, mask=m_dim)
