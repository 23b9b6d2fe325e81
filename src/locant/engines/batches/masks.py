"""The numbers of attention masks, and which tokens and pairs they mean.

`transformers` takes a mask of two axes for true and false. It adds one of four axes to the scores, unless it is bool.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from locant.engines.batches.finding import NO_TARGET, Batch, Finding, at, place_of
from locant.engines.batches.model import ModelFacts

HIDES = -100.0
"""An additive mask with this number or a smaller one hides a token: its weight is below 1e-43."""


def read_mask(mask: Tensor) -> tuple[Bool[Tensor, "rows tokens"], Bool[Tensor, "rows queries keys"] | None]:
    """Which tokens a mask means to be real, and which keys each query sees if it has four axes."""
    if mask.ndim == 2:
        return ((mask == 0) if _is_additive(mask) else (mask > 0)), None
    visible = (mask == 0) if _is_additive(mask) else (mask > 0)
    visible = visible.any(1)
    return _real_of(visible), visible


def _is_additive(mask: Tensor) -> bool:
    """Whether 0 means seen and a large negative number hidden."""
    return mask.is_floating_point() and bool((mask <= HIDES).any())


def _real_of(visible: Bool[Tensor, "rows tokens tokens"]) -> Bool[Tensor, "rows tokens"]:
    """Padding sees not even itself; or it sees everything and is seen by padding alone, as kernels demand of a row."""
    tokens = visible.shape[-1]
    own = visible.diagonal(dim1=1, dim2=2)
    sees_all = visible.all(2)
    sees_all[:, -1:] = False  # the last token of a causal row does so, too
    seen = (visible & ~sees_all[:, :, None]).any(1)
    fill = sees_all & ~seen & ~sees_all[:, : max(tokens - 1, 0)].all(1, keepdim=True)
    return own & ~fill


def mask_findings(mask: Tensor, facts: ModelFacts) -> Iterator[Finding]:
    """Numbers of a mask that a model does not take for what they mean."""
    if (place := place_of(mask.isnan())) is not None:
        row, token = place[0], place[-1]
        wrong = f"attention_mask is NaN {at(row, token)}, which a model takes for a token that is seen"
        wrong = wrong if mask.ndim == 2 else f"attention_mask is NaN {at(row, token)}: outputs are NaN"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)
    elif mask.ndim == 2:
        yield from _numbers_of_padding_mask(mask)
    else:
        yield from _numbers_of_attention_mask(mask, facts)


def _numbers_of_padding_mask(mask: Tensor) -> Iterator[Finding]:
    other = (mask != 0) & (mask != 1)
    if (place := place_of(other)) is None:
        return
    row, token = place
    number = mask[row, token].item()
    if _is_additive(mask):
        wrong = (
            f"attention_mask is {number:g} {at(row, token)}, as one that is added to scores, and with two axes it is"
        )
        wrong += " taken for true and false: padding is seen, and tokens are hidden"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)
    elif bool((mask >= 0).all()) and bool((mask == mask.round()).all()):
        wrong = f"attention_mask numbers documents, {number:g} {at(row, token)}, and models see one document in them"
        remedy = "give position_ids that begin again with each document, and no attention_mask"
        yield Finding("documents", wrong, remedy, row, token)
    else:
        wrong = f"attention_mask is {number:g} {at(row, token)}, which a model takes for a token that is seen"
        yield Finding("mask", wrong, "use 1 for tokens and 0 for padding", row, token)


def _numbers_of_attention_mask(mask: Tensor, facts: ModelFacts) -> Iterator[Finding]:
    remedy = "use a mask of bool, True where a query sees a key"
    if mask.dtype == torch.bool:
        if facts.attention == "eager":
            wrong = "attention_mask of bool is added to scores by eager attention, as 0 and 1, and hides nothing"
            yield Finding("mask", wrong, "add 0 for what is seen and torch.finfo(dtype).min for what is not")
        return
    if not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        yield Finding("mask", f"attention_mask of four axes is of {kind}: attention refuses it, or adds it", remedy)
        return
    other = (mask != 0) & (mask > HIDES)
    if (place := place_of(other)) is not None:
        row, head, query, key = place
        number = mask[row, head, query, key].item()
        wrong = f"attention_mask of four axes is added to scores, and its {number:g} {at(row, query)} for the key {key}"
        yield Finding("mask", f"{wrong} hides nothing", remedy, row, query)


def inverted_findings(batch: Batch) -> Iterator[Finding]:
    """A token that a mask of four axes hides from itself and shows to others, as one that is inverted does."""
    if batch.visible is None:
        return
    own, sees_all = batch.visible.diagonal(dim1=1, dim2=2), batch.visible.all(2)
    shown = batch.visible & ~sees_all[:, :, None] & ~own[:, None, :]
    if (place := place_of(shown)) is not None:
        row, query, key = place
        wrong = f"attention_mask of four axes hides token {key} of row {row} from itself and shows it to token {query}"
        remedy = "exchange seen and hidden: use True, or 0 in a mask that is added, where a query sees a key"
        yield Finding("mask", wrong, remedy, row, key)


def future_findings(batch: Batch) -> Iterator[Finding]:
    """Tokens that see what they are to predict."""
    facts = batch.facts
    causal = facts.is_causal or (facts.is_causal is None and _predicts_next(batch))
    if causal and (place := _ahead(batch)) is not None:
        row, query, key = place
        why = "which it is to predict" if "labels" in batch.tensors else f"and {facts.name} is causal"
        wrong = f"attention_mask shows token {query} of row {row} the token {key} after it, {why}"
        yield Finding("future", wrong, "hide from each token those after it", row, query)


def future_unchecked(batch: Batch) -> str | None:
    """What is not known of tokens that see those after them."""
    if batch.facts.is_causal is not None or _predicts_next(batch) or (place := _ahead(batch)) is None:
        return None
    row, query, key = place
    seen = f"whether a token may see those after it, as token {query} of row {row} sees token {key}"
    return f"{seen}: {batch.facts.name} is not known" if batch.facts.is_known else f"{seen}: give the model"


def _predicts_next(batch: Batch) -> bool:
    """Whether targets are the tokens themselves, as those of a causal model are."""
    labels, ids = batch.tensors.get("labels"), batch.tensors.get("input_ids")
    if labels is None or ids is None:
        return False
    aims = labels != NO_TARGET
    return bool(aims.any()) and bool((labels == ids)[aims].all())


def _ahead(batch: Batch) -> tuple[int, ...] | None:
    """The first row, query and key after it that a mask shows, and that tells of a target if there are any."""
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
        aims = (labels != NO_TARGET).long().cumsum(1)
        ahead &= aims[:, None, :] > aims[:, :, None]
    return place_of(ahead)
