"""Numbers and truth values as callers pass them, checked where they come in: raw errors of others name no cause.

Each check gives back a plain ``int`` or ``float``, whatever kind of number it was given (NumPy's, a tensor of one
number), or raises a `RangeError`. What is no number stays out: a text that reads like one, ``True``, NaN. What is no
truth value is not taken for one either: an ``"no"`` would be true.
"""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from locant.errors import InputError, RangeError

__all__ = ["LARGEST", "WIDEST", "Real", "real", "shown", "truth", "whole"]

Real = float | int
"""An int is as good as a float, but not to those who check types while the tests run."""

LARGEST = 2**31 - 1
"""The largest count, where nothing else is said."""

WIDEST = 2**24
"""The widest vector: a table of `LARGEST` rows of it still has a size that 64 bits can hold."""

FINITE = 3.4028235e38
"""The largest number that is finite in float32."""


def whole(name: str, value: Any, low: int, high: int | None = LARGEST, *, even: bool = False, remedy: str) -> int:
    """An integer from `low` to `high`; ``None`` for no end.

    >>> whole("num_heads", "8", 1, remedy="the number of query heads")
    Traceback (most recent call last):
    ...
    locant.errors.RangeError: got '8' for num_heads, expected an integer of 1 or more; try: the number of query heads
    """
    number = _integer(value)
    if number is None or number < low:
        raise RangeError(f"got {shown(value)} for {name}, expected an integer of {low} or more", remedy)
    if high is not None and number > high:
        raise RangeError(f"got {shown(value)} for {name}, expected at most {high}", remedy)
    if even and number % 2:
        raise RangeError(f"got {shown(value)} for {name}, expected an even number", remedy)
    return number


def real(
    name: str,
    value: Any,
    *,
    low: Real = -FINITE,
    above: Real = -math.inf,
    high: Real = FINITE,
    below: Real = math.inf,
    remedy: str,
) -> Real:
    """A finite number from `low` to `high`, and above and below others where these are given.

    Finite in float32, the narrowest that any number here is computed in.

    >>> real("base", 10_000, above=0, remedy="base=10_000.0"), real("dropout", 0.1, low=0, below=1, remedy="0.1")
    (10000, 0.1)
    """
    number = _float(value)
    if number is None or not (low <= number <= high and above < number < below):  # NaN is in no range
        ends = {"of at least": low, "above": above, "of at most": high, "below": below}
        limits = " and ".join(f"{word} {end:g}" for word, end in ends.items() if abs(end) < FINITE)
        raise RangeError(f"got {shown(value)} for {name}, expected a finite number {limits}".rstrip(), remedy)
    return number


def truth(name: str, value: Any) -> bool:
    """``True`` or ``False``, or NumPy's.

    Raises:
        InputError: anything else, numbers too.
    """
    of_numpy = getattr(getattr(value, "dtype", None), "kind", None) == "b" and value.ndim == 0
    if not (isinstance(value, bool) or of_numpy):
        raise InputError(f"got {name}={shown(value)}, expected True or False", f"{name}=True")
    return bool(value)


def shown(value: object) -> str:
    """What was got, in a line: Python itself refuses to write an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # such an integer inside of something
        return f"a {type(value).__name__} that holds an integer of thousands of digits"


def _integer(value: Any) -> Any:
    # Sizes that torch.compile and torch.export keep open are of a type that torch alone knows. An index of one would
    # settle it for good, so it stays what it is; so does an int, which Dynamo takes such a size for.
    if type(value) is int or type(value).__name__ == "SymInt":
        return value
    if _is_no_number(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device, which has no value
        return None


def _float(value: Any) -> Real | None:
    if type(value) is int and abs(value) < 2**53:
        return value  # as good as a float, and shown as it was written
    if _is_no_number(value) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _is_no_number(value: Any) -> bool:
    """A truth value or text, or an array that may hold one number and is none."""
    dtype = getattr(value, "dtype", None)
    of_numpy = getattr(dtype, "kind", "f") in "iuf"  # which gives texts and complex numbers a way to be floats
    of_torch = not str(dtype).startswith(("torch.bool", "torch.complex"))
    truth = isinstance(value, bool) or not (of_numpy and of_torch)
    return truth or getattr(value, "ndim", 0) != 0
