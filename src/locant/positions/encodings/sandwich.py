"""Sandwich: Chi et al. 2023, https://arxiv.org/abs/2212.10356."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.angles import Angles
from locant.positions.base import EncodingInfo, PositionEncoding, ScoreMod, bias_dtype
from locant.positions.constant import Constant
from locant.positions.distance import distances
from locant.positions.frequencies import base_of, inverse_frequencies, width_of
from locant.positions.heads import Heads
from locant.positions.pairs import step_mod
from locant.positions.positions import Positions

__all__ = ["Sandwich"]

GRID = 2.0**-40
"""Cosines are rounded to this before they are added up: a sum without further rounding is the same in any order."""


class Sandwich(PositionEncoding):
    """Adds the inner product of the sinusoidal vectors of both positions, which decays with distance.

    ``(PE(i) . PE(j) - d/2) / c_h`` with the compression ratio ``c_h = 8 (h + 1) / H`` of head h. The paper leaves
    out ``- d/2``, a constant per head that softmax cannot see; with it the diagonal is 0, and near distances keep
    their bits. No parameters, no maximal length, exact angles at every distance; symmetric where not causal.

    Costs one value per distance and pair of the sinusoid, then one look-up per pair of tokens. Where the positions'
    bounds are unknown (`Positions.of` on an accelerator) the values are computed for every pair of tokens instead.

    Args:
        num_heads: the number of query heads.
        dim: the width of the sinusoidal vectors, the paper's one hyperparameter.
        base: as in `Sinusoidal`.
        head_slice: the heads of this rank under tensor parallelism; default: all.

    >>> q = k = torch.zeros(1, 8, 4, 16)
    >>> Sandwich(8).bias(q, k, Positions.arange(4))[0, 7, 3]
    tensor([-1.4767, -0.8273, -0.2383,  0.0000])
    """

    info = EncodingInfo(
        name="sandwich",
        kind="relative",
        parameters="none",
        cost_of_tokens="nothing",
        cost_of_pairs="one look-up and division",
        extrapolation="good: decays with the logarithm of the distance",
        used_by="its paper's models",
        paper="Chi 2023, arXiv 2212.10356",
    )

    by_distance = True

    def __init__(
        self, num_heads: int, *, dim: int = 128, base: float = 10_000.0, head_slice: slice | None = None
    ) -> None:
        super().__init__()
        self.heads = Heads.of(num_heads, head_slice)
        self.num_heads = self.heads.num_heads
        self.dim = width_of("dim", dim, remedy="dim=128, the paper's")
        self.base = base_of(base)
        self.angles = Angles(inverse_frequencies(self.dim, self.base))
        ratios = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device="cpu") * 8 / self.num_heads
        self.ratios = Constant(self.heads.own(ratios))

    def decay(
        self, steps: Int[Tensor, "*shape"], largest: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*shape"]:
        """``PE(i) . PE(j) - d/2`` for every distance; `largest` as `max_index` in `Angles.cos_sin`."""
        cos, _ = self.angles.cos_sin(steps.abs(), largest, 0, torch.float64)
        return (((cos - 1) / GRID).round() * GRID).sum(-1).to(dtype)

    def bias(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> Float[Tensor, "#batch heads query key"]:
        """The decay of every distance, divided by each head's ratio; float32 at least."""
        self.heads.require(self, q)
        steps = distances(q, k, positions, k_positions, "Sandwich").abs()
        dtype = bias_dtype(q)
        table = self._table(positions, k_positions, dtype)
        decay = self.decay(steps, None, dtype) if table is None else table[steps]
        return decay[:, None] / self.ratios.on(q.device).to(dtype)[:, None, None]

    def score_mod(
        self,
        q: Float[Tensor, "batch heads query head_dim"],
        k: Float[Tensor, "batch kv_heads key head_dim"],
        positions: Positions,
        k_positions: Positions | None = None,
    ) -> ScoreMod:
        self.heads.require(self, q)
        steps = step_mod(q, k, positions, k_positions, "Sandwich")
        dtype = bias_dtype(q)
        table = self._table(positions, k_positions, dtype)
        if table is None:
            return self._by_pair(q, k, positions, k_positions)
        ratios = self.ratios.on(q.device).to(dtype)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[steps(batch, query, key).abs()] / ratios[head]

        return add

    def _table(
        self, positions: Positions, k_positions: Positions | None, dtype: torch.dtype
    ) -> Float[Tensor, " distances"] | None:
        """The decay of every distance there can be, unless that is unknown, or more than there are pairs."""
        keys = positions if k_positions is None else k_positions
        reach = _reach(positions, keys)
        if reach is None or reach >= max(positions.batch, keys.batch) * positions.seq_len * keys.seq_len:
            return None
        return self.decay(torch.arange(reach + 1, device=positions.device), reach, dtype)

    def _by_pair(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None) -> ScoreMod:
        """Where a table of distances would be larger than the pairs themselves."""
        bias = self.bias(q, k, positions, k_positions).expand(q.shape[0], -1, -1, -1)

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias[batch, head, query, key]

        return add

    def extra_repr(self) -> str:
        return f"{self.heads}, dim={self.dim}, base={self.base:g}"


def _reach(queries: Positions, keys: Positions) -> int | None:
    """No pair is farther apart, as far as the host knows."""
    bounds = (queries.min_index, queries.max_index, keys.min_index, keys.max_index)
    if None in bounds:
        return None
    q_low, q_high, k_low, k_high = bounds
    return max(q_high - k_low, k_high - q_low, 0)  # type: ignore[operator]
