"""The input of a transformer written down plainly; what every faster form has to agree with.

Arithmetic is float32 whatever the dtype of the tables (float64 for float64), rounded once at the end: token, position
and segment are added in this order, the norm is that of `torch.nn.LayerNorm`, and an entry that dropout keeps is
divided by ``1 - p``.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from locant.kernels.input_embedding.operands import Operands

__all__ = ["input_embedding"]


def input_embedding(
    o: Operands, keep: Bool[Tensor, "batch seq d_model"] | None = None
) -> Float[Tensor, "batch seq d_model"]:
    """The sum for every token, normed; `keep` says which entries dropout leaves.

    >>> import torch
    >>> input_embedding(Operands(ids=torch.tensor([[1]]), token=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), scale=2.0))
    tensor([[[6., 8.]]])
    """
    dtype = o.accumulator
    x = F.embedding(o.ids, o.token.to(dtype), o.padding_idx) * o.scale
    if o.position is not None and o.position_index is not None:
        x = x + F.embedding(o.position_index, o.position.to(dtype))
    if o.segment is not None:
        segment = o.segment.to(dtype)
        x = x + (segment[0] if o.segments is None else F.embedding(o.segments, segment))
    if o.eps is not None:
        gamma, beta = (None if table is None else table.to(dtype) for table in (o.gamma, o.beta))
        x = F.layer_norm(x, (o.width,), gamma, beta, o.eps)
    if keep is not None:
        x = x * keep / (1 - o.p)
    return x.to(o.token.dtype)
