"""Pairs of a query and a key: how far apart they are, and what a table of products holds for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.base import Bias, Keys, PositionEncoding, Queries, ScoreMod, require_heads
from locant.positions.positions import Positions

__all__ = [
    "MAX_DISTANCE",
    "LookedUp",
    "Products",
    "TableBias",
    "distance_mod",
    "distances",
    "exact_dot",
    "require_tokens",
]

Products = tuple[Float[Tensor, "batch heads query rows"] | None, Float[Tensor, "batch heads key rows"] | None]

MAX_DISTANCE = 2**24
"""Encodings that list the bucket of every distance go no farther: 128 MiB, and seconds to make."""


def require_tokens(
    owner: object, q: Tensor, k: Tensor, positions: Positions, keys: Positions | None, head_dim: int | None = None
) -> Positions:
    """Raise unless queries, keys and positions fit each other and, if given, `head_dim`; returns those of the keys."""
    keys = positions if keys is None else keys
    for name, x, where in (("q", q, positions), ("k", k, keys)):
        require_heads(name, x, where, head_dim)
        where.require_single_axis(type(owner).__name__)
    return keys


def distances(positions: Positions, keys: Positions) -> Int[Tensor, "batch query key"]:
    """Query index minus key index; positive where the key came earlier. Batch is 1 where all rows agree."""
    return positions.index[:, :, None] - keys.index[:, None, :]


def distance_mod(q: Tensor, positions: Positions, keys: Positions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same for one pair: ``(batch, query, key) -> query index minus key index``, all three broadcast."""
    q_index, k_index = positions.expand(q.shape[0]).index_mod(), keys.expand(q.shape[0]).index_mod()

    def distance(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return q_index(batch, query) - k_index(batch, key)

    return distance


class LookedUp(NamedTuple):
    """Numbers of every query, and of every key, of which a pair gets those at the row of its distance."""

    of_query: Float[Tensor, "batch heads query rows"] | None
    of_key: Float[Tensor, "batch heads key rows"] | None
    row_of: Callable[[Tensor], Tensor]
    """Rows never fall, or never rise, with the distance (query index minus key index)."""
    first: int
    last: int
    """Distances before the first have its row, those behind the last have that one's."""

    def rows(self, device: torch.device) -> Int[Tensor, " distances"]:
        """The row of each distance from the first to the last."""
        return self.row_of(torch.arange(self.first, self.last + 1, device=device)).int()

    def score_mod(self, distance: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ScoreMod:
        """The score function that adds these numbers."""
        of_query, of_key, row_of = self.of_query, self.of_key, self.row_of

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = row_of(distance(batch, query, key))
            from_query = 0.0 if of_query is None else of_query[batch, head, query, row]
            from_key = 0.0 if of_key is None else of_key[batch, head, key, row]
            return score + (from_query + from_key)

        return add


class TableBias(PositionEncoding):
    """A bias made of products of tokens with the rows of a table, of which each distance has one.

    A subclass has `head_dim`, `ends`, `row_of` and `products`.
    """

    head_dim: int
    ends: tuple[int, int]
    """The distances from which on, before the first and behind the second, all have one row."""

    def rows(self, distance: Int[Tensor, "*pairs"]) -> Int[Tensor, "*pairs"]:
        """The table's row for every distance (query index minus key index)."""
        return self.row_of(distance.device)(distance)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """`rows` as a function that copies nothing to this device, which would end a CUDA graph.

        Rows never fall, or never rise, with the distance.
        """
        raise NotImplementedError

    def products(self, q: Queries, k: Keys) -> Products:
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
        keys = positions if k_positions is None else k_positions
        return self.looked_up(q, k, positions, keys).score_mod(distance_mod(q, positions, keys))

    def looked_up(self, q: Queries, k: Keys, positions: Positions, keys: Positions) -> LookedUp:
        """What `score_mod` looks up."""
        require_tokens(self, q, k, positions, keys, self.head_dim)
        return LookedUp(*self.products(q, k), self.row_of(q.device), *self.ends)


def _pick(products: Float[Tensor, "batch heads n rows"], rows: Int[Tensor, "#batch n m"]) -> Tensor:
    """For every pair of a token and another, the token's product with the row that belongs to the pair."""
    return products.gather(3, rows[:, None].expand(*products.shape[:3], rows.shape[-1]))


def exact_dot(
    a: Float[Tensor, "*#batch n dim"], b: Float[Tensor, "*#batch m dim"], dtype: torch.dtype
) -> Float[Tensor, "*batch n m"]:
    """Every row of `a` times every row of `b`, in float64, with bits that depend on the two rows alone.

    A matrix product adds up in an order that the library chooses by shape, so one query against a cache and the same
    query in a prompt differ in the last bits. Here each vector is first put on a grid of its own: as fine as float32,
    and coarse enough that float64 holds every partial sum without rounding. Such sums have no order. Gradients pass
    the grid unchanged. Costs a float64 matrix product, and two passes over the vectors.

    Args:
        a, b: rows of vectors, of any dtype.
        dtype: what the result is for. For float32 each entry moves by at most 2**-22 of the largest one of its row
            (for 128 dimensions or fewer). For float64 there is no grid, and the last bits may depend on the shapes.

    >>> q = torch.randn(40, 64)
    >>> torch.equal(exact_dot(q, q, torch.float32)[:1], exact_dot(q[:1], q, torch.float32))
    True
    """
    if dtype == torch.float64:
        return a.double() @ b.double().transpose(-1, -2)
    bits = (53 - max(a.shape[-1] - 1, 0).bit_length()) // 2  # of the 53 of a float64
    return _on_grid(a, bits) @ _on_grid(b, bits).transpose(-1, -2)


def _on_grid(x: Float[Tensor, "*batch n dim"], bits: int) -> Float[Tensor, "*batch n dim"]:
    """Each row rounded to whole multiples of its step, at most ``2**bits`` of them in size."""
    exact = x.double()
    if not x.shape[-1]:
        return exact
    largest = exact.detach().abs().amax(-1, keepdim=True)
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
    return exact + ((exact / step).round() * step - exact).detach()  # exactly the rounded value: both share its grid
