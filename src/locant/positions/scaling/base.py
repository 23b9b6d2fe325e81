"""`Scaling`, the base class, `Unscaled`, and the two arithmetics in which a formula is evaluated."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import Real, real, whole
from locant.deprecation import Renamed, adopt_old_names
from locant.positions.frequencies import PRECISION, TWO_PI, inverse_frequencies

Frequencies = tuple[Decimal, ...]

LENGTH = "original_max_seq_len"
"""The name of the field with the trained length."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The operations of a formula: on arrays of decimals or on tensors of float32, both with Python's operators.

    Args:
        real: converts a number that is not an integer.
        number: converts a number that the reference implementation stores in a tensor.
        vector: makes an array of numbers.
        powers: returns ``base ** (2 i / dim)`` for every pair i. The arguments are dim and base. A third argument
            limits the pairs.
        two_pi, log, exp, where, concatenate: the number 2 pi, and the functions of arrays with these names.
    """

    real: Callable[[Any], Any]
    number: Callable[[Any], Any]
    vector: Callable[[Iterable[Any]], Any]
    powers: Callable[..., Any]
    two_pi: Any
    log: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    concatenate: Callable[[list[Any]], Any]


def _float32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _rounded_powers(dim: int, base: Real | Tensor, pairs: int | None = None) -> Tensor:
    """Return only the powers of the needed pairs, because torch rounds powers at the end of an array differently."""
    even = torch.arange(0, dim if pairs is None else 2 * pairs, 2, dtype=torch.int64, device="cpu")
    return base ** (even.to(torch.float32) / dim)


DECIMALS = Arithmetic(
    two_pi=TWO_PI,
    real=Decimal,
    number=Decimal,
    vector=lambda values: np.array([*map(Decimal, values)], dtype=object),
    log=Decimal.ln,
    exp=np.exp,
    where=np.where,
    concatenate=np.concatenate,
    powers=lambda dim, base, pairs=None: 1 / np.array(inverse_frequencies(dim, base)[:pairs], dtype=object),
)
"""Decimals of 50 digits. `Scaling.frequencies` sets this precision, independent of the process's precision."""

FLOAT32 = Arithmetic(
    two_pi=2 * math.pi,
    real=float,
    number=lambda value: _float32(float(value)),
    vector=lambda values: _float32([*map(float, values)]),
    log=torch.log,
    exp=torch.exp,
    where=torch.where,
    concatenate=torch.cat,
    powers=_rounded_powers,
)
"""float32, rounded after every step, with Python's floats where `transformers` uses them."""


@dataclass(frozen=True, kw_only=True)
class ScalingInfo:
    """The facts about a scaling for users who choose one by name.

    Args:
        name: its name on command lines, or ``""`` if they do not accept it.
        aliases: other names for it.
        rope_type: its name in Hugging Face configurations, or ``""`` if they cannot express it.
        extends: a note for users who extend a model's context with it, or ``""`` if it is not offered for that.
        options: fields other than the factor and the trained length that are set when it is chosen by name.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    rope_type: str = ""
    extends: str = ""
    options: Mapping[str, Real] = field(default_factory=dict[str, float])


class Scaling:
    """The base class of scalings, which compute the frequencies of a rotary encoding from its base.

    A subclass is a frozen dataclass that overrides `formula`.

    >>> from locant import Rotary
    >>> from locant.scaling import Linear
    >>> Rotary(8, scaling=Linear(factor=4.0)).inv_freq
    tensor([0.2500, 0.0250, 0.0025, 0.0003], dtype=torch.float64)
    """

    info: ClassVar[ScalingInfo] = ScalingInfo()

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        """Return the radians per position of the ``dim / 2`` pairs, in the order of operations of `transformers`."""
        raise NotImplementedError

    def frequencies(self, dim: int, base: Real, seq_len: int | None = None) -> Frequencies:
        """Return the radians per position of each of the ``dim / 2`` pairs, in decimals of 50 digits."""
        with decimal.localcontext(PRECISION):
            return tuple(self.formula(DECIMALS, dim, base, seq_len))

    def rounded(self, dim: int, base: Real, seq_len: int | None = None) -> Float[Tensor, " pairs"]:
        """Return the frequencies in float32, rounded after every step."""
        return self.formula(FLOAT32, dim, base, seq_len)

    @property
    def effective_attention_factor(self) -> float:
        """The factor on cos and sin. It multiplies both q and k, so scores grow by its square."""
        return 1.0

    @property
    def length_threshold(self) -> int | None:
        """The length above which the frequencies depend on the sequence length, or ``None`` if they never do."""
        return None

    length_that_matters = Renamed("length_threshold")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        adopt_old_names(cls)

    @classmethod
    def by_factor(cls, factor: Real, trained: int, dim: int, base: Real) -> Scaling:
        """Return the usual scaling of this class for `factor` times the trained length of a rotary encoding."""
        values: dict[str, Any] = {"factor": factor, **cls.info.options}
        if LENGTH in cls.__dataclass_fields__:  # type: ignore[attr-defined]  # all are dataclasses
            values[LENGTH] = trained
        return cls(**values)

    def _set(self, name: str, value: object) -> None:
        """Set a field of this frozen dataclass during construction."""
        object.__setattr__(self, name, value)

    def _check_floats(self, *names: str, **ends: Real) -> None:
        """Check that these fields are numbers within `ends`, and convert them.

        A field with the default ``None`` may be ``None``.
        """
        kind = type(self).__name__
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]  # all are dataclasses
        remedy = f"{kind}({', '.join(f'{name}=...' for name in defaults)})"
        for name in names:
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                self._set(name, real(f"{kind}'s {name}", value, remedy=remedy, **ends))

    def _check_length(self, low: int = 1) -> None:
        """Check the trained length."""
        value = getattr(self, LENGTH)
        self._set(LENGTH, whole(f"{type(self).__name__}'s {LENGTH}", value, low, remedy="pass the trained length"))


@dataclass(frozen=True, kw_only=True)
class Unscaled(Scaling):
    """The plain frequencies of Su et al. 2021: ``base ** (-2 i / dim)``."""

    info: ClassVar[ScalingInfo] = ScalingInfo(rope_type="default")

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        return 1 / numbers.powers(dim, base)
