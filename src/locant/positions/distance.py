"""How far each query stands from each key: what every relative encoding begins with."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor, nn

from locant.errors import ShapeError
from locant.positions.where import Positions

__all__ = ["distances", "require_heads"]


def distances(
    q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None, owner: str
) -> Int[Tensor, "batch query key"]:
    """Query index minus key index; positive where the key came earlier. Batch is 1 where all rows agree."""
    keys = positions if k_positions is None else k_positions
    for name, x, where in (("q", q, positions), ("k", k, keys)):
        where.require_single_axis(owner)
        where.require_fits(x.shape[0], x.shape[2], x.device, name)
    return positions.index[:, :, None] - keys.index[:, None, :]


def require_heads(owner: nn.Module, num_heads: int, q: Tensor) -> None:
    """Raise unless `q` has the heads that `owner` has a bias for."""
    if q.ndim != 4 or q.shape[1] != num_heads:
        name = type(owner).__name__
        raise ShapeError(
            f"got q of shape {tuple(q.shape)}, "
            f"{name}(num_heads={num_heads}) expects (batch, {num_heads}, query, head_dim)",
            f"{name} built with the number of query heads",
        )
