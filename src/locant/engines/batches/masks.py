"""Check attention masks: their values, and which tokens and pairs of tokens they show.

`transformers` reads a 2-D mask as true and false. It adds a 4-D mask to the scores, unless the mask is boolean.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from locant.engines.batches.finding import NO_TARGET, Batch, Finding, at, place_of
from locant.engines.batches.model import ModelFacts
from locant.spelling import dtype_name

HIDES = -100.0
"""The largest value of an additive mask that hides a token. The token's attention weight is then below 1e-43."""


def read_mask(mask: Tensor) -> tuple[Bool[Tensor, "rows tokens"], Bool[Tensor, "rows queries keys"] | None]:
    """Return whether each token is real, and whether each query sees each key if the mask is 4-D."""
    if mask.ndim == 2:
        return ((mask == 0) if _is_additive(mask) else (mask > 0)), None
    visible = (mask == 0) if _is_additive(mask) else (mask > 0)
    visible = visible.any(1)
    return _real_of(visible), visible


def _is_additive(mask: Tensor) -> bool:
    """Return whether 0 in the mask shows a token and a large negative number hides it."""
    return mask.is_floating_point() and bool((mask <= HIDES).any())


def _real_of(visible: Bool[Tensor, "rows tokens tokens"]) -> Bool[Tensor, "rows tokens"]:
    """Return whether each token is real.

    A padding token does not see itself, or it sees all tokens and only padding sees it. Masks have the second form
    because some kernels require that each query sees a key.
    """
    tokens = visible.shape[-1]
    sees_itself = visible.diagonal(dim1=1, dim2=2)
    sees_all = visible.all(2)
    sees_all[:, -1:] = False  # the last token of a causal row does so, too
    seen = (visible & ~sees_all[:, :, None]).any(1)
    fill = sees_all & ~seen & ~sees_all[:, : max(tokens - 1, 0)].all(1, keepdim=True)
    return sees_itself & ~fill


def mask_findings(mask: Tensor, facts: ModelFacts) -> Iterator[Finding]:
    """Find values of a mask that a model does not interpret as the caller means them."""
    if (place := place_of(mask.isnan())) is not None:
        row, token = place[0], place[-1]
        wrong = f"attention_mask is NaN {at(row, token)}, which a model reads as a visible token"
        wrong = wrong if mask.ndim == 2 else f"attention_mask is NaN {at(row, token)}: outputs are NaN"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)
    elif mask.ndim == 2:
        yield from _check_padding_mask(mask)
    else:
        yield from _check_attention_mask(mask, facts)


def _check_padding_mask(mask: Tensor) -> Iterator[Finding]:
    other = (mask != 0) & (mask != 1)
    if (place := place_of(other)) is None:
        return
    row, token = place
    number = mask[row, token].item()
    if _is_additive(mask):
        wrong = f"attention_mask is {number:g} {at(row, token)}, like an additive mask, but a model reads a mask of two"
        wrong += " axes as true and false: padding is visible, and tokens are hidden"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)
    elif bool((mask >= 0).all()) and bool((mask == mask.round()).all()):
        wrong = f"attention_mask numbers documents, {number:g} {at(row, token)}, but models read them as one document"
        remedy = "give position_ids that restart with each document, and no attention_mask"
        yield Finding("documents", wrong, remedy, row, token, "packed-as-one-text")
    else:
        wrong = f"attention_mask is {number:g} {at(row, token)}, which a model reads as a visible token"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)


def _check_attention_mask(mask: Tensor, facts: ModelFacts) -> Iterator[Finding]:
    remedy = "use a mask of bool, True where a query sees a key"
    if mask.dtype == torch.bool:
        if facts.attention == "eager":
            wrong = "attention_mask of bool is added to scores by eager attention, as 0 and 1, and hides nothing"
            yield Finding("mask", wrong, "use 0 for visible keys and torch.finfo(dtype).min for hidden ones")
        return
    if not mask.is_floating_point():
        wrong = f"attention_mask of four axes is of {dtype_name(mask.dtype)}: attention raises an error, or adds it"
        yield Finding("mask", wrong, remedy)
        return
    other = (mask != 0) & (mask > HIDES)
    if (place := place_of(other)) is not None:
        row, head, query, key = place
        number = mask[row, head, query, key].item()
        wrong = f"attention_mask of four axes is added to scores, and its {number:g} {at(row, query)} for the key {key}"
        yield Finding("mask", f"{wrong} hides nothing", remedy, row, query)


def inverted_findings(batch: Batch) -> Iterator[Finding]:
    """Find a token that a 4-D mask hides from itself but shows to others. Such a mask is inverted."""
    if batch.visible is None:
        return
    sees_itself, sees_all = batch.visible.diagonal(dim1=1, dim2=2), batch.visible.all(2)
    shown = batch.visible & ~sees_all[:, :, None] & ~sees_itself[:, None, :]
    if (place := place_of(shown)) is not None:
        row, query, key = place
        wrong = f"attention_mask of four axes hides token {key} of row {row} from itself and shows it to token {query}"
        remedy = "invert the mask: use True (or 0 in an additive mask) if a query sees a key"
        yield Finding("mask", wrong, remedy, row, key)


def future_findings(batch: Batch) -> Iterator[Finding]:
    """Find tokens that see a later token although the model is causal, or although they have to predict it."""
    facts = batch.facts
    causal = facts.is_causal or (facts.is_causal is None and _predicts_next(batch))
    if causal and (place := _future_key(batch)) is not None:
        row, query, key = place
        why = "which it has to predict" if "labels" in batch.tensors else f"but {facts.name} is causal"
        wrong = f"attention_mask shows token {query} of row {row} the token {key} after it, {why}"
        yield Finding("future", wrong, "hide later tokens from each token", row, query)


def future_unchecked(batch: Batch) -> str | None:
    """Return which check of later tokens was not possible, or ``None`` if all were."""
    if batch.facts.is_causal is not None or _predicts_next(batch) or (place := _future_key(batch)) is None:
        return None
    row, query, key = place
    seen = f"whether tokens may see later ones, as token {query} of row {row} sees token {key}"
    return f"{seen}: locant does not know {batch.facts.name}" if batch.facts.is_known else f"{seen}: give the model"


def _predicts_next(batch: Batch) -> bool:
    """Return whether the targets equal the tokens, as for a causal model, which shifts the targets itself."""
    labels, ids = batch.tensors.get("labels"), batch.tensors.get("input_ids")
    if labels is None or ids is None:
        return False
    has_target = labels != NO_TARGET
    return bool(has_target.any()) and bool((labels == ids)[has_target].all())


def _future_key(batch: Batch) -> tuple[int, ...] | None:
    """Return the first row, query and later key that a mask shows. With labels, the key must reveal a target."""
    visible, labels = batch.visible, batch.tensors.get("labels")
    if visible is None or (labels is None and batch.facts.sees_prefix):
        return None
    sees_all = visible.all(2)
    fill = sees_all & ~(visible & ~sees_all[:, :, None]).any(1) & ~sees_all.all(1, keepdim=True)  # padding behind
    real = batch.real & ~fill
    ahead = visible.triu(1) & real[:, :, None] & real[:, None, :]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if (types := batch.tensors.get(name)) is not None:  # tokens of an image see each other
            ahead &= (types[:, :, None] != types[:, None, :]) | (types == 0)[:, None, :]
    if labels is not None:
        num_targets = (labels != NO_TARGET).long().cumsum(1)
        ahead &= num_targets[:, None, :] > num_targets[:, :, None]
    return place_of(ahead)
