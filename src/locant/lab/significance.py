"""Decide whether a difference is clear. At most one in twenty comparisons of equal encodings finds a clear difference.

All intervals of the lab are two-sided and use Student's t. If several intervals must hold at once, Bonferroni's rule
widens each of them. The best encoding is chosen among all encodings, so all pairs of encodings count.

The spread over seeds is pooled over all encodings in a comparison, as in an analysis of variance, because two or three
seeds of one encoding are too few to estimate it. If an encoding has a larger spread, its own deviation is used.

The limit of one in twenty holds for normal distributions with equal spreads. In simulations, the share of clear
differences was 7 % for two encodings with two seeds each, if the share of correct rows was near 0 or 1. It was up to
12 % if one encoding had a much larger spread than the others, and 10 to 29 % if that encoding also had fewer seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

Seeds = tuple[float, int]
"""The standard deviation over the seeds of an encoding, and the number of seeds."""

MIN_DIFFERENCE = 0.0005
"""The smallest difference between losses, in nats per token, that can be clear. Reports print less as 0.000."""

LEVEL = 0.05
"""The largest share of comparisons of equal encodings that may find a clear difference."""


def tail(comparisons: int = 1) -> float:
    """Return the probability beyond each end of an interval if `comparisons` intervals must hold at once."""
    return LEVEL / 2 / comparisons


def margin_of_mean(deviation: float, count: int, comparisons: int = 1) -> float:
    """Return the half-width of the interval of a mean of two or more values with this standard deviation.

    >>> round(margin_of_mean(1.0, 16), 3)  # 2.131 / 4
    0.533
    """
    return student(1 - tail(comparisons), count - 1) * deviation / math.sqrt(count)


@dataclass(frozen=True)
class Spread:
    """The pooled spread over seeds, for encodings that are compared in pairs."""

    comparisons: int
    variance: float
    freedom: int

    @classmethod
    def of(cls, encodings: Collection[Seeds]) -> Spread:
        """Pool the seeds of all encodings.

        >>> Spread.of([(0.1, 2), (0.2, 2), (0.0, 1)]).freedom
        2
        """
        freedom = sum(count - 1 for _, count in encodings)
        squares = sum(deviation**2 * (count - 1) for deviation, count in encodings)
        return cls(max(1, math.comb(len(encodings), 2)), squares / freedom if freedom else math.nan, freedom)

    def margin(self, one: Seeds, other: Seeds) -> float:
        """Return the half-width of the interval of a difference. It is infinite if no encoding has two seeds.

        >>> round(Spread.of([(0.1, 2), (0.1, 2)]).margin((0.1, 2), (0.1, 2)), 4)  # 4.303 * 0.1
        0.4303
        """
        if not self.freedom:
            return math.inf
        error = math.sqrt(sum(max(self.variance, deviation**2) / count for deviation, count in (one, other)))
        return student(1 - tail(self.comparisons), self.freedom) * error


@functools.lru_cache(maxsize=256)
def student(share: float, freedom: int) -> float:
    """Return a quantile of Student's t: √freedom times the tangent of an angle with density cos(angle)^(freedom - 1).

    >>> [round(student(share, freedom), 3) for share, freedom in ((0.975, 2), (0.975, 9), (0.999, 9))]
    [4.303, 2.262, 4.297]
    """
    even = np.linspace(0, 1, 20_001)
    from_end = math.pi / 2 * even**2 * (3 - 2 * even)  # dense at both ends, because most of the mass can be there
    density = np.sin(from_end) ** (freedom - 1)
    shares = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) * np.diff(from_end))])
    return math.sqrt(freedom) / math.tan(np.interp(2 * (1 - share), shares / shares[-1], from_end))
