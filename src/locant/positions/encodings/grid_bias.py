"""A learned number for every offset on a grid: Liu et al. 2021 (Swin), https://arxiv.org/abs/2103.14030, equation 4."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import flag
from locant.positions.base import EncodingInfo
from locant.positions.offset_bias import HeadTable

__all__ = ["GridBias"]

INIT_STD = 0.02


class GridBias(HeadTable):
    r"""Adds a learned number per head for the rows and columns between a query and a key.

    .. math:: b_{hij} = W_{h,\, y_i - y_j,\, x_i - x_j}

    y and x are a token's row and column. The table has ``(2 height - 1) (2 width - 1)`` rows, in the order of Swin's
    and BEiT's, so that those of a checkpoint fit as they are.

    Tokens whose positions have one index stand in one row of the grid.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        height, width: of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.
        prefix: whether three more rows of the table are for pairs with a prefix token, ``Positions.grid(prefix=1)``:
            from it to a cell, from a cell to it, and among such tokens (BEiT). Without them nothing is added there.

    Limits:
        No offset beyond the table: for grids of another size it is interpolated, by `at` or for good by `resize`.

    Tested against:
        `transformers`' Swin and BEiT: the bias, grids of other sizes, and gradients.

    >>> from locant import Positions
    >>> bias, positions = GridBias(3, 4, 5), Positions.grid(4, 5)
    >>> q = torch.zeros(1, 3, 4 * 5, 8)
    >>> bias.bias(q, q, positions).shape, bias.weight.shape
    (torch.Size([1, 3, 20, 20]), torch.Size([63, 3]))
    >>> bias.at(8, 8).matrix(64).shape
    torch.Size([3, 64, 64])
    """

    info = EncodingInfo(
        name="grid_bias",
        aliases=("swin", "beit"),
        kind="relative",
        parameters="(2 height - 1) x (2 width - 1) x num_heads",
        cost_of_tokens="nothing",
        cost_of_pairs="one look-up",
        extrapolation="none: for larger grids the table is interpolated",
        used_by="Swin, BEiT, Data2Vec-Vision, CLAP, Donut",
        paper="Liu 2021, arXiv 2103.14030",
    )

    def __init__(
        self, num_heads: int, height: int, width: int, *, prefix: bool = False, head_slice: slice | None = None
    ) -> None:
        super().__init__(num_heads, height, width, head_slice=head_slice)
        self.prefix = flag("prefix", prefix)
        self.learned = (self.height, self.width)
        """The grid whose offsets the table has."""
        self.weight = nn.Parameter(torch.empty(_offsets(*self.learned) + 3 * self.prefix, len(self.heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        full = self.weight.new_empty(len(self.weight), self.num_heads).normal_(std=INIT_STD)
        self.heads.fill(self.weight, full, dim=1)

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        """Bilinear between the entries that were learned where the grid has another size, as BEiT interpolates."""
        table = self.weight[: _offsets(*self.learned)].to(dtype).T
        if (self.height, self.width) == self.learned:
            return table.contiguous()
        old, new = ((2 * height - 1, 2 * width - 1) for height, width in (self.learned, (self.height, self.width)))
        return F.interpolate(table.unflatten(1, old)[None], new, mode="bilinear")[0].flatten(1)

    def of_prefix(self, dtype: torch.dtype) -> Float[Tensor, "heads 3"] | None:
        return self.weight[-3:].to(dtype).T if self.prefix else None

    def resize(self, height: int, width: int) -> None:
        """Interpolate the table for grids of this size, in place, as `at` does.

        The weight is a new parameter afterwards: build the optimizer after resizing.

        >>> bias = GridBias(3, 4, 5)
        >>> bias.resize(7, 7)
        >>> bias.weight.shape
        torch.Size([169, 3])
        """
        other, prefix = self.at(height, width), self.weight[_offsets(*self.learned) :]
        with torch.no_grad():
            table = torch.cat([other.of_offsets(torch.float64).T.to(prefix.dtype), prefix])
        self.weight = nn.Parameter(table, requires_grad=self.weight.requires_grad)
        self.height, self.width = self.learned = other.height, other.width

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', prefix=True' if self.prefix else ''}"


def _offsets(height: int, width: int) -> int:
    return (2 * height - 1) * (2 * width - 1)
