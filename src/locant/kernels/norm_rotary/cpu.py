"""The norm and the rotation on a CPU, by ``native/norm_rotary.c``, if this kernel supports the tensors.

It is one call with one parallel region. It has the bits of the reference, because it adds the squares of a row in the
order in which torch does on this machine. torch's order depends on the width of its vectors, so `sum_lanes` compares
sums. The order does not depend on strides, lengths, batches or threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from locant.kernels import native
from locant.kernels.norm_rotary import reference
from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary import cpu as rotary
from locant.kernels.rotary.reference import Layout, Tables
from locant.spelling import dtype_name

FORWARD = "locant_norm_rotate"
BACKWARD = "locant_norm_rotate_back"
LANES = (16, 8, 4)
"""The numbers of float32 numbers in a vector, for which the native kernel has an order of sums."""

pack_task = struct.Struct("=q3qd8q10q").pack
"""``NormTask`` in C without its last field, the task of the rotation."""
pack_back_task = struct.Struct("=3qd8q10q").pack
"""``BackTask`` in C without its last field."""
SUM_TYPES = ctypes.c_float, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
WITHOUT_NORM = (16, 0, 0, 0.0, *(0,) * 8)
WITHOUT_COPY = (0,) * 10


def why_not_native(q: Tensor, positions: Tensor, tables: Tables, norm: HeadNorm | None) -> str | None:
    """Return the reason why the native kernel does not support these tensors, or ``None``."""
    reason = rotary.why_not_native(q, positions, tables)
    if reason is not None or norm is None:
        return reason
    if sum_lanes() is None:
        return "torch adds numbers in an order that the native kernel does not have"
    for weight in (norm.q_weight, norm.k_weight):
        if weight is not None and not (weight.is_cpu and weight.dtype in native.DTYPES and native.is_in_rows(weight)):
            return f"a weight is {dtype_name(weight.dtype)} on {weight.device}, or not contiguous in memory"
    return None


@functools.cache
def sum_lanes() -> int | None:
    """Return the width of vectors with which torch's sums have the bits of the native kernel, or ``None``."""
    rows = torch.arange(3 * 1_024, dtype=torch.float64, device="cpu").sin().float().view(3, 1_024)
    expected = rows.pow(2).sum(-1).tolist()
    function = native.function("locant_sum_of_squares")
    function.restype, function.argtypes = SUM_TYPES
    for lanes in LANES:
        if [function(row.data_ptr(), row.numel(), lanes) for row in rows] == expected:
            return lanes
    return None


def norm_and_rotate_(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None,
    v: Tensor | None = None, out_v: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the rotated norms into `out_q` and `out_k`, and `v` into `out_v`. `__init__.py` describes the arguments."""
    written = [x for x in (out_q, out_k, out_v) if x is not None]
    if not all(map(native.is_in_rows, [x for x in (k, v) if x is not None] + written)):
        reference.norm_and_rotate_(q, k, out_q, out_k, positions, tables, layout, norm, v, out_v)
        return
    increment_version(written)  # torch's graph does not see that the kernel writes to them
    if tables.exact():
        _write(q, k, out_q, out_k, v, out_v, positions, tables, layout, norm, None)
        return
    tensors = (q, k, out_q, out_k, v, out_v)
    for some, part, angles in rotary.parts_with_angles(tensors, positions, tables, q.dtype, False):
        _write(*some, part, tables, layout, norm, angles)  # type: ignore[arg-type]  # q is a tensor


def _write(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None, v: Tensor | None, out_v: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm | None, angles: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    copy = WITHOUT_COPY
    if v is not None and out_v is not None:
        copy = (v.shape[3] * v.element_size(), *rotary.steps_of(v, out_v), v.data_ptr(), out_v.data_ptr())
    numbers = WITHOUT_NORM if norm is None else _numbers(norm, k)
    task = rotary.pack_task(q, k, out_q, out_k, positions, tables, layout, False, angles)
    _require_memory(native.function(FORWARD)(pack_task(norm is not None, *numbers, *copy) + task))


def norm_and_rotate_backward(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k and both weights. `__init__.py` describes the arguments."""
    if not all(native.is_in_rows(x) for x in (q, k, grad_q, grad_k) if x is not None):
        return reference.norm_and_rotate_backward(grad_q, grad_k, q, k, positions, tables, layout, norm)
    dq = torch.empty_like(q)
    dk = None if k is None or grad_k is None else torch.empty_like(k)
    q_weight, k_weight = (
        None if weight is None or grad is None else torch.zeros(weight.shape, dtype=torch.float64, device="cpu")
        for weight, grad in ((norm.q_weight, dq), (norm.k_weight, dk))
    )
    if tables.exact():
        _write_back(grad_q, grad_k, dq, dk, q, k, q_weight, k_weight, positions, tables, layout, norm, None)
    else:
        tensors = (grad_q, grad_k, dq, dk, q, k)
        for some, part, angles in rotary.parts_with_angles(tensors, positions, tables, q.dtype, True):
            sums = [None if x is None else torch.empty_like(x) for x in (q_weight, k_weight)]
            _write_back(*some, *sums, part, tables, layout, norm, angles)  # type: ignore[arg-type]  # q is a tensor
            for total, part_sum in zip((q_weight, k_weight), sums, strict=True):
                if total is not None and part_sum is not None:
                    total.add_(part_sum)
    dq_weight, dk_weight = (
        None if total is None or weight is None else total.to(weight.dtype)
        for total, weight in ((q_weight, norm.q_weight), (k_weight, norm.k_weight))
    )
    return dq, dk, dq_weight, dk_weight


def _write_back(
    grad_q: Tensor, grad_k: Tensor | None, dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None,
    positions: Tensor, tables: Tables, layout: Layout, norm: HeadNorm, angles: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    steps = [
        0 if x is None else x.element_size() * stride for x in (q, k) for stride in (q if x is None else x).stride()[:3]
    ]
    pointers = [0 if x is None else x.data_ptr() for x in (q, k, q_weight, k_weight)]
    k = k if dk is not None else None
    task = rotary.pack_task(grad_q, grad_k, dq, dk, positions, tables, layout, True, angles)
    _require_memory(native.function(BACKWARD)(pack_back_task(*_numbers(norm, dk), *steps, *pointers) + task))


def _numbers(norm: HeadNorm, k: Tensor | None) -> tuple[Any, ...]:
    """Return ``Norm`` in C."""
    q_weight, k_weight = norm.q_weight, None if k is None else norm.k_weight
    settings = sum_lanes() or 0, norm.round_before_weight, norm.plus_one, norm.eps
    return (*settings, *_weight(q_weight), *_weight(k_weight))


def _weight(weight: Tensor | None) -> tuple[int, int, int, int]:
    if weight is None:
        return 0, 0, 0, 0
    return weight.data_ptr(), native.DTYPES[weight.dtype], weight.element_size(), weight.shape[0]


def _require_memory(failed: int) -> None:
    if failed:
        raise MemoryError("there is not enough memory for the norm of queries and keys")
