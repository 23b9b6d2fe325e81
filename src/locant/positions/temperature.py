"""Queries that grow with their position, so that softmax stays sharp over more and more keys.

Nakanishi 2025, arXiv 2501.19399. It scales queries alone, after any rotation. Cached keys do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import MAX_INT32, Real, real, whole
from locant.deprecation import Renamed
from locant.positions.base import Keys, PositionEncoding, Queries, require_heads, resolve_positions
from locant.positions.positions import OptionalPositions, Positions
from locant.spelling import literal


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """The factor ``1 + weight * log(1 + floor((n + shift) / step))`` of the query at position n.

    Args:
        step: the number of tokens before queries begin to grow.
        weight: how fast queries grow.
        shift: 0 (Ministral 3, Mistral 4), or 1 if the first token counts as 1 (Llama 4).

    >>> Temperature(step=8192).of(Positions.of([8191, 8192]))
    tensor([[1.0000, 1.0693]])
    """

    step: int
    weight: Real = 0.1
    shift: int = 0

    def __post_init__(self) -> None:
        for name, value in {
            "step": whole("step", self.step, 1, remedy="step=8192"),
            "weight": real("weight", self.weight, remedy="weight=0.1"),
            "shift": whole("shift", self.shift, 0, MAX_INT32, remedy="shift=0"),
        }.items():
            object.__setattr__(self, name, value)

    def of(self, positions: Positions, dtype: torch.dtype = torch.float32) -> Float[Tensor, "batch seq"]:
        """Return the factor of every token."""
        positions.require_single_axis("Temperature")
        steps = (positions.index.clamp(min=0) + self.shift) // self.step
        return torch.log1p(steps.to(dtype)) * self.weight + 1.0

    def scale(self, q: Queries, positions: Positions, *, inplace: bool = False) -> Queries:
        """Scale the queries and keep their dtype. The factor and the product are float32 or wider."""
        factor = self.of(positions, torch.promote_types(q.dtype, torch.float32))
        scaled = (q * factor[:, None, :, None]).to(q.dtype)
        return q.copy_(scaled) if inplace else scaled

    scaled = Renamed("scale")


class Tempered(PositionEncoding):
    """Queries that grow with their position, without rotation: the layers of Llama 4 that have no RoPE.

    The query at position n is multiplied by ``1 + weight * log(1 + floor((n + 1) / step))``. Keys do not change.

    >>> q = k = torch.ones(1, 1, 2, 4)
    >>> q_grown, _ = Tempered().rotate(q, k, Positions.of([0, 8191]))
    >>> q_grown[0, 0, :, 0]
    tensor([1.0000, 1.0693])
    """

    def __init__(self, step: int = 8192, weight: Real = 0.1) -> None:
        super().__init__()
        self.temperature = Temperature(step=step, weight=weight, shift=1)

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Queries, Keys]:
        """Scale the queries in their dtype, and return the keys unchanged."""
        positions, _ = resolve_positions(self, q, k, positions, k_positions)
        require_heads("q", q, positions)
        return self.temperature.scale(q, positions, inplace=inplace), k

    def extra_repr(self) -> str:
        return f"step={self.temperature.step}, weight={literal(self.temperature.weight)}"
