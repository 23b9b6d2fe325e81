"""Positions joined along the sequence: what `Positions.cat` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from locant.errors import ShapeError
from locant.positions.documents import joined_orders
from locant.positions.grids import joined_places
from locant.positions.pytree import NOT_READ, Read

if TYPE_CHECKING:
    from locant.positions.positions import Positions

__all__ = ["joined_fields"]


def joined_fields(parts: Sequence[Positions]) -> dict[str, Any]:
    """The fields of `Positions` of these parts, one after another."""
    if not parts:
        raise ShapeError("got no positions to join, expected at least one", "Positions.arange(0) for no tokens")
    if len(axes := {part.axes for part in parts}) > 1:
        got = f"got positions with {sorted(axes)} axes, expected the same number"
        raise ShapeError(got, "Positions.of(index[..., None].expand(-1, -1, axes)) for text")
    if len(denominators := {part.denominator for part in parts}) > 1:
        got = f"got positions over the denominators {sorted(denominators)}, expected the same"
        raise ShapeError(got, "Positions.of(index * factor, denominator=...) for some")
    batch = max(part.batch for part in parts)
    wide = [part.expand(batch) for part in parts]
    filled = [part for part in wide if part.seq_len]
    lows, highs = ([getattr(part, name) for part in filled] for name in ("min_index", "max_index"))
    of_keys = [part.read.of_key for part in wide if part.read.of_key is not None]
    on_grids = filled or wide
    grids, place = joined_places([part.grids for part in on_grids], [part.place_or_none for part in on_grids])
    counting = all(a.start is not None and b.start == a.start + a.seq_len for a, b in itertools.pairwise(wide))
    one_document = all(part.document_or_none is None for part in wide)
    by_index = all(part.order_or_none is None for part in wide)
    return {
        "index": torch.cat([part.index for part in wide], dim=1),
        "document_or_none": None if one_document else torch.cat([part.document for part in wide], dim=1),
        "order_or_none": None if by_index else joined_orders([part.order for part in wide]),
        "min_index": None if None in lows else min(lows) if lows else 0,
        "max_index": None if None in highs else max(highs) if highs else 0,
        "start": wide[0].start if counting else None,
        "denominator": denominators.pop(),
        "read": Read(None, torch.cat(of_keys, dim=1)) if len(of_keys) == len(wide) else NOT_READ,
        "place_or_none": place,
        "grids": grids,
    }
