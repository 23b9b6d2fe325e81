"""What is refused as positions, and how."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from locant import LocantError, Positions, RangeError, ShapeError
from tests.refusal import refuses


def test_the_last_position_is_two_to_the_31_minus_one() -> None:
    assert Positions.after(2**31 - 2, 1).max_index == 2**31 - 2
    assert Positions.of([2**31 - 1, -(2**31) + 1]).max_index == 2**31 - 1


BEYOND = {
    "after": lambda: Positions.after(2**31 - 1, 2),
    "after, per row": lambda: Positions.after(torch.tensor([2**31]), 1),
    "of": lambda: Positions.of([2**31]),
    "of, negative": lambda: Positions.of([-(2**31)]),
    "of, bound given": lambda: Positions.of([1], max_index=2**31),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_position_beyond_the_last_is_refused(name: str) -> None:
    with refuses(RangeError, "2147483648", "2**31 - 1"):
        BEYOND[name]()


@pytest.mark.parametrize("index", [[0.5, 1.0], [1.0], [True, False], [1j]])
def test_an_index_that_is_no_integer_is_refused(index: list[object]) -> None:
    with refuses(ShapeError, "index", "dtype", "expected integers"):
        Positions.of(index)
    with refuses(ShapeError, "cache_len", "dtype"):
        Positions.after(torch.tensor(index), 1)


@pytest.mark.parametrize("n", [-1, 2.0, True, None])
def test_a_length_that_is_no_count_is_refused(n: object) -> None:
    for build in (Positions.arange, lambda n: Positions.after(3, n), lambda n: Positions.after([3], n),
                  lambda n: Positions.packed([2, n]), lambda n: Positions.grid(2, n)):  # fmt: skip
        with refuses(RangeError, repr(n), "0 or more"):
            build(n)


def test_a_negative_cache_is_refused() -> None:
    with refuses(RangeError, "got -1 for cache_len"):
        Positions.after(-1, 2)
    with refuses(RangeError, "-2", "cache_len"):
        Positions.after([3, -2], 2)


@pytest.mark.parametrize("shape", [(), (2, 2, 2, 2)])
def test_an_index_of_the_wrong_rank_is_refused(shape: tuple[int, ...]) -> None:
    with refuses(ShapeError, str(shape), "(batch, seq)"):
        Positions.of(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("name", ["document", "order"])
def test_rows_that_do_not_fit_the_index_are_refused(name: str) -> None:
    with refuses(ShapeError, name, "(1, 2)", "(1, 3)"):
        Positions.of([0, 1, 2], **{name: [0, 0]})


def test_a_cache_length_per_row_has_one_axis() -> None:
    with refuses(ShapeError, "cache_len", "(1, 2)"):
        Positions.after(torch.tensor([[1, 2]]), 2)


def test_documents_longer_than_their_row_are_refused() -> None:
    with refuses(ShapeError, "7 tokens", "row of 6"):
        Positions.packed([3, 4], length=6)


def test_lengths_and_rows_are_not_mixed() -> None:
    with refuses(ShapeError, "[3, [4]]"):
        Positions.packed([3, [4]])


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0, float("-inf"), float("nan")])
def test_an_additive_mask_is_refused(value: float) -> None:
    with refuses(RangeError, "other than 0 and 1", "additive"):
        Positions.from_mask(torch.tensor([[1.0, value]]))


def test_a_four_dimensional_mask_is_refused() -> None:
    with refuses(ShapeError, "(1, 1, 3, 3)"):
        Positions.from_mask(torch.ones(1, 1, 3, 3))


def test_a_grid_without_sizes_and_a_join_of_nothing_are_refused() -> None:
    with refuses(ShapeError, "grid"):
        Positions.grid()
    with refuses(ShapeError, "join"):
        Positions.cat([])
    with refuses(ShapeError, "[1, 2] axes"):
        Positions.cat([Positions.arange(2), Positions.grid(1, 2)])


@pytest.mark.parametrize("limit", [4, 5])
def test_the_check_of_a_table_names_the_first_position_outside(limit: int) -> None:
    """Inside, at the edge, one past; also where only the device knows."""
    for positions in (Positions.of([[0, 1], [5, 6]]), Positions.of([[0, 1], [5, 6]], max_index=100)):
        with refuses(RangeError, f"position {max(5, limit + 1)}", "(1, " + ("0" if limit == 4 else "1"), f"0..{limit}"):
            positions.require_within(0, limit, "a table", "another one")
        positions.require_within(0, 6, "a table", "another one")


@pytest.mark.parametrize("chosen", [Positions.arange(4), Positions.arange(3, batch=3)], ids=repr)
def test_positions_of_another_shape_are_refused(chosen: Positions) -> None:
    with refuses(ShapeError, "x has 2 x 3", f"{chosen.batch} x {chosen.seq_len}"):
        chosen.require_fits(2, 3, torch.device("cpu"), "x")
    with refuses(ShapeError, "on cpu", "meta"):
        Positions.arange(3).require_fits(2, 3, torch.device("meta"), "x")


def test_unsigned_indices_do_not_wrap() -> None:
    assert Positions.of(np.array([1, 2**31 - 1], dtype=np.uint64)).index.tolist() == [[1, 2**31 - 1]]
    for large in (2**63, 2**64 - 5):
        with refuses(RangeError, "index", "2**63"):
            Positions.of(np.array([large], dtype=np.uint64))


@pytest.mark.unchecked
@pytest.mark.parametrize("index", [10, [0, 1], range(3), np.arange(3), 2.5], ids=str)
def test_a_length_or_a_list_is_no_index(index: object) -> None:
    """It was taken, and failed in its repr."""
    with refuses(
        LocantError, "index of Positions", "Positions.arange(10)" if isinstance(index, int) else "Positions.of(index)"
    ):
        Positions(index)  # type: ignore[arg-type]
    shapes = tree_map(lambda x: x.dim() if isinstance(x, torch.Tensor) else x, Positions.packed([2, 1]))
    assert (shapes.index, shapes.document_or_none) == (2, 2), "a tree of anything else is still one"
