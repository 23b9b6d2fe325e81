"""`Pairs`: which queries attend to which keys, and how far apart they are; `Biases`: what is looked up for them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["FLAGGED", "Biases", "Pairs", "Tokens"]

FLAGGED = 128
"""Tokens of a block of `Pairs.some`."""

Tokens = Int[Tensor, "#batch 3 seq"]
"""The index, the document (-1 for padding) and the order of every token."""


@dataclass(frozen=True)
class Pairs:
    """Known beforehand where both sides count one by one, and have an `offset`; else by their tokens.

    Args:
        first: the distance (query index minus key index) of the first entry of a table, or of `Biases.row_of`.
        low, high: allowed are pairs of one document whose orders differ by no less than `low`, no more than `high`.
        offset: the index of the first query minus that of the first key.
        queries: the tokens, where there is no offset.
        keys: theirs; ``None`` where they are those of the queries.
        some: which blocks of `FLAGGED` queries and as many keys hold an allowed pair; ``None``: any may.
    """

    first: int
    low: int
    high: int
    offset: int | None = None
    queries: Tokens | None = None
    keys: Int[Tensor, "#batch 3 keys"] | None = None
    some: Bool[Tensor, "#batch q_blocks k_blocks"] | None = None


@dataclass(frozen=True)
class Biases:
    """What is added to scores: for each pair an entry of a table, or of what its tokens have, by their distance.

    Args:
        of_query: a table with an entry for every distance; with `row_of`, a number of every query for every row.
        of_key: a number of every key for every row; ``None``: nothing is added.
        row_of: for every distance from `Pairs.first` on its row, for those before and behind the first and the last.
            A row has all distances between two of them. ``None`` for a table.
    """

    of_query: Float[Tensor, "heads distances"] | Float[Tensor, "batch heads query rows"] | None
    of_key: Float[Tensor, "batch heads key rows"] | None = None
    row_of: Int[Tensor, " distances"] | None = None
