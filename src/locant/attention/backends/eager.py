"""Attention written down plainly: scores, mask, softmax, sum. The reference, and the only backend that keeps weights.

Holds ``batch x heads x query x key`` scores, in float32 at least.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.attention.inputs import Attended, AttentionInputs

__all__ = ["eager_attention", "obstacle"]


def obstacle(inputs: AttentionInputs) -> str | None:
    """Nothing: plain operations do everything."""
    return None


def eager_attention(inputs: AttentionInputs) -> Attended:
    """The output, the log-sum-exp and the weights, whichever of them are asked for."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask.dense()
    bias = None if inputs.bias is None else inputs.bias.dense()
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and torch.compiler.is_exporting():  # the views below would fix the length of an exported program
        k, v, groups = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), 1
    products = _spread(_gathered(q.to(dtype), groups) @ k.to(dtype).transpose(-1, -2), groups)
    scores = inputs.capped(products * inputs.scale)
    if bias is not None:
        scores = scores + bias
    scores = mask.hide(scores)
    weights = mask.blank(scores.softmax(dim=-1))
    kept = F.dropout(weights, inputs.dropout_p)
    y = _spread(_gathered(kept, groups) @ v.to(dtype), groups).to(q.dtype)
    y = mask.blank(y.clone() if groups > 1 else y)  # no view: FSDP mistrusts them
    lse = mask.without_keys(scores.logsumexp(dim=-1)) if inputs.needs_lse else None
    return Attended(y, lse, weights if inputs.return_weights else None)


def _gathered(x: Float[Tensor, "batch heads query _"], groups: int) -> Float[Tensor, "batch kv_heads rows _"]:
    """Query heads as more rows of the key head that they share, which is then not repeated."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).flatten(2, 3)


def _spread(x: Float[Tensor, "batch kv_heads rows _"], groups: int) -> Float[Tensor, "batch heads query _"]:
    """`_gathered` undone."""
    return x if groups == 1 else x.unflatten(2, (groups, -1)).flatten(1, 2)
