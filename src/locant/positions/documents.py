"""Rows that hold several documents: laying them out, finding their boundaries, cutting them for several devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import MAX_INT32
from locant.errors import RangeError, ShapeError
from locant.tensors import bounds

__all__ = ["PADDING", "pack", "require_documents", "shard_slots"]

PADDING = -1
"""The document of tokens that are not there."""


def require_documents(document: Int[Tensor, "batch seq"]) -> None:
    """Raise where one is neither padding nor a number of a document, as far as the host can read them."""
    low, high = bounds(document)
    if low is not None and high is not None and (low < PADDING or high > MAX_INT32):
        worst = low if low < PADDING else high
        raise RangeError(f"got document {worst}, expected 0 to {MAX_INT32}, or -1 for padding", "numbering from 0")


def pack(
    rows: Sequence[Sequence[int]], width: int | None
) -> tuple[Int[np.ndarray, "rows width"], Int[np.ndarray, "rows width"]]:
    """The index and document of every slot of rows made of documents of these lengths, padded to `width`."""
    longest = max((sum(row) for row in rows), default=0)
    width = longest if width is None else width
    if width < longest:
        raise ShapeError(
            f"got documents of {longest} tokens for a row of {width}", f"length={longest} or fewer documents"
        )
    index = np.zeros((len(rows), width), dtype=np.int64)
    document = np.full((len(rows), width), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        lengths = np.asarray(row, dtype=np.int64)
        used = int(lengths.sum())
        index[i, :used] = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        document[i, :used] = np.repeat(np.arange(len(lengths)), lengths)
    return index, document


def _boundaries(document: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Where a document, or a run of padding, begins. One-token documents count like any other."""
    first = torch.ones_like(document, dtype=torch.bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return first


def shard_slots(document: Int[Tensor, "batch seq"], rank: int, world: int, zigzag: bool) -> Int[Tensor, " n"]:
    """The slots of a row that belong to `rank`: an equal part of every document."""
    pieces: list[Tensor] = []
    for first, length in _runs(document.cpu()):
        parts = 2 * world if zigzag else world
        if length % parts:
            raise ShapeError(
                f"got a document of {length} tokens at slot {first} for {parts} equal parts",
                f"padding every document to a multiple of {parts}",
            )
        share = length // parts
        mine = (rank, parts - 1 - rank) if zigzag else (rank,)
        pieces.extend(torch.arange(first + part * share, first + (part + 1) * share) for part in mine)
    return torch.cat(pieces) if pieces else torch.arange(0)


def _runs(document: Int[Tensor, "batch seq"]) -> list[tuple[int, int]]:
    """First slot and length of each document, which must be the same in all rows."""
    first = _boundaries(document)
    if not document.shape[1]:
        return []
    if not bool((first == first[:1]).all()):
        raise ShapeError(
            "got rows whose documents begin at different slots, which no single cut fits", "sharding row by row"
        )
    starts = first[0].nonzero().flatten().tolist()
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], document.shape[1]], strict=True)]
