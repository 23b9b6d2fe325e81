"""The documents of a row: the rule of attention masks, packing, and sharding over devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import MAX_INT32, whole
from locant.errors import RangeError, ShapeError
from locant.positions.checks import token_count
from locant.tensors import bounds

PADDING = -1
"""The document of padding."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(batch, head, query, key) -> allowed``."""


def is_allowed(
    q_document: Tensor, k_document: Tensor, q_order: Tensor, k_order: Tensor, causal: bool, window: int | None
) -> Bool[Tensor, "*pairs"]:
    """Return whether a query may attend to a key, for pairs that broadcast. Every attention mask uses this rule.

    Query and key must belong to one document and must not be padding. If `causal`, the key must not be later in order.
    If there is a sliding `window`, query and key must be fewer than `window` positions apart.
    """
    allowed = (q_document == k_document) & (q_document != PADDING)
    if causal:
        allowed = allowed & (q_order >= k_order)
    if window is not None:
        allowed = allowed & ((q_order - k_order).abs() < window)
    return allowed


def check_window(window: Any) -> int | None:
    """Return the checked width of a sliding window, or ``None``."""
    return None if window is None else whole("window", window, 1, remedy="use window=None for no limit")


def require_documents(document: Int[Tensor, "batch seq"]) -> None:
    """Raise `RangeError` for an invalid document number, if the host can read the numbers. -1 is padding."""
    for number in bounds(document):
        if number is not None and not PADDING <= number <= MAX_INT32:
            raise RangeError(f"got document {number}, expected 0 to {MAX_INT32}, or -1 for padding", "0, 1, 2, ...")


def row_width(what: str, lengths: Sequence[int], length: Any) -> int:
    """Return the width of rows that hold these numbers of tokens: the caller's `length`, or the longest row."""
    longest = max([0, *lengths])
    width = longest if length is None else token_count("length", length)
    if width < longest:
        raise ShapeError(f"got {what} of {longest} tokens for a row of {width}", f"length={longest}")
    return width


def pack(
    rows: Sequence[Sequence[int]], length: Any
) -> tuple[Int[np.ndarray, "rows width"], Int[np.ndarray, "rows width"]]:
    """Return the index and document of every slot. Rows have documents of these lengths and are padded to `length`."""
    width = row_width("documents", [sum(row) for row in rows], length)
    index = np.zeros((len(rows), width), dtype=np.int64)
    document = np.full((len(rows), width), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        lengths = np.asarray(row, dtype=np.int64)
        used = int(lengths.sum())
        index[i, :used] = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        document[i, :used] = np.repeat(np.arange(len(lengths)), lengths)
    return index, document


def document_or_none(document: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"] | None:
    """Return `document`, or ``None`` if all tokens belong to the first document."""
    return document if bool((document != 0).any()) else None


def cu_seqlens(document: Int[Tensor, "batch seq"]) -> Int[Tensor, " documents_plus_1"]:
    """Return the start of each document and the end of the last. Only tokens that are not padding count."""
    real = document != PADDING
    row = torch.arange(len(document), device=document.device)[:, None].expand_as(document)
    tokens = torch.stack([row[real], document[real]])  # padding within a document does not end it
    first = torch.ones_like(tokens[0], dtype=torch.bool)
    first[1:] = (tokens[:, 1:] != tokens[:, :-1]).any(0)
    return torch.cat([first.nonzero().flatten(), real.sum()[None]]).to(torch.int32)


def shard_slots(document: Int[Tensor, "batch seq"], rank: int, world: int, zigzag: bool) -> Int[Tensor, " n"]:
    """Return the slots of a row that belong to `rank`: an equal part of every document and stretch of padding."""
    first = torch.ones_like(document, dtype=torch.bool, device="cpu")
    first[:, 1:] = document.diff().cpu() != 0
    if not bool((first == first[:1]).all()):
        got = "got rows whose documents begin at different slots, expected the same slots in all rows"
        raise ShapeError(got, "call Positions.packed(lengths_of_row).shard(rank, world) for each row")
    parts, of_rank = (2 * world, [rank, 2 * world - 1 - rank]) if zigzag else (world, [rank])
    slots: list[Tensor] = []
    for start, stop in itertools.pairwise([*first[:1].nonzero()[:, 1].tolist(), document.shape[1]]):
        if (stop - start) % parts:
            got = f"got a document of {stop - start} tokens at slot {start} for {parts} equal parts"
            raise ShapeError(got, f"pad documents to a multiple of {parts} tokens before Positions.packed")
        slots.append(torch.arange(start, stop).view(parts, -1)[of_rank].flatten())
    return torch.cat([torch.arange(0), *slots])
