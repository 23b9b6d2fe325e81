"""`attend`: softmax attention with any position encoding, masked by where the tokens stand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import flag
from locant.attention.arguments import dropout_of, factor_of, require_encoding, require_tensors
from locant.attention.backends import BackendName, Request, choose_backend
from locant.attention.eager import eager_attention
from locant.attention.flex import flex_attention
from locant.attention.gradients import needs_gradient, sources
from locant.attention.padding import all_blanked
from locant.attention.sdpa import sdpa_attention
from locant.attention.tiled import takes_a_table, tiled_attention
from locant.attention.visibility import steps_ahead, visibility
from locant.kernels.transforms import is_differentiated
from locant.positions import PositionEncoding, Positions
from locant.positions.base import has_bias, has_score_mod
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
    """``softmax(q k^T scale + bias) v`` over the keys that each query may see.

    Padding, document boundaries and the cache offset come from the positions; there is no separate mask. A query
    that may see nothing (padding) gets zeros. What stands at padding, NaN included, changes nothing, and its gradients
    are zeros. But where there are 16 keys or more to a query and nothing is differentiated (decoding), `k` and `v` are
    taken as they are, because a copy of a cache would cost ten times its attention: `KVCache` stores zeros at padding,
    and who keeps another cache has to fill it with finite numbers there. `q` and `k` are expected as
    `encoding.rotate` returned them.

    Args:
        q, k, v: `k` and `v` may have fewer heads than `q` (grouped-query attention).
        encoding: its `bias` is added to the scores.
        positions: where the queries stand.
        k_positions: where the keys stand, if there are others than the queries (a cache, cross-attention).
        causal: whether later tokens are hidden.
        window: if set, only tokens fewer than this many steps away are seen.
        dropout_p: probability of dropping a weight; 0 unless training.
        scale: default ``head_dim ** -0.5``; a number, not learned.
        backend: how, never what. ``"sdpa"``: torch's fused kernels, with a matrix for bias and mask; in forward mode
            and inside `torch.func.grad` and the like, torch's kernel of plain operations. ``"tiled"``: the same without
            the matrix, for a tile of queries at a time. ``"flex"``: FlexAttention (on a CPU without gradients).
            ``"eager"``: written out, the one for gradients of gradients by ``backward``. ``"auto"`` chooses by device
            and sizes, and takes ``"eager"`` in forward mode and inside `torch.func.grad` and the like.
        return_weights: also return the weights, ``batch heads query key``.

    >>> import torch
    >>> from locant.positions import ALiBi
    >>> q, k = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 5, 16)
    >>> attend(q, k, k, encoding=ALiBi(8), positions=Positions.arange(5)).shape
    torch.Size([2, 8, 5, 16])
    """
    require_tensors(q, k, v)
    require_encoding(encoding)
    factor, dropout_p, window = factor_of(scale, q.shape[-1]), dropout_of(dropout_p), window_of(window)
    causal, return_weights = flag("causal", causal), flag("return_weights", return_weights)
    for where in (positions, *([] if k_positions is None else [k_positions])):
        require_positions(where)
    keys = positions if k_positions is None else k_positions
    positions.require_fits(q.shape[0], q.shape[2], q.device, "q")
    keys.require_fits(k.shape[0], k.shape[2], k.device, "k")
    request = _request(q, k, v, encoding, positions, keys, causal, window, dropout_p, return_weights)
    name = choose_backend(backend, request).name
    if name != "tiled" or not k.shape[2]:  # tiles do it themselves: runs of tokens leave padding out
        q, k, v = all_blanked(q, k, v, encoding, positions, keys)
    with _precision_of(q):
        if name == "flex" and k.shape[2]:
            return flex_attention(q, k, v, encoding, positions, k_positions, causal, window, factor)
        if name == "tiled" and k.shape[2]:
            return tiled_attention(q, k, v, encoding, positions, k_positions, causal, window, factor, dropout_p)
        bias = None if encoding is None else encoding.bias(q, k, positions, k_positions)
        if not k.shape[2]:
            return _nothing(q, k, v, bias, return_weights)
        visible = visibility(positions, k_positions, causal, window)
        if name == "sdpa":
            return sdpa_attention(q, k, v, bias, visible, factor, dropout_p)
        y, weights = eager_attention(q, k, v, bias, visible, factor, dropout_p)
        return (y, weights) if return_weights else y


def _request(
    q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding | None, positions: Positions, keys: Positions,
    causal: bool, window: int | None, dropout_p: float, return_weights: bool,
) -> Request:  # fmt: skip
    """What `choose_backend` wants to know of a call."""
    plain = steps_ahead(positions, keys) is not None
    square = positions.start == keys.start and positions.seq_len == keys.seq_len
    return Request(
        device=q.device.type,
        dtype=q.dtype,
        head_dim=max(q.shape[-1], v.shape[-1]),
        scores=q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2],
        gradient=torch.is_grad_enabled() and needs_gradient(q, k, v, encoding),
        transformed=is_differentiated(*sources(q, k, v, encoding)),
        dropout=dropout_p > 0,
        return_weights=return_weights,
        bias=has_bias(encoding),
        score_mod=encoding is None or has_score_mod(encoding),
        mask=window is not None or not plain or (causal and not square and q.shape[2] > 1),
        table=takes_a_table(q, encoding, positions, keys, dropout_p),
        compiling=torch.compiler.is_compiling(),
    )


def _precision_of(q: Tensor) -> AbstractContextManager[object]:
    """Autocast would round a float32 bias to the dtype it casts the queries to, and with it all far distances."""
    device = q.device.type
    # `torch.amp.is_autocast_available` would know meta too, but the compiler of torch 2.9 cannot follow it.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, return_weights: bool
) -> Output | tuple[Output, Weights]:
    """Zeros, where there is no key to see; made of sums over nothing, so that they have a gradient all the same."""
    y = q.new_zeros(*q.shape[:3], v.shape[-1])
    for x in (q[:, :, :0], k, v, *([] if bias is None else [bias])):
        y = y + x.sum().to(q.dtype)
    return (y, q.new_zeros(*q.shape[:3], 0, dtype=torch.promote_types(q.dtype, torch.float32))) if return_weights else y
