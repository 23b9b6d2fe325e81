"""How a mistake has to be refused: with an exception of ours that says what was got and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import pytest

from locant import LocantError

__all__ = ["refuses", "shapes_unchecked"]


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Wrong dtypes and ranks come to our own checks, also where the suite runs under those of signatures."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextmanager
def refuses(kind: type[LocantError], *words: str) -> Iterator[None]:
    """The block raises exactly `kind`, with a remedy, and its message holds all of `words`."""
    with shapes_unchecked(), pytest.raises(LocantError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    assert error.cause
    assert error.remedy, f"no remedy: {error}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
