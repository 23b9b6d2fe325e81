"""What every scaling is, and plain frequencies; the arithmetic that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import Real, real, whole
from locant.positions.frequencies import PRECISION, inverse_frequencies

__all__ = ["Frequencies", "Rounded", "Scaling", "Unscaled", "blend", "powers", "share"]

Frequencies = tuple[Decimal, ...]
Rounded = Float[Tensor, " pairs"]


class Scaling(ABC):
    """How the frequencies of a rotary encoding follow from its base.

    >>> from locant import Rotary
    >>> from locant.scaling import Linear
    >>> Rotary(8, scaling=Linear(factor=4.0)).inv_freq
    tensor([0.2500, 0.0250, 0.0025, 0.0003], dtype=torch.float64)
    """

    name: ClassVar[str] = ""
    """By which command lines, experiments and pages find it; none: they do not."""
    aliases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of_factor(cls, factor: float, trained: int, dim: int, base: float) -> Scaling:
        """The one that stands for this class by its name: of a factor, a trained length, and a rotary's sizes.

        Overridden where the constructor requires more than ``factor`` and ``original_max_seq_len``.
        """
        known = {"factor": factor, "original_max_seq_len": trained}
        return cls(**{field.name: known[field.name] for field in fields(cls) if field.name in known})  # type: ignore[arg-type]  # all are dataclasses

    @abstractmethod
    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        """Radians per position for each of the ``dim / 2`` pairs, in decimals of 50 digits."""

    @abstractmethod
    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        """The same in float32, rounded after every step in the order of `transformers`."""

    @property
    def effective_attention_factor(self) -> float:
        """The factor on cos and sin; it acts on q and on k, so scores grow by its square."""
        return 1.0

    @property
    def length_that_matters(self) -> int | None:
        """The length from which on the frequencies depend on the length of the sequence; ``None``: they never do."""
        return None

    def _settle(self, name: str, value: object) -> None:
        """Set a field, which is frozen afterwards."""
        object.__setattr__(self, name, value)

    def _settle_reals(self, *names: str, **ends: Real) -> None:
        """Make plain numbers of these fields, within `ends`; a ``None`` that is the default stays."""
        kind = type(self).__name__
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]  # all are dataclasses
        remedy = f"{kind}({', '.join(f'{name}=...' for name in defaults)})"
        for name in names:
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                self._settle(name, real(f"{kind}'s {name}", value, remedy=remedy, **ends))

    def _settle_length(self, low: int = 1) -> None:
        """The same for the trained length."""
        name = "original_max_seq_len"
        length = whole(f"{type(self).__name__}'s {name}", getattr(self, name), low, remedy="the trained length")
        self._settle(name, length)


@dataclass(frozen=True, kw_only=True)
class Unscaled(Scaling):
    """The plain frequencies of Su et al. 2021: ``base ** (-2 i / dim)``."""

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        return inverse_frequencies(dim, base)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        return 1.0 / powers(dim, base)


def powers(dim: int, base: float | Float[Tensor, ""], pairs: int | None = None) -> Float[Tensor, " pairs"]:
    """``base ** (2 i / dim)`` with the float32 roundings of `transformers`.

    Takes as many pairs as are needed and no more: torch's power rounds a number differently at the end of a tensor.
    """
    even = torch.arange(0, dim if pairs is None else 2 * pairs, 2, dtype=torch.int64, device="cpu")
    return base ** (even.to(torch.float32) / dim)


def share(part: Decimal, width: Decimal) -> Decimal:
    """One over the other, from 0 to 1; a step where there is no width."""
    return min(max(PRECISION.divide(part, width), Decimal(0)), Decimal(1)) if width else Decimal(part >= 0)


def blend(plain: Decimal, factor: float, kept: Decimal) -> Decimal:
    """`kept` of a frequency and the rest of it divided; Python's operators round as the process set decimals to."""
    stretched = PRECISION.divide(plain, Decimal(factor))
    return PRECISION.fma(kept, PRECISION.subtract(plain, stretched), stretched)
