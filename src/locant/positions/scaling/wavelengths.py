"""By wavelength: long ones stretched more than short ones, or all rounded to whole numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

from locant.arguments import shown
from locant.errors import RangeError
from locant.positions.frequencies import PRECISION, TWO_PI
from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo, Unscaled

__all__ = ["Llama3", "Resonance"]


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
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="llama3",
        aliases=("llama_3",),
        rope_type="llama3",
        extends="Llama 3.1's blend by wavelength, with its low_freq_factor 1 and high_freq_factor 4",
        options={"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    )

    def __post_init__(self) -> None:
        self._settle_reals("factor", "low_freq_factor", "high_freq_factor", above=0)
        self._settle_length()
        if self.high_freq_factor < self.low_freq_factor:
            low, high = (f"{name}_freq_factor={getattr(self, f'{name}_freq_factor')}" for name in ("low", "high"))
            raise RangeError(f"got {high}, expected at least {low}", "low_freq_factor=1, high_freq_factor=4")

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
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


@dataclass(frozen=True, kw_only=True)
class Resonance(Scaling):
    r"""Every wavelength rounded to a whole number of tokens: Wang et al. 2024, arXiv 2403.00071.

    .. math:: \theta_i' = \frac{2 \pi}{\mathrm{round}(2 \pi / \theta_i)}

    A pair that came round once within the trained length is then never seen at a new angle. It goes on top of any other
    scaling: ``Resonance(scaling=YaRN(...))``.

    Limits:
        Pairs whose wavelength is longer than the trained length gain nothing.

    Tested against:
        The formula in mpmath on top of plain frequencies and of YaRN.

    >>> import math
    >>> from locant import Rotary
    >>> (2 * math.pi / Rotary(8, scaling=Resonance()).inv_freq).round(decimals=3).tolist()
    [6.0, 63.0, 628.0, 6283.0]
    """

    scaling: Scaling = field(default_factory=Unscaled)

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, Scaling) or isinstance(self.scaling, Resonance):
            got = f"got {shown(self.scaling)} for Resonance's scaling, expected another one of locant.scaling"
            raise RangeError(got, "Resonance(scaling=YaRN(...))")

    @property
    def effective_attention_factor(self) -> float:
        return self.scaling.effective_attention_factor

    @property
    def length_that_matters(self) -> int | None:
        return self.scaling.length_that_matters

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        exact = self.scaling.frequencies(dim, base, seq_len)  # float32 cannot tell which wavelength is nearest
        return numbers.vector(map(_resonant, exact))


def _resonant(frequency: Decimal) -> Decimal:
    """That of the nearest wavelength of whole tokens; 0 stays, which is no wave."""
    if not frequency:
        return frequency
    wavelength = PRECISION.divide(TWO_PI, frequency).to_integral_value(context=PRECISION)
    return PRECISION.divide(TWO_PI, max(wavelength, Decimal(1)))
