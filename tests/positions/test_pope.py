"""Polar positions: scores and gradients are the paper's formula, in one pass, behind a cache and packed."""

from __future__ import annotations

import numpy as np
import torch

from locant import LocantError, Positions, RangeError, ShapeError
from locant.positions import PoPE
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, WIDTH = 4, 2, 6


def encoding() -> PoPE:
    torch.manual_seed(0)
    made = PoPE(WIDTH, KV_HEADS)
    with torch.no_grad():
        made.shift.uniform_(-7.5, 0.5)  # some beyond what counts
    return made


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def test_scores_are_the_formula_at_the_scale_of_head_dim() -> None:
    pope = encoding().double()
    q, k = (torch.randn(2, heads, 9, WIDTH, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    where = Positions.of([[0, 1, 2, 5, 9, 30, 31, 400, 5000]])
    polar_q, polar_k = pope.rotate(q, k, where)
    ours = polar_q @ polar_k.repeat_interleave(2, dim=1).mT / np.sqrt(2 * WIDTH)  # as attention scales by itself
    frequencies = 10_000.0 ** (-np.arange(WIDTH) / WIDTH)
    shift = np.clip(pope.shift.detach().numpy(), -2 * np.pi, 0)
    apart = where.index[0].numpy()[None, :] - where.index[0].numpy()[:, None]
    for head in range(HEADS):
        lengths = softplus(q[:, head].numpy())[:, :, None] * softplus(k[:, head // 2].numpy())[:, None]
        angle = apart[..., None] * frequencies + shift[head // 2]
        expected = (lengths * np.cos(angle)).sum(-1) / np.sqrt(WIDTH)
        assert_close(ours[:, head].detach(), torch.from_numpy(expected), torch.float32)


def test_in_place_rotation_and_wrong_heads_raise_an_error() -> None:
    q, where = torch.zeros(1, HEADS, 3, WIDTH), Positions.arange(3)
    with refuses(LocantError, "inplace", "twice the width"):
        encoding().rotate(q, q[:, :2], where, inplace=True)
    with refuses(ShapeError, "k", "2 heads"):
        encoding().rotate(q, q, where)
    with refuses(RangeError, "num_heads"):
        PoPE(8, 0)
