"""A learned table that grows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from locant import Learned, Positions, RangeError
from tests.refusal import refuses
from tests.tolerances import DRAWN, INTERPOLATED, SHORT_SUM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0, 2])
def test_extending_keeps_every_old_row_byte_for_byte(offset: int, dtype: torch.dtype) -> None:
    learned = Learned(5, 3, offset=offset).to(dtype)
    before, parameter = learned.weight.detach().clone(), learned.weight
    learned.resize(9)
    assert learned.weight.shape == (9 + offset, 3)
    assert torch.equal(learned.weight[: 5 + offset], before)
    assert learned.weight is not parameter
    assert isinstance(learned.weight, torch.nn.Parameter)
    assert learned.weight.dtype == dtype
    assert learned.max_seq_len == 9
    assert "max_seq_len=9" in repr(learned)


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


def test_interpolation_is_what_torch_calls_linear_with_aligned_corners() -> None:
    learned = Learned(16, 4)
    expected = F.interpolate(learned.weight.detach().T[None], size=50, mode="linear", align_corners=True)[0].T
    learned.resize(50, method="interpolate")
    torch.testing.assert_close(learned.weight.detach(), expected, **SHORT_SUM)


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
    assert learned.weight.grad is not None
    assert torch.equal(learned.weight.grad, torch.ones(7, 3))
    with refuses(RangeError, "position 7", "0..6"):
        learned.embed(torch.zeros(1, 8, 3), Positions.arange(8))


def test_a_frozen_table_stays_frozen() -> None:
    learned = Learned(4, 3)
    learned.weight.requires_grad_(False)
    learned.resize(6)
    assert not learned.weight.requires_grad


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


def test_a_resized_table_saves_and_loads() -> None:
    learned, other = Learned(4, 3), Learned(6, 3)
    learned.resize(6)
    other.load_state_dict(copy.deepcopy(learned.state_dict()))
    assert torch.equal(other.weight, learned.weight)
