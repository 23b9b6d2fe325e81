"""The rotation on a CPU: by ``native/rotary.c`` if this kernel supports the tensors, otherwise by torch's loops.

Both give the bits of the reference, because every product is rounded before it is added. They allocate memory of the
size of q only for the result, and not in place.

The native kernel is one call for q and k, with one parallel region of torch's own threads. Small tensors do not start
threads. C code computes exact angles from the tables of bytes. In float32 mode torch computes cosines and sines, for
some tokens at a time, because other functions give other bits.

torch's loops iterate over blocks that fit into the cache. Two passes over a block multiply every element by its sine
and by its cosine. Two more passes, each over half of the block, combine the products. Half precision is converted block
by block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels import native
from locant.kernels.rotary.reference import Layout, Tables, cos_sin
from locant.spelling import dtype_name

FUNCTION = "locant_rotate"
MOST_PAIRS = 8_192
"""``BLOCK_ANGLES`` in C. The angles of one token must fit into it."""
NATIVE_ANGLES = 2**18
"""Angles to compute at a time for the native kernel in float32 mode: 1 MiB each of cosines and sines."""
ANGLES = 2**17
"""Angles to compute at a time for torch's loops: 1 MiB each of cosines and sines in float64."""
BLOCK = 2**19
"""Elements to rotate at a time: 2 MiB of float32. A quarter takes 1.4 times as long, because threads start and stop."""

pack = struct.Struct("=16qd20q").pack
"""``Task`` in C."""
ABSENT = (0,) * 7


def why_not_native(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Return the reason why the native kernel does not support these tensors, or ``None``."""
    if native.function(FUNCTION) is None:
        return f"native kernels are {native.status()}"
    if q.dtype not in native.DTYPES:
        return f"there is no native kernel for {dtype_name(q.dtype)}"
    if tables.pairs() > MOST_PAIRS:
        return f"there are more than {MOST_PAIRS} pairs"
    if tables.in_two_floats():
        return "the tables are for a device without float64"
    if positions.dtype != torch.int64 or not positions.is_cpu or not tables.table.is_cpu:
        return "positions are not int64, or not all tensors are on a CPU"
    return None if native.is_in_rows(q) else "the elements of a head are not contiguous in memory"


def rotate_natively_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool,
) -> None:  # fmt: skip
    """Write the rotated `q` and `k` into `out_q` and `out_k`. For unsupported strides, use torch's loops."""
    supports_k = k is None or (k.dtype == q.dtype and native.is_in_rows(k))
    if not supports_k or out_q.stride(3) != 1 or (out_k is not None and out_k.stride(3) != 1):
        rotate_by_torch_(q, k, out_q, out_k, positions, tables, layout, inverse)
        return
    if out_q is q:
        increment_version(q if k is None else (q, k))  # torch's graph does not see that the kernel writes to them
    if tables.exact():
        native.function(FUNCTION)(pack_task(q, k, out_q, out_k, positions, tables, layout, inverse, None))
        return
    for tensors, some, angles in parts_with_angles((q, k, out_q, out_k), positions, tables, q.dtype, inverse):
        native.function(FUNCTION)(pack_task(*tensors, some, tables, layout, inverse, angles))  # type: ignore[arg-type]  # q is a tensor


def parts_with_angles(
    tensors: tuple[Tensor | None, ...], positions: Tensor, tables: Tables, dtype: torch.dtype, inverse: bool
) -> Iterator[tuple[tuple[Tensor | None, ...], Tensor, tuple[Tensor, Tensor]]]:
    """Yield parts of the tokens for tables in float32 mode: tensors, positions, and contiguous cosines and sines."""
    dtype = torch.promote_types(dtype, torch.float32)
    step = NATIVE_ANGLES // max(positions.shape[0] * tables.pairs(), 1)
    parts = [(tensors, positions)]
    if positions.shape[1] > max(step, 1):
        slices = _slices(positions.shape[1], step)
        parts = ((tuple(None if x is None else x[:, :, each] for x in tensors), positions[:, each]) for each in slices)
    for some, part in parts:
        cos, sin = cos_sin(part, tables, dtype)
        yield some, part, (cos.contiguous(), (-sin if inverse else sin).contiguous())


def pack_task(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool, angles: tuple[Tensor, Tensor] | None,
) -> bytes:  # fmt: skip
    """Return ``Task`` in C. `angles` are contiguous cosines and sines, with the sign of the inverse if needed."""
    table, levels, factor, axis = tables
    cos, sin = (0, 0) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
    steps = positions.stride()
    batch, _, seq, head_dim = q.shape
    k_steps = ABSENT if k is None or out_k is None else steps_of(k, out_k)
    k_pointers = 0 if k is None else k.data_ptr(), 0 if out_k is None else out_k.data_ptr()
    return pack(
        native.threads(), native.DTYPES[q.dtype], layout == "interleaved", inverse,
        batch, seq, head_dim, tables.pairs(),
        positions.data_ptr(), positions.shape[0], steps[0], steps[1], 0 if axis is None else steps[2],
        0 if axis is None else axis.data_ptr(), table.data_ptr(), levels, factor, cos, sin,
        *steps_of(q, out_q), *k_steps, q.data_ptr(), out_q.data_ptr(), *k_pointers,
    )  # fmt: skip


def steps_of(x: Tensor, out: Tensor) -> tuple[int, ...]:
    """Return the fields of ``Tensor`` in C: heads, and steps along batch, heads and seq in bytes."""
    size, (batch, head, seq, _), (out_batch, out_head, out_seq, _) = x.element_size(), x.stride(), out.stride()
    return x.shape[1], size * batch, size * head, size * seq, size * out_batch, size * out_head, size * out_seq


# ---------------------------------------------------------------------- torch's loops


def rotate_by_torch_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool,
) -> None:  # fmt: skip
    """Write the rotated `q` and `k` into `out_q` and `out_k`."""
    rotary_dim = 2 * tables.pairs()
    work = [(q, out_q)] if k is None or out_k is None else [(q, out_q), (k, out_k)]
    work = [(x, out) for x, out in work if x.numel()]
    for x, out in work:
        if out is not x:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    work = [(x[..., :rotary_dim], out[..., :rotary_dim]) for x, out in work]
    dtype = torch.promote_types(q.dtype, torch.float32)
    for tokens in _slices(positions.shape[1] if work else 0, ANGLES // (positions.shape[0] * tables.pairs())):
        cos, sin = cos_sin(positions[:, tokens], tables, dtype)
        cos, sin = _repeat_for_pairs(cos, layout), _repeat_for_pairs(-sin if inverse else sin, layout)
        for x, out in work:
            _rotate_tokens(x[:, :, tokens], out[:, :, tokens], cos, sin, layout)


def _slices(length: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` elements that cover ``0:length``."""
    step = max(step, 1)
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _repeat_for_pairs(part: Tensor, layout: Layout) -> Tensor:
    """Repeat cosines or sines for both dimensions of each pair: ``rows 1 seq rotary_dim``."""
    return (torch.cat((part, part), -1) if layout == "half" else part.repeat_interleave(2, -1))[:, None]


def _rotate_tokens(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Rotate some sequences and heads at a time. `out` may be `x`."""
    batch, heads, length, dim = x.shape
    is_shared = cos.shape[0] == 1
    for rows in _slices(batch, BLOCK // (heads * length * dim)):
        angle_rows = slice(None) if is_shared else rows
        for part in _slices(heads, BLOCK // (length * dim)):
            wide, target = x[rows, part].to(cos.dtype), out[rows, part]
            result = target if target.dtype == cos.dtype else wide
            a_sin, b_sin = _split_pairs(wide * sin[angle_rows], layout)
            a, b = _split_pairs(torch.mul(wide, cos[angle_rows], out=result), layout)
            a.sub_(b_sin)
            b.add_(a_sin)
            if result is not target:
                target.copy_(result)


def _split_pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the first and the second dimension of every pair."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
