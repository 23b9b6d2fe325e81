"""The rotation on a CPU by ``native/rotary.c``: what it takes, and how it is told.

One call for q and k, with one parallel region of torch's own threads; small tensors start none. Exact angles are made
in C from the tables of bytes. In float32 mode cosines and sines are torch's, some tokens at a time: no other function
has their bits.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels import native
from locant.kernels.rotary import cpu
from locant.kernels.rotary.reference import Layout, Tables, cos_sin

__all__ = ["rotate_", "unsupported"]

FUNCTION = "locant_rotate"
MOST_PAIRS = 8_192
"""``BLOCK_ANGLES`` in C: the angles of one token have to fit."""
ANGLES = 2**18
"""Angles of float32 mode made at a time: 1 MiB each of cosines and sines."""

pack = struct.Struct("=16qd20q").pack
"""``Task`` in C."""
ABSENT = (0,) * 7


def unsupported(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Why these tensors cannot be rotated by it, or ``None``."""
    if native.function(FUNCTION) is None:
        return f"native kernels are {native.status()}"
    if q.dtype not in native.DTYPES:
        return f"there is no native kernel for {q.dtype}"
    if tables.pairs() > MOST_PAIRS:
        return f"there are more than {MOST_PAIRS} pairs"
    if tables.in_two_floats():
        return "the tables are those of a device without float64"
    if positions.dtype != torch.int64 or not positions.is_cpu or not tables.table.is_cpu:
        return "positions are not int64, or not all tensors are on a CPU"
    return None if native.is_in_rows(q) else "the elements of a head do not lie side by side in memory"


def rotate_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    tables: Tables,
    layout: Layout,
    rotary_dim: int,
    out_q: Tensor,
    out_k: Tensor | None,
    inverse: bool = False,
) -> None:
    """Write the rotated `q` and `k` into `out_q` and `out_k`, which may be `q` and `k` themselves."""
    is_k_read = k is None or (k.dtype == q.dtype and native.is_in_rows(k))
    if not is_k_read or out_q.stride(3) != 1 or (out_k is not None and out_k.stride(3) != 1):
        cpu.rotate_(q, k, positions, tables, layout, rotary_dim, out_q, out_k, inverse)
        return
    if out_q is q:
        increment_version(q if k is None else (q, k))  # torch's graph does not see them written to
    if tables.exact():
        _call(q, k, positions, tables, None, layout, out_q, out_k, inverse)
        return
    step = max(ANGLES // max(positions.shape[0] * tables.pairs(), 1), 1)
    for first in range(0, positions.shape[1], step):
        at = slice(first, first + step)
        cos, sin = cos_sin(positions[:, at], tables, torch.promote_types(q.dtype, torch.float32))
        angles = cos.contiguous(), (-sin if inverse else sin).contiguous()
        of_k = None if k is None else k[:, :, at], None if out_k is None else out_k[:, :, at]
        _call(q[:, :, at], of_k[0], positions[:, at], tables, angles, layout, out_q[:, :, at], of_k[1], inverse)


def _call(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    tables: Tables,
    angles: tuple[Tensor, Tensor] | None,
    layout: Layout,
    out_q: Tensor,
    out_k: Tensor | None,
    inverse: bool,
) -> None:
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
