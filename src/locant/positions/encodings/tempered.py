"""Queries that grow with their position, without any rotation: the other layers of Llama 4."""

from __future__ import annotations

import torch

from locant.arguments import real, whole
from locant.positions.base import Keys, PositionEncoding, Queries, require_heads
from locant.positions.positions import Positions

__all__ = ["Tempered"]


class Tempered(PositionEncoding):
    """Multiplies the query at position n by ``1 + weight * log(1 + floor((n + 1) / step))``, and leaves keys alone.

    Softmax spreads over more and more keys; larger scores keep it sharp (Nakanishi 2025, arXiv 2501.19399). Up to
    `step` tokens nothing changes.

    >>> q = k = torch.ones(1, 1, 2, 4)
    >>> q_grown, _ = Tempered().rotate(q, k, Positions.of([0, 8191]))
    >>> q_grown[0, 0, :, 0]
    tensor([1.0000, 1.0693])
    """

    def __init__(self, step: int = 8192, weight: float = 0.1) -> None:
        super().__init__()
        self.step = whole("step", step, 1, remedy="step=8192")
        self.weight = real("weight", weight, remedy="weight=0.1")

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Scaled queries in the dtype they came in, and the keys unchanged."""
        require_heads("q", q, positions)
        positions.require_single_axis("Tempered")
        steps = (positions.index.clamp(min=0) + 1) // self.step
        factor = torch.log1p(steps.to(torch.promote_types(q.dtype, torch.float32))) * self.weight + 1.0
        grown = (q * factor[:, None, :, None]).to(q.dtype)
        return (q.copy_(grown) if inplace else grown), k

    def extra_repr(self) -> str:
        return f"step={self.step}, weight={self.weight:g}"
