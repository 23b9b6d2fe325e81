"""A bias of straight pieces over the distance, as FIRE's is, for tiles of attention: by ``native/pieces.c``.

The pair of query i and key j has entry ``i - j + keys - 1`` of a table, divided by the reach of the query; a function
of straight pieces of that, one for each head, is its bias. In a row of pairs each piece is a run of keys, and
no piece is looked up: over 8192 tokens all of the bias takes a tenth of plain causal attention's time.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locant.kernels import native

__all__ = ["Pieces", "add_bias", "add_gradient", "takes_pieces", "write_bias"]

FUNCTION, GRADIENT = "locant_pieces", "locant_pieces_gradient"
MOST_PIECES, DIAGONALS = 1025, 512
"""As in C."""

pack = struct.Struct("=7qd8q").pack
"""``Task`` in C."""


class Pieces(NamedTuple):
    """What entries of a table of distances go through."""

    reach: Float[Tensor, " query"]
    """By which those of each query are divided; positive."""
    kinks: Float[Tensor, " kinks"]
    """Where the function bends, in their order; they have no gradient."""
    slopes: Float[Tensor, "heads pieces"]
    """Of the piece before, between and after the kinks."""
    offsets: Float[Tensor, "heads pieces"]


def takes_pieces(dtype: torch.dtype, pieces: int) -> bool:
    """Whether a bias of so many pieces in this dtype, on a CPU, can be made here."""
    return dtype == torch.float32 and pieces <= MOST_PIECES and native.has(FUNCTION)


def write_bias(
    table: Float[Tensor, " entries"], pieces: Pieces, low: int, high: int, columns: int
) -> Float[Tensor, "1 heads row column"]:
    """The bias of some queries in reverse order: row r and column c have entry ``r + c`` of a table read backwards.

    Args:
        table: with ``row + column - 1`` entries, which fall.
        pieces: of these queries, in that order, and of some heads; each tensor is one piece of memory.
        low, high: entries before `low` and from `high` on are hidden: minus infinity.
        columns: how many keys there are.
    """
    out = table.new_empty(1, len(pieces.slopes), len(pieces.reach), columns)
    native.function(FUNCTION)(_packed(table, pieces, low, high, out, columns))
    return out


def add_bias(
    scores: Float[Tensor, "row column"], factor: float, table: Float[Tensor, " entries"], pieces: Pieces, low: int,
    high: int,
) -> None:  # fmt: skip
    """``scores * factor`` and, as in `write_bias`, the bias of one head, in the place of the scores."""
    native.function(FUNCTION)(_packed(table, pieces, low, high, scores, scores.shape[1], factor))


def add_gradient(
    skewed: Float[Tensor, " numbers"], table: Float[Tensor, " entries"], pieces: Pieces, low: int, high: int,
    columns: int, gradient: Pieces,
) -> Float[Tensor, " entries"]:  # fmt: skip
    """The gradient of the table's entries; those of the reach, the slopes and the offsets are added to.

    Args:
        skewed: the gradient of one head's scores; row r begins at ``r * (row + column)``.
        table, pieces, low, high, columns: as in `write_bias`, of one head.
        gradient: in float64.
    """
    rows, count = len(pieces.reach), pieces.slopes.shape[1]
    along = table.new_empty(rows + columns - 1)
    items = -(-len(along) // DIAGONALS)
    sums = table.new_empty(items, 2 * count + rows, dtype=torch.float64)
    native.function(GRADIENT)(_packed(table, pieces, low, high, skewed, columns, 0.0, along, sums))
    of_slopes, of_offsets, of_reach = sums.sum(0).split([count, count, rows])
    gradient.slopes.add_(of_slopes)
    gradient.offsets.add_(of_offsets)
    gradient.reach.add_(of_reach)
    return along


def _packed(
    table: Tensor, pieces: Pieces, low: int, high: int, scores: Tensor, columns: int, factor: float = 0.0,
    *gradients: Tensor,
) -> bytes:  # fmt: skip
    reach, kinks, slopes, offsets = pieces
    sizes = (native.threads(), len(reach), columns, low, high, *slopes.shape)
    along, sums = (x.data_ptr() for x in gradients) if gradients else (0, 0)
    places = (x.data_ptr() for x in (table, reach, kinks, slopes, offsets, scores))
    return pack(*sizes, factor, *places, along, sums)
