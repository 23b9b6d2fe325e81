"""Write numbers and dtypes for people and for Python, and read them.

For people, a number has thousands separators and no exponent if it is above 1 (`spell`), and a dtype has its short
name, such as ``float32``. In Python code, such as a `repr`, a number has no separators (`literal`). JSON has raw
numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

N = TypeVar("N")

OTHER_NAMES = {
    "fp64": "float64", "f64": "float64", "double": "float64", "fp32": "float32", "f32": "float32", "float": "float32",
    "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2", **{f"{short}{bits}": f"{kind}{bits}" for short, kind in (("i", "int"), ("u", "uint"))
                                 for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Other names of dtypes, as in safetensors, in configurations and in torch's own aliases."""


def dtype_name(dtype: Any) -> str:
    """Return the short name of a dtype of torch or NumPy, or of another name of a dtype.

    >>> import torch
    >>> dtype_name(torch.bfloat16), dtype_name("fp32"), dtype_name("torch.float32"), dtype_name("BF16")
    ('bfloat16', 'float32', 'float32', 'bfloat16')
    """
    name = str(dtype).strip().lower().removeprefix("torch.").removeprefix("numpy.").removeprefix("np.")
    return OTHER_NAMES.get(name, name)


def spell(value: float | int, digits: int = 6) -> str:
    """Return a number as text for people, rounded to `digits` significant digits.

    >>> spell(500_000.0), spell(1_304.2, 3), spell(1e6), spell(0.0625), spell(3.1e-7)
    ('500,000', '1,300', '1,000,000', '0.0625', '3.1e-07')
    """
    text = f"{value:,.{digits}g}"
    return f"{float(f'{value:.{digits}g}'):,.0f}" if "e+" in text else text


def literal(value: float | int) -> str:
    """Return a number as Python code, in the fewest digits that Python reads as the same number.

    >>> literal(10_000.0), literal(1e6), literal(0.125), literal(1 / 3)
    ('10000', '1000000', '0.125', '0.3333333333333333')
    """
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e16):
        return str(int(value))
    return repr(float(value))


class AmbiguousNumberError(ValueError):
    """A text that may mean two numbers, such as ``8k``, or a number or a list. The message states both."""


SEPARATED = r"[1-9]\d{0,2}(?:,\d{3})+"
"""A whole number with separators of thousands."""
PAIRS = rf"{SEPARATED}(?:,{SEPARATED})*"
"""One or more such numbers."""


def _without_separators(text: str) -> str:
    """Remove the separators of thousands from a number.

    >>> _without_separators("-12,345.5"), _without_separators("12,34")
    ('-12345.5', '12,34')
    """
    return text.replace(",", "") if re.match(rf"[+-]?{SEPARATED}(?![\d,])", text) else text


def whole_number(text: str) -> int:
    """Return the whole number in a text such as ``8192``, ``8_192``, ``8,192`` or ``1e6``.

    Raises:
        ValueError: the text is not a whole number, or may mean two (``8k``). The message lists both.

    >>> whole_number("1_000_000"), whole_number("1,000,000"), whole_number("1e6")
    (1000000, 1000000, 1000000)
    >>> whole_number("8k")
    Traceback (most recent call last):
    ...
    locant.spelling.AmbiguousNumberError: '8k' may mean two numbers; write 8192 or 8000
    """
    digits = _without_separators(text)
    with suppress(ValueError):
        return int(digits)
    if short := re.fullmatch(r"(\d+)([km])", text, re.IGNORECASE):
        number, power = int(short[1]), 1 + (short[2] in "mM")
        raise AmbiguousNumberError(
            f"{text!r} may mean two numbers; write {number * 1024**power} or {number * 1000**power}"
        )
    with suppress(ValueError):
        if (real := float(digits)).is_integer() and abs(real) <= 2**53:
            return int(real)
    raise ValueError(f"{text!r} is not a whole number such as 8192, 8,192 or 1e6")


def real_number(text: str) -> float:
    """Return the number in a text such as ``0.5``, ``1e-4``, ``10000`` or ``10,000``.

    Raises:
        ValueError: the text is not a number, or may mean two (``8k``). The message lists both.

    >>> real_number("10,000"), real_number("1,234.5"), real_number("2e-4")
    (10000.0, 1234.5, 0.0002)
    """
    try:
        return float(whole_number(text))
    except AmbiguousNumberError:
        raise
    except ValueError:
        with suppress(ValueError):
            return float(_without_separators(text))
    raise ValueError(f"{text!r} is not a number such as 0.5, 10000, 10,000 or 1e-4")


def numbers(text: str, read: Callable[[str], N]) -> tuple[N, ...]:
    """Return the numbers in a list such as ``0,1,2``, each read by `read`.

    In a list, a comma separates two numbers, and a number has no separators of thousands. A text that could be such
    numbers, as ``1,200``, is an error. With a blank after each comma it is a list.

    Raises:
        ValueError: the text is not a list of numbers, or could be numbers with separators of thousands. The message
            lists both ways to write it.

    >>> numbers("128,256", whole_number), numbers("1, 200", whole_number)
    ((128, 256), (1, 200))
    >>> numbers("1,200", whole_number)
    Traceback (most recent call last):
    ...
    locant.spelling.AmbiguousNumberError: '1,200' may mean a number or a list; write 1200 or '1, 200'
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    has_zeros = any(re.fullmatch(r"0\d+", part) for part in parts)
    if re.fullmatch(PAIRS, text) and (has_zeros or _could_be_numbers(parts)):
        joined = re.sub(r",(?=\d{3}(?!\d))", "", text)
        as_list = f" or {', '.join(parts)!r}" if not has_zeros else ""
        meaning = "is a list, in which numbers have no separators" if has_zeros else "may mean a number or a list"
        raise AmbiguousNumberError(f"{text!r} {meaning}; write {joined}{as_list}")
    if has_zeros:
        raise AmbiguousNumberError(f"{text!r} is a list, in which 1,000 would be two numbers; write 1000 or 1_000")
    return tuple(map(read, parts))


def number_list(values: Iterable[float | int | str]) -> str:
    """Return values as a text that `numbers` reads as the same list.

    >>> number_list([64, 1024]), number_list([1, 200])
    ('64,1024', '1, 200')
    """
    words = [*map(str, values)]
    text = ",".join(words)
    return ", ".join(words) if re.fullmatch(PAIRS, text) and _could_be_numbers(words) else text


def _could_be_numbers(parts: Sequence[str]) -> bool:
    """Return whether the parts do not ascend, or are two of which the second is more than eight times the first.

    A list of lengths ascends, mostly by small factors (``128,256``). The factor of ``8,192`` and ``65,536`` is larger.
    """
    values = [*map(int, parts)]
    return values != sorted(values) or (len(values) == 2 and values[1] > 8 * values[0])
