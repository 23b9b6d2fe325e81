"""Scalings: formulas that stretch rotary frequencies for contexts longer than a model's training length.

Every scaling has one formula. ``frequencies`` evaluates it in 50-digit decimals. ``rounded`` evaluates it in float32,
for models that were trained with that rounding. A new scaling is a class in a file of this folder and needs no entry in
a list. The imports below give the scalings of this package short names, such as `locant.scaling.YaRN`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from locant.arguments import Real, one_of
from locant.errors import RangeError
from locant.positions.scaling.base import LENGTH, Scaling, Unscaled
from locant.positions.scaling.divisors import Linear, Llama3, LongRoPE, Proportional, Resonance
from locant.positions.scaling.ntk import NTK, DynamicNTK, MixedNTK, ntk_exponent
from locant.positions.scaling.yarn import YaRN
from locant.registry import key_of

__all__ = [
    "EXTENDING", "KINDS", "NTK", "SCALINGS", "TRAINED", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "MixedNTK",
    "Proportional", "Resonance", "Scaling", "Unscaled", "YaRN", "ntk_exponent", "scaling_by_name",
]  # fmt: skip

LISTING_ORDER = ("linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "mixed_ntk", "proportional")
"""The scalings that come first in lists, in this order. The others follow, sorted by name."""

TRAINED = 4_096
"""The default trained length for a scaling that is chosen by name."""

_FILES = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]

KINDS: Mapping[str, type[Scaling]] = {
    name: kind
    for file in _FILES
    for name, kind in vars(file).items()
    if isinstance(kind, type) and issubclass(kind, Scaling) and kind.__module__ == file.__name__
    if kind is not Scaling and not name.startswith("_")
}
"""Every scaling by the name of its class."""

_BY_NAME = {kind.info.name: kind for kind in KINDS.values() if kind.info.name}
SCALINGS: Mapping[str, type[Scaling]] = {
    name: _BY_NAME[name] for name in (*LISTING_ORDER, *sorted({*_BY_NAME} - {*LISTING_ORDER}))
}
"""Every scaling with a name, by that name."""

EXTENDING = tuple(name for name, kind in SCALINGS.items() if kind.info.extends)
"""The names of the scalings that extend the context of any model by a factor."""


def scaling_name(name: str) -> str | None:
    """Return the name of the scaling with this name or alias, or ``None`` if there is none. Case does not matter.

    >>> scaling_name("YaRN"), scaling_name("Llama-3"), scaling_name("alibi")
    ('yarn', 'llama3', None)
    """
    key = key_of(name)
    return next((candidate for candidate, kind in SCALINGS.items() if key in (candidate, *kind.info.aliases)), None)


def scaling_by_name(text: str, trained: int, dim: int, base: Real) -> Scaling:
    """Return the scaling with this name or alias and factor, such as ``"yarn:8"``. The default factor is 4.

    Args:
        text: the name, in upper or lower case. A third part, as in ``"yarn:8:8192"``, is the trained length.
        trained: the trained length if the text has none.
        dim, base: the dimensions and the base of the rotary encoding.

    >>> scaling_by_name("linear:2", 4096, 64, 10_000.0)
    Linear(factor=2.0)
    """
    name, _, numbers = text.partition(":")
    name = scaling_name(name) or name
    one_of("scaling", name, SCALINGS, "use yarn:4, or another of these names")
    factor, colon, length = numbers.partition(":")
    if colon and LENGTH not in SCALINGS[name].__dataclass_fields__:  # type: ignore[attr-defined]  # all are dataclasses
        raise RangeError(
            f"got {text!r} for scaling, and {name} takes no trained length", text.removesuffix(":" + length)
        )
    try:
        trained = int(length) if colon else trained
        return SCALINGS[name].by_factor(float(factor) if numbers else 4.0, trained, dim, base)
    except RangeError as error:
        raise RangeError(error.cause, f"{name}:4") from error
    except ValueError:
        got = f"got {text!r} for scaling, expected numbers after the colons"
        raise RangeError(got, f"{name}:4, or {name}:4:{TRAINED}") from None
