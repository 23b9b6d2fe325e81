"""What the queries may see, in the cheapest form that says it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from locant.positions import Positions

__all__ = ["Visibility", "visibility"]


@dataclass(frozen=True)
class Visibility:
    """Either everything, or the lower triangle of a square, or a mask.

    ``empty`` marks queries that see nothing (padding): their output is zero, not NaN.
    """

    is_causal: bool = False
    mask: Bool[Tensor, "batch 1 query key"] | None = None
    empty: Bool[Tensor, "batch 1 query 1"] | None = None


def visibility(positions: Positions, k_positions: Positions | None, causal: bool, window: int | None) -> Visibility:
    """Decided from what the host knows of the positions; a mask is built only where one is needed.

    Rows that see nothing are opened to every key in the mask and marked in `empty`, so that neither the softmax nor
    its gradient ever meets a row of minus infinities.
    """
    keys = positions if k_positions is None else k_positions
    if positions.start is not None and keys.start is not None and window is None:
        if not causal or positions.start >= keys.start + keys.seq_len - 1:
            return Visibility()
        if positions.start == keys.start and positions.seq_len == keys.seq_len:
            return Visibility(is_causal=True)
    mask = positions.mask(k_positions, causal=causal, window=window)
    empty = ~mask.any(-1, keepdim=True)
    return Visibility(mask=mask | empty, empty=empty)
