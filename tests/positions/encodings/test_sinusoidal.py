"""Sinusoidal positions, against the formula of the paper."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
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


@pytest.mark.parametrize("first", ["sine", "cosine"])
@pytest.mark.parametrize("d_model", [2, 3, 7, 64])
def test_layouts_order_the_papers_entries_and_an_offset_moves_them(
    d_model: int, first: Literal["sine", "cosine"]
) -> None:
    index, offset, scale = [0, 1, 2, 63, 4095], 3, 0.25
    options: dict[str, Any] = {"first": first, "offset": offset, "scale": scale}
    half, turns = (Sinusoidal(d_model, layout=layout, **options) for layout in ("half", "interleaved"))
    papers = oracles.sinusoidal(
        [each + offset for each in index], d_model + d_model % 2, 1e4 ** ((d_model + d_model % 2) / d_model)
    )
    sines, cosines = papers[:, 0::2] * scale, papers[:, 1::2] * scale
    parts = [sines, cosines] if first == "sine" else [cosines, sines]
    wanted = np.concatenate(parts, axis=1)[:, :d_model]
    assert abs(half.vectors(Positions.of(index))[0].numpy() - wanted).max() <= ANGLE
    wanted = np.stack(parts, axis=-1).reshape(len(index), -1)[:, :d_model]
    assert abs(turns.vectors(Positions.of(index))[0].numpy() - wanted).max() <= ANGLE


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
