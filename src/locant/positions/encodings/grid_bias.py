"""Biases by rows and columns on a grid: a table (Swin, BEiT), an MLP (Swin v2), vectors for queries (SAM, ViTDet)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, flag, real, whole
from locant.positions.base import EncodingInfo
from locant.positions.encodings import INIT_STD
from locant.positions.heads import empty_linear
from locant.positions.offset_bias import HeadTable, OffsetBias, Table
from locant.spelling import literal

SPREAD = 8.0
"""The range of offsets within the grid, from minus this number to this number, and the base of their logarithm."""


class GridBias(HeadTable):
    r"""Adds a learned number for each head and each offset in rows and columns between a query and a key.

    .. math:: b_{hij} = W_{h,\, y_i - y_j,\, x_i - x_j}

    y and x are a token's row and column. Tokens with one index are in one row of the grid. The table has
    ``(2 height - 1) (2 width - 1)`` rows, in the order of Swin and BEiT, so that tables of checkpoints fit.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        height, width: the size of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.
        prefix: whether the table has three more rows for pairs with a prefix token, ``Positions.grid(prefix=1)``:
            from a prefix token to a cell, from a cell to a prefix token, and between prefix tokens (BEiT). Without
            these rows such pairs have no bias.

    Limits:
        Offsets beyond the table raise `RangeError`. `at` interpolates it for grids of another size, and `resize` does
        so permanently.

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
        self.learned = (self.height, self.width)  # the grid whose offsets the table has
        offsets = (2 * self.height - 1) * (2 * self.width - 1)
        self.weight = nn.Parameter(torch.empty(offsets + 3 * self.prefix, len(self.heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        full = self.weight.new_empty(len(self.weight), self.num_heads).normal_(std=INIT_STD)
        self.heads.fill(self.weight, full, dim=1)

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        """Return the table, with bilinear interpolation as in BEiT if the grid has another size."""
        table = self.weight[: len(self.weight) - 3 * self.prefix].to(dtype).T
        if (self.height, self.width) == self.learned:
            return table.contiguous()
        old, new = ((2 * height - 1, 2 * width - 1) for height, width in (self.learned, (self.height, self.width)))
        return F.interpolate(table.unflatten(1, old)[None], new, mode="bilinear")[0].flatten(1)

    def of_prefix(self, dtype: torch.dtype) -> Float[Tensor, "heads 3"] | None:
        return self.weight[-3:].to(dtype).T if self.prefix else None

    def resize(self, height: int, width: int) -> None:
        """Interpolate the table for grids of this size, in place, as `at` does.

        The weight becomes a new parameter, so build the optimizer after resizing.

        >>> bias = GridBias(3, 4, 5)
        >>> bias.resize(7, 7)
        >>> bias.weight.shape
        torch.Size([169, 3])
        """
        other, prefix = self.at(height, width), self.weight[len(self.weight) - 3 * self.prefix :]
        with torch.no_grad():
            table = torch.cat([other.of_offsets(torch.float64).T.to(prefix.dtype), prefix])
        self.weight = nn.Parameter(table, requires_grad=self.weight.requires_grad)
        self.height, self.width = self.learned = other.height, other.width

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', prefix=True' if self.prefix else ''}"


class ContinuousGridBias(HeadTable):
    r"""Adds the output of a small MLP for the rows and columns between a query and a key, on a logarithmic scale.

    .. math:: b_{ij} = 16 \, \sigma\left( W_2 \max(W_1 [\delta_y, \delta_x] + \beta, 0) \right), \qquad
        \delta = \mathrm{sign}(n) \log_8 \left( 1 + \frac{8 |n|}{\text{size} - 1} \right)

    n is the number of rows (for the height) or columns (for the width) between query and key. Offsets of any size have
    a bias, even in grids larger than in training. `at` does not change the sizes that divide offsets
    (``pretrained_window_size`` in the published models). These models normalise queries and keys, and multiply scores
    by a learned number per head. To do the same, call `attend` with ``F.normalize(q, dim=-1) * factor``,
    ``F.normalize(k, dim=-1)`` and ``scale=1.0``. The MLP runs once per call for every offset of the grid, not for every
    pair.

    Args:
        num_heads, head_slice: as in `DistanceBias`.
        height, width: the size of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.
        hidden: the width of the MLP.
        largest: the factor of the sigmoid.

    Limits:
        Far beyond the trained size, the bias is an untrained extrapolation of the MLP.

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
        extrapolation="good for grids of twice the size and more, for which it was designed",
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
        self.learned = (self.height, self.width)  # the sizes that divide offsets
        self.hidden_width = whole("hidden", hidden, 1, MAX_WIDTH, remedy="hidden=512, the width of the MLP")
        self.largest = real("largest", largest, above=0, remedy="largest=16.0")
        self.hidden = empty_linear(2, self.hidden_width)
        self.weight = nn.Parameter(torch.empty(len(self.heads), self.hidden_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.hidden.reset_parameters()
        bound = self.hidden_width**-0.5
        self.heads.fill(self.weight, self.weight.new_empty(self.num_heads, self.hidden_width).uniform_(-bound, bound))

    def of_offsets(self, dtype: torch.dtype) -> Float[Tensor, "heads offsets"]:
        device = self.weight.device
        shares = (
            torch.arange(1 - size, size, device=device, dtype=dtype) / max(learned - 1, 1)
            for size, learned in zip((self.height, self.width), self.learned, strict=True)
        )
        rows, columns = (x.sign() * torch.log2(1 + SPREAD * x.abs()) / math.log2(SPREAD) for x in shares)
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        hidden = F.linear(offsets, self.hidden.weight.to(dtype), self.hidden.bias.to(dtype)).relu()
        return self.largest * torch.sigmoid(self.weight.to(dtype) @ hidden.T)

    def extra_repr(self) -> str:
        height, width = self.learned
        other_grid = "" if (self.height, self.width) == self.learned else f", learned on {height} x {width}"
        return f"{super().extra_repr()}, hidden={self.hidden_width}, largest={literal(self.largest)}{other_grid}"


class DecomposedBias(OffsetBias):
    r"""Adds the products of the query with two learned vectors, for the rows and for the columns between query and key.

    .. math:: b_{ij} = q_i \cdot R_{y_i - y_j} + q_i \cdot C_{x_i - x_j}

    y and x are a token's row and column. All heads share the two tables. As in the published models, the query is not
    scaled: the bias is added to scores that are already scaled.

    A query has ``2 height - 1`` products for rows and ``2 width - 1`` for columns (in float64 during the computation).
    Attention adds two of them to each score.

    Args:
        head_dim: dimensions per head.
        height, width: the size of the grid, or of a window of it (`locant.positions.GridWindows`), in tokens.

    Limits:
        Offsets beyond the tables raise `RangeError`. `at` interpolates them for grids of another size, and `resize`
        does so permanently. Queries and keys have to be on one grid, unlike MViTv2's pooled keys.

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
        self.head_dim = whole("head_dim", head_dim, 1, MAX_WIDTH, remedy="pass the width of a head")
        self.rows = nn.Parameter(torch.empty(2 * self.height - 1, self.head_dim))
        self.columns = nn.Parameter(torch.empty(2 * self.width - 1, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.rows, self.columns):
            nn.init.normal_(table, std=INIT_STD)

    def tables(self, dtype: torch.dtype) -> Sequence[Table]:
        """Return both tables, whose rows multiply every query."""
        of_rows, of_columns = self._interpolate_tables(dtype)
        return [Table(1, 0, of_query=of_rows), Table(0, 1, of_query=of_columns)]

    def resize(self, height: int, width: int) -> None:
        """Interpolate the tables for grids of this size, in place, as `at` does.

        They become new parameters, so build the optimizer after resizing.

        >>> bias = DecomposedBias(8, 4, 5)
        >>> bias.resize(7, 7)
        >>> bias.rows.shape
        torch.Size([13, 8])
        """
        other = self.at(height, width)
        with torch.no_grad():
            for name, table in zip(("rows", "columns"), other._interpolate_tables(torch.float64), strict=True):
                old = getattr(self, name)
                setattr(self, name, nn.Parameter(table.to(old.dtype), requires_grad=old.requires_grad))
        self.height, self.width = other.height, other.width

    def _interpolate_tables(
        self, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "rows head_dim"], Float[Tensor, "columns head_dim"]]:
        """Return both tables, with linear interpolation if the grid has another size."""
        rows, columns = (
            table.to(dtype)
            if len(table) == 2 * size - 1
            else F.interpolate(table.to(dtype).T[None], 2 * size - 1, mode="linear")[0].T
            for table, size in ((self.rows, self.height), (self.columns, self.width))
        )
        return rows, columns

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, height={self.height}, width={self.width}"
