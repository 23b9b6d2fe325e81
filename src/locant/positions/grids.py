"""Images as grids of tokens: the sizes of the grids, which the host knows, and the place of each token in its grid.

A token's *place* is its offset in its grid: prefix tokens first, then the cells row by row. With several grids,
places continue from one grid to the next, so that ``torch.cat(tables)[place]`` looks up the entry of each token.
This module never waits for a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import MAX_INT32, entries, short_repr, whole
from locant.errors import RangeError, ShapeError
from locant.positions.checks import token_count
from locant.positions.documents import pack

Device = torch.device | str | None
Slots = Int[np.ndarray, "rows width"]


class Grid(NamedTuple):
    """The sizes of a grid, and the number of prefix tokens (class token, registers) before its cells.

    >>> Grid((2, 3), prefix=1).num_tokens
    7
    """

    sizes: tuple[int, ...]
    prefix: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefix + math.prod(self.sizes)

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes)) + (f" after {self.prefix}" if self.prefix else "")


def to_grid(sizes: Sequence[Any], prefix: Any) -> Grid:
    """Check the sizes of a grid, and return the grid."""
    if not sizes:
        raise ShapeError("got a grid without sizes, expected one per axis", "Positions.grid(height, width)")
    counts = tuple(token_count("a grid's size", size) for size in sizes)
    return Grid(counts, whole("prefix", prefix, 0, remedy="use prefix=1 for a class token"))


def to_rows_of_grids(grids: Any, prefix: Any) -> list[list[Grid]]:
    """Return the grids of every row, from a list per row or from the list of a single row.

    A tuple or a list of integers holds the sizes of a grid, as processors of `transformers` return them.
    """
    remedy = "[(16, 24), (8, 8)], or [[(16, 24), (8, 8)], [(20, 20)]]"
    rows = entries("grids", grids, remedy)
    nested = [row for row in rows if isinstance(row, list) and not (row and all(isinstance(each, int) for each in row))]
    rows = rows if nested else [rows]
    if not any(rows) or (nested and len(nested) < len(rows)):
        raise ShapeError(
            f"got {short_repr(grids)} for grids, expected (height, width) of each, or a list per row", remedy
        )
    checked = [[to_grid(entries("one of grids", sizes, remedy), prefix) for sizes in row] for row in rows]
    if len(numbers := {len(grid.sizes) for grid in itertools.chain(*checked)}) > 1:
        raise ShapeError(f"got grids of {sorted(numbers)} axes, expected the same number", remedy)
    return checked


def cells(grids: Sequence[Grid], device: Device = None) -> Int[Tensor, "places axes"]:
    """Return the coordinates of the cell at each place of these grids. Prefix tokens have -1 on all axes.

    >>> cells([Grid((1, 2), prefix=1)]).tolist()
    [[-1, -1], [0, 0], [0, 1]]
    """
    return torch.cat([_coordinates(grid, device, prefix_value=-1) for grid in grids])


def _indices(grids: Sequence[Grid], centred: bool, device: Device) -> tuple[Int[Tensor, "places axes"], int]:
    """Return the index at each place, and the denominator. The index of a prefix token is 0 on all axes."""
    if not centred:
        return torch.cat([_coordinates(grid, device) for grid in grids]), 1
    sides = {max(size, 1) for grid in grids for size in grid.sizes}
    if (over := math.lcm(*sides)) > MAX_INT32:
        got = f"got centred grids of sides {short_repr(sorted(sides))}, whose least common multiple is past {MAX_INT32}"
        raise RangeError(got, "use Positions.grid(height, width, centred=True) for one image at a time")
    return torch.cat([_coordinates(grid, device, over) for grid in grids]), over


def _coordinates(
    grid: Grid, device: Device, over: int | None = None, prefix_value: int = 0
) -> Int[Tensor, "places axes"]:
    """Return the coordinates of the cell at each place. With `over`, return its centre in -1 .. 1, times `over`."""
    axes = [torch.arange(size, device=device) for size in grid.sizes]
    if over is not None:
        axes = [(2 * axis + 1 - len(axis)) * (over // max(len(axis), 1)) for axis in axes]
    inside = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(axes))
    return torch.cat([inside.new_full((grid.prefix, len(axes)), prefix_value), inside]) if grid.prefix else inside


def pack_grids(rows: Sequence[Sequence[Grid]], length: Any) -> tuple[tuple[Grid, ...], Slots, Slots, Slots]:
    """Return the distinct grids in these rows, and the place, order and document of every slot.

    Each grid is a document. Padding is at place 0.
    """
    grids = tuple(dict.fromkeys(itertools.chain(*rows)))
    begins = dict(zip(grids, itertools.accumulate((grid.num_tokens for grid in grids), initial=0), strict=False))
    order, document = pack([[grid.num_tokens for grid in row] for row in rows], length)
    place = order.copy()
    for number, row in enumerate(rows):
        place[number] += np.array([*(begins[grid] for grid in row), 0])[document[number]]  # index -1: padding
    return grids, place, order, document


def fields_from_grids(
    grids: tuple[Grid, ...],
    centred: bool,
    place: Int[Tensor, "rows width"],
    order: Int[Tensor, "rows width"],
    document: Int[Tensor, "rows width"] | None,
) -> dict[str, Any]:
    """Return the fields of `Positions` for tokens at these places, in their order."""
    index, denominator = _indices(grids, centred, place.device)
    index = index[place]
    largest = max([0, *(size - 1 for grid in grids for size in grid.sizes)])
    low, high = (-denominator, denominator) if centred else (0, largest)
    is_line = index.shape[2] == 1 and not any(grid.prefix for grid in grids)
    return {
        "index": index.squeeze(2) if index.shape[2] == 1 else index,
        "document_or_none": document,
        "order_or_none": order,
        "min_index": low,
        "max_index": high,
        "denominator": denominator,
        "place_or_none": None if is_line else place,
        "grids": () if is_line else grids,
    }


def join_places(
    grids: Sequence[tuple[Grid, ...]], places: Sequence[Int[Tensor, "batch _"] | None]
) -> tuple[tuple[Grid, ...], Int[Tensor, "batch seq"] | None]:
    """Join the grids and the places of parts along the sequence. Return no grids if a part has no grids.

    If all parts have the same grids, tokens keep their places. Such parts belong to the same images, or to images of
    the same sizes.
    """
    present = [place for place in places if place is not None]
    if not present or len(present) < len(places):
        return (), None
    if len({*grids}) == 1:
        return grids[0], torch.cat(present, dim=1)
    before = itertools.accumulate((sum(grid.num_tokens for grid in each) for each in grids), initial=0)
    present = [place + first for place, first in zip(present, before, strict=False)]
    return tuple(itertools.chain(*grids)), torch.cat(present, dim=1)
