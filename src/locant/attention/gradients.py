"""What attention is made of, and whether a gradient of it is wanted."""

from __future__ import annotations

from torch import Tensor

from locant.kernels.transforms import hides_gradient
from locant.positions import PositionEncoding

__all__ = ["needs_gradient", "sources"]


def sources(q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding | None) -> tuple[Tensor, ...]:
    """All that the result is made of."""
    return (q, k, v) if encoding is None else (q, k, v, *encoding.parameters(), *encoding.buffers())


def needs_gradient(q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding | None) -> bool:
    """Whether the result depends on something that wants a gradient."""
    return any(tensor.requires_grad or hides_gradient(tensor) for tensor in sources(q, k, v, encoding))
