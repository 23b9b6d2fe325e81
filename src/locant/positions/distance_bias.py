"""Base classes of encodings whose bias depends on the distance.

`DistanceBias` adds a number for each head and distance. `RowBias` adds the product of a query or key with a table row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import LocantError
from locant.positions.base import Keys, PositionEncoding, Queries, bias_matrix, require_tokens
from locant.positions.constant import Constant
from locant.positions.distances import bias_dtype
from locant.positions.heads import Heads, for_query_heads
from locant.positions.kept_table import KeptTable, RowsByDistance, can_keep
from locant.positions.positions import Positions
from locant.positions.score_bias import ByDistance, Entries, Lookup
from locant.positions.score_bias.by_distance import single_thread_distances


class DistanceBias(PositionEncoding):
    """A bias that is a function of distance and head. A subclass defines it once, for every attention backend.

    `of_distance` determines `bias`, `score_mod` for FlexAttention, and the table that attention on a CPU uses instead
    of a matrix. The table has one number per head and distance.

    Args:
        num_heads: the number of query heads.
        head_slice: the heads of this rank under tensor parallelism. Default: all.

    >>> class Gentle(DistanceBias):
    ...     '''Each head subtracts the logarithm of the distance, the later ones less of it.'''
    ...     def of_distance(self, distance, head):
    ...         return -torch.log1p(distance.abs()) / (head + 1)
    >>> Gentle(4).matrix(3)[1]
    tensor([[-0.0000, -0.3466, -0.5493],
            [-0.3466, -0.0000, -0.3466],
            [-0.5493, -0.3466, -0.0000]])
    """

    is_arithmetic: ClassVar[bool] = False
    """True if `of_distance` costs less than a table look-up: a multiplication or two."""
    is_traceable_per_pair: ClassVar[bool] = True
    """True if `of_distance` uses only operations that a score function of FlexAttention supports for one pair."""
    _defines_along: ClassVar[bool] = False
    """True if this class itself defines `along`."""

    def __init__(self, num_heads: int, *, head_slice: slice | None = None) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self._numbers = Constant(torch.tensor(list(self.heads.indices), device="cpu"))
        self._kept_table = KeptTable[RowsByDistance]()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._defines_along = "along" in vars(cls)

    def of_distance(
        self, distance: Int[Tensor, "*#pairs"], head: Int[Tensor, "*#pairs"], *args: Any, **operands: Any
    ) -> Float[Tensor, "*#pairs"]:
        """Return the bias of a query and a key. Subclasses implement this with plain torch operations.

        Args:
            distance: query index minus key index, positive for an earlier key and negative for a later one.
            head: the index of the head in the model, from 0, even if this rank holds a slice of the heads. To index
                values of this rank's heads alone, use ``self.heads.to_local(head)``.
            operands: the values that `operands` returned, by name.
        """
        raise LocantError(f"{type(self).__name__} does not define of_distance", "def of_distance(self, distance, head)")

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Any]:
        """Return keyword arguments for `of_distance`: constants on the device of `q`, parameters in float32.

        It is called once per attention call, because a copy from another device inside the score function would break a
        CUDA graph. `largest` is the largest distance of two tokens, or ``None`` if it is unknown or if there are more
        distances than pairs.
        """
        return {}

    def along(self, q: Queries, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"]:
        """Return `of_distance` for all heads and distances, in the dtype of the bias.

        A class defines it if it is faster on one thread. The bits of a number must depend on its distance alone. The
        numbers are kept for later calls while the parameters have the same values, so they must not depend on anything
        else that can change. A subclass does not inherit it, because it may change `of_distance`.
        """
        raise LocantError(f"{type(self).__name__} does not define along", "def along(self, q, distance)")

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ByDistance:
        """Return `of_distance` of every pair of tokens as a `ByDistance` value."""
        subset, numbers_on = self.heads.subset(heads), self._numbers.on
        subset.require(self, q)
        require_tokens(self, q, k, queries, keys)
        return ByDistance(
            q=q, queries=queries, keys=keys, sources=self._tensors(), heads=subset,
            of_distance=self.of_distance, operands=self.operands,
            numbers=numbers_on if heads is None else lambda device: numbers_on(device)[heads],
            table_on_one_thread=self._table_on_one_thread if heads is None and self._defines_along else None,
            is_arithmetic=self.is_arithmetic, is_traceable_per_pair=self.is_traceable_per_pair,
        )  # fmt: skip

    def _table_on_one_thread(self, q: Queries, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """Return `along` at the distances from `first` to `last`, from the kept table if it can be kept."""
        sources = [x for x in self._tensors() if x is not None]
        if not can_keep(sources):
            return self._along_parts(q, torch.arange(first, last + 1, device=q.device))

        def make() -> RowsByDistance:  # of negated distances, because the smallest distance comes first in a table
            like = q.new_empty(0, 0, 0, 0)  # a kept function must not hold the queries
            return RowsByDistance(lambda negated: self._along_parts(like, -negated), dim=-1)

        return self._kept_table.get(sources, bias_dtype(q), make).between(-last, -first)

    def _along_parts(self, q: Tensor, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"]:
        parts = distance.split(single_thread_distances(len(self.heads)))
        return torch.cat([self.along(q, part) for part in parts], -1)

    def distance_table(self, q: Queries, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """Return the bias at the distances from `first` to `last` for every held head, with the same bits as in `bias`.

        >>> from locant import ALiBi
        >>> ALiBi(2).distance_table(torch.zeros(1, 2, 5, 8), -1, 2)[0]
        tensor([-0.0625, -0.0000, -0.0625, -0.1250])
        """
        no_tokens = Positions.arange(0, device=q.device)
        return self.score_bias(q[:, :, :0], q[:, :, :0], no_tokens, no_tokens).table(first, last)

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

    def extra_repr(self) -> str:
        return str(self.heads)


class RowBias(PositionEncoding):
    """A bias made of products of tokens with the rows of a table. Every distance has a row.

    A subclass implements `row_of` and `vectors`. Its constructor sets the attributes below: the scale of the products,
    whether queries have products, whether keys have products, and `ends`. Farther distances share the rows of these two
    distances.
    """

    head_dim: int
    scale: float
    ends: tuple[int, int]
    of_queries: bool = True
    of_keys: bool = False

    def rows(self, distance: Int[Tensor, "*pairs"]) -> Int[Tensor, "*pairs"]:
        """Return the table's row for every distance (query index minus key index)."""
        return self.row_of(distance.device)(distance)

    def row_of(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return `rows` as a function that does not copy data to this device. Rows are monotonic in the distance."""
        raise LocantError(f"{type(self).__name__} does not define row_of", "def row_of(self, device)")

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of queries and of keys: ``rows head_dim`` or ``heads rows head_dim``, or ``None``."""
        raise LocantError(f"{type(self).__name__} does not define vectors", "def vectors(self, dtype)")

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> Lookup:
        """Return the products of every pair of tokens with the row of their distance, as a `Lookup` value."""
        require_tokens(self, q, k, queries, keys, self.head_dim)

        def make() -> tuple[Entries, ...]:
            of_query, of_key = self.vectors(bias_dtype(q))
            table = Entries(
                queries=queries, keys=keys, entry_of=self.row_of(q.device), ends=self.ends, of_query=of_query,
                of_key=of_key, scale=self.scale,
            )  # fmt: skip
            return (table if heads is None else table.select_heads(heads),)

        return Lookup(
            q=q, queries=queries, keys=keys, sources=self._tensors(), make=make,
            of_query=q if self.of_queries else None, of_key=for_query_heads(k, q.shape[1]) if self.of_keys else None,
        )  # fmt: skip
