"""The rule of who may attend to whom: dense masks ask it of all pairs at once, FlexAttention of slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from locant.arguments import whole
from locant.positions.documents import PADDING

__all__ = ["MaskMod", "may_see", "require_window", "same_document"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(batch, head, query, key) -> allowed``."""


def may_see(
    q_document: Int[Tensor, "*#pairs"],
    k_document: Int[Tensor, "*#pairs"],
    q_order: Int[Tensor, "*#pairs"],
    k_order: Int[Tensor, "*#pairs"],
    causal: bool,
    window: int | None,
) -> Bool[Tensor, "*#pairs"]:
    """Same document and not padding; if `causal`, not later in order; if `window`, fewer steps away than that."""
    allowed = (q_document == k_document) & (q_document != PADDING)
    if causal:
        allowed = allowed & (q_order >= k_order)
    if window is not None:
        allowed = allowed & ((q_order - k_order).abs() < window)
    return allowed


def same_document(
    q_document: Int[Tensor, "batch query"],
    k_document: Int[Tensor, "batch key"],
    q_order: Int[Tensor, "batch query"],
    k_order: Int[Tensor, "batch key"],
    causal: bool,
    window: int | None,
) -> MaskMod:
    """`may_see`, asked by slots."""
    window = require_window(window)
    one_row = q_document.shape[0] == 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch * 0 if one_row else batch  # FlexAttention asks about every row of its batch
        documents = (q_document[row, query], k_document[row, key])
        return may_see(*documents, q_order[row, query], k_order[row, key], causal, window)

    return visible


def require_window(window: Any) -> int | None:
    """A number of steps, or none."""
    return None if window is None else whole("window", window, 1, remedy="window=None for no limit")
