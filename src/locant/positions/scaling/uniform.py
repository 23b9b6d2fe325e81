"""All frequencies divided alike, and the first share of them alone."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import torch

from locant.positions.frequencies import PRECISION, inverse_frequencies
from locant.positions.scaling.base import Frequencies, Rounded, Scaling, powers

__all__ = ["Linear", "Proportional"]


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

    name = "linear"
    aliases = ("interpolation",)

    factor: float

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)

    def frequencies(self, dim: int, base: float, seq_len: int | None = None) -> Frequencies:
        factor = Decimal(self.factor)
        return tuple(PRECISION.divide(frequency, factor) for frequency in inverse_frequencies(dim, base))

    def rounded(self, dim: int, base: float, seq_len: int | None = None) -> Rounded:
        return 1.0 / powers(dim, base) / self.factor


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

    name = "proportional"

    rotated_share: float = 1.0
    factor: float = 1.0

    @classmethod
    def of_factor(cls, factor: float, trained: int, dim: int, base: float) -> Proportional:
        """With Gemma 4's share."""
        return cls(rotated_share=0.25, factor=factor)

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
        plain = 1.0 / powers(dim, base, rotated)
        return torch.cat([plain, plain.new_zeros(pairs - rotated)]) / self.factor
