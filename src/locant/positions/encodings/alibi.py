"""ALiBi: attention with linear biases. Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import Real, entries, flag, real, short_repr
from locant.errors import ShapeError
from locant.positions.base import EncodingInfo
from locant.positions.constant import Constant
from locant.positions.distance_bias import DistanceBias
from locant.positions.distances import bias_dtype
from locant.positions.heads import check_num_heads


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the paper's slope for every head: ``2 ** (-8 (h + 1) / H)`` if H is a power of two.

    For other H, return the slopes of the next smaller power of two, followed by every other slope of the next larger
    power.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = check_num_heads(num_heads)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


class ALiBi(DistanceBias):
    r"""Subtracts slope x distance from every score, so that nearer tokens count more. Each head has its own slope.

    .. math:: b_{hij} = -m_h \, |i - j|, \qquad m_h = 2^{-8 h / H} \text{ for } h = 1, \ldots, H

    i and j are the positions of the query and of the key. If H is not a power of two, the slopes of two powers of two
    are mixed, as in the paper's code. In calls without gradients on a CPU, ``distances x num_heads`` numbers are kept
    for later calls while the slopes have the same values.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        learned: whether the slopes are a parameter, which begins at `slopes`. Learned slopes may change sign.
        slopes: the slope of each head of the model. Default: `alibi_slopes`, as in the paper.

    Limits:
        Heads with steep slopes almost ignore far tokens, whatever their content. The bias is symmetric, so without a
        causal mask it does not distinguish earlier keys from later keys.

    Tested against:
        `transformers`' BLOOM, the paper's slopes in NumPy, and 50-digit arithmetic (mpmath) at 131,072 distances.

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
        slopes: Sequence[Real] | None = None,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__(num_heads, head_slice=head_slice)
        self.learned = flag("learned", learned)
        self._custom_slopes = None if slopes is None else _check_slopes(slopes, self.num_heads)
        all_heads = torch.tensor(self._custom_slopes or alibi_slopes(self.num_heads), dtype=torch.float64, device="cpu")
        held = self.heads.select(all_heads)
        self._initial, self._negated = Constant(held), Constant(-held[:, None])
        self.slopes = nn.Parameter(torch.empty(len(self.heads))) if self.learned else held
        """One slope per held head: a parameter if learned, otherwise float64 on the CPU."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            with torch.no_grad():
                self.slopes.copy_(self._initial.on(self.slopes.device))

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor]:
        slopes = self.slopes if self.learned else self._initial.on(q.device)
        return {"slopes": slopes.to(bias_dtype(q))}

    def of_distance(self, distance: Tensor, head: Tensor, *, slopes: Tensor) -> Tensor:
        return -slopes[self.heads.to_local(head)] * distance.abs()

    def along(self, q: Tensor, distance: Int[Tensor, " distances"]) -> Float[Tensor, "heads distances"]:
        """Use the slopes of all heads as they are. An index of the heads takes longer than the product."""
        slopes = -self.slopes[:, None] if self.learned else self._negated.on(q.device)
        return slopes.to(bias_dtype(q)) * distance.abs()

    def extra_repr(self) -> str:
        custom = "" if self._custom_slopes is None else f", slopes={short_repr(self._custom_slopes)}"
        return str(self.heads) + (", learned=True" if self.learned else "") + custom


def _check_slopes(slopes: Any, num_heads: int) -> list[Real]:
    remedy = f"pass {num_heads} numbers, one per head of the model"
    checked = [real("an entry of slopes", slope, remedy=remedy) for slope in entries("slopes", slopes, remedy)]
    if len(checked) != num_heads:
        raise ShapeError(f"got {len(checked)} slopes for {num_heads} heads", remedy)
    return checked
