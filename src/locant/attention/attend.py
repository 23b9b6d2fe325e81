"""`attend`: softmax attention with any position encoding. The positions determine the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import Real, flag
from locant.attention.backends.dense import eager_attention, sdpa_attention
from locant.attention.backends.flex import flex_attention
from locant.attention.backends.tiled import tiled_attention
from locant.attention.choice import BackendChoice, BackendName, choose_backend
from locant.attention.inputs import (
    AttentionInputs,
    AttentionResult,
    check_dropout,
    check_scale,
    check_sinks,
    check_softcap,
    concatenate,
    padding_or_none,
    require_encoding,
    require_keys_between,
    require_tensors,
    zero_padding,
)
from locant.attention.mask import AttentionMask
from locant.attention.merge import shares
from locant.errors import LocantError
from locant.kernels.transforms import is_transforming
from locant.positions import PositionEncoding
from locant.positions.base import has_pair_sets, resolve_positions
from locant.positions.documents import check_window
from locant.positions.positions import OptionalPositions, positions_or_default, require_positions
from locant.positions.rotary_by_class import PairClass

Output = Float[Tensor, "batch heads query value_dim"]
Weights = Float[Tensor, "batch heads query key"]
LogSumExp = Float[Tensor, "batch heads query"]


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: OptionalPositions = ..., k_positions: OptionalPositions = ..., causal: bool = ...,
    window: int | None = ..., dropout_p: Real = ..., scale: Real | None = ..., sinks: Tensor | None = ...,
    softcap: Real | None = ..., backend: BackendName = ...,
    return_weights: Literal[False] = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: OptionalPositions = ..., k_positions: OptionalPositions = ..., causal: bool = ...,
    window: int | None = ..., dropout_p: Real = ..., scale: Real | None = ..., sinks: Tensor | None = ...,
    softcap: Real | None = ..., backend: BackendName = ...,
    return_weights: Literal[True], return_lse: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: OptionalPositions = ..., k_positions: OptionalPositions = ..., causal: bool = ...,
    window: int | None = ..., dropout_p: Real = ..., scale: Real | None = ..., sinks: Tensor | None = ...,
    softcap: Real | None = ..., backend: BackendName = ...,
    return_weights: Literal[False] = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, encoding: PositionEncoding | None = ..., rotate: bool = ...,
    positions: OptionalPositions = ..., k_positions: OptionalPositions = ..., causal: bool = ...,
    window: int | None = ..., dropout_p: Real = ..., scale: Real | None = ..., sinks: Tensor | None = ...,
    softcap: Real | None = ..., backend: BackendName = ...,
    return_weights: Literal[True], return_lse: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    *,
    encoding: PositionEncoding | None = None,
    rotate: bool = False,
    positions: OptionalPositions = None,
    k_positions: OptionalPositions = None,
    causal: bool = True,
    window: int | None = None,
    dropout_p: Real = 0.0,
    scale: Real | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    softcap: Real | None = None,
    backend: BackendName = "auto",
    return_weights: bool = False,
    return_lse: bool = False,
) -> Output | tuple[Output, *tuple[Weights | LogSumExp, ...]]:
    """Return ``softmax(q k^T scale + bias) v`` over the keys that each query attends to.

    Padding, document boundaries and the cache offset come from the positions. There is no separate mask. A query
    without any key (padding) gets zeros. Values at padding, including NaN, do not affect any result, and their
    gradients are zeros. Decoding is an exception. In a call without gradients and with 16 or more keys per query, `k`
    and `v` are not copied, because a copy of a cache would take ten times as long as its attention. `KVCache` stores
    zeros at padding. Any other cache must contain finite numbers at padding.

    A NaN or an infinity in `k` or `v` can reach other documents of a packed row, because torch's kernels multiply
    hidden values by zero. Encodings do not spread it.

    Rotary encodings act before attention. Pass `q` and `k` as `encoding.rotate` returned them, so that a cache can hold
    rotated keys. Without a cache, ``rotate=True`` rotates both tensors. Otherwise a rotary encoding has no effect.

    Args:
        q, k, v: queries, keys and values. `k` and `v` may have fewer heads than `q` (grouped-query attention).
        encoding: its `bias` is added to the scores. An encoding that `needs_all_keys` (`Cope`) raises an error if the
            positions show that keys between a key and its query are missing. Causal attention checks this on a CPU,
            and elsewhere if the positions of queries and keys count one by one.
        rotate: whether the encoding rotates `q` and `k` first. Use it without a cache, because cached keys are already
            rotated.
        positions: the positions of the queries. They may be omitted for two or more queries with the same number of
            keys, because these can only be at 0, 1, 2, ... They may also be omitted without a causal mask, window and
            encoding, because then nothing depends on them.
        k_positions: the positions of the keys, if they differ from the positions of the queries (a cache,
            cross-attention).
        causal: whether later tokens are hidden.
        window: width of a sliding window. Tokens that are `window` or more positions away are hidden.
        dropout_p: probability of dropping a weight. Use 0 unless training.
        scale: the factor of the products of queries and keys, which is not learned. Default: ``head_dim ** -0.5``.
        sinks: a learned logit for each query head (gpt-oss, https://arxiv.org/abs/2508.10925). It acts as a key without
            a value: every query attends to it, and it takes weight from the other keys. A query without any key still
            gets zeros.
        softcap: bounds scaled scores to ``softcap * tanh(scores / softcap)`` (Gemma 2,
            https://arxiv.org/abs/2408.00118). A bias is added after it and is not bounded, as in flash-attention.
        backend: how the result is computed. It never changes what is computed. ``"sdpa"``: torch's fused kernels, with
            a matrix for bias and mask. In forward mode and inside `torch.func.grad` and similar transforms this is
            torch's kernel of plain operations. ``"tiled"``: the same without the matrix, for a tile of queries at a
            time. ``"flex"``: FlexAttention (on a CPU without gradients). ``"eager"``: plain operations, the only
            backend for gradients of gradients by ``backward``. ``"auto"`` chooses by device and sizes
            (`locant.attention.choice`). ``"sdpa"`` does not support `softcap`, `sinks` and `return_lse`. On a CPU
            ``"flex"`` does not support `sinks` and `return_lse`.
        return_weights: also return the weights, ``batch heads query key``, before dropout. With a sink their sum is
            less than one.
        return_lse: also return the log-sum-exp of every query's scores with bias and sink, after the weights if there
            are any. It is ``batch heads query``, in float32 at least, and minus infinity for a query with neither key
            nor sink. It has a gradient. `locant.attention.merge` uses it to combine outputs over disjoint sets of keys.

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
    require_tensors(q, k, v)
    require_encoding(encoding)
    if encoding is positions is k_positions is window is None and not causal:  # nothing depends on the positions
        positions, k_positions = (positions_or_default(None, x.shape[2], x.device, matter=False) for x in (q, k))
    positions, keys = resolve_positions(encoding, q, k, positions, k_positions)
    require_positions(positions, keys)
    if flag("rotate", rotate) and encoding is not None:
        q, k = encoding.rotate(q, k, positions, keys)
    mask = AttentionMask(positions, k_positions, flag("causal", causal), check_window(window))
    positions.require_fits(q.shape[0], q.shape[2], q.device, "q")
    keys.require_fits(k.shape[0], k.shape[2], k.device, "k")
    require_keys_between(encoding, mask)
    column, wants_lse = check_sinks(sinks, q), flag("return_lse", return_lse)
    factor = check_scale(scale, q.shape[-1])
    inputs = AttentionInputs(
        q, k, v, mask, encoding, factor, check_dropout(dropout_p), flag("return_weights", return_weights),
        check_softcap(softcap), needs_lse=wants_lse or column is not None,
    )  # fmt: skip
    y, lse, weights = attend_to_inputs(inputs, backend, column)
    if weights is None and not wants_lse:
        return y
    return y, *(x for x in (weights, lse if wants_lse else None) if x is not None)


def attend_to_inputs(
    inputs: AttentionInputs, backend: BackendName | BackendChoice = "auto", sinks: Tensor | None = None
) -> AttentionResult:
    """Return the result of `attend` for checked arguments. `backend` may be the choice for inputs that are alike."""
    _require_no_context_parallel()
    encoding, mask = inputs.encoding, inputs.mask
    with without_autocast(inputs.q):
        if isinstance(backend, BackendChoice):
            result = _run_chosen_backend(backend, inputs)
        elif encoding is not None and has_pair_sets(encoding):
            result = _attend_by_set(backend, encoding, inputs)
        else:
            classes = None if encoding is None else encoding.pair_classes(mask.queries, mask.k_positions)
            result = _run_backend(backend, inputs) if classes is None else _attend_by_class(backend, classes, inputs)
        if sinks is None or result.lse is None:
            return result
        return _add_sinks(result.y, result.lse, result.weights, sinks)


def without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round a float32 bias to the dtype of the queries.

    Far distances would then be the same number.
    """
    # `torch.amp.is_autocast_available` also knows the meta device, but the compiler of torch 2.9 cannot trace it.
    if q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)


def _require_no_context_parallel() -> None:
    """Raise inside torch's `context_parallel`, whose fused attention ignores these positions and the bias."""
    if torch.compiler.is_compiling():
        return
    module = getattr(F.scaled_dot_product_attention, "__module__", None) or ""
    if module.startswith("torch.distributed.tensor"):
        got = "got attend inside torch's context_parallel, which replaces torch's attention and ignores Positions"
        remedy = "locant.parallel.attend(..., group=mesh, positions=positions.shard(rank, world)), outside of it"
        raise LocantError(got, remedy)


def _attend_by_class(backend: BackendName, classes: Sequence[PairClass], inputs: AttentionInputs) -> AttentionResult:
    """Attend to each class of pairs with the rotation of that class, and merge the results by their log-sum-exps."""
    mask = inputs.mask
    if not mask.causal or mask.window is not None:
        what = "causal=False" if not mask.causal else f"window={mask.window}"
        name = type(inputs.encoding).__name__
        got = f"got {what} with {name}, whose classes are classes of the pairs of a causal mask"
        raise LocantError(got, "use encoding.rotary instead")
    by_rows: dict[int, list[AttentionResult]] = {}
    for pairs in classes:
        q, k = pairs.rotate(inputs.q, inputs.k)
        v = inputs.v[:, :, slice(*pairs.columns)]
        mask = AttentionMask(pairs.queries, pairs.keys, pairs.causal, pairs.window)
        class_inputs = dataclasses.replace(inputs, q=q, k=k, v=v, mask=mask, encoding=None, needs_lse=True)
        part = _run_backend(backend, class_inputs)
        if part.weights is not None:
            left = pairs.columns[0]
            right = inputs.k.shape[2] - left - part.weights.shape[-1]
            part = part._replace(weights=F.pad(part.weights, (left, right)))
        by_rows.setdefault(pairs.rows[0], []).append(part)
    return concatenate([_merge_classes(parts) for parts in by_rows.values()], dim=2)


def _merge_classes(parts: Sequence[AttentionResult]) -> AttentionResult:
    """Merge the outputs over the keys of each class into one output."""
    if len(parts) == 1:
        return parts[0]
    fractions, lse = shares([part.lse for part in parts if part.lse is not None])
    weighted = list(zip(parts, fractions, strict=True))
    y = torch.stack([part.y * fraction for part, fraction in weighted]).sum(0)
    weights = [part.weights * fraction for part, fraction in weighted if part.weights is not None]
    return AttentionResult(y.to(parts[0].y.dtype), lse, torch.stack(weights).sum(0) if weights else None)


def _attend_by_set(backend: BackendName, encoding: PositionEncoding, inputs: AttentionInputs) -> AttentionResult:
    """Attend to each set of pairs with its own vectors, and merge the results by their log-sum-exps."""
    mask, dtype = inputs.mask, torch.promote_types(inputs.q.dtype, torch.float32)
    if not mask.causal:
        got = f"got causal=False with {type(encoding).__name__}, which has scores only for earlier keys"
        raise LocantError(got, "causal=True")
    inputs = inputs.without_padding()
    q, plain = inputs.q, dataclasses.replace(inputs, encoding=None, needs_lse=True, return_weights=False)
    sets = encoding.pair_sets(q, inputs.k, inputs.v, mask.queries, mask.keys) if _has_elements(inputs) else None
    if sets is None:
        return _run_backend(backend, dataclasses.replace(plain, return_weights=inputs.return_weights))
    y = torch.zeros(*q.shape[:2], sets.num_rows, inputs.v.shape[-1], dtype=dtype, device=q.device)
    lse = y.new_full(y.shape[:3], float("-inf"))
    for part in sets.sets:
        part_mask = AttentionMask(part.queries, part.keys, True, mask.window)
        result = _run_backend(backend, dataclasses.replace(plain, q=part.q, k=part.k, v=part.v, mask=part_mask))
        part_lse = part.ungroup(result.lse)  # type: ignore[arg-type]  # needs_lse is set
        part_y, rows = part.ungroup(result.y), part.rows.flatten()
        (before, fraction), merged = shares([lse.index_select(2, rows), part_lse])
        y = y.index_copy(2, rows, y.index_select(2, rows) * before + part_y * fraction)
        lse = lse.index_copy(2, rows, merged)
    y, lse = (sets.in_order(x) for x in (y, lse))
    if mask.queries.document_or_none is not None:
        (y,), padding = zero_padding(mask.queries, y), padding_or_none(mask.queries)
        lse = lse if padding is None else lse.masked_fill(padding[:, None], float("-inf"))
    if not inputs.return_weights:
        return AttentionResult(y.to(q.dtype), lse)
    sets = encoding.pair_sets(q, inputs.k, inputs.v, mask.queries, mask.keys) or sets  # the first have been read
    scores, dense = inputs.cap_scores(sets.products(inputs.k.shape[2]) * inputs.scale), mask.dense()
    return AttentionResult(y.to(q.dtype), lse, dense.blank((dense.hide(scores) - lse[..., None]).exp()))


def _has_elements(inputs: AttentionInputs) -> bool:
    return bool(inputs.q.numel() and inputs.v.numel())  # each size of k is a size of q or v


def _run_backend(backend: BackendName, inputs: AttentionInputs) -> AttentionResult:
    return _run_chosen_backend(choose_backend(backend, inputs), inputs)


def _run_chosen_backend(choice: BackendChoice, inputs: AttentionInputs) -> AttentionResult:
    eager = choice.name == "eager" or (inputs.needs_lse and not inputs.v.numel())  # values may have no width
    has_elements = _has_elements(inputs)
    if choice.method is not None and not eager and has_elements:
        return tiled_attention(inputs, choice.method)
    inputs = inputs.without_padding()
    if not inputs.k.shape[2] or not (eager or has_elements):
        return _attend_without_keys(inputs)
    if eager:
        return eager_attention(inputs)
    return flex_attention(inputs) if choice.name == "flex" else AttentionResult(sdpa_attention(inputs))


def _add_sinks(y: Tensor, lse: Tensor, weights: Tensor | None, sinks: Float[Tensor, " heads"]) -> AttentionResult:
    """Add a sink. It takes its share of every query's weights and adds nothing to the output."""
    (share, _), lse = shares([lse, sinks[None, :, None].expand_as(lse)])
    is_plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transforming())
    scaled = y.mul_(share) if is_plain else (y * share).to(y.dtype)  # in place: nothing else uses this y
    return AttentionResult(scaled, lse, None if weights is None else weights * share)


def _attend_without_keys(inputs: AttentionInputs) -> AttentionResult:
    """Return zeros if there are no keys. The zeros are sums over no elements, so that every input gets a gradient."""
    q, wide = inputs.q, torch.promote_types(inputs.q.dtype, torch.float32)
    y = q.new_zeros(*q.shape[:3], inputs.v.shape[-1])
    bias = None if inputs.k.shape[2] or inputs.bias is None else inputs.bias.dense()
    for x in (q[:, :, :0], inputs.k, inputs.v, *([] if bias is None else [bias])):
        y = y + x.sum().to(q.dtype)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide) if inputs.needs_lse else None
    return AttentionResult(y, lse, q.new_zeros(*q.shape[:3], 0, dtype=wide) if inputs.return_weights else None)
