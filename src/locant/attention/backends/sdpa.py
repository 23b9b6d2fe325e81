"""Attention through `torch.nn.functional.scaled_dot_product_attention`, which picks a fused kernel where it can.

A bias enters as an additive mask of ``heads x query x key``, kept in float32 whatever the dtype of the queries;
without one, plain causal attention needs no mask at all, and everything else a boolean one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from locant.attention.inputs import AttentionInputs
from locant.attention.mask import Dense
from locant.kernels.transforms import hides_gradient, is_differentiated

__all__ = ["obstacle", "sdpa_attention"]


def obstacle(inputs: AttentionInputs) -> str | None:
    """Why it cannot run, or ``None``."""
    if inputs.return_weights:
        return "which never holds the weights of return_weights=True"
    if inputs.softcap is not None:
        return "whose kernels have no softcap"
    if inputs.needs_lse:
        return "whose kernels keep the log-sum-exp to themselves, which sinks and return_lse=True need"
    return None


def sdpa_attention(inputs: AttentionInputs) -> Float[Tensor, "batch heads query value_dim"]:
    """The output in the dtype of `q`."""
    q, k, v, scale, bias = inputs.q, inputs.k, inputs.v, inputs.scale, inputs.bias()
    is_causal = bias is None and inputs.mask.is_causal
    dense = Dense(None, None) if is_causal else inputs.mask.dense()
    mask = dense.allowed if bias is None else dense.hide(bias)
    if scale <= 0:  # kernels multiply by it what they have hidden by minus infinity
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    with _differentiable(q, k, v, mask):
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=inputs.grouped,
        )
    return dense.blank(y)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> AbstractContextManager[object]:
    """Fused kernels support neither forward mode nor `torch.func`: there torch's kernel of plain operations runs.

    Nor does the fused kernel of CPUs support a gradient of the mask; torch checks for one, but not under `vmap`.
    """
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    written_out = is_differentiated(*tensors) or (mask is not None and hides_gradient(mask))
    return sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext()
