"""The rule of who may attend to whom, as a function of slots: dense masks and FlexAttention both ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Int
from torch import Tensor

from locant.numbers import whole
from locant.positions.where.documents import PADDING

__all__ = ["MaskMod", "require_window", "same_document"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(batch, head, query, key) -> allowed``."""


def same_document(
    q_document: Int[Tensor, "batch query"],
    k_document: Int[Tensor, "batch key"],
    q_order: Int[Tensor, "batch query"],
    k_order: Int[Tensor, "batch key"],
    causal: bool,
    window: int | None,
) -> MaskMod:
    """Same document and not padding; if `causal`, not later in order; if `window`, fewer steps away than that."""
    window = require_window(window)
    one_row = q_document.shape[0] == 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch * 0 if one_row else batch  # FlexAttention asks about every row of its batch
        document = q_document[row, query]
        allowed = (document == k_document[row, key]) & (document != PADDING)
        steps = q_order[row, query] - k_order[row, key]
        if causal:
            allowed = allowed & (steps >= 0)
        if window is not None:
            allowed = allowed & (steps.abs() < window)
        return allowed

    return visible


def require_window(window: Any) -> int | None:
    """A number of steps, or none."""
    return None if window is None else whole("window", window, 1, remedy="window=None for no limit")
