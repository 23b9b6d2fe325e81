"""Attention with a matrix for mask and bias: with plain operations, or through torch's fused kernels.

`eager_attention` is the reference: scores, mask, softmax, sum. It is the only backend that keeps the weights. It stores
``batch x heads x query x key`` scores, in float32 at least.

`sdpa_attention` is `torch.nn.functional.scaled_dot_product_attention`, which uses a fused kernel if it can. A bias is
an additive mask of ``heads x query x key``, always in float32. Without a bias, plain causal attention does not need a
mask, and everything else needs a boolean mask.

On a CPU the kernel accepts a float32 mask with 16-bit queries. On accelerators it must not get such a mask, because
cuDNN reads the bytes of the mask as numbers of the queries' dtype (pytorch#191612). There attention with a bias is
computed in float32. A mask rounded to 16 bits would be faster but wrong if far keys matter. With KERPLE over 4096
tokens, and queries that look for the first 512 tokens, the error of outputs was 0.020 times the largest output in
bfloat16 and 0.0027 times in float16, even after the largest entry of each row was subtracted. If attention is computed
in float32, only the rounding of the output remains: 0.003 times in bfloat16 and 0.0004 times in float16.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from locant.attention.inputs import NEEDS_LSE, AttentionInputs, AttentionResult
from locant.attention.mask import Dense
from locant.kernels.transforms import hides_gradient, is_differentiated
from locant.positions.distances import bias_dtype


def eager_attention(inputs: AttentionInputs) -> AttentionResult:
    """Return the output and, if requested, the log-sum-exp and the weights."""
    inputs = _repeat_keys_for_export(inputs)
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask.dense()
    bias = None if inputs.bias is None else inputs.bias.dense()
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    products = _split_groups(_stack_groups(q.to(dtype), groups) @ k.to(dtype).transpose(-1, -2), groups)
    scores = inputs.cap_scores(products * inputs.scale)
    if bias is not None:
        scores = scores + bias
    scores = mask.hide(scores)
    weights = mask.blank(scores.softmax(dim=-1))
    y = _split_groups(_stack_groups(F.dropout(weights, inputs.dropout_p), groups) @ v.to(dtype), groups).to(q.dtype)
    y = mask.blank(y.clone() if groups > 1 else y)  # not a view, which FSDP does not handle well
    lse = mask.without_keys(scores.logsumexp(dim=-1)) if inputs.needs_lse else None
    return AttentionResult(y, lse, weights if inputs.return_weights else None)


def _repeat_keys_for_export(inputs: AttentionInputs) -> AttentionInputs:
    """Repeat key heads for all query heads. Views of groups would fix the length, and OpenVINO ignores `enable_gqa`."""
    if not (inputs.is_grouped and torch.compiler.is_exporting()):
        return inputs
    k, v = (x.repeat_interleave(inputs.q.shape[1] // x.shape[1], dim=1) for x in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, k=k, v=v)


def _stack_groups(x: Float[Tensor, "#batch heads query _"], groups: int) -> Float[Tensor, "#batch kv_heads rows _"]:
    """Stack the query heads that share a key head as more rows of this head, so that the key head is not repeated."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).flatten(2, 3)


def _split_groups(x: Float[Tensor, "batch kv_heads rows _"], groups: int) -> Float[Tensor, "batch heads query _"]:
    """Undo `_stack_groups`."""
    return x if groups == 1 else x.unflatten(2, (groups, -1)).flatten(1, 2)


def sdpa_obstacle(inputs: AttentionInputs) -> str | None:
    """Return the reason why sdpa does not support these inputs, or ``None``."""
    if inputs.return_weights:
        return "which never stores the weights for return_weights=True"
    if inputs.softcap is not None:
        return "whose kernels have no softcap"
    if inputs.needs_lse:
        return f"whose kernels do not return {NEEDS_LSE}"
    return None


def sdpa_attention(inputs: AttentionInputs) -> Float[Tensor, "batch heads query value_dim"]:
    """Return the output in the dtype of `q`."""
    dtype, inputs = inputs.q.dtype, to_bias_dtype(_repeat_keys_for_export(inputs))
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    bias = None if inputs.bias is None else inputs.bias.dense()
    is_causal = bias is None and inputs.mask.is_causal
    dense = Dense(None, None) if is_causal else inputs.mask.dense()
    mask = dense.allowed if bias is None else dense.hide(bias if q.device.type == "cpu" else bias.to(q.dtype))
    if scale <= 0:  # kernels multiply the minus infinities of hidden keys by the scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    groups = q.shape[1] // k.shape[1]
    stacked = inputs.is_grouped and q.shape[2] == 1 and q.device.type == "cpu" and inputs.is_decoding
    if stacked:  # 2 to 9 times as fast
        q, mask = _stack_groups(q, groups), mask if mask is None or mask.shape[1] == 1 else _stack_groups(mask, groups)
    with _differentiable_kernel(q, k, v, mask):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=inputs.dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=inputs.is_grouped and not stacked,
        )  # fmt: skip
    return dense.blank(_split_groups(y, groups) if stacked else y).to(dtype)


def to_bias_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """Convert queries, keys and values to the dtype of the bias. On a CPU, or without a bias, do not change them."""
    if inputs.q.device.type == "cpu" or inputs.bias is None:
        return inputs
    return inputs.with_tensors(*(x.to(bias_dtype(x)) for x in (inputs.q, inputs.k, inputs.v)))


def _differentiable_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> AbstractContextManager[object]:
    """Return a context that selects torch's kernel of plain operations if fused kernels lack a derivative.

    Fused kernels support neither forward mode nor `torch.func`. The fused kernel of CPUs does not support a gradient of
    the mask. torch checks this, but not under `vmap`.
    """
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    needs_plain_operations = is_differentiated(*tensors) or (mask is not None and hides_gradient(mask))
    return sdpa_kernel(SDPBackend.MATH) if needs_plain_operations else nullcontext()
