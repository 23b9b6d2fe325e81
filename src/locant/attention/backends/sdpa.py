"""Attention through `torch.nn.functional.scaled_dot_product_attention`, which picks a fused kernel where it can.

A bias enters as an additive mask of ``heads x query x key``, kept in float32 whatever the dtype of the queries;
without one, plain causal attention needs no mask at all, and everything else a boolean one.

On a CPU the kernel takes that mask beside 16-bit queries. On accelerators it must not get one: cuDNN reads its bytes as
numbers of the queries' dtype (pytorch#191612). There attention with a bias is computed in float32. A mask rounded to 16
bits would be quicker, and wrong where far keys count: with KERPLE over 4096 tokens, and queries that look for the first
512 of them, outputs were off by 0.020 of the largest in bfloat16 and 0.0027 in float16, also where the largest entry of
each row was subtracted first. In float32 they are off by the rounding of the output, 0.003 and 0.0004.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from locant.attention.inputs import AttentionInputs
from locant.attention.mask import Dense
from locant.kernels.transforms import hides_gradient, is_differentiated
from locant.positions.pairs import bias_dtype

__all__ = ["as_wide_as_bias", "obstacle", "sdpa_attention"]


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
    dtype, inputs = inputs.q.dtype, as_wide_as_bias(inputs)
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    bias = None if inputs.bias is None else inputs.bias.dense()
    is_causal = bias is None and inputs.mask.is_causal
    dense = Dense(None, None) if is_causal else inputs.mask.dense()
    mask = dense.allowed if bias is None else dense.hide(bias if q.device.type == "cpu" else bias.to(q.dtype))
    if scale <= 0:  # kernels multiply by it what they have hidden by minus infinity
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    gathered = inputs.grouped and q.shape[2] == 1 and q.device.type == "cpu" and inputs.is_decoding
    if gathered:  # 2 to 9 times as fast
        q, mask = _gathered(q, k.shape[1]), mask if mask is None or mask.shape[1] == 1 else _gathered(mask, k.shape[1])
    with _differentiable(q, k, v, mask):
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=inputs.grouped and not gathered,
        )
    y = y.flatten(1, 2)[:, :, None] if gathered else y
    return dense.blank(y).to(dtype)


def _gathered(x: Float[Tensor, "#batch heads 1 _"], kv_heads: int) -> Float[Tensor, "#batch kv_heads group _"]:
    """Of one query, the heads that share a key head as so many queries."""
    return x.unflatten(1, (kv_heads, -1)).squeeze(3)


def as_wide_as_bias(inputs: AttentionInputs) -> AttentionInputs:
    """With queries, keys and values in the dtype of the bias, if there is one; on a CPU as they are."""
    if inputs.q.device.type == "cpu" or inputs.bias is None:
        return inputs
    q, k, v = (x.to(bias_dtype(x)) for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> AbstractContextManager[object]:
    """Fused kernels support neither forward mode nor `torch.func`: there torch's kernel of plain operations runs.

    Nor does the fused kernel of CPUs support a gradient of the mask; torch checks for one, but not under `vmap`.
    """
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    written_out = is_differentiated(*tensors) or (mask is not None and hides_gradient(mask))
    return sdpa_kernel(SDPBackend.MATH) if written_out else nullcontext()
