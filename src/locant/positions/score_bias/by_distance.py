"""`ByDistance`: a number for each head and distance (ALiBi, T5, KERPLE, Sandwich, any `DistanceBias`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.heads import Heads
from locant.positions.pairs import ScoreMod, bias_dtype, distance_mod, distances
from locant.positions.positions import Positions
from locant.positions.score_bias.kinds import ScoreBias

FOR_ONE_THREAD = 2**15 - 1
"""Torch shares an operation on more elements out. Beside busy processes, waiting for another thread takes longer than
the table of a decoding step does."""


@dataclass(frozen=True, kw_only=True)
class ByDistance(ScoreBias):
    """A number for each head and distance.

    Args:
        of_distance: ``(distance, head, **operands)`` to the numbers: see `DistanceBias.of_distance`.
        operands: ``(q, largest distance)`` to what `of_distance` gets by name: see `DistanceBias.operands`.
        heads: those of `q` among those of the model.
        numbers: which they are, as a tensor on a device.
        along: ``(q, distances)`` to the numbers of all heads, quicker than `of_distance` on one thread.
        is_arithmetic: whether `of_distance` costs less than a look-up in a table.
        is_for_pairs: whether `of_distance` is made of what a score function may do with one pair.
    """

    of_distance: Callable[..., Tensor]
    operands: Callable[[Tensor, int | None], dict[str, Any]]
    heads: Heads
    numbers: Callable[[torch.device], Int[Tensor, " heads"]]
    along: Callable[[Tensor, Tensor], Tensor] | None = None
    is_arithmetic: bool = False
    is_for_pairs: bool = True

    def dense(self) -> Float[Tensor, "#batch heads query key"]:
        return self._of(distances(self.queries, self.keys)[:, None], largest_distance(self.queries, self.keys))

    def table(self, first: int, last: int) -> Float[Tensor, "heads distances"]:
        """What is added at the distances from `first` to `last`: the bits of `dense`."""
        distance = torch.arange(last, first - 1, -1, device=self.q.device)  # as along the keys of one query
        largest = max(-first, last) if max(-first, last) < len(distance) else None
        if self.q.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._along(distance, largest).flip(-1)
        along = self._along if self.along is None else lambda part, _: self.along(self.q, part)  # type: ignore[misc]
        parts = distance.split(max(FOR_ONE_THREAD // len(self.heads) // 64 * 64, 64))
        return torch.cat([along(part, largest).flip(-1) for part in reversed(parts)], -1)

    def listed(self) -> tuple[Float[Tensor, "heads distances"], int] | None:
        """The table in which `score_mod` looks up, and the distance of its first entry; ``None`` where it does not."""
        bounds = _bounds(self.queries, self.keys)
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.sources)
        if bounds is None or (self.is_arithmetic and not learns):
            return None
        return self.table(*bounds), bounds[0]

    @property
    def has_score_mod(self) -> bool:
        return self.is_for_pairs or _bounds(self.queries, self.keys) is not None

    def score_mod(self) -> ScoreMod | None:
        distance, listed = distance_mod(self.q, self.queries, self.keys), self.listed()
        if listed is not None:
            return look_up(*listed, distance)
        if not self.is_for_pairs:
            return None
        operands, dtype = self.operands(self.q, largest_distance(self.queries, self.keys)), bias_dtype(self.q)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = self.heads.number(head)
            return score + self.of_distance(distance(batch, query, key), number, **operands).to(dtype)

        return add

    def _along(self, distance: Int[Tensor, " distances"], largest: int | None) -> Float[Tensor, "heads distances"]:
        return self._of(distance[None, None], largest)[:, 0]

    def _of(self, distance: Int[Tensor, "*batch 1 query key"], largest: int | None) -> Tensor:
        number = self.numbers(self.q.device)[:, None, None]
        return self.of_distance(distance, number, **self.operands(self.q, largest)).to(bias_dtype(self.q))


def look_up(
    table: Float[Tensor, "heads distances"], first: int, distance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> ScoreMod:
    """A score function that adds the entry of head and distance; `first` is the distance of the first entry."""
    before = torch.full((), first, dtype=torch.int32, device=table.device)  # a number would be compiled into the kernel

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + table[head, distance(batch, query, key) - before]

    return add


def _bounds(positions: Positions, keys: Positions) -> tuple[int, int] | None:
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


def largest_distance(positions: Positions, keys: Positions) -> int | None:
    """No pair is farther apart; ``None`` where the host does not know, or where there are more distances than pairs."""
    bounds = (positions.min_index, positions.max_index, keys.min_index, keys.max_index)
    if None in bounds:
        return None
    q_low, q_high, k_low, k_high = bounds
    largest = max(q_high - k_low, k_high - q_low, 0)  # type: ignore[operator]
    return largest if largest < max(positions.batch, keys.batch) * positions.seq_len * keys.seq_len else None
