"""Read rows of a trained table, with a gradient that is summed in float32 for every dtype of the table.

torch sums the gradient of a 16-bit table in 16 bits. If a row is read often, its sum stops growing when the next addend
is less than half of the sum's last bit. In bfloat16 a sum of ones stops at 256. Here every gradient is summed in
float32 and rounded once. Tables in float32 and float64, and tables without training, use torch's own function.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.kernels.transforms import in_forward_mode, is_exporting, is_graph_transformed, is_transforming


def look_up(
    ids: Int[Tensor, "*batch"], table: Float[Tensor, "num_rows width"], padding_idx: int | None = None
) -> Float[Tensor, "*batch width"]:
    """Return the row of every id. The padding row does not get a gradient.

    >>> ones = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    >>> torch.autograd.grad(look_up(torch.zeros(1_000, dtype=torch.long), ones).sum(), ones)[0]
    tensor([[1000., 1000.]], dtype=torch.bfloat16)
    """
    is_transformed = is_transforming() or is_graph_transformed()
    is_trained = torch.is_grad_enabled() and (table.requires_grad or is_transformed)
    if table.dtype not in (torch.float16, torch.bfloat16) or not is_trained or is_exporting():
        return F.embedding(ids, table, padding_idx)
    is_plain = type(table) in (Tensor, nn.Parameter) and table.device.type == "cpu"
    if not is_plain or is_transformed or in_forward_mode() or torch.compiler.is_compiling():
        return F.embedding(ids, table.float(), padding_idx).to(table.dtype)  # a compiler does not convert all rows
    unique_ids, indices = torch.unique(ids, return_inverse=True)
    return F.embedding(indices, F.embedding(unique_ids, table, padding_idx).float()).to(table.dtype)
