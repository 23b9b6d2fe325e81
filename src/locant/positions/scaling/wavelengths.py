"""By wavelength: long ones stretched more than short ones, or all rounded to whole numbers of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal

import torch

from locant.arguments import shown
from locant.errors import RangeError
from locant.positions.frequencies import PRECISION, TWO_PI, inverse_frequencies
from locant.positions.scaling.base import Frequencies, Rounded, Scaling, Unscaled, blend, powers, share

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

    name = "llama3"
    aliases = ("llama_3",)

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    @classmethod
    def of_factor(cls, factor: float, trained: int, dim: int, base: float) -> Llama3:
        """With Llama 3.1's factors of frequency."""
        return cls(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=trained)

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
            kept = share(PRECISION.subtract(rotations, low), PRECISION.subtract(high, low))
            scaled.append(blend(frequency, self.factor, kept))
        return tuple(scaled)

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        trained, low, high = self.original_max_seq_len, self.low_freq_factor, self.high_freq_factor
        plain = 1.0 / powers(dim, base)
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
class Resonance(Scaling):
    r"""Every wavelength rounded to a whole number of tokens: Wang et al. 2024, arXiv 2403.00071.

    .. math:: \theta_i' = \frac{2 \pi}{\mathrm{round}(2 \pi / \theta_i)}

    A pair that came round once within the trained length is then never seen at a new angle. It goes on top of any other
    scaling: ``Resonance(scaling=YaRN(...))``.

    Limits:
        Pairs whose wavelength is longer than the trained length gain nothing.

    Tested against:
        The formula in mpmath on top of plain frequencies and of YaRN.

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

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        return tuple(_resonant(each) for each in self.scaling.frequencies(dim, base, seq_len))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        exact = self.frequencies(dim, base, seq_len)  # float32 cannot tell which wavelength is nearest
        return torch.tensor([*map(float, exact)], dtype=torch.float32, device="cpu")


def _resonant(frequency: Decimal) -> Decimal:
    """That of the nearest wavelength of whole tokens; 0 stays, which is no wave."""
    if not frequency:
        return frequency
    wavelength = PRECISION.divide(TWO_PI, frequency).to_integral_value(context=PRECISION)
    return PRECISION.divide(TWO_PI, max(wavelength, Decimal(1)))
