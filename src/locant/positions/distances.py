"""Distances of queries and keys, and functions for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from locant.positions.documents import MaskMod, is_allowed

if TYPE_CHECKING:
    from locant.positions.positions import Positions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(score, batch, head, query, key) -> score``."""

MAX_DISTANCE = 2**24
"""The largest distance for encodings with a table of buckets by distance. It takes 128 MiB, and seconds to compute."""


def bias_dtype(q: Tensor) -> torch.dtype:
    """Return float64 for queries in float64, and float32 otherwise."""
    return torch.promote_types(q.dtype, torch.float32)


def distances(positions: Positions, keys: Positions) -> Int[Tensor, "batch query key"]:
    """Return query index minus key index, positive for an earlier key.

    The batch is 1 if queries and keys have one row.
    """
    return positions.index[:, :, None] - keys.index[:, None, :]


def distance_mod(q: Tensor, positions: Positions, keys: Positions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function ``(batch, query, key) -> query index minus key index``. The slots broadcast."""
    q_index, k_index = (index_mod(each.expand(q.shape[0])) for each in (positions, keys))
    return lambda batch, query, key: q_index(batch, query) - k_index(batch, key)


SlotMod = Callable[[Tensor, Tensor], Tensor]
"""A function that returns a number for the token at ``(row, slot)``."""


def mask_mod(queries: Positions, keys: Positions, causal: bool, window: int | None) -> MaskMod:
    """Return the mask of the keys that each query may attend to, as a function of ``(batch, head, query, key)``."""
    q_document, k_document = _document_mod(queries), _document_mod(keys)
    q_order, k_order = _order_mod(queries), _order_mod(keys)
    one_row = queries.batch == 1

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch * 0 if one_row else batch  # FlexAttention passes every row of its batch
        pair = (q_document(row, query), k_document(row, key))
        return is_allowed(*pair, q_order(row, query), k_order(row, key), causal, window)

    return allowed


def index_mod(positions: Positions) -> SlotMod:
    """Return a function for the index of a token. If positions count up from `start`, it does not look up anything.

    If no index can be negative, it computes in 32 bits, like the slots of a kernel. Differences of indices then fit.
    """
    if positions.start is not None:
        start = positions.start
        first = torch.full((), start, dtype=torch.int32, device=positions.device) if start else None
        return lambda row, slot: slot if first is None else slot + first
    return _look_up(positions.index, positions.min_index is not None and positions.min_index >= 0)


def _order_mod(positions: Positions) -> SlotMod:
    return index_mod(positions) if positions.order_or_none is None else _look_up(positions.order_or_none, False)


def _document_mod(positions: Positions) -> SlotMod:
    if positions.document_or_none is None:
        return lambda row, slot: slot * 0
    return _look_up(positions.document_or_none, True)


def _look_up(numbers: Int[Tensor, "batch seq"], narrow: bool) -> SlotMod:
    numbers = numbers.to(torch.int32) if narrow else numbers
    return lambda row, slot: numbers[row, slot]
