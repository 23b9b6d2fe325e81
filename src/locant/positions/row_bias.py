"""`RowBias`: the base of encodings whose bias is a product of the query or the key with a row for their distance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from locant.errors import LocantError
from locant.positions.base import Keys, PositionEncoding, Queries, require_tokens
from locant.positions.heads import for_query_heads
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions
from locant.positions.score_bias import Entries, Lookup


class RowBias(PositionEncoding):
    """A bias made of products of tokens with the rows of a table; every distance has a row.

    A subclass writes `row_of` and `vectors`, and sets in its constructor what is declared here: the scale of the
    products, whether queries, and keys, have any, and `ends`, the distances beyond which all have the row of these.
    """

    head_dim: int
    scale: float
    ends: tuple[int, int]
    of_queries: bool = True
    of_keys: bool = False

    def rows(self, distance: Int[Tensor, "*pairs"]) -> Int[Tensor, "*pairs"]:
        """The table's row for every distance (query index minus key index)."""
        return self.row_of(distance.device)(distance)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """`rows` as a function that copies nothing to this device. They never turn back as the distance grows."""
        raise LocantError(f"{type(self).__name__} does not define row_of", "def row_of(self, device)")

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What queries, and what keys, are multiplied with: ``rows head_dim``, or so for each head; or ``None``."""
        raise LocantError(f"{type(self).__name__} does not define vectors", "def vectors(self, dtype)")

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Lookup:
        """The products of every pair of tokens with the row of their distance."""
        require_tokens(self, q, k, queries, keys, self.head_dim)

        def make() -> tuple[Entries, ...]:
            of_query, of_key = self.vectors(bias_dtype(q))
            table = Entries(
                queries=queries, keys=keys, entry_of=self.row_of(q.device), ends=self.ends, of_query=of_query,
                of_key=of_key, scale=self.scale,
            )  # fmt: skip
            return (table if heads is None else table.of_heads(heads),)

        return Lookup(
            q=q, queries=queries, keys=keys, sources=(*self.parameters(), *self.buffers()), make=make,
            of_query=q if self.of_queries else None, of_key=for_query_heads(k, q.shape[1]) if self.of_keys else None,
        )  # fmt: skip
