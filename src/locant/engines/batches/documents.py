"""Checks of document boundaries in a batch: in cumulative lengths, masks, ids and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.engines.batches.finding import NO_TARGET, Batch, Finding, at, place_of
from locant.errors import LocantError
from locant.positions.batches import BOUNDARIES, document_positions, documents_of_boundaries, documents_of_ids


def boundary_findings(batch: Batch) -> Iterator[Finding]:
    """Compare cumulative lengths, largest lengths and ids with each other."""
    tensors = batch.tensors
    for name in BOUNDARIES:
        yield from _longest_finding(tensors, name)
        if name not in tensors:
            continue
        other = BOUNDARIES[1 - BOUNDARIES.index(name)]
        try:
            documents_of_boundaries(tensors[name], batch.shape.numel())
        except LocantError as error:
            yield Finding("lengths", error.cause.replace(BOUNDARIES[0], name), "give 0 and the end of each document")
            return
        if other not in tensors:
            yield Finding("lengths", f"{name} is there, but {other} is missing: both are needed", f"add {other}")
        elif name == BOUNDARIES[0] and not torch.equal(tensors[name], tensors[other]):
            wrong = f"{name} and {other} differ: tokens would see other documents"
            yield Finding("lengths", wrong, "give the same lengths for both")
    if (document := _documents_from_lengths(batch)) is not None:
        yield from _compare_lengths_with_ids(document, batch)


def _documents_from_lengths(batch: Batch) -> Int[Tensor, "rows tokens"] | None:
    """Return the documents of cumulative lengths, if there are lengths that fit these tokens."""
    for name in BOUNDARIES:
        if name in batch.tensors:
            try:
                return documents_of_boundaries(batch.tensors[name], batch.shape.numel()).reshape(batch.shape)
            except LocantError:
                return None
    return None


def _longest_finding(tensors: Mapping[str, Tensor], name: str) -> Iterator[Finding]:
    longest = f"max_length_{name[-1]}"
    if longest not in tensors:
        return
    number = float(tensors[longest])
    ends = tensors.get(name)
    if not (math.isfinite(number) and number == int(number) and number >= 0):
        yield Finding(
            "lengths", f"{longest} is {number:,g}, which is not a number of tokens", f"give max({name}.diff())"
        )
    elif ends is None:
        yield Finding("lengths", f"{longest} is there, but {name} is missing", f"add {name}")
    elif ends.ndim == 1 and len(ends) > 1 and number < int(ends.diff().max()):
        wrong = f"{longest} is {int(number):,}, and a document has {int(ends.diff().max()):,} tokens"
        yield Finding("lengths", wrong, f"give max({name}.diff())")


def _compare_lengths_with_ids(document: Int[Tensor, "rows tokens"], batch: Batch) -> Iterator[Finding]:
    tokens = batch.shape[1]
    if batch.text is not None:
        differ = documents_of_ids(batch.text.reshape(1, -1)) != document.reshape(1, -1)
        if (place := place_of(differ)) is not None:
            slot = place[1]
            wrong = f"position_ids and {BOUNDARIES[0]} have different documents from token {slot} on"
            yield Finding("documents", wrong, "make both of the same lengths", slot // tokens, slot % tokens)
        return
    if batch.index is not None:
        wrong = "position_ids have no ids of text before the ids of the axes, in which the model looks for documents"
        yield Finding("documents", wrong, "put a row of ids of text before them, so that they are (4, batch, seq)")
    elif only_flash_separates(document, batch) and batch.facts.attention in ("sdpa", "eager"):
        row, token = place_of(document != document[:, :1]) or (0, 0)
        wrong = (
            f"{BOUNDARIES[0]} begins a document {at(row, token)}, and {batch.facts.attention} attention reads only ids"
        )
        remedy = "give position_ids that restart with each document"
        yield Finding("documents", wrong, remedy, row, token, "packed-as-one-text")
    in_two_rows = document[1:, :1] == document[:-1, -1:]
    if (place := place_of(in_two_rows)) is not None:
        row = place[0] + 1
        wrong = f"{BOUNDARIES[0]} continue from row {row - 1} to row {row}: one document is in two rows"
        yield Finding("documents", wrong, "end a document at the end of each row", row, 0)


def only_flash_separates(document: Int[Tensor, "rows tokens"], batch: Batch) -> bool:
    """Return whether only cumulative lengths separate the documents of a row, which only FlashAttention reads."""
    several = bool((document != document[:, :1]).any())
    by_ids = batch.index is not None and batch.facts.finds_documents is not False
    return batch.has_boundaries and several and not by_ids and batch.visible is None


def documents_from_batch(batch: Batch) -> Int[Tensor, "rows tokens"] | None:
    """Return the documents of a batch, from its lengths, its mask or its ids, or ``None`` if none of them has any."""
    if batch.has_boundaries:
        return _documents_from_lengths(batch)
    if batch.visible is not None:
        apart = ~batch.visible.diagonal(-1, 1, 2) & batch.real[:, 1:] & batch.real[:, :-1]
        return torch.nn.functional.pad(apart.long().cumsum(1), (1, 0))
    mask = batch.tensors.get("attention_mask")
    if mask is not None:
        return mask.long() if bool((mask > 1).any()) else None
    if batch.text is None:
        return None
    begins = (batch.text.diff(dim=1) <= 0) & is_first_id(batch.text)
    return torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))


def is_first_id(text: Int[Tensor, "rows tokens"]) -> Bool[Tensor, "rows rest"]:
    """Return for each token but the first whether it has an id at which documents begin: 0, or the first of its row."""
    return (text[:, 1:] == 0) | (text[:, 1:] == text[:, :1])


def second_document(batch: Batch) -> tuple[int, int] | None:
    """Return the row and the number of the first token that begins a second document in a row, or ``None``."""
    document = documents_from_batch(batch)
    begins = None if document is None else (document.diff(dim=1) != 0) & batch.real[:, 1:] & batch.real[:, :-1]
    if begins is None or (place := place_of(begins)) is None:
        return None
    return place[0], place[1] + 1


def only_ids_separate(batch: Batch) -> bool:
    """Return whether only ids separate the documents of a row, as far as the model is known."""
    reads_lengths = "flash" in (batch.facts.attention or "")
    if batch.has_mask or batch.text is None or reads_lengths or batch.facts.finds_documents is False:
        return False
    return second_document(batch) is not None and not any(mixing_findings(batch))


def mixing_findings(batch: Batch) -> Iterator[Finding]:
    """Find documents of one row that the model does not separate."""
    facts, tensors = batch.facts, batch.tensors
    if (place := second_document(batch)) is None or batch.has_padding_mask:
        return
    wrong = f"a document begins {at(*place)}, and {facts.name}"
    leak = "tokens see the document before"
    if facts.reads_seq_idx is not None:
        if not (facts.reads_seq_idx and "seq_idx" in tensors):
            state = f"{wrong} carries a state from token to token: {leak}"
            yield Finding("documents", state, facts.separation, *place)
    elif batch.visible is None and facts.finds_documents is False:
        if batch.has_boundaries and facts.attention not in ("sdpa", "eager"):
            return  # FlashAttention reads the lengths
        why = "looks for no documents in ids" if facts.takes_ids else "takes no position_ids"
        kind = "packed-documents-visible" if facts.takes_ids and batch.text is not None else "packed-as-one-text"
        yield Finding("documents", f"{wrong} {why}: {leak}", facts.separation, *place, kind)


def label_findings(batch: Batch) -> Iterator[Finding]:
    """Find targets at padding, and targets that are predicted from another document."""
    labels = batch.tensors.get("labels")
    if labels is None:
        return
    if (place := place_of(~batch.real & (labels != NO_TARGET))) is not None:
        row, token = place
        wrong = f"labels have targets at padding, the first {at(row, token)}"
        yield Finding("labels", wrong, f"set them to {NO_TARGET}", row, token)
    document = documents_from_batch(batch)
    if document is None:
        return
    leaking = (
        torch.nn.functional.pad(document_positions(document).diff(dim=1) != 0, (1, 0))
        & (labels != NO_TARGET)
        & batch.real
    )
    if (place := place_of(leaking)) is not None:
        row, token = place
        wrong = (
            f"labels have a target {at(row, token)}, the first of a document, which is predicted from another document"
        )
        yield Finding("labels", wrong, f"set it to {NO_TARGET}", row, token)


def other_findings(batch: Batch) -> Iterator[Finding]:
    """Find segments beyond their table, wrong document numbers, and padding without a mask."""
    types, kinds = batch.tensors.get("token_type_ids"), batch.facts.config.get("type_vocab_size")
    if types is not None:
        most = kinds if isinstance(kinds, int) and kinds > 0 else None
        outside = (types < 0) if most is None else (types < 0) | (types >= most)
        if (place := place_of(outside)) is not None:
            row, token = place
            wrong = f"token_type_ids are {int(types[row, token])} {at(row, token)}"
            wrong += "" if most is None else f", and {batch.facts.name} has {most} types"
            yield Finding("types", wrong, "count types from 0", row, token)
    numbers, document = batch.tensors.get("seq_idx"), documents_from_batch(batch)
    if numbers is not None and document is not None:
        differ = (document_positions(numbers) != document_positions(document)) & batch.real
        if (place := place_of(differ)) is not None:
            row, token = place
            wrong = f"seq_idx and position_ids have different documents from token {token} of row {row} on"
            yield Finding("documents", wrong, "number the documents in seq_idx", row, token)
    config, ids = batch.facts.config, batch.tensors.get("input_ids")
    pad, special = config.get("pad_token_id"), (config.get("bos_token_id"), config.get("eos_token_id"))
    if ids is not None and isinstance(pad, int) and pad not in special and not batch.has_mask:
        padded = (ids[:, :1] == pad) & (ids != pad).any(1, keepdim=True)
        if (place := place_of(padded)) is not None:
            wrong = f"row {place[0]} begins with padding (token {pad}), and without attention_mask every token sees it"
            yield Finding("padding", wrong, "give an attention_mask with 0 at padding", place[0], 0, "padding-visible")
