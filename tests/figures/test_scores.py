"""The scores in figures are those of attention: its weights, for the same contents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import ALiBi, Cope, Fox, LocantError, PositionEncoding, Positions, Rotary, Sinusoidal, attend
from locant.figures.plot import encoding_to_draw
from locant.figures.scores import random_contents, score_by_distance, score_map
from locant.positions import MixedRotary, RotaryByHead
from locant.positions.registry import encodings
from tests.tolerances import DIFFERENT, LOGITS

HEADS, WIDTH = 3, 12
INDEX = np.arange(7)


def by_group() -> RotaryByHead:
    return RotaryByHead([Rotary(WIDTH, base=base) for base in (10.0, 100.0, 1000.0)])


ENCODINGS: dict[str, Callable[[], PositionEncoding]] = {
    "rotary": lambda: Rotary(WIDTH),
    "a rotation for each head": lambda: MixedRotary(WIDTH, HEADS),
    "a rotation for each group of heads": by_group,
    "sinusoidal": lambda: Sinusoidal(WIDTH),
    "ALiBi": lambda: ALiBi(HEADS),
    "CoPE": lambda: Cope(WIDTH, max_positions=4),
    "FoX": lambda: Fox(HEADS, WIDTH),
}


def log_weights(encoding: PositionEncoding, q: Tensor, k: Tensor, positions: Positions) -> Tensor:
    """Of attention, for all heads and every query and key, which also see later keys."""
    hidden = q[:1, :1].expand(-1, len(INDEX), -1)
    positions = encoding.read(hidden, positions)
    q, k = (encoding.embed(x, positions)[:, None].expand(-1, HEADS, -1, -1) for x in (q, k))
    q, k = encoding.rotate(q, k, positions)
    _, weights = attend(q, k, k, encoding=encoding, positions=positions, causal=False, return_weights=True)
    return weights.log()


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_scores_of_a_head_are_those_of_attention(name: str) -> None:
    encoding = ENCODINGS[name]()
    for parameter in encoding.parameters():
        parameter.normal_()
    q, k = (x.expand(-1, len(INDEX), -1) for x in random_contents(WIDTH, 2, 0.5, seed=3))
    positions = Positions.of(torch.from_numpy(INDEX)[None])
    weights = log_weights(encoding, q, k, positions).mean(0)
    maps = []
    for head in range(HEADS):
        ours = score_map(encoding, INDEX, alike=0.5, head=head, draws=2, seed=3)
        expected = weights[head].double().numpy()
        np.testing.assert_allclose(ours - ours[:, :1], expected - expected[:, :1], rtol=0, atol=LOGITS)
        by_distance = score_by_distance(encoding, INDEX, alike=0.5, head=head, draws=2, seed=3)
        line = expected[-1, ::-1]
        np.testing.assert_allclose(by_distance.mean - by_distance.mean[:1], line - line[:1], rtol=0, atol=LOGITS)
        maps.append(ours)
    assert (np.abs(maps[0] - maps[1]).max() > DIFFERENT) == (name not in ("rotary", "sinusoidal", "CoPE"))


NOT_BY_DISTANCE = {
    "path": "every token between", "convolutional": "whole documents", "learned_grid": "without a grid",
    **dict.fromkeys(("continuous_grid_bias", "decomposed", "grid_bias"), "has offsets of up to"),
}  # fmt: skip
"""Encodings that have no map of distant positions in one row, with words of the reason."""


@pytest.mark.parametrize("name", encodings())
def test_every_encoding_has_a_map_at_default_sizes_or_a_reason(name: str) -> None:
    """At these sizes the hidden states are wider than a head."""
    encoding = encoding_to_draw(name)
    index = np.arange(0, 64, 16)
    if name in NOT_BY_DISTANCE:
        with pytest.raises(LocantError, match=NOT_BY_DISTANCE[name]):
            score_map(encoding, index)
        return
    assert np.isfinite(score_map(encoding, index, draws=2)).all()
    assert np.isfinite(score_by_distance(encoding, index, draws=2).mean).all()
