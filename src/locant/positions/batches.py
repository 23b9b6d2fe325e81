"""Convert between `Positions` and the batches of trainers: ids, documents and padding, as `transformers` reads them.

If a batch describes its documents in two ways that disagree, documents leak into each other. Here this raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import short_repr
from locant.errors import LocantError, ShapeError
from locant.positions.checks import padding_mask, to_int64
from locant.positions.documents import PADDING, cu_seqlens

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
AXES = 3
"""The axes of vision-language models: time, rows and columns."""


def make_batch(
    index: Int[Tensor, "batch seq"] | Int[Tensor, "batch seq axes"], document: Int[Tensor, "batch seq"]
) -> dict[str, Any]:
    """Return the result of `Positions.to_batch`."""
    padded = bool((document == PADDING).any())
    packed = bool((document.clamp(min=0) != document[:, :1].clamp(min=0)).any())
    if packed and padded:
        got = "got padding and several documents in a row, and no key of a batch describes both"
        raise LocantError(got, "use Positions.packed(lengths) without length=, so that nothing is padded")
    if index.ndim == 3:
        if index.shape[2] != AXES:
            got = f"got positions with {index.shape[2]} axes, and no key of a batch holds them"
            raise LocantError(
                got, f"use {AXES} axes, as in Positions.multimodal, or pass your model's own position_ids"
            )
        ids = index.movedim(-1, 0)
        # Vision-language models look for documents in the ids of text, which precede the ids of the axes.
        batch: dict[str, Any] = {
            "position_ids": torch.cat([_offsets_in_documents(document)[None], ids]) if packed else ids
        }
    elif packed and not torch.equal(documents_of_ids(index), document_positions(document)):
        got = "got documents whose ids do not grow by one from token to token, in which a model finds other documents"
        raise LocantError(got, "Positions.packed(lengths), which counts each document from 0")
    else:
        batch = {"position_ids": index}
    if padded:
        batch["attention_mask"] = (document != PADDING).long()
    elif not packed and index.ndim == 2 and bool(documents_of_ids(index).any()):
        batch["attention_mask"] = torch.ones_like(document)  # without a mask, a gap in the ids begins a document
    elif packed and len(document) == 1:
        boundaries = cu_seqlens(document)
        longest = int(boundaries.diff().max())
        batch |= dict.fromkeys(BOUNDARIES, boundaries) | {"max_length_q": longest, "max_length_k": longest}
    return batch


def fields_from_batch(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return index, document and order for `Positions.from_batch`. Raise if two keys contradict each other."""
    if not isinstance(batch, Mapping):
        raise LocantError(
            f"got {short_repr(batch)} for batch, expected a dictionary", "pass a model's keyword arguments"
        )
    ids, mask = batch.get("position_ids"), batch.get("attention_mask")
    boundaries, *others = [batch[name] for name in BOUNDARIES if batch.get(name) is not None] or [None]
    if ids is None and mask is None and boundaries is None:
        got = f"got a batch with {', '.join(map(str, batch)) or 'nothing'}, which has no positions"
        raise LocantError(got, "add position_ids, attention_mask or cu_seq_lens_q")
    document = None if mask is None else _documents_from_mask(mask)
    text, index = (None, None) if ids is None else split_position_ids(ids)
    if boundaries is not None:
        length = text.shape[1] if text is not None else None if document is None else document.shape[1]
        row_documents = documents_of_boundaries(boundaries, length)
        if any(not torch.equal(documents_of_boundaries(other, length), row_documents) for other in others):
            raise _disagreement(*BOUNDARIES)
        if document is not None and not torch.equal(document_positions(document), row_documents):
            raise _disagreement("cu_seq_lens_q", "attention_mask")
        document = row_documents
    if index is None or text is None:
        assert document is not None  # noqa: S101  # the batch has one of the three
        return _offsets_in_documents(document), document, None
    if document is None:
        document = documents_of_ids(text)
        document = document if bool(document.any()) else None
    elif boundaries is not None and not torch.equal(documents_of_ids(text), document):
        raise _disagreement("position_ids", "cu_seq_lens_q")
    elif has_restarts(text, document):
        raise _disagreement("position_ids", "attention_mask")
    return index, document, text if index.ndim == 3 else None


def has_restarts(text: Int[Tensor, "batch seq"], document: Int[Tensor, "batch seq"]) -> bool:
    """Return whether ids stop growing within a document. With a mask, models do not look for documents in the ids."""
    within = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] != PADDING)
    return bool(((text.diff(dim=1) <= 0) & within).any())


def split_position_ids(ids: Any) -> tuple[Int[Tensor, "batch seq"], Tensor]:
    """Split ``position_ids`` into the ids of text, which show the documents, and the index of every axis."""
    ids = to_int64("position_ids", ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim == 3 and len(ids) in (3, 4):
        slots = torch.arange(ids.shape[2], device=ids.device).expand(ids.shape[1:])
        return (ids[0], ids[1:].movedim(0, -1)) if len(ids) == 4 else (slots, ids.movedim(0, -1))
    if ids.ndim != 2:
        got = f"got position_ids of shape {tuple(ids.shape)}, expected (batch, seq), or (3 or 4, batch, seq) for images"
        raise ShapeError(got, "use position_ids[None] for one row")
    return ids, ids


def documents_of_ids(ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return the documents that `transformers` finds in ids.

    A new document begins unless an id is one more than the previous id.
    """
    return _count_begins(ids.diff(dim=1) != 1)


def documents_of_boundaries(boundaries: Any, length: int | None) -> Int[Tensor, "1 seq"]:
    """Return the documents of one row from cumulative lengths."""
    ends = to_int64("cu_seq_lens_q", boundaries)
    if ends.ndim != 1 or len(ends) < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        got = f"got cu_seq_lens_q={ends.tolist()}, expected 0 and the end of every document"
        raise ShapeError(got, "positions.cu_seqlens()")
    if length not in (None, int(ends[-1])):
        got = f"got cu_seq_lens_q that end with {int(ends[-1])}, and {length} tokens"
        raise ShapeError(got, "pass cu_seq_lens_q of the tokens in the batch, without padding")
    lengths = ends.diff()
    lengths = lengths[lengths > 0]  # some collators pad the list by repeating the end
    return torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)[None]


def _documents_from_mask(mask: Any) -> Int[Tensor, "batch seq"]:
    """Return the documents in a mask of zeros and ones, or in a mask that numbers documents from 1."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point() and mask.dtype != torch.bool:
        return mask.long() - 1
    real, _ = padding_mask(mask)
    return real - 1


def document_positions(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Renumber documents from 0 in every row. A stretch of padding counts as a document."""
    return _count_begins(document.diff(dim=1) != 0)


def _count_begins(begins: Bool[Tensor, "batch rest"]) -> Int[Tensor, "batch seq"]:
    """Return the number of begins up to each token. The first token of a row does not count."""
    return torch.nn.functional.pad(begins.long().cumsum(dim=1), (1, 0))


def _offsets_in_documents(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return the number of earlier tokens in each token's document, 0 for padding."""
    slots = torch.arange(document.shape[1], device=document.device).expand_as(document)
    begins = torch.nn.functional.pad(document.diff(dim=1) != 0, (1, 0), value=True)
    return torch.where(document == PADDING, 0, slots - torch.where(begins, slots, 0).cummax(dim=1).values)


def _disagreement(first: str, second: str) -> LocantError:
    return LocantError(
        f"got {first} and {second} with different documents", "run locant check-batch, which prints where they differ"
    )
