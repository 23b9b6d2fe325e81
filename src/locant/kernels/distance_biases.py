"""What tiles of `distance_attention` ask of a bias: that of some queries and keys, and where its gradient goes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locant.kernels.distance_pieces import Pieces, add_bias, add_gradient, write_bias

__all__ = ["HELD_BIAS", "ByPieces", "ByTable", "Tile", "bias_of"]

HELD_BIAS = 2**20
"""Of a bias that is made for a tile, no more than this, for every four threads; half a MiB each is what they hold."""


@dataclass(frozen=True)
class Tile:
    """Some queries, each with a key, and the keys that one of them or more attends to."""

    rows: slice
    keys: slice
    entry: int
    """Of the table that is read backwards, for the last query and the first key."""

    @property
    def diagonals(self) -> int:
        """How many entries of the table it has to do with."""
        return self.rows.stop - self.rows.start + self.keys.stop - self.keys.start - 1

    @property
    def entries(self) -> slice:
        return slice(self.entry, self.entry + self.diagonals)


def bias_of(table: Tensor, pieces: tuple[Tensor | None, ...], first: int, last: int) -> ByTable | ByPieces:
    """The bias that stands in the table itself, or in what becomes of it where there are `Pieces`."""
    given = [x for x in pieces if x is not None]
    return ByPieces(table, Pieces(*given), first, last) if given else ByTable(table, first, last)


class ByTable:
    """A number for each head and distance."""

    def __init__(self, table: Float[Tensor, "#heads distances"], first: int, last: int) -> None:
        hidden = table.new_full(table.shape, float("-inf"))
        hidden[:, first : last + 1] = table[:, first : last + 1]
        self.backwards = hidden.flip(1)

    @functools.cached_property
    def gradient(self) -> Float[Tensor, "#heads distances"]:
        return torch.zeros_like(self.backwards, dtype=torch.float64)

    def of(self, tile: Tile, heads: slice) -> Float[Tensor, "1 some_heads rows keys"]:
        """A view of the table: the last query comes first, and row r has for column c the entry ``entry + r + c``."""
        some = self.backwards[heads] if len(self.backwards) > 1 else self.backwards
        sizes = (1, some.shape[0], tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start)
        return some.as_strided(sizes, (0, some.stride(0), 1, 1), some.storage_offset() + tile.entry)

    def add_to(self, scores: Float[Tensor, "rows keys"], factor: float, tile: Tile, head: int) -> None:
        """``scores * factor`` and the bias of one head, in the place of the scores."""
        torch.add(self.of(tile, slice(head, head + 1))[0, 0], scores, alpha=factor, out=scores)

    def heads_together(self, tile: Tile, heads: int, group: int) -> Iterator[tuple[slice, slice]]:
        """Heads of queries that are taken at once, and those of their keys."""
        yield slice(0, heads), slice(0, heads // group)

    def learn(self, tile: Tile, head: int, skewed: Float[Tensor, " numbers"]) -> None:
        """Add the gradient of one head's scores, whose row r begins at ``r * (diagonals + 1)``.

        Read at a stride that is one shorter, what was a diagonal is a column.
        """
        rows = tile.rows.stop - tile.rows.start
        along = skewed[: rows * tile.diagonals].view(rows, tile.diagonals).sum(0)
        self.gradient[head if len(self.gradient) > 1 else 0, tile.entries] += along

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.gradient.flip(-1).to(self.backwards.dtype),)


class ByPieces:
    """A number for each distance, over one for each query, which goes through straight pieces."""

    def __init__(self, table: Float[Tensor, "1 distances"], pieces: Pieces, first: int, last: int) -> None:
        self.backwards = table[0].flip(0)
        self.low, self.high = table.shape[1] - 1 - last, table.shape[1] - first
        self.pieces = Pieces(pieces.reach.flip(0), *(x.contiguous() for x in pieces[1:]))

    @functools.cached_property
    def gradient(self) -> tuple[Float[Tensor, " distances"], Pieces]:
        of_table, *of_pieces = (torch.zeros_like(x, dtype=torch.float64) for x in (self.backwards, *self.pieces))
        return of_table, Pieces(*of_pieces)

    def of(self, tile: Tile, heads: slice) -> Float[Tensor, "1 heads rows keys"]:
        """Made for these heads; the last query comes first."""
        low, high, columns = self._bounds(tile)
        return write_bias(self.backwards[tile.entries], self._some(self.pieces, tile, heads), low, high, columns)

    def add_to(self, scores: Float[Tensor, "rows keys"], factor: float, tile: Tile, head: int) -> None:
        """``scores * factor`` and the bias of one head, in the place of the scores."""
        some = self._some(self.pieces, tile, slice(head, head + 1))
        add_bias(scores, factor, self.backwards[tile.entries], some, *self._bounds(tile)[:2])

    def heads_together(self, tile: Tile, heads: int, group: int) -> Iterator[tuple[slice, slice]]:
        """Heads of queries that are taken at once, and those of their keys: as many as may be held."""
        held = HELD_BIAS * max(1, torch.get_num_threads() // 4)
        most = held // ((tile.rows.stop - tile.rows.start) * (tile.keys.stop - tile.keys.start))
        step = most // group * group or 1
        for first in range(0, heads, step):
            stop = min(first + step, heads)
            yield slice(first, stop), slice(first // group, (stop - 1) // group + 1)

    def learn(self, tile: Tile, head: int, skewed: Float[Tensor, " numbers"]) -> None:
        """Add the gradient of one head's scores, whose row r begins at ``r * (diagonals + 1)``."""
        of_table, of_pieces = self.gradient
        some, onto = (self._some(each, tile, slice(head, head + 1)) for each in (self.pieces, of_pieces))
        of_table[tile.entries] += add_gradient(skewed, self.backwards[tile.entries], some, *self._bounds(tile), onto)

    def gradients(self) -> tuple[Tensor, ...]:
        table, (reach, _, slopes, offsets) = self.gradient
        return tuple(x.to(self.backwards.dtype) for x in (table.flip(0)[None], reach.flip(0), slopes, offsets))

    def _bounds(self, tile: Tile) -> tuple[int, int, int]:
        return self.low - tile.entry, self.high - tile.entry, tile.keys.stop - tile.keys.start

    @staticmethod
    def _some(pieces: Pieces, tile: Tile, heads: slice) -> Pieces:
        queries = len(pieces.reach)
        reach = pieces.reach[queries - tile.rows.stop : queries - tile.rows.start]
        return Pieces(reach, pieces.kinks, pieces.slopes[heads], pieces.offsets[heads])
