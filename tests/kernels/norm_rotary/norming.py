"""The norm with the rotation and its gradients in NumPy, in float64, without anything of the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests import oracles
from tests.kernels.rotary.rotating import BASE

__all__ = ["Norm", "gradients", "truth"]

Norm = tuple[Tensor | None, float, bool]
"""A weight, epsilon, and whether 1 is added to the weight."""


def _numbers(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().cpu().double().numpy()


def _normed(x: np.ndarray[Any, Any], weight: Any, eps: float) -> np.ndarray[Any, Any]:
    """`x` is ``batch heads seq head_dim`` and may be complex. The weight is as wide as a head, or as all heads."""
    batch, heads, seq, head_dim = x.shape
    if weight is None or weight.shape == (head_dim,):
        unit = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return unit if weight is None else unit * weight
    rows = x.transpose(0, 2, 1, 3).reshape(batch, seq, heads * head_dim)
    rows = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + eps) * weight
    return rows.reshape(batch, seq, heads, head_dim).transpose(0, 2, 1, 3)


def _rotated(x: np.ndarray[Any, Any], index: Tensor, layout: str, rotary_dim: int) -> np.ndarray[Any, Any]:
    def rows(part: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        for row, positions in zip(part, index.expand(len(x), -1), strict=True):
            cos, sin = oracles.angles(positions.numpy(), rotary_dim, BASE)
            yield oracles.rotate(row[None], cos, sin, layout)

    if not np.iscomplexobj(x):
        return np.concatenate([*rows(x)])
    return np.concatenate([*rows(x.real)]) + 1j * np.concatenate([*rows(x.imag)])  # the rotation is linear


def _factor(norm: Norm) -> Any:
    weight, _, plus_one = norm
    return None if weight is None else _numbers(weight) + plus_one


def truth(x: Tensor, norm: Norm, index: Tensor, layout: str, rotary_dim: int) -> Tensor:
    """What the norm and the rotation of `x` are."""
    return torch.from_numpy(_rotated(_normed(_numbers(x), _factor(norm), norm[1]), index, layout, rotary_dim))


def gradients(
    cotangent: Tensor, x: Tensor, norm: Norm, index: Tensor, layout: str, rotary_dim: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `x` and of the weight by complex steps, which are exact to rounding: Im f(x + ih) / h."""
    step, values, factor, weights = 1e-100, _numbers(x), _factor(norm), _numbers(cotangent)

    def slopes(points: np.ndarray[Any, Any], is_weight: bool) -> Tensor:
        found = np.empty(points.shape)
        for place in np.ndindex(points.shape):
            moved = points.astype(complex)
            moved[place] += 1j * step
            normed = _normed(values if is_weight else moved, moved if is_weight else factor, norm[1])
            found[place] = (_rotated(normed, index, layout, rotary_dim).imag * weights).sum() / step
        return torch.from_numpy(found)

    return slopes(values, False), None if factor is None else slopes(factor, True)
