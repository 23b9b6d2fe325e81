"""The truth about angles, from mpmath with fifty digits: nothing in it is shared with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mpmath
import torch
from torch import Tensor

__all__ = ["EDGES", "frequencies", "phase_error", "rounded_frequencies", "true_cos_sin"]

EDGES = sorted({p for k in range(25) for p in (2**k - 1, 2**k, 2**k + 1)})
"""2^k and its neighbours up to 2^24 + 1: where a float of any width runs out of bits."""


def frequencies(dim: int, base: float) -> list[mpmath.mpf]:
    """``base ** (-2 i / dim)`` for every pair i."""
    with mpmath.workdps(50):
        return [mpmath.power(mpmath.mpf(base), mpmath.mpf(-2 * i) / dim) for i in range(dim // 2)]


def rounded_frequencies(dim: int, base: float) -> Tensor:
    """The same as most published models were trained with them: in float32, rounded after every step."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / base**exponents


def true_cos_sin(index: Iterable[int], of: Sequence[mpmath.mpf] | Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position times every frequency, ``positions pairs``, rounded once, to float64.

    Where `of` is a float32 tensor, position and product are rounded to float32 as well, and only the cosine of that
    angle is taken exactly.
    """
    with mpmath.workdps(50):
        if isinstance(of, Tensor):
            products = torch.tensor(list(index)).float()[:, None] * of
            angles = [[mpmath.mpf(angle) for angle in row] for row in products.tolist()]
        else:
            angles = [[position * frequency for frequency in of] for position in index]
        return _of(mpmath.cos, angles), _of(mpmath.sin, angles)


def _of(function: Callable[[mpmath.mpf], mpmath.mpf], angles: list[list[mpmath.mpf]]) -> Tensor:
    return torch.tensor([[float(function(angle)) for angle in row] for row in angles], dtype=torch.float64)


def phase_error(cos: Tensor, sin: Tensor, true_cos: Tensor, true_sin: Tensor) -> Tensor:
    """The angle between a pair (cos, sin) and the true one, 0 to pi."""
    cos, sin = cos.double(), sin.double()
    return torch.atan2(sin * true_cos - cos * true_sin, cos * true_cos + sin * true_sin).abs()
