"""Attention written down plainly: scores, mask, softmax, sum. The reference, and the only backend that keeps weights.

Holds ``batch x heads x query x key`` scores, in float32 at least.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.attention.visibility import Visibility

__all__ = ["eager_attention"]


def eager_attention(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    bias: Float[Tensor, "#batch heads query key"] | None,
    visible: Visibility,
    scale: float,
    dropout_p: float,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query key"]]:
    """The output in the dtype of `q`, and the weights (before dropout) in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(groups, dim=1)
    values = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = q.to(dtype) @ keys.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if visible.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if visible.mask is not None:
        scores = scores.masked_fill(~visible.mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    if visible.empty is not None:
        weights = weights.masked_fill(visible.empty, 0.0)
    y = (F.dropout(weights, dropout_p) @ values).to(q.dtype)
    return (y if visible.empty is None else y.masked_fill(visible.empty, 0.0)), weights
