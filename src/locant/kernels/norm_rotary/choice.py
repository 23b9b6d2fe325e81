"""Choose the kernel that norms and rotates some tensors, and state the reason. No other file makes this choice."""

from __future__ import annotations

from torch import Tensor

from locant.kernels import rotary
from locant.kernels.norm_rotary import cpu
from locant.kernels.norm_rotary.head_norm import HeadNorm
from locant.kernels.rotary.choice import KernelChoice
from locant.kernels.rotary.reference import Tables


def choose_kernel(q: Tensor, positions: Tensor, tables: Tables, norm: HeadNorm | None) -> KernelChoice:
    """Return the fastest kernel that supports these tensors.

    >>> import torch
    >>> q = torch.ones(1, 1, 1, 2, device="meta")
    >>> choose_kernel(q, torch.zeros(1, 1, dtype=torch.int64), Tables(torch.ones(1)), HeadNorm(None, None))
    KernelChoice(kernel='reference', why='there is no kernel for meta')
    """
    if not q.is_cpu:
        return rotary.choose_kernel(q, positions, tables)  # Triton supports the norm of all that it can rotate
    reason = cpu.why_not_native(q, positions, tables, norm)
    return KernelChoice("native", "q is on a CPU") if reason is None else KernelChoice("reference", reason)
