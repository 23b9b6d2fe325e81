"""KERPLE: kernelized relative positions. Chi et al. 2022, https://arxiv.org/abs/2205.09921."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import one_of
from locant.positions.base import EncodingInfo, PositionEncoding, ScoreMod, bias_dtype
from locant.positions.distance import distances
from locant.positions.heads import Heads
from locant.positions.pairs import step_mod
from locant.positions.positions import Positions

__all__ = ["Kerple", "KerpleKind"]

KerpleKind = Literal["log", "power"]

SMALLEST = 1e-2
"""Both parameters act as if they were never smaller, as in the authors' code."""

LARGEST_POWER = 2.0
"""Beyond this exponent the kernel is no longer conditionally positive definite (the paper's theorem)."""

INITIAL = {"log": (2.0, 1.0), "power": (1.0, 2.0)}
"""The authors draw r1 and r2 uniformly from 0 to these."""


class Kerple(PositionEncoding):
    """Lets every head learn how fast distance fades: ``-r1 log(1 + r2 |i - j|)``, or ``-r1 |i - j|^r2``.

    Two parameters per head, no maximal length; symmetric where attention is not causal. `r1` and `r2` are stored as
    they are used; where training pushes one below 0.01 (or an exponent above 2) it acts as that bound, and its
    gradient still passes, so that it can come back.

    The logarithmic form is computed in float32. The power is computed in float64 and rounded: float32 would lose
    the difference between neighbours a hundred thousand tokens away.

    Args:
        num_heads: the number of query heads.
        kind: ``"log"``, the paper's best, or ``"power"`` (with r2 = 1 ALiBi with a learned slope).
        head_slice: the heads of this rank under tensor parallelism; default: all.

    >>> q = k = torch.zeros(1, 4, 6, 16)
    >>> Kerple(4).bias(q, k, Positions.arange(6)).shape
    torch.Size([1, 4, 6, 6])
    """

    info = EncodingInfo(
        name="kerple",
        aliases=("kerple_log",),
        kind="relative",
        parameters="2 x num_heads",
        cost_of_tokens="nothing",
        cost_of_pairs="one logarithm, two multiplications and an addition",
        extrapolation="good: far tokens fade as fast as each head learned",
        used_by="its paper's models",
        paper="Chi 2022, arXiv 2205.09921",
    )

    by_distance = True

    def __init__(self, num_heads: int, kind: KerpleKind = "log", *, head_slice: slice | None = None) -> None:
        super().__init__()
        one_of("kind", kind, tuple(INITIAL), "kind='log'")
        self.kind: KerpleKind = kind
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.r1 = nn.Parameter(torch.empty(len(self.heads)))
        self.r2 = nn.Parameter(torch.empty(len(self.heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter, largest in zip((self.r1, self.r2), INITIAL[self.kind], strict=True):
            self.heads.fill(parameter, parameter.new_empty(self.num_heads).uniform_(SMALLEST, largest))

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"]:
        """The kernel of every distance, float32 at least."""
        self.heads.require(self, q)
        steps = distances(q, k, positions, k_positions, "Kerple")
        r1, r2 = self._coefficients(q)
        return self._kernel(steps[:, None], r1[:, None, None], r2[:, None, None]).to(bias_dtype(q))

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod:
        self.heads.require(self, q)
        steps = step_mod(q, k, positions, k_positions, "Kerple")
        r1, r2 = self._coefficients(q)
        dtype = bias_dtype(q)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + self._kernel(steps(batch, query, key), r1[head], r2[head]).to(dtype)

        return add

    def _coefficients(self, q: Tensor) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        dtype = torch.float64 if self.kind == "power" else bias_dtype(q)
        largest = LARGEST_POWER if self.kind == "power" else None
        return _held(self.r1, None).to(dtype), _held(self.r2, largest).to(dtype)

    def _kernel(self, steps: Int[Tensor, "*#pairs"], r1: Tensor, r2: Tensor) -> Float[Tensor, "*pairs"]:
        distance = steps.abs().to(r1.dtype)
        if self.kind == "log":
            return -r1 * torch.log1p(r2 * distance)
        # Written with exp and log because they round the same wherever an entry stands in memory; pow does not.
        power = torch.exp(r2 * torch.log(distance.clamp(min=1)))
        return -r1 * torch.where(distance == 0, 0.0, power)

    def extra_repr(self) -> str:
        return f"{self.heads}, kind={self.kind!r}"


def _held(parameter: Tensor, largest: float | None) -> Tensor:
    """The parameter within its bounds, with a gradient as if it had none."""
    return parameter + (parameter.clamp(SMALLEST, largest) - parameter).detach()
