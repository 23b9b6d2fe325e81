"""Bases of encodings whose bias follows from the distance.

`DistanceBias`: a number for each head and distance. `RowBias`: the product of the query, or the key, with a row.
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
from locant.positions.heads import Heads, for_query_heads
from locant.positions.pairs import bias_dtype
from locant.positions.positions import Positions
from locant.positions.score_bias import ByDistance, Entries, Lookup


class DistanceBias(PositionEncoding):
    """A bias that a subclass writes once, as a function of distance and head, and every backend of attention uses.

    From `of_distance` follow `bias`, `score_mod` for FlexAttention, and the table of one number per head and distance
    that attention on a CPU keeps instead of a matrix.

    Args:
        num_heads: the number of query heads.
        head_slice: the heads of this rank under tensor parallelism; default: all.

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
    """Whether `of_distance` costs less than a look-up in a table: a multiplication or two."""
    is_for_pairs: ClassVar[bool] = True
    """Whether `of_distance` is made of what a score function may do with one pair."""

    def __init__(self, num_heads: int, *, head_slice: slice | None = None) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self._numbers = Constant(torch.tensor(list(self.heads.mine), device="cpu"))

    def of_distance(
        self, distance: Int[Tensor, "*#pairs"], head: Int[Tensor, "*#pairs"], *args: Any, **operands: Any
    ) -> Float[Tensor, "*#pairs"]:
        """What is added to the score of a query and a key: a subclass writes this, with plain operations of torch.

        Args:
            distance: query index minus key index; positive where the key came earlier, negative where it comes later.
            head: the number of the head in the model, from 0, also where this rank holds a slice of them. What is
                stored for the heads of this rank alone is read at ``self.heads.here(head)``.
            operands: those of `operands`, by name.
        """
        raise LocantError(f"{type(self).__name__} does not define of_distance", "def of_distance(self, distance, head)")

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Any]:
        """What `of_distance` gets by name, made once per call: constants on the device of `q`, parameters in float32.

        A copy from another device inside the score function would end a CUDA graph. No two tokens are farther apart
        than `largest`; ``None`` where that is unknown, or where there are more such distances than pairs.
        """
        return {}

    def score_bias(
        self, q: Queries, k: Keys, queries: Positions, keys: Positions, heads: slice | None = None
    ) -> ByDistance:
        """`of_distance` of every pair of tokens."""
        some, of_all = self.heads.some(heads), self._numbers.on
        some.require(self, q)
        require_tokens(self, q, k, queries, keys)
        return ByDistance(
            q=q, queries=queries, keys=keys, sources=(*self.parameters(), *self.buffers()), heads=some,
            of_distance=self.of_distance, operands=self.operands,
            numbers=of_all if heads is None else lambda device: of_all(device)[heads],
            along=getattr(self, "along", None) if heads is None else None,  # quicker on one thread, for all heads
            is_arithmetic=self.is_arithmetic, is_for_pairs=self.is_for_pairs,
        )  # fmt: skip

    def distance_table(self, q: Queries, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """What is added at the distances from `first` to `last`, for every head that is here; the bits of `bias`.

        >>> from locant import ALiBi
        >>> ALiBi(2).distance_table(torch.zeros(1, 2, 5, 8), -1, 2)[0]
        tensor([-0.0625, -0.0000, -0.0625, -0.1250])
        """
        where = Positions.arange(0, device=q.device)
        return self.score_bias(q[:, :, :0], q[:, :, :0], where, where).table(first, last)

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

    def extra_repr(self) -> str:
        return str(self.heads)


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
