"""The documents of a row: which token may attend to which, how documents are packed, and cut for several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import MAX_INT32, whole
from locant.errors import RangeError, ShapeError
from locant.tensors import bounds

__all__ = [
    "PADDING", "MaskMod", "cu_seqlens", "is_allowed", "joined_orders", "pack", "require_documents", "shard_slots",
    "window_of",
]  # fmt: skip

PADDING = -1
"""The document of padding."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(batch, head, query, key) -> allowed``."""


def is_allowed(
    q_document: Int[Tensor, "*#pairs"],
    k_document: Int[Tensor, "*#pairs"],
    q_order: Int[Tensor, "*#pairs"],
    k_order: Int[Tensor, "*#pairs"],
    causal: bool,
    window: int | None,
) -> Bool[Tensor, "*#pairs"]:
    """Whether a query may attend to a key: the rule that every attention mask of this package is made from.

    Both belong to one document, and neither is padding; if `causal`, the key is not later in order; if there is a
    sliding `window`, the two are fewer than `window` positions apart.
    """
    allowed = (q_document == k_document) & (q_document != PADDING)
    if causal:
        allowed = allowed & (q_order >= k_order)
    if window is not None:
        allowed = allowed & ((q_order - k_order).abs() < window)
    return allowed


def window_of(window: Any) -> int | None:
    """The width of a sliding window, or ``None``."""
    return None if window is None else whole("window", window, 1, remedy="window=None for no limit")


def require_documents(document: Int[Tensor, "batch seq"]) -> None:
    """Raise where a number is neither -1 (padding) nor that of a document, as far as the host can read them."""
    low, high = bounds(document)
    if low is not None and high is not None and (low < PADDING or high > MAX_INT32):
        worst = low if low < PADDING else high
        raise RangeError(f"got document {worst}, expected 0 to {MAX_INT32}, or -1 for padding", "0, 1, 2, ...")


def pack(
    rows: Sequence[Sequence[int]], width: int | None
) -> tuple[Int[np.ndarray, "rows width"], Int[np.ndarray, "rows width"]]:
    """The index and document of every slot of rows made of documents of these lengths, padded to `width`."""
    longest = max((sum(row) for row in rows), default=0)
    width = longest if width is None else width
    if width < longest:
        raise ShapeError(f"got documents of {longest} tokens for a row of {width}", f"length={longest}")
    index = np.zeros((len(rows), width), dtype=np.int64)
    document = np.full((len(rows), width), PADDING, dtype=np.int64)
    for i, row in enumerate(rows):
        lengths = np.asarray(row, dtype=np.int64)
        used = int(lengths.sum())
        index[i, :used] = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        document[i, :used] = np.repeat(np.arange(len(lengths)), lengths)
    return index, document


def joined_orders(parts: Sequence[Int[Tensor, "batch _"]]) -> Int[Tensor, "batch seq"]:
    """The orders of several parts as one: a part whose order begins at 0 goes on where the parts before it ended."""
    orders: list[Tensor] = []
    for order in parts:
        if orders and orders[-1].shape[1] and order.shape[1]:
            reached = torch.stack([before.amax(1) for before in orders if before.shape[1]]).amax(0)
            order = order + torch.where(order.amin(1) == 0, reached + 1, 0)[:, None]
        orders.append(order)
    return torch.cat(orders, dim=1)


def cu_seqlens(document: Int[Tensor, "batch seq"]) -> Int[Tensor, " documents_plus_1"]:
    """Where each document begins, and the end, among the tokens that are no padding."""
    real = document != PADDING
    row = torch.arange(len(document), device=document.device)[:, None].expand_as(document)
    tokens = torch.stack([row[real], document[real]])  # without padding, whose holes end no document
    first = torch.ones_like(tokens[0], dtype=torch.bool)
    first[1:] = (tokens[:, 1:] != tokens[:, :-1]).any(0)
    return torch.cat([first.nonzero().flatten(), real.sum()[None]]).to(torch.int32)


def shard_slots(document: Int[Tensor, "batch seq"], rank: int, world: int, zigzag: bool) -> Int[Tensor, " n"]:
    """The slots of a row that belong to `rank`: an equal part of every document."""
    parts = 2 * world if zigzag else world
    slots: list[Tensor] = []
    for start, stop in _documents(document.cpu()):
        if (stop - start) % parts:
            raise ShapeError(
                f"got a document of {stop - start} tokens at slot {start} for {parts} equal parts",
                f"documents padded to a multiple of {parts} tokens before Positions.packed",
            )
        of_rank = (rank, parts - 1 - rank) if zigzag else (rank,)
        slots.extend(torch.arange(start, stop).chunk(parts)[part] for part in of_rank)
    return torch.cat(slots) if slots else torch.arange(0)


def _documents(document: Int[Tensor, "batch seq"]) -> list[tuple[int, int]]:
    """Start and stop of each document, and of each stretch of padding; the same in all rows."""
    first = torch.ones_like(document, dtype=torch.bool)
    first[:, 1:] = document.diff() != 0
    if not document.shape[1]:
        return []
    if not bool((first == first[:1]).all()):
        raise ShapeError(
            "got rows whose documents begin at different slots, expected the same slots in all rows",
            "Positions.packed(lengths_of_row).shard(rank, world), for each row",
        )
    starts = first[0].nonzero().flatten().tolist()
    return list(zip(starts, [*starts[1:], document.shape[1]], strict=True))
