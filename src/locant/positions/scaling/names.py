"""Scalings by name, for command lines, experiments and pages: every class in a file of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from locant.arguments import one_of
from locant.errors import RangeError
from locant.positions.scaling.base import Scaling

__all__ = ["KINDS", "SCALINGS", "SCALING_ALIASES", "scaling_by_name"]

FIRST = ("linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "mixed_ntk", "proportional")
"""The order in which they are listed; what is not named here comes after, by name."""


def _kinds() -> Iterator[type[Scaling]]:
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if file.name != Path(__file__).stem:
            module = importlib.import_module(f"{__package__}.{file.name}")
            kinds = (getattr(module, name) for name in module.__all__)
            yield from (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Scaling))


KINDS: Mapping[str, type[Scaling]] = {kind.__name__: kind for kind in _kinds() if kind is not Scaling}
"""Every scaling by the name of its class."""

SCALINGS: Mapping[str, Callable[[float, int, int, float], Scaling]] = {
    kind.name: kind.of_factor
    for kind in sorted(
        (kind for kind in KINDS.values() if kind.name),
        key=lambda kind: (FIRST.index(kind.name) if kind.name in FIRST else len(FIRST), kind.name),
    )
}
"""Every scaling that has a name, by it, from factor, trained length, dimensions and base."""

SCALING_ALIASES = {alias: kind.name for kind in KINDS.values() for alias in kind.aliases}


def scaling_by_name(text: str, trained: int, dim: int, base: float) -> Scaling:
    """A scaling by its name and factor, such as ``"yarn:8"``; without a factor it is 4.

    Args:
        trained: the trained length.
        dim, base: of the rotary encoding.

    >>> scaling_by_name("linear:2", 4096, 64, 10_000.0)
    Linear(factor=2.0)
    """
    name, _, factor = text.partition(":")
    one_of("scaling", name, SCALINGS, "yarn:4, or one of the others")
    try:
        return SCALINGS[name](float(factor or 4.0), trained, dim, base)
    except RangeError as error:
        raise RangeError(error.cause, f"{name}:4") from error
    except ValueError:
        raise RangeError(f"got {text!r} for scaling, expected a number after the colon", f"{name}:4") from None
