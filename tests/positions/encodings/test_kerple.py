"""KERPLE against the paper's formulas, in both forms."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from locant import Kerple, Positions
from tests.positions import claims
from tests.positions.claims import zeros
from tests.positions.oracles_of_biases import kerple
from tests.tolerances import LOGARITHM, SHORT_SUM

KINDS = ["log", "power"]
QUERIES, KEYS = [0, 3, 4, 511, 70_000], [0, 1, 4, 9, 300, 69_999]


def set_to(encoding: Kerple, r1: list[float], r2: list[float]) -> Kerple:
    with torch.no_grad():
        encoding.r1.copy_(torch.tensor(r1))
        encoding.r2.copy_(torch.tensor(r2))
    return encoding


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_paper(kind: str) -> None:
    encoding = set_to(Kerple(3, kind), [0.3, 1.5, 0.02], [0.7, 0.05, 0.9])  # type: ignore[arg-type]
    claims.agrees_with_oracle(
        encoding, partial(kerple, [0, 3, 4, 40], [0, 1, 4, 9, 30], kind=kind), {"r1": encoding.r1, "r2": encoding.r2},
        *zeros(3, 4, 5), [0, 3, 4, 40], [0, 1, 4, 9, 30], contextual=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_far_distances_are_as_good_as_near_ones(kind: str) -> None:
    encoding = set_to(Kerple(2, kind), [0.4, 0.01], [1.0, 0.5])  # type: ignore[arg-type]
    bias = encoding.bias(*zeros(2, 5, 6), Positions.of(QUERIES), Positions.of(KEYS)).detach().double()
    parameters = [p.detach().double().numpy() for p in (encoding.r1, encoding.r2)]
    truth = torch.from_numpy(kerple(QUERIES, KEYS, *parameters, kind))
    assert float(((bias[0] - truth) / truth.clamp(max=-1e-9)).abs().max()) < LOGARITHM


def test_parameters_act_within_their_bounds_and_can_come_back() -> None:
    """Three around each bound: below, at, above. The value is held, the gradient is that of the bound."""
    encoding = set_to(Kerple(3, "power"), [0.009, 0.01, 0.011], [1.999, 2.0, 2.001])
    q, k = zeros(3, 1, 2)
    bias = encoding.bias(q, k, Positions.after(3, 1), Positions.arange(2))
    torch.testing.assert_close(bias[0, :, 0, 0], torch.tensor([-0.01 * 3**1.999, -0.01 * 9, -0.011 * 9]), **SHORT_SUM)
    bias.sum().backward()
    assert bool((encoding.r1.grad < 0).all())
    assert bool((encoding.r2.grad < 0).all())


def test_parameters_start_where_the_authors_draw_them() -> None:
    r1, r2 = Kerple(4_000).r1.detach(), Kerple(4_000).r2.detach()
    assert 0.01 <= float(r1.min()) < 0.05
    assert 1.95 < float(r1.max()) <= 2
    assert 0.01 <= float(r2.min()) < 0.05
    assert 0.97 < float(r2.max()) <= 1
    assert 1.9 < float(Kerple(4_000, "power").r2.detach().max()) <= 2
