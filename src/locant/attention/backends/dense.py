"""Attention with a matrix for mask and bias: written down plainly, or through torch's fused kernels.

`eager_attention` is the reference, and the only backend that keeps weights: scores, mask, softmax, sum. It holds
``batch x heads x query x key`` scores, in float32 at least.

`sdpa_attention` is `torch.nn.functional.scaled_dot_product_attention`, which picks a fused kernel where it can.
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

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from locant.attention.inputs import Attended, AttentionInputs
from locant.attention.mask import Dense
from locant.kernels.transforms import hides_gradient, is_differentiated
from locant.positions.pairs import bias_dtype


def eager_attention(inputs: AttentionInputs) -> Attended:
    """The output, the log-sum-exp and the weights, whichever of them are asked for."""
    inputs = _ungrouped_for_export(inputs)
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask.dense()
    bias = None if inputs.bias is None else inputs.bias.dense()
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    products = _spread(_gathered(q.to(dtype), groups) @ k.to(dtype).transpose(-1, -2), groups)
    scores = inputs.capped(products * inputs.scale)
    if bias is not None:
        scores = scores + bias
    scores = mask.hide(scores)
    weights = mask.blank(scores.softmax(dim=-1))
    y = _spread(_gathered(F.dropout(weights, inputs.dropout_p), groups) @ v.to(dtype), groups).to(q.dtype)
    y = mask.blank(y.clone() if groups > 1 else y)  # no view: FSDP mistrusts them
    lse = mask.without_keys(scores.logsumexp(dim=-1)) if inputs.needs_lse else None
    return Attended(y, lse, weights if inputs.return_weights else None)


def _ungrouped_for_export(inputs: AttentionInputs) -> AttentionInputs:
    """A key head for every query head: views of groups would fix the length, and OpenVINO ignores `enable_gqa`."""
    if not (inputs.is_grouped and torch.compiler.is_exporting()):
        return inputs
    k, v = (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], dim=1) for x in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v)


def _gathered(x: Float[Tensor, "#batch heads query _"], groups: int) -> Float[Tensor, "#batch kv_heads rows _"]:
    """Query heads as more rows of the key head that they share, which is then not repeated."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).flatten(2, 3)


def _spread(x: Float[Tensor, "batch kv_heads rows _"], groups: int) -> Float[Tensor, "batch heads query _"]:
    """`_gathered` undone."""
    return x if groups == 1 else x.unflatten(2, (groups, -1)).flatten(1, 2)


def sdpa_obstacle(inputs: AttentionInputs) -> str | None:
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
    dtype, inputs = inputs.q.dtype, as_wide_as_bias(_ungrouped_for_export(inputs))
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    bias = None if inputs.bias is None else inputs.bias.dense()
    is_causal = bias is None and inputs.mask.is_causal
    dense = Dense(None, None) if is_causal else inputs.mask.dense()
    mask = dense.allowed if bias is None else dense.hide(bias if q.device.type == "cpu" else bias.to(q.dtype))
    if scale <= 0:  # kernels multiply by it what they have hidden by minus infinity
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    groups = q.shape[1] // k.shape[1]
    gathered = inputs.is_grouped and q.shape[2] == 1 and q.device.type == "cpu" and inputs.is_decoding
    if gathered:  # 2 to 9 times as fast
        q, mask = _gathered(q, groups), mask if mask is None or mask.shape[1] == 1 else _gathered(mask, groups)
    with _differentiable(q, k, v, mask):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=inputs.dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=inputs.is_grouped and not gathered,
        )  # fmt: skip
    return dense.blank(_spread(y, groups) if gathered else y).to(dtype)


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
