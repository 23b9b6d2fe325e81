"""`Positions` as batches of trainers have them: ids, documents and padding side by side, as `transformers` reads them.

What a batch says twice has to agree, or documents leak into each other; here disagreement is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import shown
from locant.errors import LocantError, ShapeError
from locant.positions.checks import integers, padding_mask
from locant.positions.documents import PADDING, cu_seqlens

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
AXES = 3
"""Of vision-language models: time, rows and columns."""


def batch_of(
    index: Int[Tensor, "batch seq"] | Int[Tensor, "batch seq axes"], document: Int[Tensor, "batch seq"]
) -> dict[str, Any]:
    """What `Positions.to_batch` gives."""
    padded = bool((document == PADDING).any())
    packed = bool((document.clamp(min=0) != document[:, :1].clamp(min=0)).any())
    if packed and padded:
        got = "got padding beside several documents in a row, of which no key of a batch tells both"
        raise LocantError(got, "Positions.packed(lengths) without length=, so that nothing is padded")
    if index.ndim == 3:
        if index.shape[2] != AXES:
            got = f"got positions with {index.shape[2]} axes, of which no key of a batch tells"
            raise LocantError(got, f"{AXES} axes, as of Positions.multimodal, or position_ids as your model wants them")
        ids = index.movedim(-1, 0)
        # Vision-language models look for documents in ids of text, which stand before those of the axes.
        batch: dict[str, Any] = {"position_ids": torch.cat([_within(document)[None], ids]) if packed else ids}
    elif packed and not torch.equal(documents_of_ids(index), counted(document)):
        got = "got documents whose ids do not count on from token to token: a model would find other documents in them"
        raise LocantError(got, "Positions.packed(lengths), which counts each document from 0")
    else:
        batch = {"position_ids": index}
    if padded:
        batch["attention_mask"] = (document != PADDING).long()
    elif not packed and index.ndim == 2 and bool(documents_of_ids(index).any()):
        batch["attention_mask"] = torch.ones_like(document)  # without one, a gap in the ids would begin a document
    elif packed and len(document) == 1:
        boundaries = cu_seqlens(document)
        longest = int(boundaries.diff().max())
        batch |= dict.fromkeys(BOUNDARIES, boundaries) | {"max_length_q": longest, "max_length_k": longest}
    return batch


def fields_of_batch(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Index, document and order for `Positions.from_batch`; raises where two keys contradict each other."""
    if not isinstance(batch, Mapping):
        raise LocantError(f"got {shown(batch)} for batch, expected a dictionary", "the keywords of a model's call")
    ids, mask = batch.get("position_ids"), batch.get("attention_mask")
    boundaries, *others = [batch[name] for name in BOUNDARIES if batch.get(name) is not None] or [None]
    if ids is None and mask is None and boundaries is None:
        got = f"got a batch with {', '.join(map(str, batch)) or 'nothing'}, which says no positions"
        raise LocantError(got, "position_ids, attention_mask or cu_seq_lens_q in it")
    document = None if mask is None else _documents_of_mask(mask)
    text, index = (None, None) if ids is None else ids_of(ids)
    if boundaries is not None:
        length = text.shape[1] if text is not None else None if document is None else document.shape[1]
        stated = documents_of_boundaries(boundaries, length)
        if any(not torch.equal(documents_of_boundaries(other, length), stated) for other in others):
            raise _disagree(*BOUNDARIES)
        if document is not None and not torch.equal(counted(document), stated):
            raise _disagree("cu_seq_lens_q", "attention_mask")
        document = stated
    if index is None or text is None:
        assert document is not None  # noqa: S101  # one of the three is there
        return _within(document), document, None
    if document is None:
        document = documents_of_ids(text)
        document = document if bool(document.any()) else None
    elif boundaries is not None and not torch.equal(documents_of_ids(text), document):
        raise _disagree("position_ids", "cu_seq_lens_q")
    elif restarts(text, document):
        raise _disagree("position_ids", "attention_mask")
    return index, document, text if index.ndim == 3 else None


def restarts(text: Int[Tensor, "batch seq"], document: Int[Tensor, "batch seq"]) -> bool:
    """Whether ids fall within a document: models that are given a mask do not look for documents in the ids."""
    within = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] != PADDING)
    return bool(((text.diff(dim=1) <= 0) & within).any())


def ids_of(ids: Any) -> tuple[Int[Tensor, "batch seq"], Tensor]:
    """The ids of text, in which documents are found, and the index of every axis, from ``position_ids``."""
    ids = integers("position_ids", ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim == 3 and len(ids) in (3, 4):
        slots = torch.arange(ids.shape[2], device=ids.device).expand(ids.shape[1:])
        return (ids[0], ids[1:].movedim(0, -1)) if len(ids) == 4 else (slots, ids.movedim(0, -1))
    if ids.ndim != 2:
        got = f"got position_ids of shape {tuple(ids.shape)}, expected (batch, seq), or (3 or 4, batch, seq) for images"
        raise ShapeError(got, "position_ids[None] for one row")
    return ids, ids


def documents_of_ids(ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """The documents that `transformers` finds in ids: one ends where an id is not the one before plus one."""
    return _counts(ids.diff(dim=1) != 1)


def documents_of_boundaries(boundaries: Any, length: int | None) -> Int[Tensor, "1 seq"]:
    """The documents of one row that cumulative lengths tell."""
    ends = integers("cu_seq_lens_q", boundaries)
    if ends.ndim != 1 or len(ends) < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        got = f"got cu_seq_lens_q={ends.tolist()}, expected 0 and the end of every document"
        raise ShapeError(got, "positions.cu_seqlens()")
    if length not in (None, int(ends[-1])):
        got = f"got cu_seq_lens_q that end with {int(ends[-1])}, and {length} tokens"
        raise ShapeError(got, "cu_seq_lens_q of the tokens in the batch, without padding")
    lengths = ends.diff()
    lengths = lengths[lengths > 0]  # collators that fill up the list repeat an end
    return torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)[None]


def _documents_of_mask(mask: Any) -> Int[Tensor, "batch seq"]:
    """Of a mask of zeros and ones, or one that numbers documents from 1."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point() and mask.dtype != torch.bool:
        return mask.long() - 1
    return torch.where(padding_mask(mask), 0, PADDING)


def counted(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """The same documents, counted from 0 in every row; a stretch of padding counts as one."""
    return _counts(document.diff(dim=1) != 0)


def _counts(begins: Bool[Tensor, "batch rest"]) -> Int[Tensor, "batch seq"]:
    """How often something has begun; at the first token of a row it does not count."""
    return torch.nn.functional.pad(begins.long().cumsum(dim=1), (1, 0))


def _within(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """How many tokens of its document stand before each; 0 for padding."""
    slots = torch.arange(document.shape[1], device=document.device).expand_as(document)
    begins = torch.nn.functional.pad(document.diff(dim=1) != 0, (1, 0), value=True)
    return torch.where(document == PADDING, 0, slots - torch.where(begins, slots, 0).cummax(dim=1).values)


def _disagree(first: str, second: str) -> LocantError:
    return LocantError(
        f"got {first} and {second} that tell different documents", "locant check-batch, which says where they differ"
    )
