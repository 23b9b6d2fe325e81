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
from locant.kernels.rotary.reference import Layout, cos_sin
from locant.kernels.rotary.tables import Tables

__all__ = ["call", "packed", "rotate_", "unsupported"]

FUNCTION = "locant_rotate"
MOST_PAIRS = 8_192
"""``BLOCK_ANGLES`` in C: the angles of one token have to fit."""
ANGLES = 2**18
"""Angles of float32 mode made at a time: 1 MiB each of cosines and sines."""

pack = struct.Struct("=16qd16q").pack
"""``Task`` in C, but for the addresses at its end."""
pack_places = struct.Struct("=4q").pack
ABSENT = (0,) * 7


def unsupported(q: Tensor, positions: Tensor, tables: Tables) -> str | None:
    """Why these tensors cannot be rotated by it, or ``None``."""
    if native.function(FUNCTION) is None:
        return f"native kernels are {native.status()}"
    if q.dtype not in native.DTYPES:
        return f"there is no native kernel for {q.dtype}"
    if tables.pairs() > MOST_PAIRS:
        return f"there are more than {MOST_PAIRS} pairs"
    table, axis = tables.table, tables.axis_of_pair
    dense = table.is_contiguous() and (axis is None or axis.is_contiguous())
    if not dense or table.dtype != (torch.float64 if tables.exact() else torch.float32):
        return "the tables are of another dtype, or not contiguous"
    if positions.dtype != torch.int64 or not positions.is_cpu or not table.is_cpu:
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
    angles: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the rotated `q` and `k` into `out_q` and `out_k`, which may be `q` and `k` themselves."""
    others = (out_q,) if k is None or out_k is None else (out_q, k, out_k)
    if not all(x.dtype == q.dtype and native.is_in_rows(x) for x in others):
        cpu.rotate_(q, k, positions, tables, layout, rotary_dim, out_q, out_k, inverse, angles)
        return
    increment_version(out_q)  # torch does not see it written to, and its graph has to know
    if out_k is not None:
        increment_version(out_k)
    if angles is None and tables.exact():
        call(packed(q, k, positions, tables, None, layout, out_q, out_k, inverse), q, k, out_q, out_k)
        return
    step = max(ANGLES // max(positions.shape[0] * tables.pairs(), 1), 1)
    for first in range(0, positions.shape[1], step):
        at = slice(first, first + step)
        some_k, some_out_k = None if k is None else k[:, :, at], None if out_k is None else out_k[:, :, at]
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos_sin(positions[:, at], tables, dtype) if angles is None else (x[:, at] for x in angles)
        made = cos.contiguous(), (-sin if inverse else sin).contiguous()
        part = packed(q[:, :, at], some_k, positions[:, at], tables, made, layout, out_q[:, :, at], some_out_k, inverse)
        call(part, q[:, :, at], some_k, out_q[:, :, at], some_out_k)


def packed(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    tables: Tables,
    angles: tuple[Tensor, Tensor] | None,
    layout: Layout,
    out_q: Tensor,
    out_k: Tensor | None,
    inverse: bool,
) -> bytes:
    """What C is told but for the addresses of q and k: the same for all tensors of these shapes, strides and dtypes.

    `angles`: contiguous cosines and sines that are made already, of the inverse where that is wanted. They, the tables
    and the positions have to be kept until the call.
    """
    table, levels, factor, axis = tables
    cos, sin = (0, 0) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
    steps = positions.stride()
    batch, _, seq, head_dim = q.shape
    return pack(
        native.threads(), native.DTYPES[q.dtype], layout == "interleaved", inverse,
        batch, seq, head_dim, tables.pairs(),
        positions.data_ptr(), positions.shape[0], steps[0], steps[1], 0 if axis is None else steps[2],
        0 if axis is None else axis.data_ptr(), table.data_ptr(), levels, factor, cos, sin,
        *_steps(q, out_q), *(ABSENT if k is None or out_k is None else _steps(k, out_k)),
    )  # fmt: skip


def call(packed: bytes, q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None) -> None:
    """Rotate tensors for which the rest is packed."""
    of_k = (0, 0) if k is None or out_k is None else (k.data_ptr(), out_k.data_ptr())
    native.function(FUNCTION)(packed + pack_places(q.data_ptr(), out_q.data_ptr(), *of_k))


def _steps(x: Tensor, out: Tensor) -> tuple[int, ...]:
    """``Tensor`` in C: heads, and steps along batch, heads and seq in bytes."""
    size, (batch, head, seq, _), (out_batch, out_head, out_seq, _) = x.element_size(), x.stride(), out.stride()
    return x.shape[1], size * batch, size * head, size * seq, size * out_batch, size * out_head, size * out_seq
