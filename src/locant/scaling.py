"""Public names of the scalings of rotary frequencies for longer contexts. See `locant.positions.scaling`."""

from typing import Any

from locant.positions.scaling import KINDS
from locant.positions.scaling import NTK as NTK
from locant.positions.scaling import DynamicNTK as DynamicNTK
from locant.positions.scaling import Linear as Linear
from locant.positions.scaling import Llama3 as Llama3
from locant.positions.scaling import LongRoPE as LongRoPE
from locant.positions.scaling import MixedNTK as MixedNTK
from locant.positions.scaling import Proportional as Proportional
from locant.positions.scaling import Resonance as Resonance
from locant.positions.scaling import Scaling as Scaling
from locant.positions.scaling import Unscaled as Unscaled
from locant.positions.scaling import YaRN as YaRN

# `__getattr__` finds scalings that are not imported above.
__all__ = ["Scaling", *KINDS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Return a scaling. For another name of a scaling or encoding, the `AttributeError` has the public one."""
    if name in KINDS:
        return KINDS[name]
    message = f"module {__name__!r} has no attribute {name!r}"
    if name[:1].isupper():  # others are names that Python itself asks for
        from locant.positions.registry import find_class

        kind = find_class(name)
        if kind is not None:
            message = (
                f"{__name__} has no {name}; use {__name__ if kind.__name__ in KINDS else 'locant'}.{kind.__name__}"
            )
    raise AttributeError(message)
