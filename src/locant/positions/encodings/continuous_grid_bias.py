"""Swin v2's continuous bias: Liu et al. 2022, https://arxiv.org/abs/2111.09883, section 3.3."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, real, whole
from locant.positions.base import EncodingInfo
from locant.positions.heads import blank_linear
from locant.positions.offset_bias import HeadTable

__all__ = ["ContinuousGridBias"]

SPREAD = 8.0
"""Offsets within the grid go from minus this to this, before their logarithm to this base is taken."""


class ContinuousGridBias(HeadTable):
    r"""Adds what a small MLP makes of the rows and columns between a query and a key, on a logarithmic scale.

    .. math:: b_{ij} = 16 \, \sigma\left( W_2 \max(W_1 [\delta_y, \delta_x] + \beta, 0) \right), \qquad
        \delta = \mathrm{sign}(n) \log_8 \left( 1 + \frac{8 |n|}{\text{size} - 1} \right)

    n is the number of rows (for the height) or columns (for the width) between them. So it has a number for offsets of
    any size, also of grids larger than those it was trained on: `at` keeps the sizes by which offsets are divided,
    ``pretrained_window_size`` in the published models. These normalise queries and keys, and multiply scores by a
    number that each head learned: attend to ``F.normalize(q, dim=-1) * factor`` and ``F.normalize(k, dim=-1)`` with
    ``scale=1.0``.

    The MLP is run once per call for every offset of the grid, and not for pairs.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        height, width: of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.
        hidden: the width of the MLP.
        largest: what is multiplied by the sigmoid.

    Limits:
        Far beyond the trained size it says what its MLP makes of it.

    Tested against:
        `transformers`' Swin v2: the bias, windows larger than the trained ones, and gradients.

    >>> bias = ContinuousGridBias(3, 4, 5)
    >>> bias.at(8, 8).matrix(64).shape
    torch.Size([3, 64, 64])
    """

    info = EncodingInfo(
        name="continuous_grid_bias",
        aliases=("swinv2", "swin_v2"),
        kind="relative",
        parameters="hidden x (num_heads + 3)",
        cost_of_tokens="an MLP for each of four offsets",
        cost_of_pairs="one look-up",
        extrapolation="good to grids of twice the size and more, which it was made for",
        used_by="Swin v2, Swin2SR",
        paper="Liu 2022, arXiv 2111.09883",
    )

    def __init__(
        self,
        num_heads: int,
        height: int,
        width: int,
        *,
        hidden: int = 512,
        largest: Real = 16.0,
        head_slice: slice | None = None,
    ) -> None:
        super().__init__(num_heads, height, width, head_slice=head_slice)
        self.learned = (self.height, self.width)
        """By which offsets are divided."""
        self.hidden_width = whole("hidden", hidden, 1, MAX_WIDTH, remedy="hidden=512, the width of the MLP")
        self.largest = real("largest", largest, above=0, remedy="largest=16.0")
        self.hidden = blank_linear(2, self.hidden_width)
        self.weight = nn.Parameter(torch.empty(len(self.heads), self.hidden_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        bound = self.hidden_width**-0.5
        self.heads.fill(self.weight, self.weight.new_empty(self.num_heads, self.hidden_width).uniform_(-bound, bound))

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        device = self.weight.device
        rows, columns = (
            _logarithmic(torch.arange(1 - size, size, device=device, dtype=dtype) / max(learned - 1, 1))
            for size, learned in zip((self.height, self.width), self.learned, strict=True)
        )
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        hidden = F.linear(offsets, self.hidden.weight.to(dtype), self.hidden.bias.to(dtype)).relu()
        return self.largest * torch.sigmoid(self.weight.to(dtype) @ hidden.T)

    def extra_repr(self) -> str:
        height, width = self.learned
        elsewhere = "" if (self.height, self.width) == self.learned else f", learned on {height} x {width}"
        return f"{super().extra_repr()}, hidden={self.hidden_width}, largest={self.largest:g}{elsewhere}"


def _logarithmic(share: Float[Tensor, " offsets"]) -> Float[Tensor, " offsets"]:
    return share.sign() * torch.log2(1 + SPREAD * share.abs()) / math.log2(SPREAD)
