"""`OffsetBias`: the base class of encodings whose bias depends on the rows and columns between a query and a key."""

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
from locant.positions.distances import bias_dtype
from locant.positions.grids import cells
from locant.positions.heads import Heads
from locant.positions.positions import Positions
from locant.positions.score_bias import Entries, Lookup
from locant.tensors import has_values

MAX_SIDE = 2**14
"""The largest number of rows or columns of a grid.

The number of offsets is about four times the number of cells. With this limit it fits into 32 bits.
"""

E = TypeVar("E", bound="OffsetBias")


class Table(NamedTuple):
    """Entries for every offset of a query from a key. The middle entry belongs to offset zero."""

    per_row: int
    """The number of entries between one row and the next."""
    per_column: int
    of_head: Float[Tensor, "heads entries"] | None = None
    of_query: Float[Tensor, "entries head_dim"] | None = None
    """The vectors by which queries are multiplied."""
    of_prefix: Float[Tensor, "heads 3"] | None = None
    """The bias from prefix tokens to cells, from cells to prefix tokens, and among prefix tokens. Default: zero."""


class OffsetBias(PositionEncoding):
    """A bias that depends on the rows and columns between query and key. A subclass implements `tables`.

    Positions have two axes, as in `Positions.grid`, or one axis for tokens in one row of the grid. If two tokens are
    farther apart than the grid allows, `score_bias` raises `RangeError`. It cannot check this if the positions have no
    values, as in a compiled graph. Prefix tokens have no offset. Their bias is zero unless a subclass defines it.

    Args:
        height, width: the size of the grid, or of a window of it, in tokens.
    """

    of_products: ClassVar[bool] = False
    """True if the tables hold vectors by which queries are multiplied."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self._resize(height, width)

    def _resize(self, height: int, width: int) -> None:
        self.height = whole("height", height, 1, MAX_SIDE, remedy="pass the rows of the grid, such as height=14")
        self.num_axes = 2 if self.height > 1 else 1
        self.width = whole("width", width, 1, MAX_SIDE, remedy="pass the columns of the grid, such as width=14")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """Build the encoding, for tokens in one row unless the options give a grid. A `ModelShape` has no grid."""
        if "width" not in options and shape.max_seq_len > MAX_SIDE:
            got = f"got {cls.__name__} for a text of {shape.max_seq_len} tokens, expected {MAX_SIDE} at most"
            raise RangeError(got, "use an encoding for text, such as alibi")
        sizes = {size: getattr(shape, size) for size in cls.sizes() if hasattr(shape, size)}
        return build(cls, {**sizes, "height": 1, "width": shape.max_seq_len} | options)

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        """Return the tables, in this dtype. The bias is the sum of their entries. Subclasses implement this."""
        raise LocantError(f"{type(self).__name__} does not define tables", "def tables(self, dtype)")

    def at(self: E, height: int, width: int) -> E:
        """Return this encoding for grids of another size. The two encodings share parameters, also in training.

        If `resize` later changes one of them, that encoding gets its own parameters.
        """
        other = copy.copy(self)
        other._parameters, other._modules = {**self._parameters}, {**self._modules}
        other._resize(height, width)
        return other

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Lookup:
        """Return the table entries of every pair of tokens as a `Lookup` value."""
        if isinstance(held_heads := getattr(self, "heads", None), Heads):  # only a `HeadTable` has heads
            held_heads.subset(heads).require(self, q)
        self._require(q, k, queries, keys)

        def make() -> tuple[Entries, ...]:
            tables = tuple(_entries(table, queries, keys) for table in self.tables(bias_dtype(q)))
            return tables if heads is None else tuple(table.select_heads(heads) for table in tables)

        of_query = q if self.of_products else None
        return Lookup(q=q, queries=queries, keys=keys, sources=self._tensors(), make=make, of_query=of_query)

    def _require(self, q: Tensor, k: Tensor, positions: Positions, keys: Positions) -> None:
        """Raise an error unless queries, keys and positions match each other and the grid."""
        name = type(self).__name__
        for argument, x, tokens in (("q", q, positions), ("k", k, keys)):
            require_heads(argument, x, tokens, getattr(self, "head_dim", None))
            if tokens.axes > 2 or tokens.denominator != 1 or tokens.axes != keys.axes:
                parts = "" if tokens.denominator == 1 else f", in parts of 1/{tokens.denominator}"
                got = f"got positions with {tokens.axes} axes{parts}, {name} counts the rows and columns between tokens"
                raise ShapeError(got, "use Positions.grid(height, width) for queries and keys")
        if not self._is_known_to_fit(positions, keys) and has_values(positions.index) and has_values(keys.index):
            self._require_offsets(positions, keys)

    def _is_known_to_fit(self, positions: Positions, keys: Positions) -> bool:
        """Return whether all offsets are known to fit the grid, without reading the positions."""
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
        for (axis, size), reach in zip(sizes.items(), (high - low.flip(0)).amax(0).tolist(), strict=True):
            if reach >= size:
                name = f"{type(self).__name__}(height={self.height}, width={self.width})"
                got = f"got tokens that are {reach} {axis} apart, {name} has offsets of up to {size - 1}"
                raise RangeError(got, "use encoding.at(height, width) for grids of another size")


class HeadTable(OffsetBias):
    """A bias with a number for each head and offset, independent of the tokens.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        height, width: the size of the grid, or of a window of it, in tokens.
    """

    def __init__(self, num_heads: int, height: int, width: int, *, head_slice: slice | None = None) -> None:
        super().__init__(height, width)
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        """Return the bias of each head for every offset, row by row from the most negative. Subclasses implement it."""
        raise LocantError(f"{type(self).__name__} does not define of_offsets", "def of_offsets(self, dtype)")

    def of_prefix(self, dtype: torch.dtype) -> Float[Tensor, "heads 3"] | None:
        """Return the bias from prefix tokens to cells, from cells to prefix tokens, and among prefix tokens.

        ``None`` means zero.
        """
        return None

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        return [Table(2 * self.width - 1, 1, self.of_offsets(dtype), None, self.of_prefix(dtype))]

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        """Return the bias among the cells of the grid, row by row.

        The keys are the first `key_len` cells. The queries are the last `query_len` keys.

        >>> from locant import GridBias
        >>> GridBias(3, 2, 4).matrix(2 * 4).shape
        torch.Size([3, 8, 8])
        """
        cells = self.height * self.width
        query_len = whole("query_len", query_len, 0, cells, remedy=f"use query_len={cells} for the whole grid")
        key_len = query_len if key_len is None else key_len
        key_len = whole("key_len", key_len, query_len, cells, remedy=f"use key_len={cells} for the whole grid")
        device = next(self.parameters()).device
        keys = Positions.grid(self.height, self.width, device=device).slice(0, key_len)
        q, k = (torch.empty(1, len(self.heads), length, 0, device=device) for length in (query_len, key_len))
        return self.score_bias(q, k, keys.slice(key_len - query_len, key_len), keys).dense()[0]

    def extra_repr(self) -> str:
        return f"{self.heads}, height={self.height}, width={self.width}"


def _entries(table: Table, queries: Positions, keys: Positions) -> Entries:
    """Return the entries of a table, with a code for each token instead of its row and column.

    The difference of two codes determines the entry of the pair. The code of a prefix token differs from the code of a
    cell by more than the codes of two cells can differ.
    """
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

        def entry_of(offset: Tensor) -> Tensor:  # prefix tokens are farther away than any cell
            mixed = torch.where(offset > beyond, last + 1, last)
            of_prefix = torch.where(offset > 2 * beyond + middle + 1, last + 2, mixed)
            return torch.where(offset > middle, of_prefix, offset + middle)

    q_at, k_at = (Positions(code.to(torch.int32)) for code in (q_code, k_code))
    of_head, of_query = (values, None) if table.of_head is not None else (None, values.T)
    return Entries(queries=q_at, keys=k_at, entry_of=entry_of, of_head=of_head, of_query=of_query)


def _code(table: Table, positions: Positions) -> Int[Tensor, "batch seq"]:
    """Return a code for each token. The difference of two codes determines the entry of the pair."""
    if positions.axes == 1:
        return positions.index * table.per_column
    row, column = positions.index.unbind(-1)
    return row * table.per_row + column * table.per_column


def _is_prefix(positions: Positions) -> Bool[Tensor, "batch seq"]:
    if positions.place_or_none is None:
        return torch.zeros(positions.index.shape[:2], dtype=torch.bool, device=positions.device)
    return (cells(positions.grids, positions.device)[:, 0] < 0)[positions.place_or_none]
