"""Which kernel rotates some tensors, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.available import has_triton
from locant.kernels.rotary.tables import Tables

__all__ = ["Choice", "choose_kernel"]


class Choice(NamedTuple):
    """Which kernel rotates some tensors, and why not a faster one."""

    kernel: Literal["native", "cpu", "triton", "reference"]
    why: str


def choose_kernel(
    q: Float[Tensor, "batch heads seq head_dim"],
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
) -> Choice:
    """The fastest kernel that can rotate these tensors.

    >>> import torch
    >>> q = torch.ones(1, 1, 1, 2, device="meta")
    >>> choose_kernel(q, torch.zeros(1, 1, dtype=torch.int64), Tables(torch.ones(1)))
    Choice(kernel='reference', why='there is no kernel for meta')
    """
    if q.device.type == "cpu":
        from locant.kernels.rotary import native

        reason = native.unsupported(q, positions, tables)
        return Choice("native", "q is on a CPU") if reason is None else Choice("cpu", reason)
    if q.device.type != "cuda":
        return Choice("reference", f"there is no kernel for {q.device.type}")
    if not has_triton():
        return Choice("reference", "triton is not installed")
    from locant.kernels.rotary import triton

    reason = triton.unsupported(q, positions, tables)
    return Choice("triton", "q is on a GPU") if reason is None else Choice("reference", reason)
