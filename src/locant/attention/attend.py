"""`attend`: softmax attention with any position encoding; the mask follows from the positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import flag
from locant.attention.backends.eager import eager_attention
from locant.attention.backends.flex import flex_attention
from locant.attention.backends.sdpa import sdpa_attention
from locant.attention.backends.tiled import tiled_attention
from locant.attention.choice import BackendName, Choice, choose_backend
from locant.attention.inputs import AttentionInputs, dropout_of, factor_of, require_encoding, require_tensors
from locant.attention.mask import AttentionMask
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import window_of
from locant.positions.positions import require_positions

__all__ = ["attend"]

Output = Float[Tensor, "batch heads query value_dim"]
Weights = Float[Tensor, "batch heads query key"]


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., positions: Positions,
    k_positions: Positions | None = ..., causal: bool = ..., window: int | None = ..., dropout_p: float = ...,
    scale: float | None = ..., backend: BackendName = ..., return_weights: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., positions: Positions,
    k_positions: Positions | None = ..., causal: bool = ..., window: int | None = ..., dropout_p: float = ...,
    scale: float | None = ..., backend: BackendName = ..., return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    *,
    encoding: PositionEncoding | None = None,
    positions: Positions,
    k_positions: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: BackendName = "auto",
    return_weights: bool = False,
) -> Output | tuple[Output, Weights]:
    """``softmax(q k^T scale + bias) v`` over the keys that each query attends to.

    Padding, document boundaries and the cache offset come from the positions; there is no separate mask. A query
    without any key (padding) gets zeros. Values at padding, NaN included, affect no result, and their gradients are
    zeros. In decoding, where nothing is differentiated and there are 16 keys or more to a query, `k` and `v` are taken
    as they are, because a copy of a cache would cost ten times its attention: `KVCache` stores zeros at padding, and
    another cache has to hold finite numbers there. `q` and `k` are expected as `encoding.rotate` returned them.

    Args:
        q, k, v: `k` and `v` may have fewer heads than `q` (grouped-query attention).
        encoding: its `bias` is added to the scores.
        positions: of the queries.
        k_positions: of the keys, if they differ from the queries' (a cache, cross-attention).
        causal: whether later tokens are hidden.
        window: width of a sliding window: tokens `window` positions away, or farther, are hidden.
        dropout_p: probability of dropping a weight; 0 unless training.
        scale: default ``head_dim ** -0.5``; a number, not learned.
        backend: how it is computed, never what. ``"sdpa"``: torch's fused kernels, with a matrix for bias and mask; in
            forward mode and inside `torch.func.grad` and the like, torch's kernel of plain operations. ``"tiled"``: the
            same without the matrix, for a tile of queries at a time. ``"flex"``: FlexAttention (on a CPU without
            gradients). ``"eager"``: written out, the one for gradients of gradients by ``backward``. ``"auto"`` chooses
            by device and sizes (`locant.attention.choice`).
        return_weights: also return the weights, ``batch heads query key``.

    >>> import torch
    >>> from locant.positions import ALiBi
    >>> q, k = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 5, 16)
    >>> attend(q, k, k, encoding=ALiBi(8), positions=Positions.arange(5)).shape
    torch.Size([2, 8, 5, 16])
    """
    require_tensors(q, k, v)
    require_encoding(encoding)
    require_positions(positions)
    if k_positions is not None:
        require_positions(k_positions)
    mask = AttentionMask(positions, k_positions, flag("causal", causal), window_of(window))
    mask.queries.require_fits(q.shape[0], q.shape[2], q.device, "q")
    mask.keys.require_fits(k.shape[0], k.shape[2], k.device, "k")
    inputs = AttentionInputs(
        q, k, v, mask, encoding, factor_of(scale, q.shape[-1]), dropout_of(dropout_p),
        flag("return_weights", return_weights),
    )  # fmt: skip
    choice = choose_backend(backend, inputs)
    with _full_precision(q):
        y, weights = _computed(choice, inputs)
    return y if weights is None else (y, weights)


def _computed(choice: Choice, inputs: AttentionInputs) -> tuple[Output, Weights | None]:
    if choice.way is None or choice.way.name != "documents":  # which leaves padding out
        inputs = inputs.without_padding()
    if not inputs.k.shape[2] or (choice.name != "eager" and not (inputs.q.numel() and inputs.v.numel())):
        return _nothing(inputs)
    if choice.way is not None:
        return tiled_attention(inputs, choice.way), None
    if choice.name == "flex":
        return flex_attention(inputs), None
    if choice.name == "sdpa":
        return sdpa_attention(inputs), None
    y, weights = eager_attention(inputs)
    return y, weights if inputs.return_weights else None


def _full_precision(q: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which would round a float32 bias, and with it far distances, to the queries' dtype."""
    device = q.device.type
    # `torch.amp.is_autocast_available` would know meta too, but the compiler of torch 2.9 cannot follow it.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _nothing(inputs: AttentionInputs) -> tuple[Output, Weights | None]:
    """Zeros, where there is no key; computed as sums over no elements, so that every input gets a gradient."""
    q = inputs.q
    y = q.new_zeros(*q.shape[:3], inputs.v.shape[-1])
    bias = None if inputs.k.shape[2] else inputs.bias()
    for x in (q[:, :, :0], inputs.k, inputs.v, *([] if bias is None else [bias])):
        y = y + x.sum().to(q.dtype)
    if not inputs.return_weights:
        return y, None
    return y, q.new_zeros(*q.shape[:3], 0, dtype=torch.promote_types(q.dtype, torch.float32))
