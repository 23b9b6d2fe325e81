"""`DistanceBias`: the base of every encoding whose bias depends on the head and the distance alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import LocantError
from locant.positions.base import Bias, Keys, PositionEncoding, Queries, ScoreMod, bias_dtype, bias_matrix, owner_of
from locant.positions.constant import Constant
from locant.positions.heads import Heads
from locant.positions.pairs import distance_mod, distances, require_tokens
from locant.positions.positions import Positions

__all__ = ["DistanceBias", "follows_distance", "largest_distance", "look_up"]

FOR_ONE_THREAD = 2**15 - 1
"""Torch shares an operation on more elements out. Beside busy processes, waiting for another thread takes longer than
the table of a decoding step does."""


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

        Only where it matters: a copy from another device inside the score function would end a CUDA graph.

        Args:
            q: the queries, or some of them.
            largest: no two tokens are farther apart than this; ``None`` where that is unknown, or where there are
                more such distances than pairs.
        """
        return {}

    def bias(self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None) -> Bias:
        """`of_distance` of every pair of tokens, float32 at least."""
        self.heads.require(self, q)
        keys = require_tokens(self, q, k, positions, k_positions)
        return self._added(q, distances(positions, keys)[:, None], largest_distance(positions, keys))

    def score_mod(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None
    ) -> ScoreMod | None:
        """One look-up in a table of heads and distances, where the distances that there are can be listed.

        Else, and where arithmetic costs less than a look-up, `of_distance` of one pair at a time.
        """
        self.heads.require(self, q)
        keys = require_tokens(self, q, k, positions, k_positions)
        distance, listed = distance_mod(q, positions, keys), self.listed(q, positions, keys)
        if listed is not None:
            return look_up(*listed, distance)
        if not self.is_for_pairs:
            return None
        operands, dtype = self.operands(q, largest_distance(positions, keys)), bias_dtype(q)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = self.heads.number(head)
            return score + self.of_distance(distance(batch, query, key), number, **operands).to(dtype)

        return add

    def listed(
        self, q: Queries, positions: Positions, keys: Positions
    ) -> tuple[Float[Tensor, "heads distances"], int] | None:
        """The table in which `score_mod` looks up, and the distance of its first entry; ``None`` where it does not."""
        bounds = _listed(positions, keys)
        if bounds is None or (self.is_arithmetic and not self._is_learning()):
            return None
        return self.distance_table(q, *bounds), bounds[0]

    def has_score_mod(self, positions: Positions, keys: Positions) -> bool:
        """Not where it would take a matrix: what is not for pairs is looked up where distances can be listed."""
        return self.is_for_pairs or _listed(positions, keys) is not None

    def _is_learning(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

    def distance_table(self, q: Queries, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """What is added at the distances from `first` to `last`, for every head that is here; the bits of `bias`.

        Args:
            q: queries, for their device, dtype and number of heads.
            first, last: distances as in `of_distance`.

        >>> from locant import ALiBi
        >>> ALiBi(2).distance_table(torch.zeros(1, 2, 5, 8), -1, 2)[0]
        tensor([-0.0625, -0.0000, -0.0625, -0.1250])
        """
        self.heads.require(self, q)
        distance = torch.arange(last, first - 1, -1, device=q.device)  # as along the keys of one query: the same bits
        largest = max(-first, last) if max(-first, last) < len(distance) else None
        if q.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._added(q, distance[None, None], largest)[:, 0].flip(-1)
        parts = distance.split(max(FOR_ONE_THREAD // len(self.heads) // 64 * 64, 64))
        return torch.cat([self._along(q, part, largest).flip(-1) for part in reversed(parts)], -1)

    def _along(
        self, q: Tensor, distance: Int[Tensor, " distances"], largest: int | None
    ) -> Float[Tensor, "heads distances"]:
        """Some distances for every head, on a CPU and without gradients."""
        return self._added(q, distance[None, None], largest)[:, 0]

    def matrix(self, query_len: int, key_len: int | None = None) -> Float[Tensor, "heads query key"]:
        return bias_matrix(self, len(self.heads), query_len, key_len)

    def _added(self, q: Tensor, distance: Int[Tensor, "*batch 1 query key"], largest: int | None) -> Tensor:
        head = self._numbers.on(q.device)[:, None, None]
        return self.of_distance(distance, head, **self.operands(q, largest)).to(bias_dtype(q))

    def extra_repr(self) -> str:
        return str(self.heads)


def look_up(
    table: Float[Tensor, "heads distances"], first: int, distance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> ScoreMod:
    """A score function that adds the entry of head and distance; `first` is the distance of the first entry."""
    before = torch.full((), first, dtype=torch.int32, device=table.device)  # a number would be compiled into the kernel

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, distance(batch, query, key) - before]

    return add


def _listed(positions: Positions, keys: Positions) -> tuple[int, int] | None:
    """The first and the last of the distances that occur, or ``None`` where they are unknown, or too many."""
    if positions.start is not None and keys.start is not None:
        offset = positions.start - keys.start
        return offset - max(keys.seq_len, 1) + 1, offset + max(positions.seq_len, 1) - 1
    largest = largest_distance(positions, keys)
    if largest is None:
        return None
    if not torch.compiler.is_compiling():  # else it may have no value
        largest = 1 << max(largest, positions.seq_len, keys.seq_len).bit_length()  # of few sizes: each is compiled
    return -largest, largest


def follows_distance(encoding: PositionEncoding) -> bool:
    """Whether its bias is that of `DistanceBias`. Not inherited when a subclass overrides `bias`."""
    return owner_of(encoding, "bias") is DistanceBias


def largest_distance(positions: Positions, keys: Positions) -> int | None:
    """No pair is farther apart; ``None`` where the host does not know, or where there are more distances than pairs."""
    bounds = (positions.min_index, positions.max_index, keys.min_index, keys.max_index)
    if None in bounds:
        return None
    q_low, q_high, k_low, k_high = bounds
    largest = max(q_high - k_low, k_high - q_low, 0)  # type: ignore[operator]
    return largest if largest < max(positions.batch, keys.batch) * positions.seq_len * keys.seq_len else None
