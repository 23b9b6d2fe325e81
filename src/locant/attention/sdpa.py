"""Attention through `torch.nn.functional.scaled_dot_product_attention`, which picks a fused kernel where it can.

A bias enters as an additive mask of ``heads x query x key``, kept in float32 whatever the dtype of the queries;
without one, plain causal attention needs no mask at all, and everything else a boolean one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from locant.attention.visibility import Visibility
from locant.kernels.transforms import hides_gradient, is_differentiated

__all__ = ["sdpa_attention"]


def sdpa_attention(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    bias: Float[Tensor, "#batch heads query key"] | None,
    visible: Visibility,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "batch heads query value_dim"]:
    """The output in the dtype of `q`."""
    mask = _additive(bias, visible)
    if scale <= 0:  # kernels multiply by it what they have hidden by minus infinity
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    with _differentiable(q, k, v, mask):
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=visible.is_causal and mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return y if visible.empty is None else y.masked_fill(visible.empty, 0.0)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> AbstractContextManager[object]:
    """Forward mode and `torch.func` know no fused kernels: for those, the one that torch has written out.

    Nor does the fused kernel of CPUs know a gradient of the mask, which torch looks for, and `vmap` hides.
    """
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    written_out = is_differentiated(*tensors) or (mask is not None and hides_gradient(mask))
    return sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext()


def _additive(bias: Tensor | None, visible: Visibility) -> Tensor | None:
    """One mask for both: the bias where a key is seen, minus infinity where it is not."""
    if bias is None:
        return visible.mask
    if visible.is_causal:
        later = bias.new_ones(bias.shape[-2:], dtype=torch.bool).triu_(1)
        return bias.masked_fill(later, float("-inf"))
    return bias if visible.mask is None else bias.masked_fill(~visible.mask, float("-inf"))
