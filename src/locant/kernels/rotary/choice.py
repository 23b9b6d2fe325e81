"""Choose the kernel that rotates some tensors, and state the reason. No other file makes this choice."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int

from locant.kernels.rotary import cpu
from locant.kernels.rotary.reference import Tables


class KernelChoice(NamedTuple):
    """The kernel for some tensors, and the reason for it or against a faster kernel."""

    kernel: Literal["native", "cpu", "triton", "reference"]
    why: str


def choose_kernel(
    q: Float[torch.Tensor, "batch heads seq head_dim"],
    positions: Int[torch.Tensor, "#batch seq"] | Int[torch.Tensor, "#batch seq axes"],
    tables: Tables,
) -> KernelChoice:
    """Return the fastest kernel that supports these tensors.

    >>> q = torch.ones(1, 1, 1, 2, device="meta")
    >>> choose_kernel(q, torch.zeros(1, 1, dtype=torch.int64), Tables(torch.ones(1)))
    KernelChoice(kernel='reference', why='there is no kernel for meta')
    """
    if q.device.type == "cpu":
        reason = cpu.why_not_native(q, positions, tables)
        return KernelChoice("native", "q is on a CPU") if reason is None else KernelChoice("cpu", reason)
    if q.device.type != "cuda":
        return KernelChoice("reference", f"there is no kernel for {q.device.type}")
    if not _has_triton():
        return KernelChoice("reference", "triton is not installed")
    from locant.kernels.rotary import triton

    reason = triton.why_not_triton(q, positions, tables)
    return KernelChoice("triton", "q is on a GPU") if reason is None else KernelChoice("reference", reason)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
