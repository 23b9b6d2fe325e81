"""What is refused as positions, and how; odd values of single arguments are in `test_arguments.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from locant import LocantError, Positions, RangeError, ShapeError
from tests.refusal import refuses


def test_the_last_position_is_two_to_the_31_minus_one() -> None:
    assert Positions.after(2**31 - 2, 1).max_index == 2**31 - 2
    assert Positions.of([2**31 - 1, -(2**31) + 1]).max_index == 2**31 - 1


Call = Callable[[], object]

BEYOND: list[Call] = [
    lambda: Positions.after(2**31 - 1, 2),
    lambda: Positions.after(torch.tensor([2**31]), 1),
    lambda: Positions.of([2**31]),
    lambda: Positions.of([-(2**31)]),
    lambda: Positions.of([1], max_index=2**31),
]
REFUSED: list[tuple[Call, type[LocantError], tuple[str, ...]]] = [
    *((call, RangeError, ("2147483648", "2**31 - 1")) for call in BEYOND),
    (lambda: Positions.after([3, -2], 2), RangeError, ("-2", "cache_len")),
    (lambda: Positions.after(torch.tensor([[1, 2]]), 2), ShapeError, ("cache_len", "(1, 2)")),
    (lambda: Positions.of(torch.zeros((), dtype=torch.long)), ShapeError, ("()", "(batch, seq)")),
    (lambda: Positions.of(torch.zeros((2, 2, 2, 2), dtype=torch.long)), ShapeError, ("(2, 2, 2, 2)", "(batch, seq)")),
    (lambda: Positions.of([0, 1, 2], document=[0, 0]), ShapeError, ("document", "(1, 2)", "(1, 3)")),
    (lambda: Positions.of([0, 1, 2], order=[0, 0]), ShapeError, ("order", "(1, 2)", "(1, 3)")),
    (lambda: Positions.packed([3, 4], length=6), ShapeError, ("7 tokens", "row of 6")),
    (lambda: Positions.packed([3, [4]]), ShapeError, ("[3, [4]]",)),  # type: ignore[list-item]
    (lambda: Positions.packed([2, -1]), RangeError, ("-1", "0 or more")),
    (lambda: Positions.grid(2, True), RangeError, ("True", "0 or more")),
    (lambda: Positions.from_mask(torch.ones(1, 1, 3, 3)), ShapeError, ("(1, 1, 3, 3)",)),
    (Positions.grid, ShapeError, ("grid",)),
    (lambda: Positions.cat([]), ShapeError, ("join",)),
    (lambda: Positions.cat([Positions.arange(2), Positions.grid(1, 2)]), ShapeError, ("[1, 2] axes",)),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_invalid_positions_raise_an_error(call: Call, kind: type[LocantError], words: tuple[str, ...]) -> None:
    with refuses(kind, *words):
        call()


@pytest.mark.parametrize("index", [[0.5, 1.0], [1.0], [True, False], [1j]])
def test_an_index_that_is_not_an_integer_raises_an_error(index: list[object]) -> None:
    with refuses(ShapeError, "index", "dtype", "expected integers"):
        Positions.of(index)
    with refuses(ShapeError, "cache_len", "dtype"):
        Positions.after(torch.tensor(index), 1)


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0, float("-inf"), float("nan")])
def test_an_additive_mask_is_refused(value: float) -> None:
    with refuses(RangeError, "other than 0 and 1", "additive"):
        Positions.from_mask(torch.tensor([[1.0, value]]))


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
@pytest.mark.parametrize(
    "index", [10, [0, 1], (0, 1), range(3), np.arange(3), 2.5, "a", torch.tensor(3), torch.arange(3)], ids=str
)
def test_an_invalid_index_raises_an_error_at_once(index: Any) -> None:
    """It was taken, and failed in its repr."""
    with refuses(
        ShapeError if isinstance(index, torch.Tensor) else LocantError,
        "index",
        "Positions.arange(10)" if isinstance(index, int) else "Positions.of(index)",
    ):
        Positions(index)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_remedy_for_positions_of_another_size_fits(rows: int) -> None:
    """The call that the error names is run, and its result has as many rows and tokens as the tokens have."""
    for given in (Positions.arange(8, batch=2), Positions.arange(7, batch=rows)):
        with pytest.raises(ShapeError) as caught:
            given.require_fits(rows, 8, torch.device("cpu"), "q")
        call = caught.value.remedy.removeprefix("pass ").split(", or ")[0]
        positions = eval(call, {"Positions": Positions})  # noqa: S307
        positions.require_fits(rows, 8, torch.device("cpu"), "q")
        assert (positions.batch, positions.seq_len) == (rows, 8)
    with refuses(ShapeError, "Positions.arange(8, batch=3)", "Positions.from_mask"):
        Positions.arange(8, batch=2).expand(3)
    with refuses(ShapeError, "device='meta'"):
        Positions.arange(8, batch=2).require_fits(3, 8, torch.device("meta"), "q")
