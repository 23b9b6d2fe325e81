"""The order of rows in projections of queries and keys: which belong to which head, and which of them are rotated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = [
    "HeadRows", "HeadShape", "RowOrder", "group_by_group", "key_rows", "one_after_another", "query_rows", "value_rows",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The heads of one layer.

    Args:
        queries, keys: how many heads.
        width: rows of a head in the projection of queries.
        start: the first row of a head that is rotated; not 0 in multi-head latent attention alone.
        rotated: how many rows of a head are rotated.
        latent: rows before the one key head of multi-head latent attention.
    """

    queries: int
    keys: int
    width: int
    start: int = 0
    rotated: int
    latent: int = 0


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """`count` heads one after the other, of `width` rows each, of which `rotated` rows from `start` on are rotated."""

    count: int
    width: int
    start: int = 0
    rotated: int = 0

    @property
    def rows(self) -> int:
        return self.count * self.width


RowOrder = Callable[[HeadShape], tuple[HeadRows, ...]]
"""What a projection of a layer with these heads holds, from its first row to its last."""


def query_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of queries; default: all."""
    count = shape.queries if count is None else count
    return HeadRows(count=count, width=shape.width, start=shape.start, rotated=shape.rotated)


def key_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of keys; default: all."""
    return query_rows(shape, shape.keys if count is None else count)


def value_rows(shape: HeadShape, count: int | None = None) -> HeadRows:
    """`count` heads of values; default: all."""
    return replace(key_rows(shape, count), start=0, rotated=0)


def one_after_another(shape: HeadShape) -> tuple[HeadRows, ...]:
    """All queries, all keys, all values (Phi-3)."""
    return query_rows(shape), key_rows(shape), value_rows(shape)


def group_by_group(shape: HeadShape) -> tuple[HeadRows, ...]:
    """The queries that share a key, then that key and its value (GPT-NeoX, Falcon)."""
    group = (query_rows(shape, shape.queries // shape.keys), key_rows(shape, 1), value_rows(shape, 1))
    return group * shape.keys
