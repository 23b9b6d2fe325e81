"""Scalings by name, for command lines, experiments and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from locant.arguments import one_of
from locant.errors import RangeError
from locant.positions.frequencies import inverse_frequencies
from locant.positions.scaling.base import Scaling
from locant.positions.scaling.longrope import LongRoPE
from locant.positions.scaling.ntk import NTK, DynamicNTK, MixedNTK
from locant.positions.scaling.uniform import Linear, Proportional
from locant.positions.scaling.wavelengths import Llama3
from locant.positions.scaling.yarn import YaRN

__all__ = ["SCALINGS", "scaling_by_name"]


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


def _longrope(factor: float, trained: int, dim: int, base: float) -> LongRoPE:
    """Long factors that are those of YaRN's ramp: the paper's are searched on data."""
    ramp = YaRN(factor=factor, original_max_seq_len=trained).frequencies(dim, base)
    long = tuple(float(plain / each) for plain, each in zip(inverse_frequencies(dim, base), ramp, strict=True))
    short = (1.0,) * (dim // 2)
    return LongRoPE(short_factor=short, long_factor=long, original_max_seq_len=trained, factor=factor)


SCALINGS: Mapping[str, Callable[[float, int, int, float], Scaling]] = {
    "linear": lambda factor, *_: Linear(factor=factor),
    "ntk": lambda factor, *_: NTK(factor=factor),
    "dynamic": lambda factor, trained, *_: DynamicNTK(factor=factor, original_max_seq_len=trained),
    "yarn": lambda factor, trained, *_: YaRN(factor=factor, original_max_seq_len=trained),
    "longrope": _longrope,
    "llama3": lambda factor, trained, *_: Llama3(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=trained
    ),
    "mixed_ntk": lambda factor, *_: MixedNTK(factor=factor),
    "proportional": lambda factor, *_: Proportional(rotated_share=0.25, factor=factor),
}
"""Every scaling by its name, from factor, trained length, dimensions and base."""
