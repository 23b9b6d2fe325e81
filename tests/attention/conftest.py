"""What several tests of attention need."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from locant.attention.backends import flex, tiled
from locant.kernels import distance_attention as kernel


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlexAttention as a plain function, and what it is called with."""
    from torch import _dynamo
    from torch.nn.attention.flex_attention import flex_attention

    _dynamo.reset()  # numbers other than those of earlier tests would become symbols, which torch cannot trace here
    calls: list[dict[str, Any]] = []

    def listening(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return flex_attention(*tensors, **options)  # type: ignore[return-value]

    monkeypatch.setattr(flex, "_compile_for", lambda device: listening)
    return calls


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short sequence has several, and the last is cut short."""
    monkeypatch.setattr(kernel, "TILE", 5)
    monkeypatch.setattr(kernel, "NARROW_TILE", 3)
    monkeypatch.setattr(tiled, "TILE_BYTES", 0)
    monkeypatch.setattr(tiled, "MIN_ROWS", 4)
