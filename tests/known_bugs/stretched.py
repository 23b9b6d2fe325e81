"""Stretched frequencies, written down once more in float64: nothing in it is shared with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["by_wavelength", "dynamic", "on_a_ramp", "plain", "rotated", "temperature"]


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
