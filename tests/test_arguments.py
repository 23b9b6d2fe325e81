"""What counts as a number, and what is said of the rest."""

from __future__ import annotations

import enum
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant.arguments import MAX_INT32, MAX_WIDTH, flag, real, short_repr, whole
from locant.errors import RangeError
from tests.odd import ODD
from tests.refusal import refuses


class Size(enum.IntEnum):
    SMALL = 4


INTEGERS = [4, np.int8(4), np.uint64(4), np.array(4), torch.tensor(4), torch.tensor(4, dtype=torch.int8), Size.SMALL]
REALS = [4.0, np.float16(4), np.float64(4), np.array(4.0), torch.tensor(4.0), Decimal(4), Fraction(8, 2)]
TRUTHS = [True, np.True_, np.array(True), torch.tensor(True)]
OF_NUMPY = [
    np.complex128(1 + 1j), np.complex64(1), np.str_("8"), np.array("8"), np.bytes_(b"8"), np.void(b"12345678"),
    np.array(True, dtype=object), torch.tensor(1j),
]  # fmt: skip
"""What NumPy would make a float of."""
NONE = [
    *OF_NUMPY, *TRUTHS, "4", b"4", None, [4], {4}, 4j, ..., int, np.array([4]), torch.tensor([4]), torch.zeros(2, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_every_kind_of_integer_becomes_an_int(value: Any) -> None:
    number = whole("size", value, 1, remedy="size=4")
    assert (type(number), number) == (int, 4)


@pytest.mark.parametrize("value", [*INTEGERS, *REALS], ids=repr)
def test_every_kind_of_number_becomes_a_plain_one(value: Any) -> None:
    number = real("size", value, remedy="size=4")
    assert (type(number), number) == (int if type(value) is int else float, 4)


@pytest.mark.parametrize("value", [*REALS, *NONE], ids=repr)
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with refuses(RangeError, f"got {short_repr(value)} for size, expected an integer of 1 or more"):
        whole("size", value, 1, remedy="size=4")


@pytest.mark.parametrize(
    "value", [*NONE, float("nan"), np.float32("nan"), float("inf"), Decimal("-Infinity")], ids=repr
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with refuses(RangeError, f"got {short_repr(value)} for size, expected a finite number"):
        real("size", value, remedy="size=4")


@pytest.mark.parametrize("value", [Decimal("sNaN"), Fraction(10**400), 10**400, 1e39, -1e39], ids=repr)
def test_numbers_that_float32_cannot_hold_are_refused(value: Any) -> None:
    with refuses(RangeError, "expected a finite number"):
        real("size", value, remedy="size=4")


def test_a_tensor_without_a_value_is_refused() -> None:
    for check in (lambda x: whole("size", x, 0, remedy="4"), lambda x: real("size", x, remedy="4")):
        with refuses(RangeError, "size"):
            check(torch.zeros((), dtype=torch.int64, device="meta"))


@given(st.integers(), st.integers(-9, 9), st.integers(0, 20))
def test_integers_pass_within_their_ends_and_no_others(value: int, low: int, room: int) -> None:
    if low <= value <= low + room:
        assert whole("size", value, low, low + room, remedy="4") == value
    else:
        with refuses(RangeError, f"{low} or more" if value < low else f"at most {low + room}"):
            whole("size", value, low, low + room, remedy="4")


@given(st.floats(allow_nan=False, width=32), st.integers(-9, 9), st.booleans(), st.booleans())
def test_real_numbers_pass_within_their_ends_and_no_others(
    value: float, low: int, open_: bool, at_the_end: bool
) -> None:
    value = low if at_the_end else value
    ends = {"above": low, "below": low + 5} if open_ else {"low": low, "high": low + 5}
    if low < value < low + 5 or (not open_ and value in (low, low + 5)):
        assert real("size", value, remedy="4", **ends) == value
    else:
        with refuses(RangeError, "above" if open_ else "at least"):
            real("size", value, remedy="4", **ends)


def test_ends_and_evenness() -> None:
    assert whole("size", MAX_INT32, 0, remedy="4") == MAX_INT32
    assert whole("size", 2**70, 0, None, remedy="4") == 2**70
    assert whole("size", 6, 2, even=True, remedy="4") == 6
    with refuses(RangeError, f"at most {MAX_INT32}"):
        whole("size", MAX_INT32 + 1, 0, remedy="4")
    with refuses(RangeError, "got 7 for size, expected an even number", "4"):
        whole("size", 7, 2, even=True, remedy="4")
    with refuses(RangeError, "got 1 for dropout, expected a finite number of at least 0 and below 1"):
        real("dropout", 1, low=0, below=1, remedy="0.1")


def test_the_largest_table_has_a_size() -> None:
    with torch.device("meta"):
        assert torch.empty(MAX_INT32, MAX_WIDTH, dtype=torch.float64).nbytes < 2**63


@pytest.mark.parametrize("label", ODD)
def test_whatever_is_shown_takes_a_line(label: str) -> None:
    line = short_repr(ODD[label])
    assert "\n" not in line
    assert 0 < len(line) < 200


def test_what_cannot_be_shown_is_named() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise OSError

    assert "Silent" in short_repr(Silent())
    assert short_repr(10**5000) == "an integer of 16610 bits"
    assert short_repr([10**5000]) == "a list that holds an integer of thousands of digits"
    assert short_repr("x" * 10**6).count("x") < 40


def test_no_torch_is_needed() -> None:
    probe = "import sys, locant.arguments; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, np.array(False)], ids=repr)
def test_a_truth_value_becomes_a_bool(value: Any) -> None:
    assert flag("shuffle", value) is bool(value)


@pytest.mark.parametrize("value", ["no", "", None, 0, 1, 1.0, [], np.array([True]), np.int64(1)], ids=repr)
def test_what_is_no_truth_value_is_named(value: Any) -> None:
    with refuses(RangeError, "for shuffle", "expected True or False", "shuffle=True"):
        flag("shuffle", value)
