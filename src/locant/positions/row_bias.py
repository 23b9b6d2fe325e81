"""`RowBias`: products of tokens with the rows of a table, of which each distance has one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from locant.positions.base import Keys, PositionEncoding, Queries, require_tokens
from locant.positions.heads import for_query_heads
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions
from locant.positions.score_bias import Entries, Lookup

__all__ = ["RowBias"]


class RowBias(PositionEncoding):
    """A bias made of products of tokens with the rows of a table; a subclass has `head_dim`, `scale`, `ends`, `row_of`
    and `rows_of`."""

    head_dim: int
    scale: float
    ends: tuple[int, int]
    """The distances from which on, before the first and behind the second, all have one row."""

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """The row of every distance, as a function that copies nothing to this device. Rows never turn back."""
        raise NotImplementedError

    def rows_of(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What queries, and what keys, are multiplied with: ``rows head_dim``, or so for each head; or ``None``."""
        raise NotImplementedError

    def score_bias(self, q: Queries, k: Keys, queries: Positions, keys: Positions) -> Lookup:
        require_tokens(self, q, k, queries, keys, self.head_dim)

        def make() -> tuple[Entries, ...]:
            of_query, of_key = self.rows_of(bias_dtype(q))
            options = {"queries": queries, "keys": keys, "ends": self.ends, "scale": self.scale}
            return (Entries(entry_of=self.row_of(q.device), of_query=of_query, of_key=of_key, **options),)

        vectors = q if self.of_queries else None, for_query_heads(k, q.shape[1]) if self.of_keys else None
        where, sources = {"q": q, "queries": queries, "keys": keys}, (*self.parameters(), *self.buffers())
        return Lookup(**where, make=make, of_query=vectors[0], of_key=vectors[1], sources=sources)

    of_queries: bool = True
    of_keys: bool = False
    """Which of them have products."""
