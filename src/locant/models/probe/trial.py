"""Calls that are tried on code of others: what they have to give back, and the refusals where that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from locant.arguments import shown
from locant.errors import InputError

__all__ = [
    "FAILED", "HEADS", "TRIAL", "Rotate", "Tried", "UnusableError", "Way", "refusal", "refuse_unsteady", "sides_of",
]  # fmt: skip

ROTATES = "locant.probe(lambda x, positions: ..., head_dim=64), x of shape [batch, heads, seq, 64]"

TRIAL, HEADS = 3, 2
"""Tokens and heads of a trial."""

FAILED = (
    TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError,
    ArithmeticError,
)  # fmt: skip
"""What a call may end with that is tried on code of others."""

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From tokens ``[batch, heads, seq, width]`` and their index ``[batch or 1, seq, axes]`` to queries, and to keys."""

Tried = dict[str, Exception]
"""The first failure of each way of calling."""


@dataclass(frozen=True)
class Way:
    """A way of calling, in words, and what makes a `Rotate` of a target and a number of axes with it."""

    called: str
    rotation_of: Callable[[Any, int], Rotate]
    given: bool = True
    """Whether positions are told."""


class UnusableError(InputError):
    """A call came to an end, and nothing that can be measured came back."""


def sides_of(found: Any, shape: Sequence[int], count: int) -> tuple[Tensor, ...]:
    """The tensors that a call gave back, so many and of this shape."""
    sides = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if len(sides) != count:
        raise UnusableError(f"gave {len(sides)} values, not {count}", ROTATES)
    for side in sides:
        if not isinstance(side, Tensor):
            raise UnusableError(
                f"gave {shown(side)}, which is no tensor", f"return the rotated tokens, as in {ROTATES}"
            )
        if side.shape != tuple(shape):
            raise UnusableError(f"gave shape {[*side.shape]} for tokens of shape {[*shape]}", ROTATES)
    return sides


def refusal(target: Any, tried: Tried) -> InputError:
    """Of what could be called in no way: the calls that were tried, and what each ended with."""
    calls: dict[str, list[str]] = {}
    for called, error in tried.items():
        ended = error.cause if isinstance(error, UnusableError) else f"raised {type(error).__name__}: {error}"
        calls.setdefault(" ".join(ended.split()), []).append(called)
    told = "; ".join(f"{' and '.join(ways)} {ended}" for ended, ways in calls.items())
    got = f"got {shown(target)}, which neither rotates tokens nor gives a bias in any way of calling that is known"
    first = next(iter(tried.values()), None)
    remedy = first.remedy if isinstance(first, UnusableError) else ROTATES
    return InputError(f"{got}: {told}" if told else got, remedy)


def refuse_unsteady(name: str, one: Tensor, again: Tensor) -> None:
    """Of two equal calls the same is expected, up to the last digits."""
    apart = float((one - again).nan_to_num().abs().max())
    if apart > 1e-4:
        got = f"got {name}, which is random or keeps a state: two equal calls give numbers up to {apart:.2g} apart"
        raise InputError(got, ".eval() on its module, which turns dropout off, or leave the random part out")
