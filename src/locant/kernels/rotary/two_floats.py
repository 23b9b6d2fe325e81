"""Numbers as sums of two float32 numbers, for devices without float64: 48 bits in the place of 53.

What rounding leaves out of a sum or a product of float32 numbers is a float32 number itself, and can be computed:
Dekker 1971, https://doi.org/10.1007/BF01397083. Every addition and multiplication has to be rounded by itself.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

__all__ = ["TwoFloats", "plus", "times", "two_floats"]

TwoFloats = tuple[Tensor, Tensor]
"""The number rounded to float32, and what that leaves out."""

SPLITTER = 2.0**12 + 1


def two_floats(x: Float[Tensor, "*shape"]) -> TwoFloats:
    """A float64 number as two of float32.

    >>> import torch
    >>> [float(each) for each in two_floats(torch.tensor(1 + 2.0**-30, dtype=torch.float64))]
    [1.0, 9.313225746154785e-10]
    """
    high = x.float()
    return high, (x - high.double()).float()


def times(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """The product, off by some 2**-47 of it."""
    high = a[0] * b[0]
    return _settled(high, _left_out(a[0], b[0], high) + (a[0] * b[1] + a[1] * b[0]))


def plus(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """The sum, off by some 2**-47 of the larger number."""
    (high, low), (small, smallest) = _sum(a[0], b[0]), _sum(a[1], b[1])
    high, low = _settled(high, low + small)
    return _settled(high, low + smallest)


def _sum(a: Tensor, b: Tensor) -> TwoFloats:
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _settled(high: Tensor, low: Tensor) -> TwoFloats:
    total = high + low
    return total, low - (total - high)


def _left_out(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """What rounding left out of a product."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Tensor) -> TwoFloats:
    """Two numbers of 12 bits, whose products are not rounded."""
    scaled = x * SPLITTER
    high = scaled - (scaled - x)
    return high, x - high
