"""Sandwich: Chi et al. 2023, https://arxiv.org/abs/2212.10356."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import Real
from locant.positions.angles import Angles
from locant.positions.base import EncodingInfo
from locant.positions.constant import Constant
from locant.positions.distance_bias import DistanceBias
from locant.positions.distances import bias_dtype
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.kept_table import KeptTable, RowsByDistance, can_keep
from locant.spelling import literal

GRID = 2.0**-40
"""The unit to which cosines are rounded before they are added. Their sums are then exact, in any order."""


class Sandwich(DistanceBias):
    r"""Adds the inner product of the sinusoidal vectors of both positions, which decays with distance.

    .. math:: b_{hij} = \frac{\mathrm{PE}(i) \cdot \mathrm{PE}(j) - d/2}{c_h}, \qquad c_h = \frac{8 (h + 1)}{H}

    The paper omits ``- d/2``. This term does not change the softmax, and it keeps more bits of near distances.

    It costs one cosine per distance and sinusoid pair, then one look-up per pair of tokens. In calls without gradients
    on a CPU, the sums of cosines are kept for later calls and for all layers that share the encoding. If the bounds of
    positions are unknown (`Positions.of` on an accelerator), the cosines are computed for every pair of tokens instead.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        dim: the width of the sinusoidal vectors, the only hyperparameter in the paper.
        base: as in `Sinusoidal`.

    Limits:
        The bias is symmetric, so without a causal mask it does not distinguish earlier keys from later keys. Nothing is
        learned, so a head cannot adapt how fast its bias decays.

    Tested against:
        Inner products of the paper's sinusoidal vectors in NumPy.

    >>> Sandwich(8).matrix(4)[7, 3]
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

    is_traceable_per_pair = False

    def __init__(
        self, num_heads: int, *, dim: int = 128, base: Real = 10_000.0, head_slice: slice | None = None
    ) -> None:
        super().__init__(num_heads, head_slice=head_slice)
        self.dim = check_width("dim", dim, remedy="use dim=128, as in the paper")
        self.base = check_base(base)
        self.angles = Angles(inverse_frequencies(self.dim, self.base))
        ratios = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device="cpu") * 8 / self.num_heads
        self.ratios = Constant(self.heads.select(ratios))
        self._kept = KeptTable[RowsByDistance]()

    def decay(
        self, distance: Int[Tensor, "*shape"], largest: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*shape"]:
        """Return ``PE(i) . PE(j) - d/2`` for every distance. `largest` is `max_index` of `Angles.cos_sin`."""
        cos, _ = self.angles.cos_sin(distance.abs(), largest, 0, torch.float64)
        return (((cos - 1) / GRID).round() * GRID).sum(-1).to(dtype)

    def operands(self, q: Tensor, largest: int | None) -> dict[str, Tensor | None]:
        dtype = bias_dtype(q)
        decay = None if largest is None else self._decays(largest, dtype, q.device)
        return {"ratios": self.ratios.on(q.device).to(dtype), "decay": decay}

    def _decays(self, largest: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " distances"]:
        """Return the decays of the distances from 0 to `largest`. On a CPU they are kept for later calls."""
        if device.type != "cpu" or not can_keep([]):
            return self.decay(torch.arange(largest + 1, device=device), largest, dtype)
        rows = self._kept.get([], dtype, lambda: RowsByDistance(lambda each: self.decay(each, None, dtype)[:, None]))
        return rows.between(-largest, 0)[:, 0]  # decays are symmetric, and the largest number comes first

    def of_distance(self, distance: Tensor, head: Tensor, *, ratios: Tensor, decay: Tensor | None) -> Tensor:
        faded = self.decay(distance, None, ratios.dtype) if decay is None else decay[distance.abs()]
        return faded / ratios[self.heads.to_local(head)]

    def extra_repr(self) -> str:
        return f"{self.heads}, dim={self.dim}, base={literal(self.base)}"
