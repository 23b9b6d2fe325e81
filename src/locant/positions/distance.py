"""How far each query stands from each key: what every relative encoding begins with."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from locant.positions.positions import Positions

__all__ = ["MAX_DISTANCE", "distances"]

MAX_DISTANCE = 2**24
"""Encodings that list the bucket of every distance go no farther: 128 MiB, and seconds to make."""


def distances(
    q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None, owner: str
) -> Int[Tensor, "batch query key"]:
    """Query index minus key index; positive where the key came earlier. Batch is 1 where all rows agree."""
    keys = positions if k_positions is None else k_positions
    for name, x, where in (("q", q, positions), ("k", k, keys)):
        where.require_single_axis(owner)
        where.require_fits(x.shape[0], x.shape[2], x.device, name)
    return positions.index[:, :, None] - keys.index[:, None, :]
