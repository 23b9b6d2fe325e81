"""ALiBi: attention with linear biases. Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import RangeError
from locant.positions.base import PositionEncoding, ScoreMod, bias_dtype
from locant.positions.constant import Constant
from locant.positions.distance import distances, require_heads
from locant.positions.where import Positions

__all__ = ["ALiBi", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> list[float]:
    """The paper's slope for every head: ``2 ** (-8 (h + 1) / H)`` where H is a power of two.

    For other H, the slopes of the next smaller power of two, then every other slope of the next larger one.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if num_heads < 1:
        raise RangeError(f"got num_heads={num_heads}, expected 1 or more", "the number of query heads")
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


class ALiBi(PositionEncoding):
    """Subtracts slope x distance from every score: nearer tokens count more, and each head has its own reach.

    No parameters and no maximal length. The bias is ``-m_h |i - j|``: symmetric where attention is not causal.

    Args:
        num_heads: the number of query heads.

    >>> q = k = torch.zeros(1, 4, 6, 16)
    >>> ALiBi(4).bias(q, k, Positions.arange(6))[0, 0, 0]
    tensor([-0.0000, -0.2500, -0.5000, -0.7500, -1.0000, -1.2500])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.slopes = Constant(torch.tensor(alibi_slopes(num_heads), dtype=torch.float64, device="cpu"))

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"]:
        """``-slope * distance``, float32 at least."""
        require_heads(self, self.num_heads, q)
        steps = distances(q, k, positions, k_positions, "ALiBi")
        slopes = self.slopes.on(q.device).to(bias_dtype(q))
        return steps.abs().to(slopes.dtype)[:, None] * -slopes[:, None, None]

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod:
        require_heads(self, self.num_heads, q)
        keys = positions if k_positions is None else k_positions
        q_index, k_index = positions.expand(q.shape[0]).index, keys.expand(k.shape[0]).index
        slopes = self.slopes.on(q.device).to(bias_dtype(q))

        def subtract(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score - slopes[head] * (q_index[batch, query] - k_index[batch, key]).abs()

        return subtract

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"
