"""Grids in `Positions`: prefix tokens, images of several sizes, and what is known of both in any part of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locant import Positions, RangeError, Rotary, ShapeError
from locant.positions.grids import Grid, cells
from tests.refusal import refuses

SIZES = [(2, 3), (4, 1), (2, 3)]
PREFIX = 2


def images(**options: object) -> Positions:
    """Three images in a row, two of which have one size, and one of them alone in another row."""
    return Positions.packed_grids([SIZES, SIZES[1:2]], prefix=PREFIX, **options)  # type: ignore[arg-type]


def coordinates(positions: Positions) -> Tensor:
    return cells(positions.grids)[positions.place_or_none]


@pytest.mark.parametrize("centred", [False, True])
def test_packed_grids_are_each_grid_alone_one_after_another(centred: bool) -> None:
    packed = images(centred=centred)
    assert packed.grids == (Grid((2, 3), PREFIX), Grid((4, 1), PREFIX))
    first = 0
    for number, sizes in enumerate(SIZES):
        alone = Positions.grid(*sizes, centred=centred, prefix=PREFIX)
        part = packed.slice(first, first := first + alone.seq_len)
        assert torch.equal(coordinates(part)[:1], coordinates(alone))
        assert torch.equal(part.index[:1] * alone.denominator, alone.index * packed.denominator)
        assert torch.equal(part.order[:1], alone.order)
        assert set(part.document[0].tolist()) == {number}
    assert packed.document[1].tolist() == [0] * 6 + [-1] * 16


@pytest.mark.parametrize("centred", [False, True])
def test_prefix_tokens_are_not_rotated_and_move_no_cell(centred: bool) -> None:
    rotary, x = Rotary(8, sections=(2, 2)), torch.randn(1, 1, 11, 8)
    turned = rotary.rotate_one(x, Positions.grid(2, 3, centred=centred, prefix=5))
    assert torch.equal(turned[:, :, :5], x[:, :, :5])
    assert torch.equal(turned[:, :, 5:], rotary.rotate_one(x[:, :, 5:], Positions.grid(2, 3, centred=centred)))


PARTS: dict[str, Callable[[Positions], Positions]] = {
    "slice": lambda positions: positions.slice(1, 9),
    "select": lambda positions: positions.select(torch.tensor([9, 0, 3])),
    "shard": lambda positions: positions.slice(0, 8).expand(2).shard(1, 2),
    "expand": lambda positions: positions.slice(0, 8).expand(3),
    "cat": lambda positions: Positions.cat([positions.slice(3, 9), positions.slice(9, 9), positions.slice(9, 12)]),
    "to": lambda positions: positions.to("cpu"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_token_keeps_its_cell_in_any_part(part: str) -> None:
    row = Positions.packed_grids(SIZES, prefix=PREFIX)
    taken = PARTS[part](row)
    assert taken.grids == row.grids
    assert torch.equal(coordinates(taken).clamp(min=0), taken.index)
    assert torch.equal((coordinates(taken) < 0).all(-1), taken.order < PREFIX)


def test_grids_of_other_sizes_are_joined() -> None:
    parts = [Positions.grid(2, 2, prefix=1), images().slice(0, 5), Positions.grid(1, 5)]
    joined = Positions.cat(parts)
    assert joined.grids == tuple(grid for part in parts for grid in part.grids)
    expected = torch.cat([coordinates(part).expand(2, -1, -1) for part in parts], dim=1)
    assert torch.equal(coordinates(joined), expected)


def test_joining_with_tokens_outside_of_grids_drops_places() -> None:
    joined = Positions.cat([Positions.grid(2, 2), Positions.of([[[2, 2]]])])
    assert (joined.grids, joined.place_or_none) == ((), None)
    assert Positions.packed_grids([[2, 3], [4, 1]]) == Positions.packed_grids([(2, 3), (4, 1)]), "as processors give it"


def test_sides_without_a_common_multiple_that_fits_are_refused_by_name() -> None:
    with refuses(RangeError, "[23, 25, 27, 32, 37", "Positions.grid(height, width, centred=True)"):
        Positions.packed_grids([[(32, 48)], [(37, 27)], [(41, 25)], [(43, 23)]], centred=True)


@pytest.mark.parametrize("grids", [[], [[]], [(2, 2), [(2, 2)]], [(2, 2), (2,)], [(2, 2), 2], (2, 2), [()]], ids=repr)
@pytest.mark.unchecked
def test_invalid_sizes_of_images_raise_an_error(grids: object) -> None:
    with refuses(ShapeError, "grid"):
        Positions.packed_grids(grids)  # type: ignore[arg-type]
