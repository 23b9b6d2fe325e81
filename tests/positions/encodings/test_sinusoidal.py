"""Sinusoidal positions, against the formula of the paper."""

from __future__ import annotations

import pytest
import torch

from locant import Positions, Sinusoidal
from tests import oracles
from tests.tolerances import ANGLE, assert_close


@pytest.mark.parametrize("base", [1e4, 37.0])
@pytest.mark.parametrize("d_model", [1, 2, 3, 7, 64])
def test_every_entry_is_the_papers(d_model: int, base: float) -> None:
    index = [0, 1, 2, 3, 63, 64, 512, 4095]
    ours = Sinusoidal(d_model, base=base).vectors(Positions.of(index))
    assert (ours.dtype, ours.shape) == (torch.float32, (1, 8, d_model))
    expected = torch.from_numpy(oracles.sinusoidal(index, d_model, base))
    assert float((ours[0].double() - expected).abs().max()) <= ANGLE


def test_far_positions_are_exact() -> None:
    index = oracles.edge_positions()
    sin, cos = reversed(oracles.true_angles(index, 6, 1e4))
    vectors = Sinusoidal(6).vectors(Positions.of(index))[0].double().numpy()
    assert abs(vectors[:, 0::2] - sin).max() <= ANGLE
    assert abs(vectors[:, 1::2] - cos).max() <= ANGLE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tokens_and_positions_are_added_wide_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 7).to(dtype)
    encoding, positions = Sinusoidal(7), Positions.after([3, 1000], 5)
    wide = torch.promote_types(dtype, torch.float32)
    embedded = encoding.embed(x, positions)
    assert embedded.dtype == dtype
    assert torch.equal(embedded, (x.to(wide) + encoding.vectors(positions, wide)).to(dtype))
    expected = torch.stack([torch.from_numpy(oracles.sinusoidal(row, 7)) for row in positions.index.tolist()])
    assert_close(embedded, x.double() + expected)
