"""ALiBi: attention with linear biases. Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import flag
from locant.positions.base import EncodingInfo, PositionEncoding, ScoreMod, bias_dtype
from locant.positions.constant import Constant
from locant.positions.distance import distances
from locant.positions.heads import Heads, heads_of
from locant.positions.pairs import step_mod
from locant.positions.positions import Positions

__all__ = ["ALiBi", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> list[float]:
    """The paper's slope for every head: ``2 ** (-8 (h + 1) / H)`` where H is a power of two.

    For other H, the slopes of the next smaller power of two, then every other slope of the next larger one.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = heads_of(num_heads)
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


class ALiBi(PositionEncoding):
    """Subtracts slope x distance from every score: nearer tokens count more, and each head has its own reach.

    No maximal length, and no parameters unless the slopes are learned. The bias is ``-m_h |i - j|``: symmetric where
    attention is not causal.

    Args:
        num_heads: the number of query heads.
        learned: make the slopes a parameter that begins with the paper's; its sign is left free.
        head_slice: the heads of this rank under tensor parallelism; default: all.

    >>> q = k = torch.zeros(1, 4, 6, 16)
    >>> ALiBi(4).bias(q, k, Positions.arange(6))[0, 0, 0]
    tensor([-0.0000, -0.2500, -0.5000, -0.7500, -1.0000, -1.2500])
    >>> ALiBi(4, head_slice=slice(2, 4)).bias(q[:, 2:], k[:, 2:], Positions.arange(6))[0, 0, 0, 1]
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

    by_distance = True

    def __init__(self, num_heads: int, *, learned: bool = False, head_slice: slice | None = None) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.learned = flag("learned", learned)
        self.slopes = nn.Parameter(torch.empty(len(self.heads))) if self.learned else Constant(self._paper_slopes())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.slopes, nn.Parameter):
            with torch.no_grad():
                self.slopes.copy_(self._paper_slopes())

    def _paper_slopes(self) -> Float[Tensor, " heads"]:
        slopes = alibi_slopes(self.num_heads)
        return torch.tensor([slopes[head] for head in self.heads.mine], dtype=torch.float64, device="cpu")

    def _slopes(self, q: Tensor) -> Float[Tensor, " heads"]:
        slopes = self.slopes.on(q.device) if isinstance(self.slopes, Constant) else self.slopes
        return slopes.to(bias_dtype(q))

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"]:
        """``-slope * distance``, float32 at least."""
        self.heads.require(self, q)
        steps = distances(q, k, positions, k_positions, "ALiBi")
        slopes = self._slopes(q)
        return steps.abs().to(slopes.dtype)[:, None] * -slopes[:, None, None]

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod:
        self.heads.require(self, q)
        steps = step_mod(q, k, positions, k_positions, "ALiBi")
        slopes = self._slopes(q)

        def subtract(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score - slopes[head] * steps(batch, query, key).abs()

        return subtract

    def extra_repr(self) -> str:
        return str(self.heads) + (", learned=True" if self.learned else "")
