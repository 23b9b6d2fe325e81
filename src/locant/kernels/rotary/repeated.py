"""The rotation of the same positions once more: in every layer of a forward pass without gradients, on a CPU.

One token is rotated in fewer microseconds than it takes to find out how. So that is kept by shapes, strides and dtypes,
one comparison for all of them, with the arguments of the native kernel. That makes exact angles itself, in no time that
could be seen (40 heads, 1 to 4 096 tokens), also of positions that are overwritten. Angles of float32 mode, and all of
them where there is no native kernel, are made once and kept, where there are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels.native import is_in_rows, threads
from locant.kernels.rotary import cpu, native
from locant.kernels.rotary.choice import choose_kernel
from locant.kernels.rotary.inplace import require_writable
from locant.kernels.rotary.reference import Layout, cos_sin
from locant.kernels.rotary.tables import Tables

__all__ = ["Repeated"]

MOST_ANGLES = 2**18
"""Angles that are kept: 1 MiB each of cosines and sines in float32."""

Pair = tuple[Tensor, Tensor]


class Repeated:
    """One set of positions that is rotated by one table.

    Args:
        positions, tables: as in `rotate`.
        is_fixed: whether the positions are known never to be overwritten.
    """

    def __init__(self, positions: Tensor, tables: Tables, is_fixed: bool) -> None:
        self._positions = positions
        self._tables = tables
        self._is_counted = not is_fixed and not positions.is_inference()
        self._keeps_angles = is_fixed or self._is_counted
        self._version = self._writes()
        self._known: dict[tuple[Any, ...], tuple[bytes | None, Pair | None]] = {}

    def rotate(self, q: Tensor, k: Tensor, layout: Layout, inplace: bool) -> Pair | None:
        """Both rotated, or ``None`` of tensors that nothing is known about."""
        if type(q) is not Tensor or type(k) is not Tensor or self._writes() != self._version:
            return None
        known = self._known.get(_kind(q, k, layout, inplace))
        if known is None or (inplace and require_writable(q, k)) or not (_has_memory(q) and _has_memory(k)):
            return None
        packed, angles = known
        out_q, out_k = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
        if packed is None:
            rotary_dim = 2 * self._tables.pairs()
            cpu.rotate_(q, k, self._positions, self._tables, layout, rotary_dim, out_q, out_k, angles=angles)
            return out_q, out_k
        if inplace:
            increment_version((q, k))  # torch does not see them written to
        native.call(packed, q, k, out_q, out_k)
        return out_q, out_k

    def learn(self, q: Tensor, k: Tensor, layout: Layout, inplace: bool) -> None:
        """Find out how such tensors are rotated, which just were."""
        if type(q) is not Tensor or type(k) is not Tensor or not (q.is_cpu and k.is_cpu):
            return
        if self._writes() != self._version:
            self._known, self._version = {}, self._writes()
        of, exact = (self._positions, self._tables), self._tables.exact()
        out_q, out_k = (q, k) if inplace else (torch.empty_like(q), torch.empty_like(k))
        by_native = choose_kernel(q, *of).kernel == "native" and all(map(is_in_rows, (k, out_q, out_k)))
        angles = None if by_native and exact else self._angles(q.dtype)
        if angles is None and not (by_native and exact):
            return
        packed = native.packed(q, k, *of, angles, layout, out_q, out_k, False) if by_native else None
        self._known[_kind(q, k, layout, inplace)] = packed, angles

    def _angles(self, dtype: torch.dtype) -> Pair | None:
        """Cosines and sines, if they may be kept."""
        number = self._positions.shape[0] * self._positions.shape[1] * self._tables.pairs()
        if not self._keeps_angles or number > MOST_ANGLES:
            return None
        cos, sin = cos_sin(self._positions, self._tables, torch.promote_types(dtype, torch.float32))
        return cos.contiguous(), sin.contiguous()

    def _writes(self) -> int:
        """How often the positions were written to, as far as torch counts it."""
        return self._positions._version if self._is_counted else 0


def _kind(q: Tensor, k: Tensor, layout: Layout, inplace: bool) -> tuple[Any, ...]:
    """All that may change without another address."""
    of_q, of_k = (q.shape, q.stride(), q.dtype, q.is_cpu), (k.shape, k.stride(), k.dtype, k.is_cpu)
    return of_q, of_k, layout, inplace, threads()


def _has_memory(x: Tensor) -> bool:
    """Not of zeros that torch keeps without memory, nor of numbers that it keeps negated."""
    return x.data_ptr() != 0 and not x.is_neg()
