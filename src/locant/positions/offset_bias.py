"""`OffsetBias`: the base of encodings whose bias depends on how many rows and columns a key is from its query."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions.base import (
    Bias,
    Keys,
    ModelShape,
    PositionEncoding,
    Queries,
    ScoreMod,
    bias_dtype,
    build,
    require_heads,
)
from locant.positions.grids import cells
from locant.positions.heads import Heads
from locant.positions.positions import Positions
from locant.tensors import has_values

__all__ = ["HeadTable", "OffsetBias", "Table"]

MAX_SIDE = 2**14
"""Rows or columns of a grid: the number of its offsets, four times that of its cells, then fits 32 bits."""

E = TypeVar("E", bound="OffsetBias")


class Table(NamedTuple):
    """A number for every offset of a query from a key, for each head, or for each head and query.

    The entry in the middle is that of no offset.
    """

    values: Float[Tensor, "heads entries"] | Float[Tensor, "batch heads query entries"]
    per_row: int
    """How many entries farther the next row is."""
    per_column: int
    of_prefix: Float[Tensor, "heads 3"] | None = None
    """From a prefix token to a cell, from a cell to a prefix token, and among prefix tokens; ``None``: nothing."""

    def codes(self, positions: Positions) -> Int[Tensor, "batch seq"]:
        """A number for each token, so that the entry of a pair follows from their difference."""
        if positions.axes == 1:
            return positions.index * self.per_column
        row, column = positions.index.unbind(-1)
        return row * self.per_row + column * self.per_column

    @property
    def middle(self) -> int:
        return self.values.shape[-1] // 2

    def with_prefix(self) -> Table:
        """With further entries behind the last, for pairs with a prefix token."""
        more = F.pad(self.values, (0, 3)) if self.of_prefix is None else torch.cat([self.values, self.of_prefix], -1)
        return self._replace(values=more)

    def pick(self, entries: Int[Tensor, "_ query key"]) -> Float[Tensor, "_ heads query key"]:
        """These entries, for each head."""
        if self.values.ndim == 2:
            return self.values.index_select(1, entries.flatten()).unflatten(1, entries.shape).transpose(0, 1)
        return self.values.gather(3, entries[:, None].expand(*self.values.shape[:3], entries.shape[-1]))


class OffsetBias(PositionEncoding):
    """A bias by the rows and the columns between query and key, looked up in what a subclass gives as `tables`.

    Positions have two axes, as those of `Positions.grid`. Those with one index stand in one row of the grid. Offsets
    that the grid does not have are refused, as far as the host knows them. Prefix tokens have no offset: what is added
    for them is nothing, unless a subclass says otherwise.

    Args:
        height, width: of the grid, or of a window of it, in tokens.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self._resize(height, width)

    def _resize(self, height: int, width: int) -> None:
        self.height = whole("height", height, 1, MAX_SIDE, remedy="height=14, the rows of the grid")
        self.width = whole("width", width, 1, MAX_SIDE, remedy="width=14, the columns of the grid")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """For tokens in one row, unless `height` and `width` are given: sizes of a model say nothing of a grid."""
        if "width" not in options and shape.max_seq_len > MAX_SIDE:
            got = f"got {cls.__name__} for a text of {shape.max_seq_len} tokens, and its tables have {MAX_SIDE} places"
            raise RangeError(got, "an encoding of texts, such as alibi")
        known = {size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}
        return build(cls, {**known, "height": 1, "width": shape.max_seq_len} | options)

    def tables(self, q: Tensor) -> Sequence[Table]:
        """What is added up for the offset of each query from each key, float32 at least: a subclass writes this."""
        raise LocantError(f"{type(self).__name__} does not define tables", "def tables(self, q)")

    def at(self: E, height: int, width: int) -> E:
        """The same encoding for grids of another size. It shares its parameters: what one learns, the other knows.

        Where one of them is resized for good, it has parameters of its own from then on.
        """
        other = copy.copy(self)
        other._parameters, other._modules = {**self._parameters}, {**self._modules}
        other._resize(height, width)
        return other

    def bias(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> Bias:
        """What the tables have for every pair of tokens, float32 at least."""
        keys = self._require(q, k, positions, k_positions)
        prefix = _prefix_of(positions, keys)
        return _sum([_picked(table, positions, keys, prefix) for table in self.tables(q)])

    def score_mod(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> ScoreMod:
        """One look-up in each of the tables."""
        keys = self._require(q, k, positions, k_positions)
        rows = (positions.expand(q.shape[0]), keys.expand(q.shape[0]))
        tables = [_look_up(table, *rows, _prefix_of(*rows)) for table in self.tables(q)]

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + _sum([look_up(batch, head, query, key) for look_up in tables])

        return add

    def _require(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None) -> Positions:
        """Raise unless queries, keys and positions fit each other and the grid; returns those of the keys."""
        keys, name = positions if k_positions is None else k_positions, type(self).__name__
        for what, x, where in (("q", q, positions), ("k", k, keys)):
            require_heads(what, x, where, getattr(self, "head_dim", None))
            if where.axes > 2 or where.denominator != 1 or where.axes != keys.axes:
                parts = "" if where.denominator == 1 else f", in parts of 1/{where.denominator}"
                got = f"got positions with {where.axes} axes{parts}, {name} counts the rows and columns between tokens"
                raise ShapeError(got, "Positions.grid(height, width), for queries and keys")
        if not self._surely_holds(positions, keys) and has_values(positions.index) and has_values(keys.index):
            self._require_offsets(positions, keys)
        return keys

    def _surely_holds(self, positions: Positions, keys: Positions) -> bool:
        """Whether the host knows that the grid has every offset."""
        sides = (self.height, self.width)[-positions.axes :]
        if positions.grids and keys.grids:
            grids = (*positions.grids, *keys.grids)
            return all(size <= side for grid in grids for size, side in zip(grid.sizes, sides, strict=True))
        bounds = (positions.min_index, positions.max_index, keys.min_index, keys.max_index)
        if None in bounds:
            return False
        q_low, q_high, k_low, k_high = bounds
        return max(q_high - k_low, k_high - q_low) < min(sides)  # type: ignore[operator]

    def _require_offsets(self, positions: Positions, keys: Positions) -> None:
        if not positions.index.numel() or not keys.index.numel():
            return
        sizes = {"rows": self.height, "columns": self.width}
        if positions.axes == 1:
            del sizes["rows"]
        low, high = (
            torch.stack([extreme(each.index.reshape(-1, len(sizes)), 0) for each in (positions, keys)])
            for extreme in (torch.amin, torch.amax)
        )
        for (what, size), reach in zip(sizes.items(), (high - low.flip(0)).amax(0).tolist(), strict=True):
            if reach >= size:
                name = f"{type(self).__name__}(height={self.height}, width={self.width})"
                got = f"got tokens that are {reach} {what} apart, {name} has offsets of up to {size - 1}"
                raise RangeError(got, "encoding.at(height, width) for grids of another size")


class HeadTable(OffsetBias):
    """A bias with a number for each head and offset, whatever the tokens are.

    Args:
        num_heads: the number of query heads.
        height, width: of the grid, or of a window of it, in tokens.
        head_slice: the heads of this rank under tensor parallelism; default: all.
    """

    def __init__(self, num_heads: int, height: int, width: int, *, head_slice: slice | None = None) -> None:
        super().__init__(height, width)
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        """The number of each head for every offset, row by row, from the farthest before: a subclass writes this."""
        raise LocantError(f"{type(self).__name__} does not define of_offsets", "def of_offsets(self, dtype)")

    def of_prefix(self, dtype: torch.dtype) -> Float[Tensor, "heads 3"] | None:
        """From a prefix token to a cell, from a cell to a prefix token, and among prefix tokens; ``None``: nothing."""
        return None

    def tables(self, q: Tensor) -> Sequence[Table]:
        self.heads.require(self, q)
        dtype = bias_dtype(q)
        return [Table(self.of_offsets(dtype), 2 * self.width - 1, 1, self.of_prefix(dtype))]

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        """What `bias` adds among the cells of the grid, row by row: keys are the first, and queries the last of them.

        >>> from locant import GridBias
        >>> GridBias(3, 2, 4).matrix(2 * 4).shape
        torch.Size([3, 8, 8])
        """
        cells = self.height * self.width
        query_len = whole("query_len", query_len, 0, cells, remedy=f"query_len={cells}, the whole grid")
        key_len = query_len if key_len is None else key_len
        key_len = whole("key_len", key_len, query_len, cells, remedy=f"key_len={cells}, the whole grid")
        device = next(self.parameters()).device
        keys = Positions.grid(self.height, self.width, device=device).slice(0, key_len)
        q, k = (torch.empty(1, len(self.heads), length, 0, device=device) for length in (query_len, key_len))
        return self.bias(q, k, keys.slice(key_len - query_len, key_len), keys)[0]

    def extra_repr(self) -> str:
        return f"{self.heads}, height={self.height}, width={self.width}"


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


Prefix = tuple[Bool[Tensor, "_ query"], Bool[Tensor, "_ key"]]


def _prefix_of(positions: Positions, keys: Positions) -> Prefix | None:
    """Which queries and which keys are prefix tokens; ``None`` where there can be none."""
    if not any(grid.prefix for grid in (*positions.grids, *keys.grids)):
        return None
    return _is_prefix(positions), _is_prefix(keys)


def _is_prefix(positions: Positions) -> Bool[Tensor, "batch seq"]:
    if positions.place_or_none is None:
        return torch.zeros(positions.index.shape[:2], dtype=torch.bool, device=positions.device)
    return (cells(positions.grids, positions.device)[:, 0] < 0)[positions.place_or_none]


def _behind(table: Table, entries: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
    """These entries, or those behind the last where one of the pair is a prefix token, or both are."""
    last = table.values.shape[-1]
    return torch.where(of_query, torch.where(of_key, last + 2, last), torch.where(of_key, last + 1, entries))


def _picked(table: Table, positions: Positions, keys: Positions, prefix: Prefix | None) -> Tensor:
    """The entries of all pairs."""
    entries = table.codes(positions)[:, :, None] - table.codes(keys)[:, None] + table.middle
    if prefix is None:
        return table.pick(entries)
    return table.with_prefix().pick(_behind(table, entries, prefix[0][:, :, None], prefix[1][:, None]))


def _look_up(table: Table, positions: Positions, keys: Positions, prefix: Prefix | None) -> Callable[..., Tensor]:
    """The entry of one pair: ``(batch, head, query, key) -> entry``."""
    of_query, of_key = (table.codes(each).to(torch.int32) for each in (positions, keys))
    of_query, values = of_query + table.middle, (table if prefix is None else table.with_prefix()).values

    def look_up(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        entry = of_query[batch, query] - of_key[batch, key]
        if prefix is not None:
            entry = _behind(table, entry, prefix[0][batch, query], prefix[1][batch, key])
        return values[head, entry] if values.ndim == 2 else values[batch, head, query, entry]

    return look_up
