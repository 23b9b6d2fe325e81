"""Position ids: those that no text has, and those that a model reads as other documents than they mean."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.engines.batches.documents import documents_of, is_first_id
from locant.engines.batches.finding import NO_TARGET, Batch, Finding, at, place_of
from locant.positions.batches import counted

EXACT_IDS = 2**24
"""Angles are made of float32 ids, which are whole numbers up to here."""


def id_findings(batch: Batch) -> Iterator[Finding]:
    """Ids that no text has, or that a model reads as other documents than they mean."""
    yield from _range_of_ids(batch)
    text = batch.text
    if text is None:
        yield from _ids_of_axes(batch)
    elif (same := _all_the_same(text, batch)) is not None:
        row, number = same
        what = "every token is a document of its own" if not batch.has_mask else "no token has a place of its own"
        wrong = f"position_ids are {number} for every token of row {row}: {what}"
        yield Finding("ids", wrong, "count the tokens of each document from 0", row, 0)
    elif batch.visible is not None:
        yield from _ids_beside_attention_mask(text, batch.visible, batch)
    elif batch.has_padding_mask:
        yield from _ids_beside_padding_mask(text, batch)
    elif not batch.has_boundaries:
        yield from _ids_alone(text, batch)


def _range_of_ids(batch: Batch) -> Iterator[Finding]:
    facts = batch.facts
    index = batch.index
    if index is None:
        rows, tokens = batch.shape
        most = facts.longest
        if most is not None and rows and facts.counting == "slots" and tokens > most - facts.first_id:
            end = "whose table has no more rows" if facts.has_table else "which was made for no more"
            wrong = f"rows have {tokens} tokens, and {facts.name}, {end}, counts {most - facts.first_id}"
            yield Finding("length", wrong, "cut the texts")
        return
    flat = index if index.ndim == 3 else index[..., None]
    real = batch.real if not facts.has_table else torch.ones_like(batch.real)  # a table is read at padding, too
    low = facts.first_id if facts.has_table else 0
    if (place := place_of((flat < low).any(-1) & real)) is not None:
        row, token = place
        wrong = f"position_ids are {int(flat[row, token].min())} {at(row, token)}"
        if facts.first_id:
            wrong += f", and the first id of {facts.name} is {low}"
        yield Finding("ids", wrong, f"count the tokens of each document from {low}", row, token)
    most = EXACT_IDS if facts.longest is None else facts.longest
    if (place := place_of((flat >= most).any(-1) & real)) is not None:
        row, token = place
        got = f"position_ids are {int(flat[row, token].max())} {at(row, token)}"
        owner = f"{facts.name} has ids up to {most - 1}" if facts.longest else "float32 counts up to 2**24"
        yield Finding("ids", f"{got}, and {owner}", "count the tokens of each document from 0", row, token)


def _all_the_same(text: Tensor, batch: Batch) -> tuple[int, int] | None:
    """The row whose ids are all one number, and which.

    Two such tokens may be documents of one token, and a row without targets may be a filler.
    """
    if batch.visible is not None or batch.has_boundaries:
        return None
    for row, (ids, real) in enumerate(zip(text, batch.real, strict=True)):
        of_tokens = ids[real]
        labels = batch.tensors.get("labels")
        aims = labels is None or bool((labels[row] != NO_TARGET).any())
        if len(of_tokens) > (1 if batch.has_mask else 2) and aims and bool((of_tokens == of_tokens[0]).all()):
            return row, int(of_tokens[0])
    return None


def _steps(text: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """From the token before: the step of ids, and whether both are real; for every token but the first."""
    return text.diff(dim=1), real[:, 1:] & real[:, :-1]


def _falls(text: Tensor, real: Tensor) -> Bool[Tensor, "rows tokens"]:
    """Where the id of a token is not larger than that of the token before it, whatever padding stands between."""
    slots = torch.where(real, torch.arange(text.shape[1]), -1)
    before = torch.nn.functional.pad(slots, (1, 0), value=-1)[:, :-1].cummax(1).values
    return real & (before >= 0) & (text <= text.gather(1, before.clamp(min=0)))


def _fall(text: Tensor, row: int, token: int) -> Finding:
    wrong = f"position_ids go from {int(text[row, token - 1])} to {int(text[row, token])} {at(row, token)}"
    return Finding("ids", wrong + ", within a document", "count the tokens of each document from 0", row, token)


def _ids_alone(text: Tensor, batch: Batch) -> Iterator[Finding]:
    """Without a mask, every id that is not the one before plus one begins a document."""
    step, both = _steps(text, torch.ones_like(batch.real))
    again = is_first_id(text)
    falls, jumps = both & (step <= 0) & ~again, both & (step > 1)
    if (place := place_of(falls)) is not None:
        yield _fall(text, place[0], place[1] + 1)
    if (place := place_of(jumps)) is not None:
        row, token = place[0], place[1] + 1
        before, after = int(text[row, token - 1]), int(text[row, token])
        wrong = f"position_ids jump from {before} to {after} {at(row, token)}, where a model begins a new document"
        yield Finding("gap", wrong, "give an attention_mask of ones if the row is one document", row, token)
    starts = both & (step <= 0) & again
    facts = batch.facts
    if (place := place_of(starts)) is not None:
        row, token = place[0], place[1] + 1
        if facts.finds_documents is False:
            return  # whatever else the batch holds
        if batch.tensors.get("use_cache") is not None and bool(batch.tensors["use_cache"]):
            wrong = f"position_ids begin again {at(row, token)}, and with a cache a model looks for no documents in ids"
            yield Finding("documents", wrong, "set use_cache=False", row, token)
        elif len(text) > 1 and "flash" in (facts.attention or ""):
            wrong = f"position_ids begin again {at(row, token)}, and FlashAttention looks for documents in a single row"
            yield Finding("documents", wrong, "pack all documents into one row", row, token)


def _ids_beside_padding_mask(text: Tensor, batch: Batch) -> Iterator[Finding]:
    if (place := place_of(_falls(text, batch.real))) is None:
        return
    row, token = place
    if int(text[row, token]) not in (0, int(text[row, 0]), int(_first_real(text, batch.real)[row])):
        yield _fall(text, row, token)
        return
    wrong = f"attention_mask stands beside ids of several documents, of which one begins {at(row, token)}: models"
    wrong += " then do not look for documents in the ids"
    facts = batch.facts
    remedy = "leave attention_mask out" if batch.real.all() else "leave out the padding, and attention_mask with it"
    if facts.finds_documents is False or facts.reads_seq_idx is not None:
        remedy = facts.separation
    yield Finding("documents", wrong, remedy, row, token)


def _first_real(text: Tensor, real: Tensor) -> Int[Tensor, " rows"]:
    """The id of the first real token of each row."""
    slots = real.long().argmax(1) if real.shape[1] else torch.zeros(len(real), dtype=torch.int64)
    return text.gather(1, slots[:, None])[:, 0] if text.shape[1] else slots


def _ids_beside_attention_mask(text: Tensor, visible: Tensor, batch: Batch) -> Iterator[Finding]:
    document = _falls(text, batch.real).long().cumsum(1)
    earlier = torch.ones_like(visible[0]).tril(-1)
    apart = document[:, :, None] != document[:, None, :]
    real = batch.real[:, :, None] & batch.real[:, None, :]
    leaks = visible & apart & earlier & real
    if (place := place_of(leaks)) is not None:
        row, query, key = place
        begin = int((document[row] == document[row, query]).long().argmax())
        if int(text[row, begin]) in (0, int(_first_real(text, batch.real)[row])):
            wrong = f"position_ids begin a document {at(row, begin)}, and attention_mask of four axes shows token"
            wrong += f" {query} the token {key} before it"
            yield Finding("documents", wrong, "hide from each token those of other documents", row, query)
        else:
            yield _fall(text, row, begin)


def _ids_of_axes(batch: Batch) -> Iterator[Finding]:
    """Ids of several axes without those of text, which are the only ones in which documents are found."""
    if batch.index is None or batch.index.ndim != 3:
        return
    index, real = batch.index, batch.real
    for row in range(len(index)):
        of_tokens = index[row][real[row]]
        if len(of_tokens) > 1 and bool((of_tokens == of_tokens[0]).all()):
            wrong = f"position_ids are {of_tokens[0].tolist()} for every token of row {row}: no token has its own place"
            yield Finding("ids", wrong, "compute them with the model's get_rope_index", row, 0)
            return
    at_zero = (index == 0).all(-1)
    again = at_zero[:, 1:] & ~at_zero[:, :-1] & real[:, 1:] & real[:, :-1]
    if batch.visible is not None:
        again &= batch.visible.diagonal(-1, 1, 2)
    if (place := place_of(again)) is not None:
        row, token = place[0], place[1] + 1
        wrong = f"position_ids begin again {at(row, token)}, and have no ids of text before those of the axes, in which"
        remedy = "put a row of ids of text before them, so that they are (4, batch, seq)"
        yield Finding("documents", f"{wrong} a model looks for documents", remedy, row, token)


def padding_findings(batch: Batch) -> Iterator[Finding]:
    """Ids that count padding or other documents, for a model that looks at more than distances."""
    facts = batch.facts
    if not facts.absolute or (batch.text is None and (batch.index is not None or facts.counting != "slots")):
        return
    slots = torch.arange(batch.shape[1]).expand(batch.shape)
    text = slots + facts.first_id if batch.text is None else batch.text
    whose = "position_ids" if batch.text is not None else f"position_ids are not there, and those of {facts.name}"
    if (place := place_of(_behind_padding(batch) & (text != facts.first_id))) is not None:
        row, token = place
        wrong = f"{whose} count the padding: the first token of row {row}, token {token}, has the id"
        remedy = "give Positions.from_mask(attention_mask).index for position_ids"
        yield Finding("padding", f"{wrong} {int(text[row, token])}", remedy, row, token)
    document = documents_of(batch)
    if document is None:
        return
    begins = torch.nn.functional.pad(counted(document).diff(dim=1) != 0, (1, 0)) & batch.real
    begins &= torch.nn.functional.pad(batch.real[:, :-1], (1, 0))
    if (place := place_of(begins & (text != facts.first_id))) is not None:
        row, token = place
        wrong = f"{whose} go on across documents: the first token of one, {token} of row {row}, has the id"
        remedy = f"count the tokens of each document from {facts.first_id}"
        yield Finding("documents", f"{wrong} {int(text[row, token])}", remedy, row, token)


def _behind_padding(batch: Batch) -> Bool[Tensor, "rows tokens"]:
    """The first real token of each row that begins with padding."""
    nth = batch.real.long().cumsum(1)
    first = batch.real & (nth == 1)
    first[:, :1] = False
    return first


def counts_padding(batch: Batch) -> bool:
    """Whether it depends on the model if padding does harm: ids count it, or there are none."""
    behind = _behind_padding(batch)
    if batch.text is None:
        return batch.index is None and bool(behind.any())
    return bool((behind & (batch.text != 0)).any())
