"""What callers pass as whole numbers, checked: raw errors of Python name no cause."""

from __future__ import annotations

import operator
from typing import Any

from locant.errors import RangeError

__all__ = ["at_least"]

LARGEST = 2**31 - 1


def at_least(name: str, value: Any, low: int, high: int = LARGEST, remedy: str = "a number of tokens") -> int:
    """An integer between `low` and `high`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low:
        raise RangeError(f"got {value!r} for {name}, expected an integer of {low} or more", remedy)
    if number > high:
        raise RangeError(f"got {value!r} for {name}, expected at most {high}", remedy)
    return number
