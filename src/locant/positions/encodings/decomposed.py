"""Decomposed relative positions: Li et al. 2022 (MViTv2), https://arxiv.org/abs/2112.01526, section 4.1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, whole
from locant.positions.base import EncodingInfo
from locant.positions.offset_bias import OffsetBias, Table

__all__ = ["DecomposedBias"]

INIT_STD = 0.02


class DecomposedBias(OffsetBias):
    r"""Adds the products of the query with a learned vector for the rows to a key and one for the columns.

    .. math:: b_{ij} = q_i \cdot R_{y_i - y_j} + q_i \cdot C_{x_i - x_j}

    y and x are a token's row and column. All heads share the two tables, and the query is not scaled, as published:
    scores are scaled before a bias is added to them.

    A query has ``2 height - 1`` and ``2 width - 1`` products (float64 while they are computed) and no number for each
    key, until attention adds two of them to a score.

    Args:
        head_dim: dimensions per head.
        height, width: of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.

    Limits:
        No offset beyond the tables: for grids of another size they are interpolated, by `at` or for good by `resize`.
        Queries and keys stand on one grid; MViTv2's pooled keys do not.

    Tested against:
        `transformers`' SAM and ViTDet: the bias, grids of other sizes, whole attention layers, and gradients.

    >>> from locant import Positions
    >>> bias, q = DecomposedBias(8, 4, 5), torch.randn(1, 3, 4 * 5, 8)
    >>> bias.bias(q, q, Positions.grid(4, 5)).shape, bias.rows.shape, bias.columns.shape
    (torch.Size([1, 3, 20, 20]), torch.Size([7, 8]), torch.Size([9, 8]))
    """

    info = EncodingInfo(
        name="decomposed",
        aliases=("sam", "vitdet", "mvitv2"),
        kind="relative",
        parameters="(2 height + 2 width - 2) x head_dim",
        cost_of_tokens="(2 height + 2 width - 2) x head_dim operations per head",
        cost_of_pairs="two look-ups",
        extrapolation="none: for larger grids the tables are interpolated",
        used_by="MViTv2, ViTDet, SAM, GOT-OCR2",
        paper="Li 2022, arXiv 2112.01526",
    )

    of_products = True

    def __init__(self, head_dim: int, height: int, width: int) -> None:
        super().__init__(height, width)
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="the width of a head")
        self.rows = nn.Parameter(torch.empty(2 * self.height - 1, self.head_dim))
        self.columns = nn.Parameter(torch.empty(2 * self.width - 1, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rows, self.columns):
            nn.init.normal_(table, std=INIT_STD)

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        """The rows that every query is multiplied with, of both tables."""
        of_rows, of_columns = self._interpolated(dtype)
        return [Table(1, 0, of_query=of_rows), Table(0, 1, of_query=of_columns)]

    def resize(self, height: int, width: int) -> None:
        """Interpolate the tables for grids of this size, in place, as `at` does.

        They are new parameters afterwards: build the optimizer after resizing.

        >>> bias = DecomposedBias(8, 4, 5)
        >>> bias.resize(7, 7)
        >>> bias.rows.shape
        torch.Size([13, 8])
        """
        other = self.at(height, width)
        with torch.no_grad():
            for name, table in zip(("rows", "columns"), other._interpolated(torch.float64), strict=True):
                old = getattr(self, name)
                setattr(self, name, nn.Parameter(table.to(old.dtype), requires_grad=old.requires_grad))
        self.height, self.width = other.height, other.width

    def _interpolated(
        self, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "rows head_dim"], Float[Tensor, "columns head_dim"]]:
        """Both tables, linear between the vectors that were learned where the grid has another size."""
        rows, columns = (
            table.to(dtype)
            if len(table) == 2 * size - 1
            else F.interpolate(table.to(dtype).T[None], 2 * size - 1, mode="linear")[0].T
            for table, size in ((self.rows, self.height), (self.columns, self.width))
        )
        return rows, columns

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, height={self.height}, width={self.width}"
