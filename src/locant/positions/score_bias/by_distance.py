"""`ByDistance`: a number for each head and distance (ALiBi, T5, KERPLE, Sandwich, any `DistanceBias`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.distances import ScoreMod, bias_dtype, distance_mod, distances
from locant.positions.heads import Heads
from locant.positions.positions import Positions
from locant.positions.score_bias.kinds import ScoreBias

SINGLE_THREAD_ELEMENTS = 2**15 - 1
"""The largest number of elements for which torch uses one thread.

On a busy machine, waiting for another thread takes longer than computing the table of a decoding step.
"""


@dataclass(frozen=True, kw_only=True)
class ByDistance(ScoreBias):
    """A number for each head and distance.

    Args:
        of_distance: a function ``(distance, head, **operands)`` that returns the bias: `DistanceBias.of_distance`.
        operands: a function ``(q, largest distance)`` that returns keyword arguments of `of_distance`:
            `DistanceBias.operands`.
        heads: the heads of `q` among the heads of the model.
        numbers: a function that returns the indices of these heads as a tensor on a device.
        table_on_one_thread: a function ``(q, first, last)`` that returns the bias of all heads at the distances from
            `first` to `last`, faster than `of_distance` if one thread computes it. The bits are the same.
        is_arithmetic: whether `of_distance` costs less than a table look-up.
        is_traceable_per_pair: whether `of_distance` uses only operations that a score function supports for one pair.
    """

    of_distance: Callable[..., Tensor]
    operands: Callable[[Tensor, int | None], dict[str, Any]]
    heads: Heads
    numbers: Callable[[torch.device], Int[Tensor, " heads"]]
    table_on_one_thread: Callable[[Tensor, int, int], Tensor] | None = None
    is_arithmetic: bool = False
    is_traceable_per_pair: bool = True

    def dense(self) -> Float[Tensor, "#batch heads query key"]:
        return self.once("matrix", self._compute_matrix)

    def _compute_matrix(self) -> Float[Tensor, "#batch heads query key"]:
        return self._evaluate(distances(self.queries, self.keys)[:, None], largest_distance(self.queries, self.keys))

    def for_vectors(self, q: Tensor, k: Tensor) -> ByDistance:
        return self if self.is_like(q) else replace(self, q=q)

    def table(self, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """Return the bias at the distances from `first` to `last`, bit for bit as in `dense`."""
        return self.once((first, last), lambda: self._compute_table(first, last))

    def _compute_table(self, first: int, last: int) -> Float[Tensor, "heads distances"]:
        device = self.q.device
        on_one_thread = device.type == "cpu" and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        if on_one_thread and self.table_on_one_thread is not None:
            return self.table_on_one_thread(self.q, first, last)
        limit = single_thread_distances(len(self.heads))
        distance = torch.arange(last, first - 1, -1, device=device)  # the order of one query's keys
        largest = max(-first, last) if max(-first, last) < len(distance) else None
        if not on_one_thread or last - first < limit:
            return self._along_distances(distance, largest).flip(-1)
        parts = reversed(distance.split(limit))
        return torch.cat([self._along_distances(part, largest).flip(-1) for part in parts], -1)

    def table_or_none(self) -> tuple[Float[Tensor, "heads distances"], int] | None:
        """Return the table of `score_mod` and the distance of its first entry, or ``None`` if there is no table."""
        bounds = _bounds(self.queries, self.keys)
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.sources)
        if bounds is None or (self.is_arithmetic and not learns):
            return None
        return self.table(*bounds), bounds[0]

    @property
    def has_score_mod(self) -> bool:
        return self.is_traceable_per_pair or _bounds(self.queries, self.keys) is not None

    def score_mod(self) -> ScoreMod | None:
        distance, listed = distance_mod(self.q, self.queries, self.keys), self.table_or_none()
        if listed is not None:
            return look_up(*listed, distance)
        if not self.is_traceable_per_pair:
            return None
        operands, dtype = self.operands(self.q, largest_distance(self.queries, self.keys)), bias_dtype(self.q)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = self.heads.to_global(head)
            return score + self.of_distance(distance(batch, query, key), number, **operands).to(dtype)

        return add

    def _along_distances(
        self, distance: Int[Tensor, " distances"], largest: int | None
    ) -> Float[Tensor, "heads distances"]:
        return self._evaluate(distance[None, None], largest)[:, 0]

    def _evaluate(self, distance: Int[Tensor, "*batch 1 query key"], largest: int | None) -> Tensor:
        number = self.numbers(self.q.device)[:, None, None]
        return self.of_distance(distance, number, **self.operands(self.q, largest)).to(bias_dtype(self.q))


def single_thread_distances(num_heads: int) -> int:
    """Return the number of distances for which torch computes the numbers of all heads on one thread."""
    return max(SINGLE_THREAD_ELEMENTS // num_heads // 64 * 64, 64)


def look_up(
    table: Float[Tensor, "heads distances"], first: int, distance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> ScoreMod:
    """Return a score function that adds the entry of head and distance. `first` is the distance of the first entry."""
    before = torch.full((), first, dtype=torch.int32, device=table.device)  # the kernel would be compiled per number

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, distance(batch, query, key) - before]

    return add


def _bounds(positions: Positions, keys: Positions) -> tuple[int, int] | None:
    """Return the smallest and the largest distance, or ``None`` if they are unknown or too far apart."""
    if positions.start is not None and keys.start is not None:
        offset = positions.start - keys.start
        return offset - max(keys.seq_len, 1) + 1, offset + max(positions.seq_len, 1) - 1
    largest = largest_distance(positions, keys)
    if largest is None:
        return None
    if not torch.compiler.is_compiling():  # in a graph the length may be symbolic
        largest = 1 << max(largest, positions.seq_len, keys.seq_len).bit_length()  # few sizes, since each is compiled
    return -largest, largest


def largest_distance(positions: Positions, keys: Positions) -> int | None:
    """Return a bound of all distances.

    Return ``None`` if the host does not know a bound, or if the bound exceeds the number of pairs.
    """
    bounds = (positions.min_index, positions.max_index, keys.min_index, keys.max_index)
    if None in bounds:
        return None
    q_low, q_high, k_low, k_high = bounds
    largest = max(q_high - k_low, k_high - q_low, 0)  # type: ignore[operator]
    return largest if largest < max(positions.batch, keys.batch) * positions.seq_len * keys.seq_len else None
