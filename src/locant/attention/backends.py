"""Which way attention is computed: a choice made by one pure function that can say why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from locant.errors import LocantError

__all__ = ["BackendName", "Choice", "choose_backend"]

BackendName = Literal["auto", "sdpa", "eager"]


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it."""

    name: str
    reason: str


def choose_backend(backend: str, *, return_weights: bool) -> Choice:
    """The backend that runs; asking for one that cannot run raises.

    >>> choose_backend("auto", return_weights=True)
    Choice(name='eager', reason='only eager keeps the weights')
    """
    known = get_args(BackendName)
    if backend not in known:
        raise LocantError(f"got backend={backend!r}, this version has {', '.join(known)}", "backend='auto'")
    if backend == "sdpa" and return_weights:
        raise LocantError(
            "got backend='sdpa' with return_weights=True, fused attention never holds the weights", "backend='eager'"
        )
    if backend != "auto":
        return Choice(backend, "asked for")
    if return_weights:
        return Choice("eager", "only eager keeps the weights")
    return Choice("sdpa", "fused attention, with the bias as an additive mask where there is one")
