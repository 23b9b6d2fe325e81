"""Ways to stretch rotary frequencies over contexts longer than those a model was trained on.

Every scaling gives its frequencies twice: ``frequencies`` in 50-digit decimals, the formula itself, and ``rounded``
step by step in float32 as `transformers` computes them, for models that were trained with those roundings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import Real, entries, flag, one_of, real, whole
from locant.errors import RangeError, ShapeError
from locant.positions.frequencies import PRECISION, TWO_PI, inverse_frequencies

__all__ = [
    "NTK", "SCALINGS", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "Proportional", "Scaling", "Unscaled", "YaRN",
    "ntk_exponent", "scaling_by_name",
]  # fmt: skip

Frequencies = tuple[Decimal, ...]
Rounded = Float[Tensor, " pairs"]


class Scaling(ABC):
    """How the frequencies of a rotary encoding follow from its base.

    >>> from locant import Rotary
    >>> Rotary(8, scaling=Linear(factor=4.0)).inv_freq
    tensor([0.2500, 0.0250, 0.0025, 0.0003], dtype=torch.float64)
    """

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
        return 1.0 / _powers(dim, base)


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    r"""Position interpolation: every frequency divided by `factor`. Chen et al. 2023, arXiv 2306.15595.

    .. math:: \theta_i' = \theta_i / s

    Limits:
        Neighbours come as close to each other as all else: near distances lose precision, and a model has to be
        fine-tuned.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> Linear(factor=4.0)
    Linear(factor=4.0)
    """

    factor: float

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        factor = Decimal(self.factor)
        return tuple(PRECISION.divide(frequency, factor) for frequency in inverse_frequencies(dim, base))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        return 1.0 / _powers(dim, base) / self.factor


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    r"""NTK-aware scaling (bloc97 2023): a larger base, which stretches slow pairs more than fast ones.

    .. math:: \theta_i' = (\text{base} \cdot s^{d / (d - 2)})^{-2i/d}

    ``form="aware"``, the default, divides the slowest frequency by exactly `factor` s and leaves the fastest alone;
    ``form="base"`` uses ``base * factor``, as Code Llama's larger theta does.

    Limits:
        Pairs between are stretched by less than `factor`, so the longest context that works is shorter than
        `factor` promises.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> NTK(factor=4.0)
    NTK(factor=4.0, form='aware')
    """

    factor: float
    form: str = "aware"

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)
        one_of("NTK's form", self.form, ("aware", "base"), "NTK(factor=4.0)")

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        return inverse_frequencies(dim, _stretched_base(dim, base, Decimal(self.factor), self.form))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        return 1.0 / _powers(dim, base * self.factor ** (ntk_exponent(dim) if self.form == "aware" else 1.0))


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    r"""NTK-aware scaling by as much as the sequence at hand needs (emozilla 2023).

    .. math:: \theta_i' = \left( \text{base} \cdot \left( s \frac{n}{L} - (s - 1) \right)^{d / (d - 2)}
        \right)^{-2i/d}

    n is the length of the sequence, L is `original_max_seq_len`, and s is `factor`. Up to `original_max_seq_len` it is
    plain RoPE, bit for bit. Beyond, the base depends on the length of the whole sequence, which has to be given: see
    `Rotary.for_length`.

    Limits:
        Keys in a cache were rotated for a shorter sequence: `Rotary.rerotate` moves them, or they are wrong.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> DynamicNTK(factor=2.0, original_max_seq_len=4096).length_that_matters
    4096
    """

    factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        self._settle_reals("factor", low=1)
        self._settle_length()

    @property
    def length_that_matters(self) -> int:
        return self.original_max_seq_len

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        length = max(seq_len or 0, self.original_max_seq_len)
        factor = Decimal(self.factor)
        longer = PRECISION.divide(Decimal(length), Decimal(self.original_max_seq_len))
        stretch = PRECISION.fma(factor, longer, PRECISION.subtract(1, factor))
        return inverse_frequencies(dim, _stretched_base(dim, base, stretch, "aware"))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        # The reference takes the length off the position ids, so its arithmetic on it is that of a float32 tensor.
        length = torch.tensor(float(max(seq_len or 0, self.original_max_seq_len)), dtype=torch.float32, device="cpu")
        stretch = (self.factor * length / self.original_max_seq_len) - (self.factor - 1)
        return 1.0 / _powers(dim, base * stretch ** ntk_exponent(dim))


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    r"""NTK by parts, with a temperature: Peng et al. 2023, arXiv 2309.00071.

    .. math:: \theta_i' = (1 - \gamma_i) \frac{\theta_i}{s} + \gamma_i \theta_i, \qquad
        \gamma_i = \text{ramp over the pairs with } \beta_{slow} \text{ to } \beta_{fast} \text{ rotations}

    Pairs that rotate more than `beta_fast` times within the trained length keep their frequency, pairs that rotate
    less than `beta_slow` times are interpolated by `factor`, with a linear ramp over the pairs between.
    The attention factor is ``0.1 ln(factor) + 1`` unless given, or DeepSeek's ratio of two of these.

    Args:
        factor: the new length over the trained one.
        beta_fast, beta_slow: rotations within the trained length, `original_max_seq_len`.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs (gpt-oss does not).
        attention_factor: overrides everything about the temperature.
        mscale, mscale_all_dim: DeepSeek's weights; both must be given, and not be zero, to have an effect.

    Limits:
        Short texts get a little worse, since the factor acts at every length. The attention factor multiplies
        queries and keys, which a kernel that rotates by itself has to know.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> round(YaRN(factor=4.0, original_max_seq_len=4096).effective_attention_factor, 4)
    1.1386
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        self._settle_reals("factor", low=1)
        self._settle_length()
        self._settle_reals("beta_fast", "beta_slow", low=1e-9)  # the trained length is divided by these
        self._settle_reals("mscale", "mscale_all_dim", low=0)
        self._settle_reals("attention_factor", above=0)
        self._settle("truncate", flag("YaRN's truncate", self.truncate))
        if self.beta_fast < self.beta_slow:
            got = f"got beta_fast={self.beta_fast} below beta_slow={self.beta_slow}"
            raise RangeError(got, "beta_fast=32, beta_slow=1")

    @property
    def effective_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _temperature(self.factor, self.mscale) / _temperature(self.factor, self.mscale_all_dim)
        return _temperature(self.factor, 1.0)

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        low, high = (Decimal(end) for end in self._ramp_ends(dim, base))
        scaled: list[Decimal] = []
        for pair, frequency in enumerate(inverse_frequencies(dim, base)):
            ramp = _share(PRECISION.subtract(pair, low), PRECISION.subtract(high, low))
            scaled.append(_blend(frequency, self.factor, PRECISION.subtract(1, ramp)))
        return tuple(scaled)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        low, high = self._ramp_ends(dim, base)
        powers = _powers(dim, base)
        pairs = torch.arange(len(powers), dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _ramp_ends(self, dim: int, base: float) -> tuple[float, float]:
        """First and last pair of the ramp. The reference computes them in float64, so that is their definition."""
        if base == 1:
            got = "got 1 for base, at which all pairs rotate alike and YaRN has no ramp"
            raise RangeError(got, "Linear(factor=...)")
        low, high = (
            dim * math.log(self.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return float(low), float(high + 0.001 if high == low else high)


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    r"""A factor of its own for every pair, short and long sequences apart: Ding et al. 2024, arXiv 2402.13753.

    .. math:: \theta_i' = \theta_i / \lambda_i, \qquad \lambda = \text{short or long factors, by the length}

    Sequences of up to `original_max_seq_len` tokens, the trained length, use `short_factor`, longer ones
    `long_factor`. The length is that of the whole sequence, and has to be given: see `Rotary.for_length`.

    Args:
        short_factor, long_factor: one divisor per pair; kept as tuples.
        factor: the new length over the trained one; decides the attention factor.
        attention_factor: overrides ``sqrt(1 + ln(factor) / ln(original_max_seq_len))``.

    Limits:
        Keys in a cache are wrong after the sequence passed the trained length, unless `Rotary.rerotate` moves
        them. The factors are searched for one model, and mean nothing for another.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> scaling = LongRoPE(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_seq_len=4096, factor=2.0)
    >>> scaling.factors(8, seq_len=5000)
    (2.0, 2.0, 2.0, 2.0)
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_seq_len: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            given = entries(f"LongRoPE's {name}", getattr(self, name), "one number per pair")
            if not given:
                raise RangeError(f"got nothing for LongRoPE's {name}, expected numbers above 0", f"{name}=[1.0] * 32")
            what, remedy = f"an entry of LongRoPE's {name}", "one per pair"
            self._settle(name, tuple(real(what, one, above=0, remedy=remedy) for one in given))
        self._settle_reals("factor", "attention_factor", above=0)
        self._settle_length(2)

    @property
    def length_that_matters(self) -> int:
        return self.original_max_seq_len

    @property
    def effective_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_max_seq_len))

    def factors(self, dim: int, seq_len: int | None) -> Sequence[float]:
        """The divisors for a sequence of this length."""
        chosen = self.long_factor if (seq_len or 0) > self.original_max_seq_len else self.short_factor
        pairs = (dim + 1) // 2
        if len(chosen) != pairs:
            got = f"got {len(chosen)} LongRoPE factors for {pairs} pairs, expected one per pair"
            raise ShapeError(got, f"{pairs} factors, or rotary_dim={2 * len(chosen)}")
        return chosen

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        divisors = map(Decimal, self.factors(dim, seq_len))
        return tuple(map(PRECISION.divide, inverse_frequencies(dim, base), divisors))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        factors = torch.tensor(self.factors(dim, seq_len), dtype=torch.float32, device="cpu")
        return 1.0 / (factors * _powers(dim, base))


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    r"""By wavelength, as in Llama 3.1 (Dubey et al. 2024, arXiv 2407.21783).

    .. math:: \theta_i' = (1 - \gamma_i) \frac{\theta_i}{s} + \gamma_i \theta_i, \qquad
        \gamma_i = \mathrm{clip}\left( \frac{L \, \theta_i / 2 \pi - low}{high - low}, 0, 1 \right)

    Wavelengths shorter than ``original_max_seq_len / high_freq_factor`` stay, those longer than
    ``original_max_seq_len / low_freq_factor`` are stretched by `factor`, and those between are blended. With two equal
    factors there is a step.

    Limits:
        Made for a model that was trained on with it: on a model that was not, it is as good as a guess.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192).factor
    8.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        self._settle_reals("factor", "low_freq_factor", "high_freq_factor", above=0)
        self._settle_length()
        if self.high_freq_factor < self.low_freq_factor:
            low, high = (f"{name}_freq_factor={getattr(self, f'{name}_freq_factor')}" for name in ("low", "high"))
            raise RangeError(f"got {high}, expected at least {low}", "low_freq_factor=1, high_freq_factor=4")

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        low, high = Decimal(self.low_freq_factor), Decimal(self.high_freq_factor)
        scaled: list[Decimal] = []
        for frequency in inverse_frequencies(dim, base):
            rotations = PRECISION.divide(PRECISION.multiply(frequency, self.original_max_seq_len), TWO_PI)
            kept = _share(PRECISION.subtract(rotations, low), PRECISION.subtract(high, low))
            scaled.append(_blend(frequency, self.factor, kept))
        return tuple(scaled)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        trained, low, high = self.original_max_seq_len, self.low_freq_factor, self.high_freq_factor
        plain = 1.0 / _powers(dim, base)
        wavelength = 2 * math.pi / plain
        longest, shortest = trained / low, trained / high
        scaled = torch.where(wavelength > longest, plain / self.factor, plain)
        if high == low:
            return scaled
        kept = (trained / wavelength - low) / (high - low)
        blended = (1 - kept) * scaled / self.factor + kept * scaled
        between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(between, blended, scaled)


@dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    r"""Gemma 4's: only the first share of the pairs is rotated, at frequencies spaced over the whole head.

    .. math:: \theta_i' = \begin{cases} \theta_i / s & i < r \, d / 2 \\ 0 & \text{beyond} \end{cases}

    r is `rotated_share` and s is `factor`. The other pairs have frequency 0: they carry no position, but keep their
    place in the layout.

    Limits:
        A change of `rotated_share` after training changes what every pair means.

    Tested against:
        50-digit arithmetic (mpmath) on the shapes of published models; and where `transformers` has it, its own
        functions, bit for bit.

    >>> Proportional(rotated_share=0.25)
    Proportional(rotated_share=0.25, factor=1.0)
    """

    rotated_share: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)
        self._settle_reals("rotated_share", low=0, high=1)

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        pairs = (dim + 1) // 2
        rotated = int(self.rotated_share * pairs)
        return Linear(factor=self.factor).frequencies(dim, base)[:rotated] + (Decimal(0),) * (pairs - rotated)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        pairs = (dim + 1) // 2
        rotated = int(self.rotated_share * pairs)
        plain = 1.0 / _powers(dim, base, rotated)
        return torch.cat([plain, plain.new_zeros(pairs - rotated)]) / self.factor


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
    "proportional": lambda factor, *_: Proportional(rotated_share=0.25, factor=factor),
}
"""Every scaling by its name, from factor, trained length, dimensions and base."""


def _powers(dim: int, base: float | Float[Tensor, ""], pairs: int | None = None) -> Float[Tensor, " pairs"]:
    """``base ** (2 i / dim)`` with the float32 roundings of `transformers`.

    Takes as many pairs as are needed and no more: torch's power rounds a number differently at the end of a tensor.
    """
    even = torch.arange(0, dim if pairs is None else 2 * pairs, 2, dtype=torch.int64, device="cpu")
    return base ** (even.to(torch.float32) / dim)


def ntk_exponent(dim: int) -> float:
    """The power of the factor by which a base grows for the slowest of ``dim / 2`` pairs to be stretched by it."""
    if dim <= 2:
        raise RangeError(f"got NTK scaling of {dim} dimensions, expected 4 or more", "Linear(factor=...)")
    return dim / (dim - 2)


def _stretched_base(dim: int, base: float, stretch: Decimal, form: str) -> Decimal:
    ntk_exponent(dim)
    exponent = PRECISION.divide(dim, dim - 2) if form == "aware" else Decimal(1)
    return PRECISION.multiply(Decimal(base), PRECISION.power(stretch, exponent))


def _share(part: Decimal, width: Decimal) -> Decimal:
    """One over the other, from 0 to 1; a step where there is no width."""
    return min(max(PRECISION.divide(part, width), Decimal(0)), Decimal(1)) if width else Decimal(part >= 0)


def _blend(plain: Decimal, factor: float, kept: Decimal) -> Decimal:
    """`kept` of a frequency and the rest of it divided; Python's operators round as the process set decimals to."""
    stretched = PRECISION.divide(plain, Decimal(factor))
    return PRECISION.fma(kept, PRECISION.subtract(plain, stretched), stretched)


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
