"""Inverse frequencies, as exact as anyone will ask for: decimals of 50 digits.

Turning a frequency into float32 (or even float64) first and multiplying by a position later is what loses angles at
long contexts. Everything that decides a frequency is therefore computed in decimals, once, when an encoding is
built; `locant.positions.angles` turns the result into tables. Costs about 20 microseconds a frequency.
"""

from __future__ import annotations

import decimal
import operator
from decimal import Decimal

from locant.errors import RangeError

__all__ = ["PRECISION", "TWO_PI", "inverse_frequencies"]

PRECISION = decimal.Context(prec=50)
"""The arithmetic in which frequencies are computed."""

TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164195")


def inverse_frequencies(dim: int, base: float | Decimal) -> tuple[Decimal, ...]:
    """``base ** (-2 i / dim)`` for every pair i: the angle, in radians, by which a pair turns per position.

    Args:
        dim: how many dimensions the pairs fill; an odd one leaves the last pair half empty.
        base: wavelengths grow from 2 pi to about 2 pi times this.

    >>> [round(float(frequency), 4) for frequency in inverse_frequencies(64, 10_000.0)[:4]]
    [1.0, 0.7499, 0.5623, 0.4217]
    """
    base = base if isinstance(base, Decimal) else float(base)  # numbers of NumPy are no numbers to decimals
    dim = operator.index(dim)
    if not 0 < base < float("inf"):
        raise RangeError(f"got base={base}, expected a positive number", "base=10_000.0, the usual one")
    exact_base = Decimal(base)
    log_base = exact_base.ln(PRECISION)
    return tuple(
        PRECISION.exp(PRECISION.multiply(log_base, PRECISION.divide(Decimal(-2 * pair), Decimal(dim))))
        for pair in range((dim + 1) // 2)
    )
