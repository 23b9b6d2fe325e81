"""Pairs of a query and a key: how far apart they are, and what a table of products holds for them.

`bias` needs all pairs at once; a score function of FlexAttention is asked for one pair at a time, and nothing as large
as all pairs is made for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import shape_error
from locant.positions.base import Bias, Keys, PositionEncoding, Queries, ScoreMod
from locant.positions.positions import Positions

__all__ = ["MAX_DISTANCE", "TableBias", "bias_lookup", "distance_mod", "distances", "require_tokens"]

MAX_DISTANCE = 2**24
"""Encodings that list the bucket of every distance go no farther: 128 MiB, and seconds to make."""


def require_tokens(
    owner: nn.Module,
    q: Tensor,
    k: Tensor,
    positions: Positions,
    k_positions: Positions | None,
    head_dim: int | None = None,
) -> Positions:
    """Raise unless queries, keys and positions fit each other and, if given, `head_dim`; returns those of the keys."""
    keys, name = positions if k_positions is None else k_positions, type(owner).__name__
    for argument, x, where in (("q", q, positions), ("k", k, keys)):
        if x.ndim != 4 or head_dim not in (None, x.shape[-1]):
            width = "head_dim" if head_dim is None else f"head_dim={head_dim}"
            raise shape_error(argument, x, f"(batch, heads, seq, {width})", f"{name}(..., head_dim={x.shape[-1]})")
        where.require_single_axis(name)
        where.require_fits(x.shape[0], x.shape[2], x.device, argument)
    return keys


def distances(positions: Positions, keys: Positions) -> Int[Tensor, "batch query key"]:
    """Query index minus key index; positive where the key came earlier. Batch is 1 where all rows agree."""
    return positions.index[:, :, None] - keys.index[:, None, :]


def distance_mod(q: Tensor, positions: Positions, keys: Positions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same for one pair: ``(batch, query, key) -> query index minus key index``, all three broadcast."""
    q_index, k_index = positions.expand(q.shape[0]).index, keys.expand(q.shape[0]).index

    def distance(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return q_index[batch, query] - k_index[batch, key]

    return distance


def bias_lookup(bias: Float[Tensor, "batch heads query key"]) -> ScoreMod:
    """A score function that looks up a computed bias, for those that cannot be computed pair by pair."""

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[batch, head, query, key]

    return add


class TableBias(PositionEncoding):
    """A bias made of products of tokens with the rows of a table, of which each distance has one.

    A subclass has `head_dim`, `row_of` and `products`. Costs one product per token and row, and a look-up per pair and
    head.
    """

    head_dim: int

    def rows(self, distance: Int[Tensor, "*pairs"]) -> Int[Tensor, "*pairs"]:
        """The table's row for every distance (query index minus key index)."""
        return self.row_of(distance.device)(distance)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """`rows` as a function that copies nothing to this device, which would end a CUDA graph."""
        raise NotImplementedError

    def products(
        self, q: Queries, k: Keys
    ) -> tuple[Float[Tensor, "batch heads query rows"] | None, Float[Tensor, "batch heads key rows"] | None]:
        """Every query, and every key, times every row; ``None`` for those that have no part in it."""
        raise NotImplementedError

    def bias(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> Bias:
        """The scaled products for every pair of tokens, float32 at least."""
        keys = require_tokens(self, q, k, positions, k_positions, self.head_dim)
        of_query, of_key = self.products(q, k)
        rows = self.rows(distances(positions, keys))
        terms = [] if of_query is None else [_pick(of_query, rows)]
        if of_key is not None:
            terms.append(_pick(of_key, rows.transpose(1, 2)).transpose(2, 3))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def score_mod(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> ScoreMod:
        keys = require_tokens(self, q, k, positions, k_positions, self.head_dim)
        of_query, of_key = self.products(q, k)
        distance, row_of = distance_mod(q, positions, keys), self.row_of(q.device)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = row_of(distance(batch, query, key))
            from_query = 0.0 if of_query is None else of_query[batch, head, query, row]
            from_key = 0.0 if of_key is None else of_key[batch, head, key, row]
            return score + (from_query + from_key)

        return add


def _pick(
    products: Float[Tensor, "batch heads n rows"], rows: Int[Tensor, "#batch n m"]
) -> Float[Tensor, "batch heads n m"]:
    """For every pair of a token and another, the token's product with the row that belongs to the pair."""
    return products.gather(3, rows[:, None].expand(*products.shape[:3], rows.shape[-1]))
