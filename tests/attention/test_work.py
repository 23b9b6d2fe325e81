"""How much is computed and held, counted where results do not show it: hidden keys, tiles, second passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Cope, Positions, attend
from locant.attention.backends import tiled
from locant.attention.inputs import AttentionInputs
from locant.kernels import distance_attention as kernel

HEADS, HEAD_DIM = 2, 8


def drawn(length: int, heads: int = HEADS) -> Tensor:
    return torch.randn(1, heads, length, HEAD_DIM)


class Counter:
    """Pairs of queries and keys that a function is called with."""

    def __init__(self, function: Callable[..., object], first: int = 0) -> None:
        self.function, self.first, self.pairs = function, first, 0

    def __call__(self, *arguments: Any, **options: object) -> object:
        inputs = arguments[0]
        q, k = (inputs.q, inputs.k) if isinstance(inputs, AttentionInputs) else arguments[self.first : self.first + 2]
        self.pairs += q.shape[2] * k.shape[2]
        return self.function(*arguments, **options)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(kernel, "NARROW_TILE", 16)
    counter = Counter(kernel.FLASH)
    monkeypatch.setattr(kernel, "FLASH", counter)
    return counter


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(kernel.FLASH_BACKWARD, first=1)
    monkeypatch.setattr(kernel, "FLASH_BACKWARD", counter)
    return counter


@pytest.mark.parametrize(
    ("window", "causal", "pairs"),
    [(None, True, 16 * (16 + 32 + 48 + 64)), (None, False, 64 * 64), (9, True, 16 * (16 + 24 * 3))],
    ids=["causal", "both ways", "window"],
)
def test_keys_that_no_query_of_a_tile_sees_are_left_out(
    window: int | None, causal: bool, pairs: int, forward: Counter, backward: Counter
) -> None:
    q = drawn(64).requires_grad_()
    options = {"window": window, "causal": causal, "backend": "tiled", "positions": Positions.arange(64)}
    attend(q, q, q, encoding=ALiBi(HEADS), **options).sum().backward()
    assert forward.pairs == backward.pairs == pairs


@pytest.mark.parametrize(
    ("positions", "pairs"),
    [
        (Positions.packed([32, 32]), 2 * (16 * 16 + 16 * 32)),
        (Positions.from_mask(torch.arange(64)[None] >= 32), 16 * 1 + 16 * 1 + 16 * 16 + 16 * 32),
    ],
    ids=["packed", "padded"],
)
def test_keys_of_other_documents_are_left_out(
    positions: Positions, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_BYTES", 0)
    counter = Counter(tiled.sdpa_attention)
    monkeypatch.setattr(tiled, "sdpa_attention", counter)
    q = drawn(64)
    attend(q, q, q, encoding=Cope(q.shape[-1]), positions=positions, backend="tiled")
    assert counter.pairs == pairs
