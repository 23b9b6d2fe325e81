"""Learned positions: rows of a table, where there are any, and a table that grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import Learned, Positions, RangeError
from tests.refusal import refuses
from tests.tolerances import DRAWN, INTERPOLATED, assert_close


def test_each_token_gets_the_row_of_its_position() -> None:
    learned = Learned(11, 7)
    x, positions = torch.randn(2, 5, 7), Positions.of([[0, 10, 3, 3, 1], [9, 8, 7, 6, 5]])
    embedded = learned.embed(x, positions)
    for b in range(2):
        for s in range(5):
            assert torch.equal(embedded[b, s], x[b, s] + learned.weight[int(positions.index[b, s])])


def test_parameters_are_the_table() -> None:
    learned = Learned(2048, 64)
    assert float(learned.weight.detach().std()) == pytest.approx(0.02, rel=DRAWN, abs=0)
    assert (learned.max_seq_len, learned.d_model) == (2048, 64)


def test_gradients_are_right_where_a_row_is_used_twice() -> None:
    learned = Learned(4, 3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    positions = Positions.of([[0, 1, 1, 3, 0], [2, 2, 2, 1, 0]])
    cotangent = torch.randn(2, 5, 3, dtype=torch.float64)
    learned.embed(x, positions).backward(cotangent)
    assert torch.equal(x.grad, cotangent)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for b in range(2):
        for s in range(5):
            expected[positions.index[b, s]] += cotangent[b, s]
    assert_close(learned.weight.grad, expected)


@pytest.mark.parametrize("offset", [0, 2])
def test_the_end_of_the_table_is_an_error_with_a_name(offset: int) -> None:
    """Inside, at the edge, one past; and the next call still works."""
    learned = Learned(8, 3, offset=offset)
    x = torch.zeros(1, 3, 3)
    learned.embed(x, Positions.of([0, 6, 7]))
    with refuses(RangeError, "position 8", "(0, 1)", "max_seq_len=8", "0..7"):
        learned.embed(x, Positions.of([7, 8, 9]))
    learned.embed(x, Positions.of([7, 7, 7]))
    with refuses(RangeError, "position 8"):
        learned.embed(x, Positions.after(torch.tensor([6]), 3, max_index=100))
    with refuses(RangeError, "position 8"):
        learned.embed(torch.zeros(1, 9, 3), Positions.arange(9))


@pytest.mark.parametrize("offset", [0, 2])
def test_a_negative_position_is_refused(offset: int) -> None:
    """Not read from the end of the table, and not from the rows before position 0."""
    with refuses(RangeError, "position -1", "(0, 2)"):
        Learned(8, 3, offset=offset).embed(torch.zeros(1, 3, 3), Positions.of([0, 1, -1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0, 2])
def test_extending_keeps_every_old_row_byte_for_byte(offset: int, dtype: torch.dtype) -> None:
    learned = Learned(5, 3, offset=offset).to(dtype)
    before, parameter = learned.weight.detach().clone(), learned.weight
    learned.resize(9)
    assert learned.weight.shape == (9 + offset, 3)
    assert torch.equal(learned.weight[: 5 + offset], before)
    assert learned.weight is not parameter
    assert (type(learned.weight), learned.weight.dtype) == (torch.nn.Parameter, dtype)
    assert learned.max_seq_len == 9
    assert "max_seq_len=9" in repr(learned)
    learned.weight.requires_grad_(False)
    learned.resize(10)
    assert not learned.weight.requires_grad, "a frozen table stays frozen"


def test_new_rows_start_like_fresh_ones() -> None:
    learned = Learned(4, 2_000, init_std=0.5)
    learned.resize(104)
    assert float(learned.weight[4:].detach().std()) == pytest.approx(0.5, rel=DRAWN, abs=0)
    assert abs(float(learned.weight[4:].detach().mean())) < DRAWN


@pytest.mark.parametrize(("old", "new"), [(5, 9), (5, 6), (2, 7), (1, 4), (7, 100), (512, 1024)])
def test_interpolation_is_linear_and_keeps_both_ends(old: int, new: int) -> None:
    learned = Learned(old, 3, offset=2)
    before = learned.weight.detach().clone()
    learned.resize(new, method="interpolate")
    assert torch.equal(learned.weight[:3], before[:3]), "the offset rows and the first"
    assert torch.equal(learned.weight[-1], before[-1])
    places = np.linspace(0, old - 1, new)
    for column in range(3):
        truth = np.interp(places, np.arange(old), before[2:, column].double().numpy())
        np.testing.assert_allclose(learned.weight[2:, column].detach().numpy(), truth, **INTERPOLATED)


def test_rows_at_whole_places_are_copies() -> None:
    learned = Learned(5, 3)
    before = learned.weight.detach().clone()
    learned.resize(9, method="interpolate")
    assert torch.equal(learned.weight[::2], before)


@pytest.mark.parametrize("method", ["extend", "interpolate"])
def test_all_new_positions_can_be_used_and_learn(method: str) -> None:
    learned = Learned(4, 3)
    learned.resize(7, method=method)  # type: ignore[arg-type]
    learned.embed(torch.zeros(1, 7, 3), Positions.arange(7)).sum().backward()
    assert torch.equal(learned.weight.grad, torch.ones(7, 3))
    with refuses(RangeError, "position 7", "0..6"):
        learned.embed(torch.zeros(1, 8, 3), Positions.arange(8))


def test_the_same_size_changes_nothing_and_a_smaller_one_is_refused() -> None:
    learned = Learned(4, 3)
    parameter = learned.weight
    learned.resize(4)
    learned.resize(4, method="interpolate")
    assert learned.weight is parameter
    for size in (3, 0, -1):
        with refuses(RangeError, f"got {size} for max_seq_len", "4 or more", "never dropped"):
            learned.resize(size)
    with refuses(RangeError, "'stretch'", "'interpolate'"):
        learned.resize(8, method="stretch")  # type: ignore[arg-type]
    assert learned.weight is parameter
