"""Check arguments at the call, because errors from inside other libraries do not name the argument.

`whole` and `real` return a plain ``int`` or ``float`` for any kind of number (NumPy's, a tensor of one number). `flag`
returns a plain ``bool``, and `one_of` returns one of several names. A value that is not allowed raises a `RangeError`.
Strings, ``True`` and NaN are not accepted as numbers. 0, 1 and ``"no"`` are not accepted as flags.
"""

from __future__ import annotations

import difflib
import math
import operator
import reprlib
from collections.abc import Iterable
from typing import Any

from locant.errors import RangeError, Remedy, ShapeError

Real = float | int
"""A float, or an int instead of it. The type checks of the test suite distinguish them."""

MAX_INT32 = 2**31 - 1
"""The largest count, unless another limit is given."""

MAX_WIDTH = 2**24
"""The largest width of a vector. The size of a table with `MAX_INT32` such rows still fits into 64 bits."""

FINITE = 3.4028235e38
"""The largest finite number in float32."""


def whole(name: str, value: Any, low: int, high: int | None = MAX_INT32, *, even: bool = False, remedy: str) -> int:
    """Return an integer from `low` to `high`. ``high=None`` sets no limit."""
    number = value if type(value) is int else _integer(value)
    if number is None or number < low:
        raise RangeError(f"got {short_repr(value)} for {name}, expected an integer of {low} or more", remedy)
    if high is not None and number > high:
        raise RangeError(f"got {short_repr(value)} for {name}, expected at most {high}", remedy)
    if even and number % 2:
        raise RangeError(f"got {short_repr(value)} for {name}, expected an even number", remedy)
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
    """Return a number that is finite in float32, from `low` to `high`, greater than `above` and less than `below`."""
    number = value if type(value) is float else _float(value)
    if number is None or not (low <= number <= high and above < number < below):  # NaN is in no range
        ends = {"of at least": low, "above": above, "of at most": high, "below": below}
        limits = " and ".join(f"{word} {end:g}" for word, end in ends.items() if abs(end) < FINITE)
        raise RangeError(f"got {short_repr(value)} for {name}, expected a finite number {limits}".rstrip(), remedy)
    return number


def scale_of(scale: Any, usual: float) -> Real:
    """Return the factor of the products of queries and keys: `scale`, or `usual` if it is ``None``."""
    # The remedy is a plain string: torch cannot trace the construction of a Remedy, and compiled models call this.
    return usual if scale is None else real("scale", scale, remedy=f"scale=None, which is {usual:g} here")


def flag(name: str, value: Any) -> bool:
    """Return ``True`` or ``False`` for a bool of Python or NumPy."""
    if value is True or value is False:
        return value
    is_numpy_bool = getattr(getattr(value, "dtype", None), "kind", None) == "b" and value.ndim == 0
    if not is_numpy_bool:
        raise RangeError(f"got {short_repr(value)} for {name}, expected True or False", Remedy(**{name: True}))
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str], remedy: str = "") -> str:
    """Return `value` if it is one of these names. The default remedy is the nearest name."""
    names = tuple(names)
    if isinstance(value, str) and value in names:
        return value
    expected = " or ".join(filter(None, (", ".join(map(repr, names[:-1])), repr(names[-1]))))
    nearest = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)[0] if isinstance(value, str) else names[0]
    raise RangeError(f"got {short_repr(value)} for {name}, expected {expected}", remedy or Remedy(**{name: nearest}))


def entries(name: str, value: Any, remedy: str) -> tuple[Any, ...]:
    """Return the entries of a list, tuple or array."""
    try:
        if not isinstance(value, (str, bytes, dict)):
            return tuple(value)
    except TypeError:
        pass
    raise ShapeError(f"got {short_repr(value)} for {name}, expected a list", remedy)


def shape_error(name: str, x: Any, expected: str, remedy: str) -> ShapeError:
    """Return the error for a tensor or array that does not have the expected shape."""
    return ShapeError(f"got {name} of shape {tuple(x.shape)}, expected {expected}", remedy)


def short_repr(value: object) -> str:
    """Return a value in one line, for an error. Python does not print integers with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # the value contains such an integer
        return f"a {type(value).__name__} that holds an integer of thousands of digits"


def _integer(value: Any) -> Any:
    # Symbolic sizes of torch.compile and torch.export have torch's own type, or appear to be an int.
    # operator.index would specialize the graph to one size.
    if type(value).__name__ == "SymInt":
        return value
    if _is_not_a_number(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device has no value
        return None


def _float(value: Any) -> Real | None:
    if type(value) is int and abs(value) < 2**53:
        return value  # such an int is exact as a float, and is printed as the caller wrote it
    if _is_not_a_number(value) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _is_not_a_number(value: Any) -> bool:
    """Return whether this is a bool, a complex number, a NumPy string, or an array, even with a single number."""
    dtype = getattr(value, "dtype", None)
    is_real_in_numpy = getattr(dtype, "kind", "f") in "iuf"  # NumPy also converts strings and complex numbers to floats
    is_real_in_torch = not str(dtype).startswith(("torch.bool", "torch.complex"))
    is_other_type = isinstance(value, bool) or not (is_real_in_numpy and is_real_in_torch)
    return is_other_type or getattr(value, "ndim", 0) != 0
