"""Values that make no sense as most arguments, tried for every parameter that a signature has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from locant.errors import LocantError, RangeError
from tests.refusal import refuses, shapes_unchecked

__all__ = ["FLAG", "ODD", "POSITIVE", "REAL", "parameters", "require_refused"]

ODD: Mapping[str, Any] = {
    "text": "8", "bytes": b"8", "None": None, "True": True, "type": int, "function": len, "object": object(),
    "0": 0, "-1": -1, "2**70": 2**70, "10**5000": 10**5000,
    "1.5": 1.5, "tiny": 5e-324, "1e308": 1e308, "nan": float("nan"), "inf": float("inf"), "1j": 1j,
    "list": [8], "dict": {}, "array": np.zeros(2), "tensor": torch.zeros(2),
}  # fmt: skip

POSITIVE = frozenset({"1.5", "tiny", "2**70"})
"""What of these is a number above zero; the others below are of the same kind."""
REAL = POSITIVE | {"-1", "0"}
FLAG = frozenset({"True"})


def parameters(build: Callable[..., Any], sample: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every parameter of `build`, with a sample for each that has to be given besides.

    A new one that has no default is no argument of any sample: a `KeyError` asks for it.
    """
    given = inspect.signature(build).parameters
    required = {name: sample[name] for name, one in given.items() if one.default is inspect.Parameter.empty}
    for name in given:
        yield name, required


def require_refused(
    build: Callable[..., Any],
    required: Mapping[str, Any],
    name: str,
    accepted: Collection[str],
    *,
    number: bool = True,
    word: str | None = None,
) -> None:
    """Odd values of a parameter end in an error that names it, a `RangeError` where a number is asked for.

    Those in `accepted` end in none.
    """
    for label, odd in ODD.items():
        try:
            with _refusal(label in accepted, number, name if word is None else word):
                build(**{**required, name: odd})
        except BaseException as error:
            error.add_note(f"{name}={label}")
            raise


@contextmanager
def _refusal(accepted: bool, number: bool, word: str) -> Iterator[None]:
    if accepted:
        with shapes_unchecked():
            yield
    elif number:
        with refuses(RangeError, word):
            yield
    else:
        with shapes_unchecked(), pytest.raises(LocantError) as caught:
            yield
        assert caught.value.remedy, f"no remedy: {caught.value}"
        assert word in caught.value.cause
