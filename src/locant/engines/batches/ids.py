"""Checks of position ids: ids that no text can have, and ids that a model reads as other documents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.engines.batches.documents import documents_from_batch, is_first_id
from locant.engines.batches.finding import NO_TARGET, Batch, Finding, at, first_place
from locant.positions.batches import document_positions

VISIBLE = "packed-documents-visible"
"""The kind of mistake if documents see each other, although the ids of each document begin at 0."""

EXACT_IDS = 2**24
"""The limit of exact integers in float32. Models compute angles from float32 ids."""


def id_findings(batch: Batch) -> Iterator[Finding]:
    """Find ids that no text can have, or that a model reads as other documents."""
    yield from _range_of_ids(batch)
    text = batch.text
    if text is None:
        yield from _ids_of_axes(batch)
    elif (same := _constant_row(text, batch)) is not None:
        row, number = same
        what = "each token is a separate document" if not batch.has_mask else "all tokens have the same position"
        wrong = f"position_ids are {number} for all tokens of row {row}: {what}"
        kind = "not-rotated" if batch.has_mask else None
        yield Finding("ids", wrong, "count the tokens of each document from 0", row, 0, kind)
    elif batch.visible is not None:
        yield from _ids_with_attention_mask(text, batch.visible, batch)
    elif batch.has_padding_mask:
        yield from _ids_with_padding_mask(text, batch)
    elif not batch.has_boundaries:
        yield from _ids_alone(text, batch)


def _range_of_ids(batch: Batch) -> Iterator[Finding]:
    facts = batch.facts
    index = batch.index
    if index is None:
        counted, most = _is_counted(batch).sum(-1), facts.num_ids
        tokens = int(counted.max()) if len(counted) else 0
        if most is not None and tokens > most - facts.first_id:
            limit = "has a table for" if facts.has_table else "is made for"
            wrong = f"rows have {tokens:,} tokens, and {facts.name} {limit} {most - facts.first_id:,}"
            yield Finding("length", wrong, "cut the texts")
        return
    flat = index if index.ndim == 3 else index[..., None]
    real = batch.real if not facts.has_table else torch.ones_like(batch.real)  # a table is read at padding, too
    low = facts.first_id if facts.has_table else 0
    if (place := first_place((flat < low).any(-1) & real)) is not None:
        row, token = place
        wrong = f"position_ids are {int(flat[row, token].min()):,} {at(row, token)}"
        if facts.first_id:
            wrong += f", and the first id of {facts.name} is {low}"
        yield Finding("ids", wrong, f"count the tokens of each document from {low}", row, token)
    most = EXACT_IDS if facts.num_ids is None else facts.num_ids
    if (place := first_place((flat >= most).any(-1) & real)) is not None:
        row, token = place
        got = f"position_ids are {int(flat[row, token].max()):,} {at(row, token)}"
        owner = f"{facts.name} has ids up to {most - 1}" if facts.num_ids else "float32 counts up to 2**24"
        yield Finding("ids", f"{got}, and {owner}", "count the tokens of each document from 0", row, token)


def _is_counted(batch: Batch) -> Bool[Tensor, "rows tokens"]:
    """Return whether the model counts each token, if the batch has no ids."""
    facts, ids = batch.facts, batch.tensors.get("input_ids")
    if facts.counting == "tokens" and ids is not None and facts.first_id:
        return ids != facts.first_id - 1  # the id of padding
    return torch.ones_like(batch.real) if facts.counting == "slots" else batch.real


def _constant_row(text: Tensor, batch: Batch) -> tuple[int, int] | None:
    """Return the first row whose ids are all one number, and the number, or ``None``.

    Skip two such tokens without a mask, which may be documents of one token, and rows without targets, which may be
    padding of the batch.
    """
    if batch.visible is not None or batch.has_boundaries:
        return None
    for row, (ids, real) in enumerate(zip(text, batch.real, strict=True)):
        real_ids = ids[real]
        labels = batch.tensors.get("labels")
        has_targets = labels is None or bool((labels[row] != NO_TARGET).any())
        if len(real_ids) > (1 if batch.has_mask else 2) and has_targets and bool((real_ids == real_ids[0]).all()):
            return row, int(real_ids[0])
    return None


def _steps(text: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each token but the first, the step from the previous id, and whether both tokens are real."""
    return text.diff(dim=1), real[:, 1:] & real[:, :-1]


def _find_falls(text: Tensor, real: Tensor) -> Bool[Tensor, "rows tokens"]:
    """Return whether the id of each token is not larger than the id of the real token before it."""
    slots = torch.where(real, torch.arange(text.shape[1]), -1)
    before = torch.nn.functional.pad(slots, (1, 0), value=-1)[:, :-1].cummax(1).values
    return real & (before >= 0) & (text <= text.gather(1, before.clamp(min=0)))


def _fall_finding(text: Tensor, row: int, token: int) -> Finding:
    wrong = f"position_ids go from {int(text[row, token - 1]):,} to {int(text[row, token]):,} {at(row, token)}"
    kind = "position-repeated" if text[row, token - 1] == text[row, token] else "ranks-in-wrong-order"
    return Finding("ids", wrong + ", within a document", "count the tokens of each document from 0", row, token, kind)


def _ids_alone(text: Tensor, batch: Batch) -> Iterator[Finding]:
    """Check ids without a mask. A document then begins at each id that is not one more than the id before it."""
    step, both = _steps(text, torch.ones_like(batch.real))
    again = is_first_id(text)
    falls, jumps = both & (step <= 0) & ~again, both & (step > 1)
    if (place := first_place(falls)) is not None:
        yield _fall_finding(text, place[0], place[1] + 1)
    if (place := first_place(jumps)) is not None:
        row, token = place[0], place[1] + 1
        before, after = int(text[row, token - 1]), int(text[row, token])
        wrong = f"position_ids jump from {before:,} to {after:,} {at(row, token)}, where a model begins a new document"
        yield Finding("gap", wrong, "give an attention_mask of ones if the row is one document", row, token)
    starts = both & (step <= 0) & again
    facts = batch.facts
    if (place := first_place(starts)) is not None:
        row, token = place[0], place[1] + 1
        if facts.finds_documents is False:
            return  # `mixing_findings` reports these
        if batch.tensors.get("use_cache") is not None and bool(batch.tensors["use_cache"]):
            wrong = f"position_ids restart {at(row, token)}, but with a cache a model looks for no documents in ids"
            yield Finding("documents", wrong, "set use_cache=False", row, token, VISIBLE)
        elif len(text) > 1 and "flash" in (facts.attention or ""):
            wrong = (
                f"position_ids restart {at(row, token)}, but FlashAttention looks for documents only in a single row"
            )
            yield Finding("documents", wrong, "pack all documents into one row", row, token, VISIBLE)


def _ids_with_padding_mask(text: Tensor, batch: Batch) -> Iterator[Finding]:
    if (place := first_place(_find_falls(text, batch.real))) is None:
        return
    row, token = place
    if int(text[row, token]) not in (0, int(text[row, 0]), int(_first_real(text, batch.real)[row])):
        yield _fall_finding(text, row, token)
        return
    wrong = f"there is an attention_mask, and a document begins in the ids {at(row, token)}: with a mask, models"
    wrong += " do not look for documents in the ids"
    facts = batch.facts
    remedy = "leave attention_mask out" if batch.real.all() else "leave out the padding, and attention_mask with it"
    if facts.finds_documents is False or facts.reads_seq_idx is not None:
        remedy = facts.mixing_remedy
    yield Finding("documents", wrong, remedy, row, token, VISIBLE)


def _first_real(text: Tensor, real: Tensor) -> Int[Tensor, " rows"]:
    """Return the id of the first real token of each row."""
    slots = real.long().argmax(1) if real.shape[1] else torch.zeros(len(real), dtype=torch.int64)
    return text.gather(1, slots[:, None])[:, 0] if text.shape[1] else slots


def _ids_with_attention_mask(text: Tensor, visible: Tensor, batch: Batch) -> Iterator[Finding]:
    document = _find_falls(text, batch.real).long().cumsum(1)
    earlier = torch.ones_like(visible[0]).tril(-1)
    apart = document[:, :, None] != document[:, None, :]
    real = batch.real[:, :, None] & batch.real[:, None, :]
    leaks = visible & apart & earlier & real
    if (place := first_place(leaks)) is not None:
        row, query, key = place
        begin = int((document[row] == document[row, query]).long().argmax())
        if int(text[row, begin]) in (0, int(_first_real(text, batch.real)[row])):
            wrong = f"position_ids begin a document {at(row, begin)}, and attention_mask of four axes shows token"
            wrong += f" {query} the token {key} before it"
            yield Finding("documents", wrong, "hide other documents from each token", row, query, VISIBLE)
        else:
            yield _fall_finding(text, row, begin)


def _ids_of_axes(batch: Batch) -> Iterator[Finding]:
    """Check ids of several axes without ids of text. Models look for documents only in ids of text."""
    if batch.index is None or batch.index.ndim != 3:
        return
    index, real = batch.index, batch.real
    for row in range(len(index)):
        real_ids = index[row][real[row]]
        if len(real_ids) > 1 and bool((real_ids == real_ids[0]).all()):
            wrong = f"position_ids are {real_ids[0].tolist()} for all tokens of row {row}: they have the same position"
            yield Finding("ids", wrong, "compute them with the model's get_rope_index", row, 0)
            return
    at_zero = (index == 0).all(-1)
    again = at_zero[:, 1:] & ~at_zero[:, :-1] & real[:, 1:] & real[:, :-1]
    if batch.visible is not None:
        again &= batch.visible.diagonal(-1, 1, 2)
    if (place := first_place(again)) is not None:
        row, token = place[0], place[1] + 1
        wrong = f"position_ids restart {at(row, token)}, but have no ids of text before the ids of the axes, in which"
        remedy = "put a row of ids of text before them, so that they are (4, batch, seq)"
        yield Finding("documents", f"{wrong} a model looks for documents", remedy, row, token)


def padding_findings(batch: Batch) -> Iterator[Finding]:
    """Find ids that count padding or other documents, if the model depends on more than distances."""
    facts = batch.facts
    if not facts.adds_positions or (batch.text is None and (batch.index is not None or facts.counting != "slots")):
        return
    slots = torch.arange(batch.shape[1]).expand(batch.shape)
    text = slots + facts.first_id if batch.text is None else batch.text
    whose = (
        "position_ids" if batch.text is not None else f"position_ids are missing, and the default ids of {facts.name}"
    )
    if (place := first_place(_first_after_padding(batch) & (text != facts.first_id))) is not None:
        row, token = place
        wrong = f"{whose} count the padding: the first token of row {row}, token {token}, has the id"
        remedy = "give Positions.from_mask(attention_mask).index for position_ids"
        yield Finding("padding", f"{wrong} {int(text[row, token]):,}", remedy, row, token)
    document = documents_from_batch(batch)
    if document is None:
        return
    begins = torch.nn.functional.pad(document_positions(document).diff(dim=1) != 0, (1, 0)) & batch.real
    begins &= torch.nn.functional.pad(batch.real[:, :-1], (1, 0))
    if (place := first_place(begins & (text != facts.first_id))) is not None:
        row, token = place
        wrong = f"{whose} continue across documents: token {token} of row {row}, the first of a document, has the id"
        remedy = f"count the tokens of each document from {facts.first_id}"
        yield Finding("documents", f"{wrong} {int(text[row, token]):,}", remedy, row, token)


def _first_after_padding(batch: Batch) -> Bool[Tensor, "rows tokens"]:
    """Return the first real token of each row that begins with padding."""
    nth = batch.real.long().cumsum(1)
    first = batch.real & (nth == 1)
    first[:, :1] = False
    return first


def counts_padding(batch: Batch) -> bool:
    """Return whether padding may shift positions in some models: the ids count padding, or there are no ids."""
    behind = _first_after_padding(batch)
    if batch.text is None:
        return batch.index is None and bool(behind.any())
    return bool((behind & (batch.text != 0)).any())
