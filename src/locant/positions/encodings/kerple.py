"""KERPLE: kernelized relative positions. Chi et al. 2022, https://arxiv.org/abs/2205.09921."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from locant.arguments import Real, one_of
from locant.positions.base import EncodingInfo
from locant.positions.distance_bias import DistanceBias
from locant.positions.distances import bias_dtype

KerpleKind = Literal["log", "power"]

MIN_PARAMETER = 1e-2  # the minimum of both parameters, as in the authors' code
MAX_POWER = 2.0  # beyond it the kernel is no longer conditionally positive definite (the paper's theorem)
INITIAL = {"log": (2.0, 1.0), "power": (1.0, 2.0)}
"""The upper ends of the authors' initial distributions of r1 and r2, which are uniform from 0."""


class Kerple(DistanceBias):
    r"""Lets every head learn how fast attention fades with distance.

    .. math:: b_{ij} = -r_1 \log(1 + r_2 \, |i - j|) \qquad \text{or} \qquad b_{ij} = -r_1 \, |i - j|^{r_2}

    If training pushes a parameter below 0.01 (or an exponent above 2), the bias uses that bound. The gradient still
    passes, so the parameter can return. The logarithmic form is computed in float32. The power is computed in float64,
    because float32 would lose the difference between neighbours a hundred thousand tokens away.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        kind: ``"log"`` (the best in the paper) or ``"power"`` (ALiBi with a learned slope if r2 = 1).

    Limits:
        The bias is symmetric, so without a causal mask it does not distinguish earlier keys from later ones.

    Tested against:
        The paper's formulas (equations 5 and 6) in NumPy, forward and every gradient.

    >>> Kerple(4).matrix(6).shape
    torch.Size([4, 6, 6])
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

    def __init__(self, num_heads: int, kind: KerpleKind = "log", *, head_slice: slice | None = None) -> None:
        super().__init__(num_heads, head_slice=head_slice)
        one_of("kind", kind, tuple(INITIAL), "kind='log'")
        self.kind: KerpleKind = kind
        self.r1 = nn.Parameter(torch.empty(len(self.heads)))
        self.r2 = nn.Parameter(torch.empty(len(self.heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter, largest in zip((self.r1, self.r2), INITIAL[self.kind], strict=True):
            self.heads.fill(parameter, parameter.new_empty(self.num_heads).uniform_(MIN_PARAMETER, largest))

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor]:
        dtype = torch.float64 if self.kind == "power" else bias_dtype(q)
        bound = MAX_POWER if self.kind == "power" else None
        return {
            "r1": _clamp_keeping_gradient(self.r1, None).to(dtype),
            "r2": _clamp_keeping_gradient(self.r2, bound).to(dtype),
        }

    def of_distance(self, distance: Tensor, head: Tensor, *, r1: Tensor, r2: Tensor) -> Tensor:
        index = self.heads.to_local(head)
        r1, r2, far = r1[index], r2[index], distance.abs().to(r1.dtype)
        if self.kind == "log":
            return -r1 * torch.log1p(r2 * far)
        # The rounding of pow depends on the memory layout, unlike exp and log.
        power = torch.exp(r2 * torch.log(far.clamp(min=1)))
        return -r1 * torch.where(far == 0, 0.0, power)

    def extra_repr(self) -> str:
        return f"{self.heads}, kind={self.kind!r}"


def _clamp_keeping_gradient(parameter: Tensor, largest: Real | None) -> Tensor:
    """Clamp the parameter and pass its gradient on unchanged."""
    return parameter + (parameter.clamp(MIN_PARAMETER, largest) - parameter).detach()
