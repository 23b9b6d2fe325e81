"""Queries that grow with their position, without any rotation: the other layers of Llama 4."""

from __future__ import annotations

from locant.positions.base import Keys, PositionEncoding, Queries, require_heads
from locant.positions.positions import Positions
from locant.positions.temperature import Temperature

__all__ = ["Tempered"]


class Tempered(PositionEncoding):
    """Multiplies the query at position n by ``1 + weight * log(1 + floor((n + 1) / step))``, and leaves keys alone.

    Softmax spreads over more and more keys; larger scores keep it sharp: see `locant.positions.Temperature`, which
    `Rotary` takes where queries are rotated, too.

    >>> import torch
    >>> q = k = torch.ones(1, 1, 2, 4)
    >>> q_grown, _ = Tempered().rotate(q, k, Positions.of([0, 8191]))
    >>> q_grown[0, 0, :, 0]
    tensor([1.0000, 1.0693])
    """

    def __init__(self, step: int = 8192, weight: float = 0.1) -> None:
        super().__init__()
        self.temperature = Temperature(step=step, weight=weight, shift=1)

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Scaled queries in the dtype they came in, and the keys unchanged."""
        require_heads("q", q, positions)
        return self.temperature.grown(q, positions, inplace=inplace), k

    def extra_repr(self) -> str:
        return f"step={self.temperature.step}, weight={self.temperature.weight:g}"
