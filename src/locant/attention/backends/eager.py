"""Attention written down plainly: scores, mask, softmax, sum. The reference, and the only backend that keeps weights.

Holds ``batch x heads x query x key`` scores, in float32 at least.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from locant.attention.inputs import Attended, AttentionInputs

__all__ = ["eager_attention", "obstacle"]


def obstacle(inputs: AttentionInputs) -> str | None:
    """Nothing: plain operations do everything."""
    return None


def eager_attention(inputs: AttentionInputs) -> Attended:
    """The output, the log-sum-exp and the weights, whichever of them are asked for."""
    q, k, v, bias, mask = inputs.q, inputs.k, inputs.v, inputs.bias(), inputs.mask.dense()
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]  # as more rows of their key head, which is then not repeated
    by_key_head = q.to(dtype).unflatten(1, (-1, groups)).flatten(2, 3)
    products = by_key_head @ k.to(dtype).transpose(-1, -2)
    scores = inputs.capped(products.unflatten(2, (groups, -1)).flatten(1, 2) * inputs.scale)
    if bias is not None:
        scores = scores + bias
    scores = mask.hide(scores)
    weights = mask.blank(scores.softmax(dim=-1))
    kept = F.dropout(weights, inputs.dropout_p).unflatten(1, (-1, groups)).flatten(2, 3)
    y = (kept @ v.to(dtype)).unflatten(2, (groups, -1)).flatten(1, 2)
    y = mask.blank(y.to(q.dtype))
    lse = mask.without_keys(scores.logsumexp(dim=-1)) if inputs.needs_lse else None
    return Attended(y, lse, weights if inputs.return_weights else None)
