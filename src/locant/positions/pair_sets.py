"""`PairSets`: sets of pairs of queries and keys, with vectors of their own, whose products are the scores.

An encoding returns them if each pair has its own score, such as PaTH. `attend` computes attention over each set, and
merges the outputs by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.positions import Positions


class PairSet(NamedTuple):
    """Groups of queries and keys: every query of a group meets the keys of this group that its mask allows.

    The groups are the rows of a batch of ``batch x groups`` rows, the groups of the first row of the batch first.

    Args:
        q, k, v: the vectors of queries, keys and values. Their width may differ from `head_dim`.
        queries, keys: their positions, which give the mask.
        rows, columns: the slots of the queries and of the keys of each group.
    """

    q: Float[Tensor, "rows heads query width"]
    k: Float[Tensor, "rows kv_heads key width"]
    v: Float[Tensor, "rows kv_heads key value_dim"]
    queries: Positions
    keys: Positions
    rows: Int[Tensor, "groups query"]
    columns: Int[Tensor, "groups key"]

    def ungroup(self, x: Float[Tensor, "rows heads query *_"]) -> Float[Tensor, "batch heads queries *_"]:
        """Return the outputs of all groups in the order of `rows`."""
        return x.unflatten(0, (-1, len(self.rows))).transpose(1, 2).flatten(2, 3)


class PairSets(NamedTuple):
    """All pairs of a causal mask, each exactly once.

    Args:
        sets: the sets, in any order.
        num_rows: the number of slots of queries.
        row_of: the slot of each query, if the slots are not the queries in their order.
        column_of: the slot of each key, if the slots are not the keys in their order.
    """

    sets: Iterable[PairSet]
    num_rows: int
    row_of: Int[Tensor, "batch query"] | None = None
    column_of: Int[Tensor, "batch key"] | None = None

    def products(self, num_columns: int) -> Float[Tensor, "batch heads query key"]:
        """Return the product of every pair as a matrix, and 0 for keys that no set has. For inspection."""
        parts = list(self.sets)
        q, groups = parts[0].q, len(parts[0].rows)
        matrix = q.new_zeros(len(q) // groups, q.shape[1], self.num_rows, num_columns)
        for part in parts:
            products = part.q.unflatten(1, (part.k.shape[1], -1)) @ part.k[:, :, None].mT
            each_group = products.flatten(1, 2).unflatten(0, (-1, len(part.rows))).unbind(1)
            for rows, columns, entries in zip(part.rows, part.columns, each_group, strict=True):
                matrix[:, :, rows[:, None], columns] = entries.to(matrix.dtype)
        return self.in_order(matrix, self.column_of)

    def in_order(
        self, x: Float[Tensor, "batch heads rows *_"], column_of: Int[Tensor, "batch key"] | None = None
    ) -> Float[Tensor, "batch heads query *_"]:
        """Return the results in the order of the queries, and of the keys."""
        if self.row_of is not None:
            slots = self.row_of.reshape(len(self.row_of), 1, -1, *[1] * (x.ndim - 3))
            x = x.gather(2, slots.expand(*x.shape[:2], -1, *x.shape[3:]))
        if column_of is not None:
            x = x.gather(3, column_of[:, None, None].expand(*x.shape[:3], -1))
        return x


def group(x: Float[Tensor, "batch heads token width"], slots: Int[Tensor, "groups taken"]) -> Tensor:
    """Return the tokens of each group as a row of the batch."""
    taken = x[:, :, slots.flatten()].unflatten(2, slots.shape)
    return taken.transpose(1, 2).flatten(0, 1)


def group_positions(positions: Positions, batch: int, slots: Int[Tensor, "groups token"]) -> Positions:
    """Return the positions of each group as a row of the batch."""
    taken = positions.expand(batch).select(slots.flatten())

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, slots.shape).flatten(0, 1)

    order = None if taken.order_or_none is None else grouped(taken.order_or_none)
    bounds = positions.min_index, positions.max_index
    return Positions(grouped(taken.index), grouped(taken.document), order, *bounds)
