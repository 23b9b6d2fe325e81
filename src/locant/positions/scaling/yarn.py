"""YaRN with its attention factor, and MrRoPE: divisors that depend on a pair's rotations within the trained length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from locant.arguments import Real, flag, one_of
from locant.errors import RangeError
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo


class _Ramp(Scaling):
    """The base class of scalings with a ramp, from unchanged pairs to pairs that are interpolated by `factor`."""

    factor: float
    original_max_seq_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None

    @property
    def effective_attention_factor(self) -> float:
        return _usual_attention_factor(self.factor) if self.attention_factor is None else self.attention_factor

    def ramp_ends(self, dim: int, base: Real, truncate: bool = True) -> tuple[float, float]:
        """Return the first and last pair of the ramp, in float64 by definition, as in the reference."""
        if base == 1:
            got = f"got 1 for base, at which all pairs rotate equally and {type(self).__name__} has no ramp"
            raise RangeError(got, "Linear(factor=...)")
        low, high = (
            dim * math.log(self.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return float(low), float(high + 0.001 if high == low else high)

    def _check_ramp(self) -> None:
        self._check_length()
        self._check_floats("beta_fast", "beta_slow", low=1e-9)  # the trained length is divided by these
        self._check_floats("attention_factor", above=0)
        if self.beta_fast < self.beta_slow:
            got = f"got beta_fast={self.beta_fast} below beta_slow={self.beta_slow}"
            raise RangeError(got, "beta_fast=32, beta_slow=1")


def _usual_attention_factor(factor: Real, weight: Real = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class YaRN(_Ramp):
    r"""NTK by parts, with a temperature: Peng et al. 2023, arXiv 2309.00071.

    .. math:: \theta_i' = (1 - \gamma_i) \frac{\theta_i}{s} + \gamma_i \theta_i, \qquad
        \gamma_i = \text{ramp over the pairs with } \beta_{slow} \text{ to } \beta_{fast} \text{ rotations}

    Pairs that rotate more than `beta_fast` times within the trained length keep their frequency. Pairs that rotate less
    than `beta_slow` times are interpolated by `factor`. Between them is a linear ramp.

    Args:
        factor: the new length divided by the trained length.
        original_max_seq_len: the trained length.
        truncate: whether to round the ends of the ramp outwards to whole pairs (gpt-oss does not).
        attention_factor: the factor on cos and sin. Default: ``0.1 ln(factor) + 1``, or DeepSeek's ratio of two such
            terms.
        mscale, mscale_all_dim: the weights in that ratio. They have an effect only if both are given and nonzero.

    Limits:
        Short texts get slightly worse, because the scaling applies at every length. A kernel with its own rotation
        needs the attention factor.

    Tested against:
        mpmath at 50 digits, on the shapes of published models, and `transformers`' own function, bit for bit.

    >>> round(YaRN(factor=4.0, original_max_seq_len=4096).effective_attention_factor, 4)
    1.1386
    """

    factor: Real = field(kw_only=False)
    original_max_seq_len: int
    beta_fast: Real = 32.0
    beta_slow: Real = 1.0
    truncate: bool = True
    attention_factor: Real | None = None
    mscale: Real | None = None
    mscale_all_dim: Real | None = None
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="yarn",
        rope_type="yarn",
        extends="fast pairs stay, slow ones are interpolated, with a ramp between (arXiv 2309.00071)",
    )

    def __post_init__(self) -> None:
        self._check_floats("factor", low=1)
        self._check_ramp()
        self._check_floats("mscale", "mscale_all_dim", low=0)
        self._set("truncate", flag("YaRN's truncate", self.truncate))

    @property
    def effective_attention_factor(self) -> float:
        if self.attention_factor is None and self.mscale and self.mscale_all_dim:
            weights = (self.mscale, self.mscale_all_dim)
            numerator, denominator = (_usual_attention_factor(self.factor, weight) for weight in weights)
            return numerator / denominator
        return super().effective_attention_factor

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        low, high = map(numbers.real, self.ramp_ends(dim, base, self.truncate))
        powers = numbers.powers(dim, base)
        share = 1 - ((numbers.vector(range(len(powers))) - low) / (high - low)).clip(0, 1)
        return 1 / (numbers.real(self.factor) * powers) * (1 - share) + 1 / powers * share


@dataclass(frozen=True, kw_only=True)
class MrRoPE(_Ramp):
    r"""Pairs as the digits of a position, with a radix that grows more for slower pairs (arXiv 2601.22181).

    .. math:: \theta_i' = \theta_i \, s^{-e_i}, \qquad e_i = \frac{n_i (n_i + 1)}{N (N + 1)}, \qquad
        n_i = \mathrm{clip}(i - l, 0, N), \quad N = h - l

    From Tian et al. 2026. l and h are the ends of `YaRN`'s ramp: pairs up to l rotate more than `beta_fast` times
    within the trained length and keep their frequency. Pair h and later pairs rotate less than `beta_slow` times and
    are interpolated by `factor`, s. Between them, the n-th radix is multiplied by s to the power of 2n / (N(N + 1))
    (MrRoPE-Pro). With ``form="uniform"`` all radices are multiplied by the same number, so e = n / N (MrRoPE-Uni).

    Args:
        factor: the new length divided by the trained length.
        original_max_seq_len: the trained length.
        form: ``"progressive"`` or ``"uniform"``.
        attention_factor: the factor on cos and sin. Default: ``0.1 ln(factor) + 1``.

    Limits:
        The paper measured only models without further training. No published configuration uses it.

    Tested against:
        The paper's products of radices, pair by pair, in mpmath at 50 digits, on the shapes of published models.

    >>> from locant import Rotary
    >>> plain, scaled = Rotary(16), Rotary(16, scaling=MrRoPE(factor=8.0, original_max_seq_len=2048))
    >>> (plain.inv_freq / scaled.inv_freq).round(decimals=2).tolist()
    [1.0, 1.0, 1.0, 1.23, 1.87, 3.48, 8.0, 8.0]
    """

    factor: Real = field(kw_only=False)
    original_max_seq_len: int
    beta_fast: Real = 32.0
    beta_slow: Real = 1.0
    form: str = "progressive"
    attention_factor: Real | None = None
    info: ClassVar[ScalingInfo] = ScalingInfo(name="mrrope", aliases=("mixed_radix", "mrrope_pro"))

    def __post_init__(self) -> None:
        self._check_floats("factor", above=0)
        self._check_ramp()
        one_of("MrRoPE's form", self.form, ("progressive", "uniform"), "MrRoPE(factor=4.0, original_max_seq_len=4096)")

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        low, high = map(int, self.ramp_ends(dim, base))
        steps = max(high - low, 1)
        powers = numbers.powers(dim, base)
        digits = numbers.vector(min(max(pair - low, 0), steps) for pair in range(len(powers)))
        progressive = self.form == "progressive"
        exponents = digits * (digits + 1) / (steps * (steps + 1)) if progressive else digits / steps
        return 1 / powers / numbers.real(self.factor) ** exponents
