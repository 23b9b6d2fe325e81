"""What callers pass, checked where it comes in: errors from inside other libraries name no argument.

`whole` and `real` give back a plain ``int`` or ``float``, whatever kind of number it was given (NumPy's, a tensor of
one number); `flag` a plain ``bool``; `one_of` one of several names. A value that is not allowed raises a `RangeError`.
Texts, ``True`` and NaN are not accepted as numbers, nor 0, 1 and ``"no"`` as flags.
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
"""A float, or an int in its place: the type checks of the test suite tell them apart."""

MAX_INT32 = 2**31 - 1
"""The largest count, unless another limit is given."""

MAX_WIDTH = 2**24
"""The widest vector: a table of `MAX_INT32` rows of it still has a size that 64 bits can hold."""

FINITE = 3.4028235e38
"""The largest number that is finite in float32."""


def whole(name: str, value: Any, low: int, high: int | None = MAX_INT32, *, even: bool = False, remedy: str) -> int:
    """An integer from `low` to `high`; ``None`` for no end."""
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
    """A number from `low` to `high`, above and below others where these are given, and finite in float32."""
    number = _float(value)
    if number is None or not (low <= number <= high and above < number < below):  # NaN is in no range
        ends = {"of at least": low, "above": above, "of at most": high, "below": below}
        limits = " and ".join(f"{word} {end:g}" for word, end in ends.items() if abs(end) < FINITE)
        raise RangeError(f"got {shown(value)} for {name}, expected a finite number {limits}".rstrip(), remedy)
    return number


def scale_of(scale: Any, usual: float) -> Real:
    """The factor on the products of queries and keys; `usual` for ``None``."""
    # A plain string: torch cannot trace how a Remedy is made, and this is asked in compiled models.
    return usual if scale is None else real("scale", scale, remedy=f"scale=None, which is {usual:g} here")


def flag(name: str, value: Any) -> bool:
    """``True`` or ``False``, or NumPy's."""
    of_numpy = getattr(getattr(value, "dtype", None), "kind", None) == "b" and value.ndim == 0
    if not (isinstance(value, bool) or of_numpy):
        raise RangeError(f"got {shown(value)} for {name}, expected True or False", Remedy(**{name: True}))
    return bool(value)


def one_of(name: str, value: Any, names: Iterable[str], remedy: str = "") -> str:
    """One of these names; `remedy` where there is more to say than the nearest of them."""
    names = tuple(names)
    if isinstance(value, str) and value in names:
        return value
    expected = " or ".join(filter(None, (", ".join(map(repr, names[:-1])), repr(names[-1]))))
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)[0] if isinstance(value, str) else names[0]
    raise RangeError(f"got {shown(value)} for {name}, expected {expected}", remedy or Remedy(**{name: near}))


def entries(name: str, value: Any, remedy: str) -> tuple[Any, ...]:
    """The entries of a list, tuple or array."""
    try:
        if not isinstance(value, (str, bytes, dict)):
            return tuple(value)
    except TypeError:
        pass
    raise ShapeError(f"got {shown(value)} for {name}, expected a list", remedy)


def shape_error(name: str, x: Any, expected: str, remedy: str) -> ShapeError:
    """The error for a tensor or array whose shape is not the expected one."""
    return ShapeError(f"got {name} of shape {tuple(x.shape)}, expected {expected}", remedy)


def shown(value: object) -> str:
    """A value in one line, for an error; Python refuses to print an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # such an integer inside a container
        return f"a {type(value).__name__} that holds an integer of thousands of digits"


def _integer(value: Any) -> Any:
    # Sizes that torch.compile and torch.export keep open are of a type that torch alone knows, or are taken for an
    # int. An index of one would settle it for good.
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
        return value  # exact as a float, and printed as it was given
    if _is_no_number(value) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _is_no_number(value: Any) -> bool:
    """Whether it is a bool, a text, or an array, even one of a single number."""
    dtype = getattr(value, "dtype", None)
    of_numpy = getattr(dtype, "kind", "f") in "iuf"  # which gives texts and complex numbers a way to be floats
    of_torch = not str(dtype).startswith(("torch.bool", "torch.complex"))
    is_bool = isinstance(value, bool) or not (of_numpy and of_torch)
    return is_bool or getattr(value, "ndim", 0) != 0
