"""The truth, which shares nothing with the package: angles of fifty digits, and stretched frequencies in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import mpmath
import torch
from torch import Tensor

__all__ = [
    "EDGES", "by_wavelength", "dynamic", "frequencies", "on_a_ramp", "phase_error", "plain", "rotated",
    "rounded_frequencies", "temperature", "true_cos_sin",
]  # fmt: skip

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


def plain(dim: int, base: float) -> Tensor:
    """Radians per position of each pair."""
    return torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def dynamic(dim: int, base: float, factor: float, original: int, seq_len: int) -> Tensor:
    """NTK scaling by as much as this length needs; within the trained length, none."""
    stretch = factor * max(seq_len, original) / original - (factor - 1)
    return plain(dim, base * stretch ** (dim / (dim - 2)))


def on_a_ramp(dim: int, base: float, factor: float, low: float, high: float) -> Tensor:
    """YaRN between two pairs: before the first as it was, past the second divided, in between a share of both."""
    share = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain(dim, base) * (1 - share + share / factor)


def by_wavelength(dim: int, base: float, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3's: short wavelengths as they were, long ones stretched, a blend in between."""
    scaled = []
    for frequency in plain(dim, base).tolist():
        periods = original * frequency / (2 * math.pi)
        kept = min(max((periods - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency * (kept + (1 - kept) / factor))
    return torch.tensor(scaled, dtype=torch.float64)


def temperature(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on cosines and sines."""
    return 0.1 * weight * math.log(factor) + 1


def rotated(x: Tensor, index: Sequence[int], frequencies: Tensor) -> Tensor:
    """``batch heads seq dim`` rotated pair by pair, where i belongs with i + pairs; what is left over stays."""
    angle = torch.tensor(list(index), dtype=torch.float64)[:, None] * frequencies
    pairs = len(frequencies)
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
