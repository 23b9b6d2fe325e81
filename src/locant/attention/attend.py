"""`attend`: softmax attention with any position encoding; the mask follows from the positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import flag, real
from locant.attention.backends.dense import eager_attention, sdpa_attention
from locant.attention.backends.flex import flex_attention
from locant.attention.backends.tiled import tiled_attention
from locant.attention.choice import BackendName, choose_backend
from locant.attention.inputs import (
    Attended,
    AttentionInputs,
    factor_of,
    joined,
    require_encoding,
    require_keys_between,
    require_tensors,
    sinks_of,
    softcap_of,
)
from locant.attention.mask import AttentionMask
from locant.attention.merge import shares
from locant.errors import LocantError
from locant.kernels.transforms import is_transforming
from locant.positions import PositionEncoding, Positions
from locant.positions.base import standing
from locant.positions.documents import window_of
from locant.positions.positions import Where, require_positions
from locant.positions.rotary_by_class import PairClass

Output = Float[Tensor, "batch heads query value_dim"]
Weights = Float[Tensor, "batch heads query key"]
LogSumExp = Float[Tensor, "batch heads query"]


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: Where = ..., k_positions: Where = ..., causal: bool = ..., window: int | None = ...,
    dropout_p: float = ..., scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    backend: BackendName = ..., return_weights: Literal[False] = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: Where = ..., k_positions: Where = ..., causal: bool = ..., window: int | None = ...,
    dropout_p: float = ..., scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    backend: BackendName = ..., return_weights: Literal[True], return_lse: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: Where = ..., k_positions: Where = ..., causal: bool = ..., window: int | None = ...,
    dropout_p: float = ..., scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    backend: BackendName = ..., return_weights: Literal[False] = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: Where = ..., k_positions: Where = ..., causal: bool = ..., window: int | None = ...,
    dropout_p: float = ..., scale: float | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    backend: BackendName = ..., return_weights: Literal[True], return_lse: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    *,
    encoding: PositionEncoding | None = None,
    rotate: bool = False,
    positions: Where = None,
    k_positions: Where = None,
    causal: bool = True,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    backend: BackendName = "auto",
    return_weights: bool = False,
    return_lse: bool = False,
) -> Output | tuple[Output, *tuple[Weights | LogSumExp, ...]]:
    """``softmax(q k^T scale + bias) v`` over the keys that each query attends to.

    Padding, document boundaries and the cache offset come from the positions; there is no separate mask. A query
    without any key (padding) gets zeros. Values at padding, NaN included, affect no result, and their gradients are
    zeros. In decoding, where nothing is differentiated and there are 16 keys or more to a query, `k` and `v` are taken
    as they are, because a copy of a cache would cost ten times its attention: `KVCache` stores zeros at padding, and
    another cache has to hold finite numbers there.

    Rotary encodings act before attention: `q` and `k` are expected as `encoding.rotate` returned them, so that a cache
    can hold rotated keys. Without a cache, ``rotate=True`` does both. An encoding that rotates has no effect otherwise.

    Args:
        q, k, v: `k` and `v` may have fewer heads than `q` (grouped-query attention).
        encoding: its `bias` is added to the scores. One that `needs_all_keys` (`Cope`) is refused where positions tell
            that keys between a key and its query are not there: in causal attention, on a CPU, and where both count one
            by one.
        rotate: whether `q` and `k` are rotated by the encoding first. For tokens without a cache; cached keys are
            rotated already.
        positions: of the queries; may be left out where they can only be 0, 1, 2, ...: of two tokens or more, with as
            many keys, or of any where nothing depends on them: not causal, without window and encoding.
        k_positions: of the keys, if they differ from the queries' (a cache, cross-attention).
        causal: whether later tokens are hidden.
        window: width of a sliding window: tokens `window` positions away, or farther, are hidden.
        dropout_p: probability of dropping a weight; 0 unless training.
        scale: default ``head_dim ** -0.5``; a number, not learned.
        sinks: a learned logit for each query head (gpt-oss, https://arxiv.org/abs/2508.10925): a key that every query
            attends to and that has no value, so that its weight is taken from the others. A query without any key
            still gets zeros.
        softcap: bounds scaled scores to ``softcap * tanh(scores / softcap)`` (Gemma 2,
            https://arxiv.org/abs/2408.00118). A bias is added after it and is not bounded, as in flash-attention.
        backend: how it is computed, never what. ``"sdpa"``: torch's fused kernels, with a matrix for bias and mask; in
            forward mode and inside `torch.func.grad` and the like, torch's kernel of plain operations. ``"tiled"``: the
            same without the matrix, for a tile of queries at a time. ``"flex"``: FlexAttention (on a CPU without
            gradients). ``"eager"``: written out, the one for gradients of gradients by ``backward``. ``"auto"`` chooses
            by device and sizes (`locant.attention.choice`). ``"sdpa"`` refuses `softcap`, `sinks` and `return_lse`;
            on a CPU ``"flex"`` refuses the last two.
        return_weights: also return the weights, ``batch heads query key``, before dropout. Beside a sink they add up to
            less than one.
        return_lse: also return, after the weights if there are any, the log-sum-exp of every query's scores, bias and
            sink included: ``batch heads query``, float32 at least, minus infinity where there is neither key nor sink.
            It has a gradient, and is what `locant.attention.merge` joins outputs over other keys by.

    >>> import torch
    >>> from locant.positions import ALiBi, Rotary
    >>> q, k = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 5, 16)
    >>> attend(q, k, k, encoding=ALiBi(8)).shape
    torch.Size([2, 8, 5, 16])
    >>> torch.equal(attend(q, k, k, encoding=Rotary(16), rotate=True), attend(*Rotary(16).rotate(q, k), k))
    True
    >>> _, lse = attend(q, k, k, sinks=torch.zeros(8), softcap=50.0, return_lse=True)
    >>> lse.shape, lse.dtype
    (torch.Size([2, 8, 5]), torch.float32)
    """
    _require_no_context_parallel()
    require_tensors(q, k, v)
    require_encoding(encoding)
    if encoding is positions is k_positions is window is None and not causal:  # wherever tokens stand
        positions, k_positions = (Positions.arange(x.shape[2], device=x.device) for x in (q, k))
    positions, keys = standing(encoding, q, k, positions, k_positions)
    require_positions(positions)
    require_positions(keys)
    if flag("rotate", rotate) and encoding is not None:
        q, k = encoding.rotate(q, k, positions, keys)
    mask = AttentionMask(positions, k_positions, flag("causal", causal), window_of(window))
    mask.queries.require_fits(q.shape[0], q.shape[2], q.device, "q")
    mask.keys.require_fits(k.shape[0], k.shape[2], k.device, "k")
    require_keys_between(encoding, mask)
    column, wants_lse = sinks_of(sinks, q), flag("return_lse", return_lse)
    factor = factor_of(scale, q.shape[-1])
    dropout_p = real("dropout_p", dropout_p, low=0, below=1, remedy="dropout_p=0.0 outside training")
    inputs = AttentionInputs(
        q, k, v, mask, encoding, factor, dropout_p, flag("return_weights", return_weights), softcap_of(softcap),
        needs_lse=wants_lse or column is not None,
    )  # fmt: skip
    with _full_precision(q):
        classes = None if encoding is None else encoding.pair_classes(mask.queries, mask.k_positions)
        y, lse, weights = _computed(backend, inputs) if classes is None else _by_class(backend, classes, inputs)
        if column is not None and lse is not None:
            y, lse, weights = _beside_sinks(y, lse, weights, column)
    also = [x for x in (weights, lse if wants_lse else None) if x is not None]
    return (y, *also) if also else y


def _require_no_context_parallel() -> None:
    """Raise inside torch's `context_parallel`, whose fused attention knows neither these positions nor a bias."""
    if torch.compiler.is_compiling():
        return
    module = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed.tensor"):
        got = "got attend inside torch's context_parallel, which replaces torch's attention and knows no Positions"
        remedy = "locant.parallel.attend(..., group=mesh, positions=positions.shard(rank, world)), outside of it"
        raise LocantError(got, remedy)


def _by_class(backend: BackendName, classes: Sequence[PairClass], inputs: AttentionInputs) -> Attended:
    """Every class of pairs under its own rotation, joined by their log-sum-exps."""
    mask = inputs.mask
    if not mask.causal or mask.window is not None:
        what = "causal=False" if not mask.causal else f"window={mask.window}"
        name = type(inputs.encoding).__name__
        got = f"got {what} beside {name}, whose classes are those of the pairs of a causal mask"
        raise LocantError(got, "encoding.rotary in its place")
    by_rows: dict[int, list[Attended]] = {}
    for pairs in classes:
        q, k = pairs.rotated(inputs.q, inputs.k)
        v = inputs.v[:, :, slice(*pairs.columns)]
        mask = AttentionMask(pairs.queries, pairs.keys, pairs.causal, pairs.window)
        of_class = dataclasses.replace(inputs, q=q, k=k, v=v, mask=mask, encoding=None, needs_lse=True)
        part = _computed(backend, of_class)
        if part.weights is not None:
            before = pairs.columns[0]
            behind = inputs.k.shape[2] - before - part.weights.shape[-1]
            part = part._replace(weights=F.pad(part.weights, (before, behind)))
        by_rows.setdefault(pairs.rows[0], []).append(part)
    return joined([_of_classes(parts) for parts in by_rows.values()], dim=2)


def _of_classes(parts: Sequence[Attended]) -> Attended:
    """One output out of those over the keys of each class."""
    if len(parts) == 1:
        return parts[0]
    portions, lse = shares([part.lse for part in parts if part.lse is not None])
    pairs = list(zip(parts, portions, strict=True))
    y = torch.stack([part.y * portion for part, portion in pairs]).sum(0)
    weights = [part.weights * portion for part, portion in pairs if part.weights is not None]
    return Attended(y.to(parts[0].y.dtype), lse, torch.stack(weights).sum(0) if weights else None)


def _computed(backend: BackendName, inputs: AttentionInputs) -> Attended:
    choice = choose_backend(backend, inputs)
    eager = choice.name == "eager" or (inputs.needs_lse and not inputs.v.numel())  # values may have no width
    if choice.way is not None and not eager and all(x.numel() for x in (inputs.q, inputs.k, inputs.v)):
        return tiled_attention(inputs, choice.way)
    inputs = inputs.without_padding()
    if not inputs.k.shape[2] or (not eager and not (inputs.q.numel() and inputs.v.numel())):
        return _nothing(inputs)
    if eager:
        return eager_attention(inputs)
    return flex_attention(inputs) if choice.name == "flex" else Attended(sdpa_attention(inputs))


def _beside_sinks(y: Tensor, lse: Tensor, weights: Tensor | None, sinks: Float[Tensor, " heads"]) -> Attended:
    """A sink takes its share of every query's weights and leaves nothing in the output."""
    (share, _), lse = shares([lse, sinks[None, :, None].expand_as(lse)])
    outside = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transforming())
    shared = y.mul_(share) if outside else (y * share).to(y.dtype)  # nobody else has this y, and nobody asks for it
    return Attended(shared, lse, None if weights is None else weights * share)


def _full_precision(q: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which would round a float32 bias, and with it far distances, to the queries' dtype."""
    device = q.device.type
    # `torch.amp.is_autocast_available` would know meta too, but the compiler of torch 2.9 cannot follow it.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _nothing(inputs: AttentionInputs) -> Attended:
    """Zeros, where there is no key; computed as sums over no elements, so that every input gets a gradient."""
    q, wide = inputs.q, torch.promote_types(inputs.q.dtype, torch.float32)
    y = q.new_zeros(*q.shape[:3], inputs.v.shape[-1])
    bias = None if inputs.k.shape[2] or inputs.bias is None else inputs.bias.dense()
    for x in (q[:, :, :0], inputs.k, inputs.v, *([] if bias is None else [bias])):
        y = y + x.sum().to(q.dtype)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide) if inputs.needs_lse else None
    return Attended(y, lse, q.new_zeros(*q.shape[:3], 0, dtype=wide) if inputs.return_weights else None)
