"""xPos against rotary-embedding-torch, and what that one does not hold: cached decoding equals one shot."""

from __future__ import annotations

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding

from locant import Positions, RangeError, ShapeError, XPos
from tests.refusal import refuses
from tests.tolerances import PEER, SHORT_SUM, assert_close

DIM = 8


def tokens(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, n, DIM).to(dtype), torch.randn(2, 3, n, DIM).to(dtype)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.double() @ k.double().transpose(-1, -2)


@pytest.mark.filterwarnings("ignore:.*autocast")  # the peer, about a device that is not here
@pytest.mark.parametrize(("length", "scale_base"), [(1, 512.0), (7, 20.0), (64, 512.0)])
def test_q_k_and_gradients_are_those_of_rotary_embedding_torch(length: int, scale_base: float) -> None:
    """Its center is the middle of the sequence at hand."""
    peer = RotaryEmbedding(DIM, use_xpos=True, xpos_scale_base=scale_base)
    xpos = XPos(DIM, scale_base=scale_base, center=length // 2, layout="interleaved")
    q, k = (t.requires_grad_() for t in tokens(length))
    expected = peer.rotate_queries_and_keys(q, k)
    ours = xpos.rotate(q, k, Positions.arange(length))
    cotangents = [torch.randn_like(q), torch.randn_like(k)]
    pairs = [*zip(ours, expected, strict=True)]
    gradients = (torch.autograd.grad(rotated, [q, k], cotangents) for rotated in (ours, expected))
    for actual, wanted in [*pairs, *zip(*gradients, strict=True)]:
        torch.testing.assert_close(actual, wanted, **PEER)  # its angles are float32


def test_scores_are_a_rotation_times_a_decay_of_distance() -> None:
    """The paper's formula, pair by pair: ``sum_i zeta_i^((n - m) / 512) Re(q_i conj(k_i) e^(i (n - m) theta_i))``."""
    q, k = tokens(6, torch.float64)
    n = torch.tensor([0.0, 1, 5, 300, 1000, 1007], dtype=torch.float64)
    distance = (n[:, None] - n[None, :])[..., None]
    pair = torch.arange(DIM // 2, dtype=torch.float64)
    decay = ((2 * pair / DIM + 0.4) / 1.4) ** (distance / 512)
    turn = torch.polar(decay, distance * 10_000 ** (-2 * pair / DIM))
    q_pairs, k_pairs = (torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) for x in (q, k))
    expected = torch.einsum("bhnp,bhmp,nmp->bhnm", q_pairs, k_pairs.conj(), turn).real
    rotated = XPos(DIM).rotate(q, k, Positions.of(n.long()))
    assert_close(scores(*rotated), expected)


@pytest.mark.parametrize("center", [-50, 0, 40, 10_000])
def test_the_center_cancels(center: int) -> None:
    q, k = tokens(20, torch.float64)
    plain = scores(*XPos(DIM).rotate(q, k, Positions.arange(20)))
    moved = scores(*XPos(DIM, center=center).rotate(q, k, Positions.arange(20)))
    assert_close(moved, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_within_reach_every_number_is_normal(dtype: torch.dtype) -> None:
    """At the limit on both sides, and one past it, which is refused."""
    xpos = XPos(DIM, center=7)
    reach = xpos.reach(dtype)
    ones = torch.ones(1, 1, 1, DIM, dtype=dtype)
    for place in (7 - reach, 7 + reach - 1, 7 + reach):
        for rotated in xpos.rotate(ones, ones, Positions.of([place])):
            pairs = torch.hypot(*rotated.double().chunk(2, dim=-1))
            assert torch.finfo(dtype).tiny < float(pairs.min())
            assert float(pairs.max()) < torch.finfo(dtype).max
    for place in (8 + reach, 6 - reach):
        with refuses(RangeError, f"position {place}", str(dtype)[6:], "scale_base"):
            xpos.rotate(ones, ones, Positions.of([place]))


@pytest.mark.parametrize(
    ("dtype", "smallest", "largest"), [(torch.float16, -6, 7), (torch.bfloat16, -26, 27), (torch.float32, -26, 27)]
)
def test_within_reach_no_query_of_usual_size_loses_digits(dtype: torch.dtype, smallest: int, largest: int) -> None:
    """Not only ones stay normal numbers: a half has 5 bits for its exponent, and queries are small and large."""
    xpos = XPos(DIM)
    fastest = 0.4 / 1.4  # zeta of pair 0
    for place in (-xpos.reach(dtype), xpos.reach(dtype)):
        for size in (2.0**smallest, 2.0**largest):
            q = torch.full((1, 1, 1, DIM), size, dtype=dtype)
            rotated, _ = xpos.rotate(q, q, Positions.of([place]))
            pair = torch.hypot(rotated[0, 0, 0, 0].double(), rotated[0, 0, 0, DIM // 2].double())
            expected = size * 2**0.5 * fastest ** (place / 512)
            assert float(pair) == pytest.approx(expected, rel=float(torch.finfo(dtype).eps), abs=0)


def test_far_positions_are_exact() -> None:
    """Angles of float64 truth at positions where float32 angles are noise."""
    xpos = XPos(DIM, scale_base=1e9)
    place = 123_456_789
    q = torch.randn(1, 1, 1, DIM)
    rotated, _ = xpos.rotate(q, q, Positions.of([place]))
    double, _ = xpos.rotate(q.double(), q.double(), Positions.of([place]))
    assert_close(rotated, double)
    angle = torch.tensor([place * 10_000 ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)
    scale = ((torch.arange(0, DIM, 2) / DIM + 0.4) / 1.4).double() ** (place / 1e9)
    a, b = q[0, 0, 0].double().chunk(2)
    expected = torch.cat([(a * angle.cos() - b * angle.sin()) * scale, (b * angle.cos() + a * angle.sin()) * scale])
    torch.testing.assert_close(rotated[0, 0, 0].double(), expected, **SHORT_SUM)


def test_inplace_writes_into_q_and_k() -> None:
    q, k = tokens(4)
    expected = XPos(DIM).rotate(q, k, Positions.arange(4))
    rotated = XPos(DIM).rotate(q, k, Positions.arange(4), inplace=True)
    assert rotated[0] is q
    assert rotated[1] is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_inplace_one_tensor_cannot_be_both() -> None:
    """Queries and keys are scaled in opposite ways: what is written last would be both."""
    q, _ = tokens(4)
    before = q.clone()
    for k in (q, q.view(q.shape), q[:, :2]):
        with refuses(ShapeError, "k", "clone"):
            XPos(DIM).rotate(q, k, Positions.arange(4), inplace=True)
        assert torch.equal(q, before)
