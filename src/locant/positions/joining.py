"""Several positions one after the other, as `Positions.cat` has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from locant.errors import ShapeError

if TYPE_CHECKING:
    from locant.positions.positions import Positions

__all__ = ["Joined", "joined"]

Joined = tuple[Tensor, Tensor | None, Tensor | None, int | None, int | None, int | None]
"""The fields of `Positions`, in their order."""


def joined(parts: Sequence[Positions]) -> Joined:
    """What positions are made of that go through all parts."""
    if not parts:
        raise ShapeError("got no positions to join, expected at least one", "Positions.arange(0) for an empty sequence")
    axes = {part.axes for part in parts}
    if len(axes) > 1:
        raise ShapeError(
            f"got positions with {sorted(axes)} axes, expected the same number",
            "text with its index repeated on every axis",
        )
    batch = max(part.batch for part in parts)
    wide = [part.expand(batch) for part in parts]
    plain = all(part.document_or_none is None for part in wide)
    ordered = all(part.order_or_none is None for part in wide)
    lows = [part.min_index for part in wide if part.seq_len]
    highs = [part.max_index for part in wide if part.seq_len]
    chain = all(a.start is not None and b.start == a.start + a.seq_len for a, b in itertools.pairwise(wide))
    return (
        torch.cat([part.index for part in wide], dim=1),
        None if plain else torch.cat([part.document for part in wide], dim=1),
        None if ordered else _joined_orders(wide),
        min((low for low in lows if low is not None), default=0) if None not in lows else None,
        max((high for high in highs if high is not None), default=0) if None not in highs else None,
        wide[0].start if chain else None,
    )


def _joined_orders(parts: Sequence[Positions]) -> Int[Tensor, "batch seq"]:
    orders: list[Tensor] = []
    for part in parts:
        order = part.order
        if orders and orders[-1].shape[1] and order.shape[1]:
            reached = torch.stack([before.amax(1) for before in orders if before.shape[1]]).amax(0)
            order = order + torch.where(order.amin(1) == 0, reached + 1, 0)[:, None]
        orders.append(order)
    return torch.cat(orders, dim=1)
