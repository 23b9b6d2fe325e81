"""No backend but `sdpa` and `eager` holds a matrix of scores, forward or backward, and training needs none either."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from locant import (
    ALiBi,
    Cope,
    Deberta,
    Fire,
    Kerple,
    PositionEncoding,
    Positions,
    Sandwich,
    Shaw,
    T5Bias,
    TransformerXL,
    attend,
)
from locant.attention.backends import tiled
from tests.attention.allocations import Allocations, allocations_of

HEADS, HEAD_DIM, LENGTH = 4, 16, 1024
MATRIX = HEADS * LENGTH**2 * 4
"""Of float32 scores of all heads."""

BY_DISTANCE: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(HEADS),
    "alibi, learned": lambda: ALiBi(HEADS, learned=True),
    "t5": lambda: T5Bias(HEADS),
    "kerple": lambda: Kerple(HEADS),
    "sandwich": lambda: Sandwich(HEADS),
}


def training_step(
    encoding: PositionEncoding | None, positions: Positions, backend: str, window: int | None = None, **options: Any
) -> Allocations:
    q, k, v = (torch.randn(1, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))

    def run() -> None:
        y = attend(q, k, v, encoding=encoding, positions=positions, backend=backend, window=window, **options)
        y.backward(torch.ones_like(y))

    seen = allocations_of(run)
    assert all(leaf.grad is not None for leaf in (q, k, v))
    assert all(leaf.grad is not None for leaf in (encoding.parameters() if encoding else ()))
    return seen


def test_the_ruler_sees_a_matrix() -> None:
    assert allocations_of(lambda: torch.zeros(1000) + torch.zeros(500, 1)).largest == 4 * 500 * 1000
    for backend in ("sdpa", "eager"):
        assert training_step(T5Bias(HEADS), Positions.arange(LENGTH), backend).largest >= MATRIX


KINDS: dict[str, tuple[Positions, int | None]] = {
    "causal": (Positions.arange(LENGTH), None),
    "window": (Positions.arange(LENGTH), 100),
    "packed": (Positions.packed([600, 424]), None),
}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "softcap": {"softcap": 30.0},
    "both": {"sinks": torch.zeros(HEADS), "softcap": 30.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("encoding_name", "backend", "beside"),
    [
        *((name, "tiled", "nothing") for name in BY_DISTANCE),
        ("t5", "auto", "nothing"),
        *itertools.product(("none", "t5"), ("auto",), ("sinks", "softcap", "both")),
    ],
)
def test_by_distance_only_a_head_of_a_tile_is_held(encoding_name: str, backend: str, beside: str, kind: str) -> None:
    positions, window = KINDS[kind]
    seen = training_step(BY_DISTANCE[encoding_name](), positions, backend, window, **BESIDE[beside])
    assert seen.largest <= MATRIX / 8
    assert seen.peak < MATRIX / 2


@pytest.mark.parametrize("encoding_name", ["fire", "t5"])
def test_otherwise_a_tile_is_held(encoding_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents have no table, and those of FIRE none at all. Its look-ups are int64, twice as wide as scores."""
    monkeypatch.setattr(tiled, "TILE_BYTES", MATRIX // 32)
    encoding = Fire(HEADS) if encoding_name == "fire" else T5Bias(HEADS)
    seen = training_step(encoding, Positions.packed([100] * 10, length=LENGTH), "tiled")
    assert seen.largest <= MATRIX / 16
    assert seen.peak < MATRIX


NO_TABLE: dict[str, Callable[[], PositionEncoding]] = {
    "fire": lambda: Fire(HEADS),
    "cope": lambda: Cope(HEAD_DIM, 8),
    "shaw": lambda: Shaw(HEAD_DIM, 8),
    "transformer_xl": lambda: TransformerXL(HEADS, 16, head_dim=HEAD_DIM),
    "deberta": lambda: Deberta(HEADS, HEAD_DIM, num_buckets=8, max_distance=16),
}


@pytest.mark.parametrize(
    ("encoding_name", "kind"),
    [
        ("fire", "packed"),
        ("cope", "causal"),
        pytest.param("shaw", "causal", marks=pytest.mark.slow),
        pytest.param("transformer_xl", "packed", marks=pytest.mark.slow),
        pytest.param("deberta", "causal", marks=pytest.mark.slow),
    ],
)
def test_sinks_and_soft_caps_hold_a_tile_of_a_bias_that_has_no_table(
    encoding_name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", MATRIX // 32)
    positions = Positions.arange(LENGTH) if kind == "causal" else Positions.packed([100] * 10, length=LENGTH)
    seen = training_step(NO_TABLE[encoding_name](), positions, "tiled", **BESIDE["both"])
    assert seen.largest <= MATRIX / 16
    assert seen.peak < MATRIX


LONG, LONG_HEADS, WIDE = 8_192, 8, 64
FORWARD: dict[str, tuple[Callable[[], PositionEncoding | None], Positions, dict[str, Any]]] = {
    "sinks": (lambda: None, Positions.arange(LONG), {"sinks": torch.zeros(LONG_HEADS)}),
    "t5, four documents, a soft cap": (
        lambda: T5Bias(LONG_HEADS), Positions.packed([LONG // 4] * 4), {"softcap": 30.0}
    ),
    "kerple, two documents, log-sum-exp": (
        lambda: Kerple(LONG_HEADS), Positions.packed([LONG // 2] * 2), {"return_lse": True}
    ),
    "alibi, documents of 60 and padding, sinks": (
        lambda: ALiBi(LONG_HEADS), Positions.packed([60] * 130, length=LONG), {"sinks": torch.zeros(LONG_HEADS)}
    ),
}  # fmt: skip


def held_forward(encoding: PositionEncoding | None, positions: Positions, **options: Any) -> int:
    qkv = torch.randn(3, 1, LONG_HEADS, LONG, WIDE)
    with torch.no_grad():
        return allocations_of(lambda: attend(*qkv, encoding=encoding, positions=positions, **options)).peak


@pytest.fixture(scope="module")
def plain_causal() -> int:
    return held_forward(None, Positions.arange(LONG))


@pytest.mark.slow
@pytest.mark.parametrize("case", FORWARD)
def test_forward_it_takes_1_3_times_what_plain_causal_attention_takes(case: str, plain_causal: int) -> None:
    encoding, positions, options = FORWARD[case]
    assert held_forward(encoding(), positions, **options) <= 1.3 * plain_causal
