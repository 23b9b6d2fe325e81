"""How a mistake has to be refused: with an exception of ours that says what was got and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import pytest

from locant import LocantError

__all__ = ["refuses"]


@contextmanager
def refuses(kind: type[LocantError], *words: str) -> Iterator[None]:
    """The block raises exactly `kind`, with a remedy, and its message holds all of `words`.

    Where shapes are checked at run time, wrong dtypes and ranks already end at the signature.
    """
    with pytest.raises((LocantError, jaxtyping.TypeCheckError)) as caught:
        yield
    error = caught.value
    if isinstance(error, jaxtyping.TypeCheckError):
        return
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    assert error.cause
    assert error.remedy, f"no remedy: {error}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
