"""What several tests of attention need."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from locant.attention.backends import flex


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlexAttention as a plain function, and what it is called with."""
    from torch.nn.attention.flex_attention import flex_attention

    calls: list[dict[str, Any]] = []

    def listening(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return flex_attention(*tensors, **options)  # type: ignore[return-value]

    monkeypatch.setattr(flex, "_compiled", lambda device: listening)
    return calls
