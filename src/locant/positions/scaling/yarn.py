"""NTK by parts, with a temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from locant.arguments import flag
from locant.errors import RangeError
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo

__all__ = ["YaRN"]


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
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="yarn",
        rope_type="yarn",
        extends="fast pairs stay, slow ones are interpolated, with a ramp between (arXiv 2309.00071)",
    )

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

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        low, high = map(numbers.real, self.ramp_ends(dim, base))
        powers = numbers.powers(dim, base)
        share = 1 - numbers.clamp((numbers.vector(range(len(powers))) - low) / (high - low))
        return 1 / (numbers.real(self.factor) * powers) * (1 - share) + 1 / powers * share

    def ramp_ends(self, dim: int, base: float) -> tuple[float, float]:
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


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
