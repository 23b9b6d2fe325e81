"""`OffsetBias`: the base of encodings whose bias depends on how many rows and columns a key is from its query."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions.base import Keys, ModelShape, PositionEncoding, Queries, build, require_heads
from locant.positions.grids import cells
from locant.positions.heads import Heads
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions
from locant.positions.score_bias import Entries, Lookup
from locant.tensors import has_values

MAX_SIDE = 2**14
"""Rows or columns of a grid: the number of its offsets, four times that of its cells, then fits 32 bits."""

E = TypeVar("E", bound="OffsetBias")


class Table(NamedTuple):
    """What is held for every offset of a query from a key; the entry in the middle is that of no offset."""

    per_row: int
    """How many entries farther the next row is."""
    per_column: int
    of_head: Float[Tensor, "heads entries"] | None = None
    of_query: Float[Tensor, "entries head_dim"] | None = None
    """What queries are multiplied with."""
    of_prefix: Float[Tensor, "heads 3"] | None = None
    """From a prefix token to a cell, from a cell to a prefix token, and among prefix tokens; ``None``: nothing."""


class OffsetBias(PositionEncoding):
    """A bias by the rows and the columns between query and key, looked up in what a subclass gives as `tables`.

    Positions have two axes, as those of `Positions.grid`, or one, for tokens in one row of the grid. Offsets that the
    grid does not have are refused, as far as the host knows them. Nothing is added for prefix tokens, which have no
    offset, unless a subclass says otherwise.

    Args:
        height, width: of the grid, or of a window of it, in tokens.
    """

    of_products: ClassVar[bool] = False
    """Whether tables hold what queries are multiplied with."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self._resize(height, width)

    def _resize(self, height: int, width: int) -> None:
        self.height = whole("height", height, 1, MAX_SIDE, remedy="height=14, the rows of the grid")
        self.num_axes = 2 if self.height > 1 else 1
        self.width = whole("width", width, 1, MAX_SIDE, remedy="width=14, the columns of the grid")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """For tokens in one row, unless `height` and `width` are given: sizes of a model say nothing of a grid."""
        if "width" not in options and shape.max_seq_len > MAX_SIDE:
            got = f"got {cls.__name__} for a text of {shape.max_seq_len} tokens, and its tables have {MAX_SIDE} places"
            raise RangeError(got, "an encoding of texts, such as alibi")
        sizes = {size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}
        return build(cls, {**sizes, "height": 1, "width": shape.max_seq_len} | options)

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        """What is added up for the offset of each query from each key, in this dtype: a subclass writes this."""
        raise LocantError(f"{type(self).__name__} does not define tables", "def tables(self, dtype)")

    def at(self: E, height: int, width: int) -> E:
        """The same encoding for grids of another size. It shares its parameters: what one learns, the other knows.

        Where one of them is resized for good, it has parameters of its own from then on.
        """
        other = copy.copy(self)
        other._parameters, other._modules = {**self._parameters}, {**self._modules}
        other._resize(height, width)
        return other

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Lookup:
        """What the tables have for every pair of tokens."""
        if isinstance(of_tables := getattr(self, "heads", None), Heads):  # those with a number for each head
            of_tables.some(heads).require(self, q)
        self._require(q, k, queries, keys)

        def make() -> tuple[Entries, ...]:
            tables = tuple(_entries(table, queries, keys) for table in self.tables(bias_dtype(q)))
            return tables if heads is None else tuple(table.of_heads(heads) for table in tables)

        of_query, sources = q if self.of_products else None, (*self.parameters(), *self.buffers())
        return Lookup(q=q, queries=queries, keys=keys, sources=sources, make=make, of_query=of_query)

    def _require(self, q: Tensor, k: Tensor, positions: Positions, keys: Positions) -> None:
        """Raise unless queries, keys and positions fit each other and the grid."""
        name = type(self).__name__
        for what, x, where in (("q", q, positions), ("k", k, keys)):
            require_heads(what, x, where, getattr(self, "head_dim", None))
            if where.axes > 2 or where.denominator != 1 or where.axes != keys.axes:
                parts = "" if where.denominator == 1 else f", in parts of 1/{where.denominator}"
                got = f"got positions with {where.axes} axes{parts}, {name} counts the rows and columns between tokens"
                raise ShapeError(got, "Positions.grid(height, width), for queries and keys")
        if not self._surely_holds(positions, keys) and has_values(positions.index) and has_values(keys.index):
            self._require_offsets(positions, keys)

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
        sizes = {"rows": self.height} if positions.axes == 2 else {}
        sizes["columns"] = self.width
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
        num_heads, head_slice: as in `DistanceBias`.
        height, width: of the grid, or of a window of it, in tokens.
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

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        return [Table(2 * self.width - 1, 1, self.of_offsets(dtype), None, self.of_prefix(dtype))]

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
        return self.score_bias(q, k, keys.slice(key_len - query_len, key_len), keys).dense()[0]

    def extra_repr(self) -> str:
        return f"{self.heads}, height={self.height}, width={self.width}"


def _entries(table: Table, queries: Positions, keys: Positions) -> Entries:
    """Entries by a code of each token; those of prefix tokens are farther off than any two cells are apart."""
    values = table.of_head if table.of_head is not None else table.of_query.T  # type: ignore[union-attr]
    last = values.shape[-1]
    middle = last // 2
    q_code, k_code = _code(table, queries), _code(table, keys)

    def entry_of(offset: Tensor) -> Tensor:
        return offset + middle

    if any(grid.prefix for grid in (*queries.grids, *keys.grids)):
        beyond = 2 * middle + 1
        q_code = torch.where(_is_prefix(queries), beyond, q_code)
        k_code = torch.where(_is_prefix(keys), -(2 * beyond + 1), k_code)
        values = F.pad(values, (0, 3)) if table.of_prefix is None else torch.cat([values, table.of_prefix], -1)

        def entry_of(offset: Tensor) -> Tensor:  # a prefix token is farther than cells are
            of_one = torch.where(offset > beyond, last + 1, last)
            of_prefix = torch.where(offset > 2 * beyond + middle + 1, last + 2, of_one)
            return torch.where(offset > middle, of_prefix, offset + middle)

    q_at, k_at = (Positions(code.to(torch.int32)) for code in (q_code, k_code))
    of_head, of_query = (values, None) if table.of_head is not None else (None, values.T)
    return Entries(queries=q_at, keys=k_at, entry_of=entry_of, of_head=of_head, of_query=of_query)


def _code(table: Table, positions: Positions) -> Int[Tensor, "batch seq"]:
    """A number for each token, so that the entry of a pair follows from their difference."""
    if positions.axes == 1:
        return positions.index * table.per_column
    row, column = positions.index.unbind(-1)
    return row * table.per_row + column * table.per_column


def _is_prefix(positions: Positions) -> Bool[Tensor, "batch seq"]:
    if positions.place_or_none is None:
        return torch.zeros(positions.index.shape[:2], dtype=torch.bool, device=positions.device)
    return (cells(positions.grids, positions.device)[:, 0] < 0)[positions.place_or_none]
