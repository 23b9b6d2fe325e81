"""Rows of a trained table, with a gradient that is added up in float32 however narrow the table is.

torch adds up the gradient of a 16-bit table in 16 bits: a row that is read often stops growing where the next addend
is less than half of its last bit, which is at 256 for ones in bfloat16. Here every gradient is summed in float32 and
rounded once, in the order of the tokens. Tables in float32 and float64, and those that are
not trained, are read by torch itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.kernels.available import has_triton
from locant.kernels.input_embedding.op import input_embedding
from locant.kernels.transforms import in_forward_mode, is_exporting, is_graph_transformed, is_transforming

__all__ = ["look_up", "look_up_unchecked", "reports_faults"]


def look_up(
    ids: Int[Tensor, "*batch"], table: Float[Tensor, "num_rows width"], padding_idx: int | None = None
) -> Float[Tensor, "*batch width"]:
    """The row of every id; the padding row gets no gradient.

    >>> ones = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    >>> torch.autograd.grad(look_up(torch.zeros(1_000, dtype=torch.long), ones).sum(), ones)[0]
    tensor([[1000., 1000.]], dtype=torch.bfloat16)
    """
    if table.dtype not in (torch.float16, torch.bfloat16) or not _is_trained(table) or is_exporting():
        return F.embedding(ids, table, padding_idx)
    if _has_kernel(table):
        return look_up_unchecked(ids, table, padding_idx)[0]
    return F.embedding(ids, table.float(), padding_idx).to(table.dtype)  # slower: it converts all rows


def look_up_unchecked(
    ids: Int[Tensor, "*batch"], table: Float[Tensor, "num_rows width"], padding_idx: int | None = None
) -> tuple[Float[Tensor, "*batch width"], Int[Tensor, " tables"]]:
    """The same by our own kernel, and its faults: on a GPU an id without a row gives NaN, and is counted there."""
    rows, _, _, faults = input_embedding(
        ids.reshape(1, -1), table, None, None, None, None, None, None, None, 1.0, padding_idx, None, 0.0
    )
    return rows.view(*ids.shape, table.shape[1]), faults


def reports_faults(table: Float[Tensor, "num_rows width"]) -> bool:
    """Whether `look_up_unchecked` can do without a check of the ids, which would wait for the device.

    In a graph nothing is checked, and the compiler makes one kernel of torch's look-up and what follows it.
    """
    checked_by_kernel = table.is_cuda and table.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return checked_by_kernel and not torch.compiler.is_compiling() and not is_exporting() and _has_kernel(table)


def _is_trained(table: Tensor) -> bool:
    """Whether its gradient may be computed; under a function transform, always."""
    return torch.is_grad_enabled() and (table.requires_grad or is_transforming() or is_graph_transformed())


def _has_kernel(table: Tensor) -> bool:
    """Whether our operator can read it: it supports ``backward`` alone, and plain tensors on one device."""
    if type(table) not in (Tensor, nn.Parameter) or in_forward_mode() or is_transforming() or is_graph_transformed():
        return False
    return table.device.type == "cpu" or (table.device.type == "cuda" and has_triton())
