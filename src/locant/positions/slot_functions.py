"""Positions as functions of row and slot, for FlexAttention, which compiles them into its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from locant.positions.documents import MaskMod, is_allowed

if TYPE_CHECKING:
    from locant.positions.positions import Positions

SlotMod = Callable[[Tensor, Tensor], Tensor]
"""``(row, slot)`` to what is known of the token there."""


def mask_mod(queries: Positions, keys: Positions, causal: bool, window: int | None) -> MaskMod:
    """Which key each query may attend to, as a function of ``(batch, head, query, key)``."""
    q_document, k_document = _document_mod(queries), _document_mod(keys)
    q_order, k_order = _order_mod(queries), _order_mod(keys)
    one_row = queries.batch == 1

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch * 0 if one_row else batch  # FlexAttention asks about every row of its batch
        pair = (q_document(row, query), k_document(row, key))
        return is_allowed(*pair, q_order(row, query), k_order(row, key), causal, window)

    return allowed


def index_mod(positions: Positions) -> SlotMod:
    """The index of a token: arithmetic where slots count it.

    In 32 bits where no index is known to be negative, so that the difference of two fits: a kernel's slots have 32.
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
