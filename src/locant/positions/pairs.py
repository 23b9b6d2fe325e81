"""From tokens to pairs of tokens: the distance of two slots, and the entry of a table that belongs to it.

A FlexAttention score function asks for one pair at a time; nothing as large as all pairs has to be made for it.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.positions import Positions

__all__ = ["StepMod", "pick", "step_mod"]

StepMod = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(batch, query, key) -> query index minus key index``, all three broadcast."""


def step_mod(q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None, owner: str) -> StepMod:
    """What `distances` holds for all pairs, for one pair at a time."""
    keys = positions if k_positions is None else k_positions
    for name, x, where in (("q", q, positions), ("k", k, keys)):
        where.require_single_axis(owner)
        where.require_fits(x.shape[0], x.shape[2], x.device, name)
    q_index, k_index = positions.expand(q.shape[0]).index, keys.expand(k.shape[0]).index

    def steps(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return q_index[batch, query] - k_index[batch, key]

    return steps


def pick(
    products: Float[Tensor, "batch heads n rows"], rows: Int[Tensor, "#batch n m"]
) -> Float[Tensor, "batch heads n m"]:
    """For every pair of a token and another, the token's product with the row that belongs to the pair."""
    return products.gather(3, rows[:, None].expand(*products.shape[:3], rows.shape[-1]))
