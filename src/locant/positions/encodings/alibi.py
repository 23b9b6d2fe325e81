"""ALiBi: attention with linear biases. Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import entries, flag, real, shown
from locant.errors import ShapeError
from locant.positions.base import EncodingInfo
from locant.positions.constant import Constant
from locant.positions.distance_bias import DistanceBias
from locant.positions.distances import bias_dtype
from locant.positions.heads import check_num_heads


def alibi_slopes(num_heads: int) -> list[float]:
    """The paper's slope for every head: ``2 ** (-8 (h + 1) / H)`` where H is a power of two.

    For other H, the slopes of the next smaller power of two, then every other slope of the next larger one.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = check_num_heads(num_heads)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


class ALiBi(DistanceBias):
    r"""Subtracts slope x distance from every score: nearer tokens count more, and each head has its own reach.

    .. math:: b_{hij} = -m_h \, |i - j|, \qquad m_h = 2^{-8 h / H} \text{ for } h = 1, \ldots, H

    i and j are the positions of the query and of the key. Where H is no power of two, the slopes of two powers of two
    are mixed, as in the paper's code.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        learned: make the slopes a parameter that begins with these; their signs are left free.
        slopes: one per head of the model; default: the paper's, `alibi_slopes`.

    Limits:
        Steep heads see next to nothing of far tokens, whatever these say. The bias is symmetric, so without a
        causal mask it cannot tell earlier keys from later ones.

    Tested against:
        `transformers`' BLOOM, the paper's slopes in NumPy, and 50-digit arithmetic (mpmath) at 131 072 distances.

    >>> ALiBi(4).matrix(6)[0, 0]
    tensor([-0.0000, -0.2500, -0.5000, -0.7500, -1.0000, -1.2500])
    >>> ALiBi(4, head_slice=slice(2, 4)).matrix(2)[0, 0, 1]
    tensor(-0.0156)
    """

    info = EncodingInfo(
        name="alibi",
        aliases=("linear_bias", "attention_with_linear_biases"),
        kind="relative",
        parameters="none",
        cost_of_tokens="nothing",
        cost_of_pairs="one multiplication and addition",
        extrapolation="good: loss stays near its short-length value, because far tokens fade",
        used_by="BLOOM, MPT, Falcon-RW, BTLM",
        paper="Press 2022, arXiv 2108.12409",
    )

    is_arithmetic = True

    def __init__(
        self,
        num_heads: int,
        *,
        learned: bool = False,
        slopes: Sequence[float] | None = None,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__(num_heads, head_slice=head_slice)
        self.learned = flag("learned", learned)
        self._given = None if slopes is None else _slopes(slopes, self.num_heads)
        all_heads = torch.tensor(self._given or alibi_slopes(self.num_heads), dtype=torch.float64, device="cpu")
        self._initial = Constant(self.heads.select(all_heads))
        self.slopes = nn.Parameter(torch.empty(len(self.heads))) if self.learned else self.heads.select(all_heads)
        """One per head that is here: a parameter if learned, otherwise float64 on the CPU."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            with torch.no_grad():
                self.slopes.copy_(self._initial.on(self.slopes.device))

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor]:
        slopes = self.slopes if self.learned else self._initial.on(q.device)
        return {"slopes": slopes.to(bias_dtype(q))}

    def of_distance(self, distance: Tensor, head: Tensor, *, slopes: Tensor) -> Tensor:
        return -slopes[self.heads.here(head)] * distance.abs()

    def extra_repr(self) -> str:
        given = "" if self._given is None else f", slopes={shown(self._given)}"
        return str(self.heads) + (", learned=True" if self.learned else "") + given


def _slopes(slopes: Any, num_heads: int) -> list[float]:
    remedy = f"{num_heads} numbers, one per head of the model"
    given = [real("an entry of slopes", slope, remedy=remedy) for slope in entries("slopes", slopes, remedy)]
    if len(given) != num_heads:
        raise ShapeError(f"got {len(given)} slopes for {num_heads} heads", remedy)
    return given
