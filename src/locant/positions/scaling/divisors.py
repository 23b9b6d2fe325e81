"""Scalings that divide the frequency of each pair by one number, a number per pair, or a function of the wavelength."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

from locant.arguments import Real, entries, real, short_repr
from locant.errors import RangeError, ShapeError
from locant.positions.frequencies import PRECISION, TWO_PI, inverse_frequencies
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo, Unscaled
from locant.positions.scaling.yarn import YaRN


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    r"""Position interpolation: every frequency divided by `factor`. Chen et al. 2023, arXiv 2306.15595.

    .. math:: \theta_i' = \theta_i / s

    Limits:
        Near distances also lose precision, and a model needs fine-tuning.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> Linear(factor=4.0)
    Linear(factor=4.0)
    """

    factor: Real = field(kw_only=False)
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="linear",
        aliases=("interpolation",),
        rope_type="linear",
        extends="every pair is interpolated; without fine-tuning, near tokens blur (arXiv 2306.15595)",
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", above=0)

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        return 1 / numbers.powers(dim, base) / numbers.real(self.factor)


@dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    r"""Gemma 4's scaling: only the first pairs are rotated, at frequencies spaced over the whole head.

    .. math:: \theta_i' = \begin{cases} \theta_i / s & i < r \, d / 2 \\ 0 & \text{beyond} \end{cases}

    r is `rotated_share`, a fraction of the pairs, and s is `factor`. The other pairs are not rotated, but keep their
    place in the layout.

    Limits:
        Changing `rotated_share` after training changes the meaning of every pair.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> Proportional(rotated_share=0.25)
    Proportional(rotated_share=0.25, factor=1.0)
    """

    rotated_share: Real = 1.0
    factor: Real = 1.0
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="proportional", rope_type="proportional", options={"rotated_share": 0.25}
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", above=0)
        self._check_floats("rotated_share", low=0, high=1)

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        pairs = (dim + 1) // 2
        rotated = int(self.rotated_share * pairs)
        zeros = numbers.vector([0] * (pairs - rotated))
        return numbers.concatenate([1 / numbers.powers(dim, base, rotated), zeros]) / numbers.real(self.factor)


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    r"""A divisor for every pair, from one of two lists, for short and for long sequences.

    Ding et al. 2024, arXiv 2402.13753.

    .. math:: \theta_i' = \theta_i / \lambda_i, \qquad \lambda = \text{short or long factors, by the length}

    Args:
        short_factor, long_factor: one divisor per pair, for sequences up to the trained length and for longer ones.
            The length of the whole sequence decides. `Rotary.for_length` sets it.
        original_max_seq_len: the trained length.
        factor: the new length divided by the trained length. It determines the attention factor.
        attention_factor: overrides ``sqrt(1 + ln(factor) / ln(original_max_seq_len))``.

    Limits:
        Once the sequence exceeds the trained length, cached keys are wrong until `Rotary.rerotate` rotates them to the
        new angles. The factors come from a search for one model and do not suit another.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> scaling = LongRoPE(short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_seq_len=4096, factor=2.0)
    >>> scaling.factors(8, seq_len=5000)
    (2.0, 2.0, 2.0, 2.0)
    """

    short_factor: Sequence[Real]
    long_factor: Sequence[Real]
    original_max_seq_len: int
    factor: Real = field(kw_only=False)
    attention_factor: Real | None = None
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="longrope",
        aliases=("long_rope",),
        rope_type="longrope",
        extends="the long factors are those of YaRN's ramp and the short ones are 1; the paper searches them on data "
        "(arXiv 2402.13753), and so does --search TEXT",
    )

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            divisors = entries(f"LongRoPE's {name}", getattr(self, name), "pass one number per pair")
            if not divisors:
                raise RangeError(f"got nothing for LongRoPE's {name}, expected numbers above 0", f"{name}=[1.0] * 32")
            entry = f"an entry of LongRoPE's {name}"
            self._set(name, tuple(real(entry, each, above=0, remedy="pass one per pair") for each in divisors))
        self._check_floats("factor", "attention_factor", above=0)
        self._check_length(2)

    @property
    def length_threshold(self) -> int:
        return self.original_max_seq_len

    @property
    def effective_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_max_seq_len))

    def factors(self, dim: int, seq_len: int | None) -> Sequence[Real]:
        """Return the divisors for a sequence of this length."""
        divisors = self.long_factor if (seq_len or 0) > self.original_max_seq_len else self.short_factor
        pairs = (dim + 1) // 2
        if len(divisors) != pairs:
            got = f"got {len(divisors)} LongRoPE factors for {pairs} pairs, expected one per pair"
            raise ShapeError(got, f"pass {pairs} factors, or rotary_dim={2 * len(divisors)}")
        return divisors

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        return 1 / (numbers.vector(self.factors(dim, seq_len)) * numbers.powers(dim, base))

    @classmethod
    def by_factor(cls, factor: Real, trained: int, dim: int, base: Real) -> LongRoPE:
        """Return a scaling with the long factors of YaRN's ramp. The paper searches its factors on data."""
        ramp = YaRN(factor=factor, original_max_seq_len=trained).frequencies(dim, base)
        long = tuple(float(plain / each) for plain, each in zip(inverse_frequencies(dim, base), ramp, strict=True))
        return cls(short_factor=(1.0,) * (dim // 2), long_factor=long, original_max_seq_len=trained, factor=factor)


@dataclass(frozen=True, kw_only=True)
class Resonance(Scaling):
    r"""Every wavelength rounded to a whole number of tokens. Wang et al. 2024, arXiv 2403.00071.

    .. math:: \theta_i' = \frac{2 \pi}{\mathrm{round}(2 \pi / \theta_i)}

    If a pair completes a turn within the trained length, it then has only angles that occurred in training. It combines
    with any other scaling: ``Resonance(scaling=YaRN(...))``.

    Limits:
        It does not help pairs with a wavelength longer than the trained length.

    Tested against:
        The formula in mpmath, with plain frequencies and with YaRN.

    >>> import math
    >>> from locant import Rotary
    >>> (2 * math.pi / Rotary(8, scaling=Resonance()).inv_freq).round(decimals=3).tolist()
    [6.0, 63.0, 628.0, 6283.0]
    """

    scaling: Scaling = field(default_factory=Unscaled)

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, Scaling) or isinstance(self.scaling, Resonance):
            got = f"got {short_repr(self.scaling)} for Resonance's scaling, expected another scaling of locant.scaling"
            raise RangeError(got, "Resonance(scaling=YaRN(...))")

    @property
    def effective_attention_factor(self) -> float:
        return self.scaling.effective_attention_factor

    @property
    def length_threshold(self) -> int | None:
        return self.scaling.length_threshold

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        exact = self.scaling.frequencies(dim, base, seq_len)  # float32 cannot decide which wavelength is nearest
        return numbers.vector(_resonant(frequency) if frequency else frequency for frequency in exact)


def _resonant(frequency: Decimal) -> Decimal:
    """Return the frequency of the nearest whole wavelength."""
    wavelength = PRECISION.divide(TWO_PI, frequency).to_integral_value(context=PRECISION)
    return PRECISION.divide(TWO_PI, max(wavelength, Decimal(1)))


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    r"""Scaling by wavelength, as in Llama 3.1 (Dubey et al. 2024, arXiv 2407.21783).

    .. math:: \theta_i' = (1 - \gamma_i) \frac{\theta_i}{s} + \gamma_i \theta_i, \qquad
        \gamma_i = \mathrm{clip}\left( \frac{L \, \theta_i / 2 \pi - low}{high - low}, 0, 1 \right)

    Wavelengths shorter than ``original_max_seq_len / high_freq_factor`` do not change. Wavelengths longer than
    ``original_max_seq_len / low_freq_factor`` are stretched by `factor`. The rest are blended. If both factors are
    equal, the blend is a step.

    Limits:
        It was designed for a model with further training. Without that training its values are a guess.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192).factor
    8.0
    """

    factor: Real = field(kw_only=False)
    low_freq_factor: Real
    high_freq_factor: Real
    original_max_seq_len: int
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="llama3",
        aliases=("llama_3",),
        rope_type="llama3",
        extends="Llama 3.1's blend by wavelength, with its low_freq_factor 1 and high_freq_factor 4",
        options={"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", "low_freq_factor", "high_freq_factor", above=0)
        self._check_length()
        if self.high_freq_factor < self.low_freq_factor:
            low, high = (f"{name}_freq_factor={getattr(self, f'{name}_freq_factor')}" for name in ("low", "high"))
            raise RangeError(f"got {high}, expected at least {low}", "low_freq_factor=1, high_freq_factor=4")

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        trained, factor = self.original_max_seq_len, numbers.real(self.factor)
        low, high = numbers.real(self.low_freq_factor), numbers.real(self.high_freq_factor)
        plain = 1 / numbers.powers(dim, base)
        wavelength = numbers.two_pi / plain
        longest, shortest = trained / low, trained / high
        scaled = numbers.where(wavelength > longest, plain / factor, plain)
        if high == low:
            return scaled
        share = (trained / wavelength - low) / (high - low)
        blended = (1 - share) * scaled / factor + share * scaled
        return numbers.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)
