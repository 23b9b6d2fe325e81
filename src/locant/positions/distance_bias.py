"""`DistanceBias`: the base of every encoding whose bias depends on the head and the distance alone."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import LocantError
from locant.positions.base import Keys, PositionEncoding, Queries, bias_matrix, require_tokens
from locant.positions.constant import Constant
from locant.positions.heads import Heads
from locant.positions.positions import Positions
from locant.positions.score_bias import ByDistance


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
