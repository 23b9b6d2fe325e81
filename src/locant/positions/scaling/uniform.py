"""All frequencies divided alike, and the first share of them alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from locant.positions.scaling.base import Arithmetic, Scaling, ScalingInfo

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

    factor: float
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="linear",
        aliases=("interpolation",),
        rope_type="linear",
        extends="every pair is interpolated; without training on it, near tokens blur (arXiv 2306.15595)",
    )

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        return 1 / numbers.powers(dim, base) / numbers.real(self.factor)


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
    info: ClassVar[ScalingInfo] = ScalingInfo(
        name="proportional", rope_type="proportional", options={"rotated_share": 0.25}
    )

    def __post_init__(self) -> None:
        self._settle_reals("factor", above=0)
        self._settle_reals("rotated_share", low=0, high=1)

    def formula(self, numbers: Arithmetic, dim: int, base: float, seq_len: int | None) -> Any:
        pairs = (dim + 1) // 2
        rotated = int(self.rotated_share * pairs)
        zeros = numbers.vector([0] * (pairs - rotated))
        return numbers.concatenate([1 / numbers.powers(dim, base, rotated), zeros]) / numbers.real(self.factor)
