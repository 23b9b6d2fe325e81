"""How a known bug is shown: a check that our code passes, and that the bug it describes does not.

The bug stands beside each test as a *twin*: the fewest lines that have the mechanism. A check that the twin passes
too would prove nothing, and a twin that crashes would prove little, so the check has to end in an assertion, and its
message has to name the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from locant import PositionEncoding
from tests.positions.alone import require_same_alone, three_rows

__all__ = ["exhibit", "same_alone"]

Subject = TypeVar("Subject")


def exhibit(check: Callable[[Subject], None], *ours: Subject, twin: Subject, because: str) -> None:
    """`check` accepts each of `ours` and rejects `twin`, with a message that matches `because`."""
    assert ours, "nothing of ours is shown"
    for subject in ours:
        check(subject)
    with pytest.raises(AssertionError, match=because):
        check(twin)


def same_alone(arrangement: str) -> Callable[[PositionEncoding], None]:
    """The check of `tests/positions/test_same_alone.py`, which asks it of every encoding in every arrangement."""
    return lambda encoding: require_same_alone(encoding, arrangement, three_rows(torch.float32))
