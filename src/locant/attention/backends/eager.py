"""Attention written down plainly: scores, mask, softmax, sum. The reference, and the only backend that keeps weights.

Holds ``batch x heads x query x key`` scores, in float32 at least.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.attention.inputs import AttentionInputs

__all__ = ["eager_attention", "obstacle"]


def obstacle(inputs: AttentionInputs) -> str | None:
    """Nothing: plain operations do everything."""
    return None


def eager_attention(
    inputs: AttentionInputs,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query key"]]:
    """The output in the dtype of `q`, and the weights (before dropout) in float32 at least."""
    q, k, v, bias, mask = inputs.q, inputs.k, inputs.v, inputs.bias(), inputs.mask.dense()
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(groups, dim=1)
    values = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = q.to(dtype) @ keys.transpose(-1, -2) * inputs.scale
    if bias is not None:
        scores = scores + bias
    weights = mask.blank(mask.hide(scores).softmax(dim=-1))
    y = (F.dropout(weights, inputs.dropout_p) @ values).to(q.dtype)
    return mask.blank(y), weights
