"""Inverse frequencies, as decimals of 50 digits. A rounded frequency gives a wrong angle at a far position."""

from __future__ import annotations

import decimal
from decimal import Decimal
from functools import lru_cache
from typing import Any

from locant.arguments import Real, real, whole
from locant.errors import Remedy

MAX_DIM = 2**18
"""The largest number of rotated dimensions.

Their tables take 2 GiB of memory, and computing them takes several times as much.
"""

PRECISION = decimal.Context(prec=50)
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164195")


def check_base(base: Any) -> Real:
    """Check the base of frequencies that a constructor received, and return it."""
    return real("base", base, above=0, remedy=Remedy("{}, the usual one", base=10_000.0))


def check_width(name: str, dim: Any, low: int = 2, *, even: bool = True, remedy: str) -> int:
    """Check the number of rotated dimensions that a constructor received, and return it."""
    return whole(name, dim, low, MAX_DIM, even=even, remedy=remedy)


def inverse_frequencies(dim: int, base: Real | Decimal) -> tuple[Decimal, ...]:
    """Return ``base ** (-2 i / dim)`` for every pair i: the radians by which a pair is rotated per position.

    Args:
        dim: the number of dimensions in the pairs. If it is odd, the last pair is half empty.
        base: about the ratio of the longest wavelength to the shortest, which is 2 pi.

    >>> [round(float(frequency), 4) for frequency in inverse_frequencies(64, 10_000.0)[:4]]
    [1.0, 0.7499, 0.5623, 0.4217]
    """
    return _ladder(int(dim), base if isinstance(base, Decimal) else Decimal(check_base(base)))


@lru_cache(maxsize=64)
def _ladder(dim: int, base: Decimal) -> tuple[Decimal, ...]:
    log_base = base.ln(PRECISION)
    return tuple(
        PRECISION.exp(PRECISION.multiply(log_base, PRECISION.divide(-2 * pair, dim))) for pair in range((dim + 1) // 2)
    )
