"""The rotation on a CPU: by ``native/rotary.c`` where there is such a kernel for these tensors, else by torch's loops.

Both give the bits of the reference, every product being rounded before the sum is, and nothing of the size of q is
allocated but the result, and nothing at all in place.

The native kernel is one call for q and k, with one parallel region of torch's own threads; small tensors start none.
Exact angles are made in C from the tables of bytes. In float32 mode cosines and sines are torch's, some tokens at a
time: no other function has their bits.

torch's loops go over blocks that stay in cache. Every element is multiplied by its sine and by its cosine, in two
passes over the block, and two over half of it each put the products together. Half precision is widened and narrowed
block by block.
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
"""``BLOCK_ANGLES`` in C: the angles of one token have to fit."""
NATIVE_ANGLES = 2**18
"""Angles of float32 mode made at a time for the native kernel: 1 MiB each of cosines and sines."""
ANGLES = 2**17
"""Angles made at a time for torch's loops: 1 MiB each of cosines and sines in float64."""
BLOCK = 2**19
"""Elements rotated at a time: 2 MiB of float32. A fourth of it takes 1.4 times as long: threads start and stop."""

pack = struct.Struct("=16qd20q").pack
"""``Task`` in C."""
ABSENT = (0,) * 7


def why_not_native(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Why these tensors cannot be rotated by the native kernel, or ``None``."""
    if native.function(FUNCTION) is None:
        return f"native kernels are {native.status()}"
    if q.dtype not in native.DTYPES:
        return f"there is no native kernel for {dtype_name(q.dtype)}"
    if tables.pairs() > MOST_PAIRS:
        return f"there are more than {MOST_PAIRS} pairs"
    if tables.in_two_floats():
        return "the tables are those of a device without float64"
    if positions.dtype != torch.int64 or not positions.is_cpu or not tables.table.is_cpu:
        return "positions are not int64, or not all tensors are on a CPU"
    return None if native.is_in_rows(q) else "the elements of a head do not lie side by side in memory"


def rotate_natively_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool,
) -> None:  # fmt: skip
    """Write the rotated `q` and `k` into `out_q` and `out_k`; where these have strides of another kind, by torch."""
    is_k_read = k is None or (k.dtype == q.dtype and native.is_in_rows(k))
    if not is_k_read or out_q.stride(3) != 1 or (out_k is not None and out_k.stride(3) != 1):
        rotate_by_torch_(q, k, out_q, out_k, positions, tables, layout, inverse)
        return
    if out_q is q:
        increment_version(q if k is None else (q, k))  # torch's graph does not see them written to
    if tables.exact():
        _call(q, k, out_q, out_k, positions, tables, layout, inverse, None)
        return
    step = max(NATIVE_ANGLES // max(positions.shape[0] * tables.pairs(), 1), 1)
    for first in range(0, positions.shape[1], step):
        at = slice(first, first + step)
        cos, sin = cos_sin(positions[:, at], tables, torch.promote_types(q.dtype, torch.float32))
        angles = cos.contiguous(), (-sin if inverse else sin).contiguous()
        of_k, onto_k = (None if x is None else x[:, :, at] for x in (k, out_k))
        _call(q[:, :, at], of_k, out_q[:, :, at], onto_k, positions[:, at], tables, layout, inverse, angles)


def _call(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, inverse: bool, angles: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """`angles`: contiguous cosines and sines that are made already, of the inverse where that is wanted."""
    table, levels, factor, axis = tables
    cos, sin = (0, 0) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
    steps = positions.stride()
    batch, _, seq, head_dim = q.shape
    of_k = ABSENT if k is None or out_k is None else _steps(k, out_k)
    places = q.data_ptr(), out_q.data_ptr(), 0 if k is None else k.data_ptr(), 0 if out_k is None else out_k.data_ptr()
    native.function(FUNCTION)(pack(
        native.threads(), native.DTYPES[q.dtype], layout == "interleaved", inverse,
        batch, seq, head_dim, tables.pairs(),
        positions.data_ptr(), positions.shape[0], steps[0], steps[1], 0 if axis is None else steps[2],
        0 if axis is None else axis.data_ptr(), table.data_ptr(), levels, factor, cos, sin,
        *_steps(q, out_q), *of_k, *places,
    ))  # fmt: skip


def _steps(x: Tensor, out: Tensor) -> tuple[int, ...]:
    """``Tensor`` in C: heads, and steps along batch, heads and seq in bytes."""
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
    for tokens in _cut(positions.shape[1] if work else 0, ANGLES // (positions.shape[0] * tables.pairs())):
        cos, sin = cos_sin(positions[:, tokens], tables, dtype)
        cos, sin = _twice(cos, layout), _twice(-sin if inverse else sin, layout)
        for x, out in work:
            _rotate_tokens(x[:, :, tokens], out[:, :, tokens], cos, sin, layout)


def _cut(length: int, step: int) -> Iterator[slice]:
    """``0:length`` in parts of `step`."""
    step = max(step, 1)
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _twice(part: Tensor, layout: Layout) -> Tensor:
    """Cosines or sines where the first of each pair lies, and where its second does: ``rows 1 seq rotary_dim``."""
    return (torch.cat((part, part), -1) if layout == "half" else part.repeat_interleave(2, -1))[:, None]


def _rotate_tokens(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    """Some sequences and heads at a time; the result may lie where the input does."""
    batch, heads, length, dim = x.shape
    shared = cos.shape[0] == 1
    for rows in _cut(batch, BLOCK // (heads * length * dim)):
        of_rows = slice(None) if shared else rows
        for some in _cut(heads, BLOCK // (length * dim)):
            wide, into = x[rows, some].to(cos.dtype), out[rows, some]
            result = into if into.dtype == cos.dtype else wide
            a_sin, b_sin = _parts(wide * sin[of_rows], layout)
            a, b = _parts(torch.mul(wide, cos[of_rows], out=result), layout)
            a.sub_(b_sin)
            b.add_(a_sin)
            if result is not into:
                into.copy_(result)


def _parts(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
