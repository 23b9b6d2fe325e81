"""Scalings of models that make pictures and video: longer videos, and frequencies that follow the diffusion.

A scaling is frozen, so one that follows the diffusion has the time as a field, and ``scaling.at(time)`` is another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from locant.arguments import MAX_INT32, Real, whole
from locant.errors import RangeError
from locant.positions.scaling.base import Arithmetic, Scaling
from locant.positions.scaling.ntk import ntk_exponent


@dataclass(frozen=True, kw_only=True)
class RIFLEx(Scaling):
    r"""The one pair whose period a longer video would repeat is slowed down: Zhao et al. 2025, arXiv 2502.15894.

    .. math:: \theta_k' = 0.9 \cdot \frac{2 \pi}{L}

    For the time axis alone: `locant.engines.diffusers` takes a scaling for each axis.

    Args:
        num_frames: of the new video, L, as the model counts them (latent frames).
        pair: which one, from 0, so that it is k - 1 of the paper; see `pair_that_repeats`.
        share: how much of its period the video may fill; the paper's 0.9.

    Limits:
        Good for twice the trained length without training and for three times with some, by its authors.

    Tested against:
        The authors' formula in mpmath at 50 digits, and their choice of pairs for published models.

    >>> RIFLEx(num_frames=66, pair=RIFLEx.pair_that_repeats(50, 16, 256.0))
    RIFLEx(num_frames=66, pair=3, share=0.9)
    """

    num_frames: int
    pair: int
    share: float = 0.9

    def __post_init__(self) -> None:
        self._settle("num_frames", whole("RIFLEx's num_frames", self.num_frames, 1, MAX_INT32, remedy="num_frames=66"))
        self._settle("pair", whole("RIFLEx's pair", self.pair, 0, remedy="pair=3, the first being 0"))
        self._settle_reals("share", above=0, high=1)

    @staticmethod
    def pair_that_repeats(after: Real, dim: int, base: Real) -> int:
        """The pair whose period is nearest to the frame `after` which the videos of a model repeat themselves."""
        return min(range(dim // 2), key=lambda i: abs(round(2 * math.pi * base ** (2 * i / dim)) - after))

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        plain = 1 / numbers.powers(dim, base)
        if self.pair >= len(plain):
            raise RangeError(f"got pair={self.pair} of RIFLEx for {len(plain)} pairs", f"pair=0 to {len(plain) - 1}")
        slower = numbers.vector([numbers.real(self.share) * numbers.two_pi / self.num_frames])
        return numbers.concatenate([plain[: self.pair], slower, plain[self.pair + 1 :]])


@dataclass(frozen=True, kw_only=True)
class DyPE(Scaling):
    r"""NTK-aware scaling that fades as the picture emerges: Issachar et al. 2025, arXiv 2510.20766 (DY-NTK).

    .. math:: \theta_i' = \left( \text{base} \cdot s^{\kappa d / (d - 2)} \right)^{-2i/d}, \qquad
        \kappa = \lambda_s \, t^{\lambda_t}

    Large shapes settle first, and need slow pairs that see the whole picture; at the end the frequencies are those of
    training.

    Args:
        factor: patches per side over the trained number, s.
        time: t, from 1 (noise) to 0; see `at`.
        strength, exponent: :math:`\lambda_s` and :math:`\lambda_t`.

    Limits:
        The authors' other form blends by YaRN's bands, and multiplies cosines of rows and columns but not of the first
        axis, so that it is no rotation: not here.

    Tested against:
        The authors' formula in mpmath at 50 digits, and in NumPy.

    >>> scaling = DyPE(factor=4.0)
    >>> scaling.at(0.5)
    DyPE(factor=4.0, time=0.5, strength=2.0, exponent=2.0)
    """

    factor: Real = field(kw_only=False)
    time: float = 1.0
    strength: float = 2.0
    exponent: float = 2.0

    def __post_init__(self) -> None:
        self._settle_reals("factor", low=1)
        self._settle_reals("time", low=0, high=1)
        self._settle_reals("strength", "exponent", low=0, high=4)

    def at(self, time: Real) -> DyPE:
        """This scaling at another time of the diffusion, from 1, pure noise, to 0."""
        return replace(self, time=time)

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        exponent = numbers.real(self.strength * self.time**self.exponent) * ntk_exponent(dim, numbers.real)
        return 1 / numbers.powers(dim, numbers.real(base) * numbers.real(self.factor) ** exponent)
