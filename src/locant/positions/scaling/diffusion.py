"""Scalings of image and video models: for longer videos, and for frequencies that depend on the diffusion time.

A scaling is frozen. So a scaling that depends on the diffusion time has a field for the time, and ``scaling.at(time)``
returns a new scaling.
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
    r"""A slower frequency for the one pair whose period makes longer videos repeat. Zhao et al. 2025, arXiv 2502.15894.

    .. math:: \theta_k' = 0.9 \cdot \frac{2 \pi}{L}

    Use it only for the time axis. `locant.engines.diffusers` takes a scaling for each axis.

    Args:
        num_frames: the number of frames of the new video, L, as the model counts them (latent frames).
        pair: the index of the pair, from 0, which is k - 1 in the paper. See `pair_that_repeats`.
        share: the fraction of the period that the video may fill, 0.9 in the paper.

    Limits:
        Its authors report twice the trained length without training, and three times with some training.

    Tested against:
        The authors' formula in mpmath at 50 digits, and their choice of pairs for published models.

    >>> RIFLEx(num_frames=66, pair=RIFLEx.pair_that_repeats(50, 16, 256.0))
    RIFLEx(num_frames=66, pair=3, share=0.9)
    """

    num_frames: int
    pair: int
    share: Real = 0.9

    def __post_init__(self) -> None:
        self._set("num_frames", whole("RIFLEx's num_frames", self.num_frames, 1, MAX_INT32, remedy="num_frames=66"))
        self._set("pair", whole("RIFLEx's pair", self.pair, 0, remedy="use pair=3; the first is 0"))
        self._check_floats("share", above=0, high=1)

    @staticmethod
    def pair_that_repeats(after: Real, dim: int, base: Real) -> int:
        """Return the pair whose period is nearest to `after`, the frame at which a model's videos begin to repeat."""
        return min(range(dim // 2), key=lambda i: abs(round(2 * math.pi * base ** (2 * i / dim)) - after))

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        plain = 1 / numbers.powers(dim, base)
        if self.pair >= len(plain):
            raise RangeError(f"got pair={self.pair} of RIFLEx for {len(plain)} pairs", f"use 0 to {len(plain) - 1}")
        slower = numbers.vector([numbers.real(self.share) * numbers.two_pi / self.num_frames])
        return numbers.concatenate([plain[: self.pair], slower, plain[self.pair + 1 :]])


@dataclass(frozen=True, kw_only=True)
class DyPE(Scaling):
    r"""NTK-aware scaling that fades during the diffusion: Issachar et al. 2025, arXiv 2510.20766 (DY-NTK).

    .. math:: \theta_i' = \left( \text{base} \cdot s^{\kappa d / (d - 2)} \right)^{-2i/d}, \qquad
        \kappa = \lambda_s \, t^{\lambda_t}

    Large shapes form first and need slow pairs that span the whole image. At the end the frequencies are the trained
    ones.

    Args:
        factor: s, the number of patches per side divided by the trained number.
        time: t, from 1 (noise) to 0. See `at`.
        strength, exponent: :math:`\lambda_s` and :math:`\lambda_t`.

    Limits:
        The authors' other form, which blends by YaRN's bands, is not supported. It multiplies the cosines of rows and
        columns but not of the first axis, so it is not a rotation.

    Tested against:
        The authors' formula in mpmath at 50 digits, and in NumPy.

    >>> scaling = DyPE(factor=4.0)
    >>> scaling.at(0.5)
    DyPE(factor=4.0, time=0.5, strength=2.0, exponent=2.0)
    """

    factor: Real = field(kw_only=False)
    time: Real = 1.0
    strength: Real = 2.0
    exponent: Real = 2.0

    def __post_init__(self) -> None:
        self._check_floats("factor", low=1)
        self._check_floats("time", low=0, high=1)
        self._check_floats("strength", "exponent", low=0, high=4)

    def at(self, time: Real) -> DyPE:
        """Return this scaling at another diffusion time, from 1, pure noise, to 0."""
        return replace(self, time=time)

    def formula(self, numbers: Arithmetic, dim: int, base: Real, seq_len: int | None) -> Any:
        exponent = numbers.real(self.strength * self.time**self.exponent) * ntk_exponent(dim, numbers.real)
        return 1 / numbers.powers(dim, numbers.real(base) * numbers.real(self.factor) ** exponent)
