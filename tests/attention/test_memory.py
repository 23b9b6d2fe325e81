"""No backend but `sdpa` and `eager` holds a matrix of scores, forward or backward, and training needs none either."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from locant import ALiBi, Cope, Fire, Kerple, PositionEncoding, Positions, Sandwich, Shaw, T5Bias, attend
from locant.attention.backends import tiled
from tests.attention.allocations import Allocations, allocations_of

HEADS, HEAD_DIM, LENGTH = 4, 16, 1024

BY_DISTANCE: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(HEADS),
    "alibi, learned": lambda: ALiBi(HEADS, learned=True),
    "t5": lambda: T5Bias(HEADS),
    "kerple": lambda: Kerple(HEADS),
    "sandwich": lambda: Sandwich(HEADS),
}


def matrix(length: int) -> int:
    """The bytes of float32 scores of all heads."""
    return HEADS * length**2 * 4


def training_step(
    encoding: PositionEncoding | None, positions: Positions, backend: str, window: int | None = None, **options: Any
) -> Allocations:
    q, k, v = (torch.randn(1, HEADS, positions.seq_len, HEAD_DIM, requires_grad=True) for _ in range(3))

    def run() -> None:
        y = attend(q, k, v, encoding=encoding, positions=positions, backend=backend, window=window, **options)
        y.backward(torch.ones_like(y))

    seen = allocations_of(run)
    assert all(leaf.grad is not None for leaf in (q, k, v))
    assert all(leaf.grad is not None for leaf in (encoding.parameters() if encoding else ()))
    return seen


KINDS: dict[str, tuple[Positions, int | None]] = {
    "causal": (Positions.arange(LENGTH), None),
    "window": (Positions.arange(LENGTH), 100),
    "packed": (Positions.packed([600, 424]), None),
}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "both": {"sinks": torch.zeros(HEADS), "softcap": 30.0},
}


@pytest.mark.parametrize(
    ("encoding_name", "backend", "beside", "kind"),
    [
        *((name, "tiled", "nothing", "causal") for name in BY_DISTANCE),
        *itertools.product(["t5"], ["auto"], ["nothing", "both"], KINDS),
        *itertools.product(["none"], ["auto"], ["sinks"], KINDS),
    ],
)
def test_by_distance_only_a_head_of_a_tile_is_held(encoding_name: str, backend: str, beside: str, kind: str) -> None:
    positions, window = KINDS[kind]
    seen = training_step(BY_DISTANCE[encoding_name](), positions, backend, window, **BESIDE[beside])
    assert seen.largest <= matrix(LENGTH) / 8
    assert seen.peak < matrix(LENGTH) / 2


@pytest.mark.parametrize(
    ("encoding", "positions", "beside"),
    [
        (T5Bias(HEADS), Positions.packed([50] * 10, length=512), "nothing"),
        (Fire(HEADS), Positions.packed([50] * 10, length=512), "both"),
        (Cope(HEAD_DIM, 8), Positions.arange(LENGTH), "both"),
        (Shaw(HEAD_DIM, 8), Positions.arange(LENGTH), "both"),
    ],
    ids=["t5", "fire", "cope", "shaw"],
)
def test_otherwise_a_tile_is_held(
    encoding: PositionEncoding, positions: Positions, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short documents have no table, some biases none at all. Look-ups of FIRE are int64, twice as wide as scores."""
    whole = matrix(positions.seq_len)
    monkeypatch.setattr(tiled, "TILE_BYTES", whole // 32)
    seen = training_step(encoding, positions, "tiled", **BESIDE[beside])
    assert seen.largest <= whole / 16
    assert seen.peak < whole


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
