"""Inverse frequencies, made in decimals of 50 digits: a rounded one, times a far position, is a wrong angle."""

from __future__ import annotations

import decimal
from decimal import Decimal
from functools import lru_cache
from typing import Any

from locant.arguments import Real, real, whole
from locant.errors import Remedy

MAX_DIM = 2**18
"""The most dimensions that have angles: their tables take 2 GiB, and several times that while they are made."""

PRECISION = decimal.Context(prec=50)
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164195")


def base_of(base: Any) -> Real:
    """The base of frequencies, as a constructor was given it."""
    return real("base", base, above=0, remedy=Remedy("{}, the usual one", base=10_000.0))


def width_of(name: str, dim: Any, low: int = 2, *, even: bool = True, remedy: str) -> int:
    """A number of dimensions that are rotated, as a constructor was given it."""
    return whole(name, dim, low, MAX_DIM, even=even, remedy=remedy)


def inverse_frequencies(dim: int, base: float | Decimal) -> tuple[Decimal, ...]:
    """``base ** (-2 i / dim)`` for every pair i: the angle, in radians, by which a pair is rotated per position.

    Args:
        dim: how many dimensions the pairs fill; an odd one leaves the last pair half empty.
        base: wavelengths grow from 2 pi to about 2 pi times this.

    >>> [round(float(frequency), 4) for frequency in inverse_frequencies(64, 10_000.0)[:4]]
    [1.0, 0.7499, 0.5623, 0.4217]
    """
    return _ladder(int(dim), base if isinstance(base, Decimal) else Decimal(base_of(base)))


@lru_cache(maxsize=64)
def _ladder(dim: int, base: Decimal) -> tuple[Decimal, ...]:
    log_base = base.ln(PRECISION)
    return tuple(
        PRECISION.exp(PRECISION.multiply(log_base, PRECISION.divide(-2 * pair, dim))) for pair in range((dim + 1) // 2)
    )
