"""Learned absolute positions: a trained vector for each position (GPT-2, BERT) or each cell of a grid (ViT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, flag, one_of, real, whole
from locant.errors import ShapeError
from locant.kernels.look_up import look_up
from locant.positions.base import Embeddings, EncodingInfo, ModelShape, PositionEncoding, build, require_embeddings
from locant.positions.encodings import INIT_STD
from locant.positions.grids import Grid
from locant.positions.positions import OptionalPositions, Positions

Interpolation = Literal["bicubic", "bilinear"]
ResizeMethod = Literal["extend", "interpolate"]


class Learned(PositionEncoding):
    r"""Adds row p of a trained table to the token at position p.

    .. math:: x_p \leftarrow x_p + W_{p + \text{offset}}

    Args:
        max_seq_len: the number of positions.
        d_model: the width of the token embeddings.
        offset: the number of rows before position 0, which some checkpoints have (RoBERTa and OPT: 2).
        init_std: rows are initialized from N(0, init_std**2). If they are much smaller than token vectors, they are
            learned slowly.

    Limits:
        A position past the end of the table raises `RangeError`. Rows that no training text has reached are
        meaningless. `resize` makes a table longer.

    Tested against:
        `transformers`' OPT, and an explicit look-up of rows.

    >>> Learned(512, 256).embed(torch.zeros(8, 4, 256)).shape
    torch.Size([8, 4, 256])
    """

    info = EncodingInfo(
        name="learned",
        aliases=("absolute", "learned_absolute", "position_embedding"),
        kind="absolute",
        parameters="max_seq_len x d_model",
        cost_of_tokens="one row looked up, d_model additions",
        cost_of_pairs="nothing",
        extrapolation="none: the table ends, and rows that were never trained are meaningless",
        used_by="BERT, GPT-2, GPT-3, OPT, RoBERTa",
        paper="Devlin 2018, arXiv 1810.04805",
    )

    def __init__(self, max_seq_len: int, d_model: int, *, offset: int = 0, init_std: Real = INIT_STD) -> None:
        super().__init__()
        self.max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy="pass the number of positions")
        width = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the token embeddings")
        self.offset = whole("offset", offset, 0, remedy="offset=0, or 2 for tables of RoBERTa and OPT")
        self.init_std = real("init_std", init_std, low=0, remedy="init_std=0.02")
        self.weight = nn.Parameter(torch.empty(self.max_seq_len + self.offset, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    @property
    def d_model(self) -> int:
        return self.weight.shape[1]

    def embed(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Add each token's row to `x`. Raise a `RangeError` that names the first position without a row."""
        positions = require_embeddings(self, x, positions, self.d_model)
        self.require_rows(positions)
        return x + look_up(self.row_of(positions), self.weight)

    def require_rows(self, positions: Positions) -> None:
        """Raise `RangeError` unless every position has a row. See `Positions.require_within`."""
        name, remedy = f"Learned(max_seq_len={self.max_seq_len})", "use shorter windows, or a larger max_seq_len"
        positions.require_within(0, self.max_seq_len - 1, name, remedy)

    def row_of(self, positions: Positions) -> Int[Tensor, "batch seq"]:
        """Return the table row of each position. A graph cannot check positions, so it maps negative ones to -1."""
        if not self.offset:
            return positions.index
        rows = positions.index + self.offset
        has_bounds = positions.min_index is not None and positions.max_index is not None
        return rows if has_bounds else rows.masked_fill(positions.index < 0, -1)  # not a row before the offset

    def resize(self, max_seq_len: int, *, method: ResizeMethod = "extend") -> None:
        """Grow the table in place to `max_seq_len` positions. It never shrinks, and offset rows do not change.

        The weight becomes a new parameter, so build the optimizer after resizing.

        Args:
            max_seq_len: the new number of positions.
            method: ``"extend"`` keeps every old row byte for byte and initialises the new rows as in the constructor.
                ``"interpolate"`` stretches the table: row p is interpolated at ``p (old - 1) / (new - 1)``.

        >>> learned = Learned(2, 1)
        >>> _ = learned.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
        >>> learned.resize(5, method="interpolate")
        >>> learned.weight.flatten().tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        one_of("method", method, get_args(ResizeMethod))
        old = self.max_seq_len
        max_seq_len = whole(
            "max_seq_len", max_seq_len, old, remedy=f"use resize({old}) or more; rows are never dropped"
        )
        if max_seq_len == old:
            return
        with torch.no_grad():
            if method == "interpolate":
                parts = [self.weight[: self.offset], _interpolate(self.weight[self.offset :], max_seq_len)]
            else:
                fresh = self.weight.new_empty(max_seq_len - old, self.d_model).normal_(std=self.init_std)
                parts = [self.weight, fresh]
            self.weight = nn.Parameter(torch.cat(parts), requires_grad=self.weight.requires_grad)
        self.max_seq_len = max_seq_len

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"max_seq_len={self.max_seq_len}, d_model={self.d_model}{offset}"


def _interpolate(rows: Float[Tensor, "old d_model"], new: int) -> Float[Tensor, "new d_model"]:
    """Interpolate linearly in float64, round once, and keep both ends. At a whole number the row is copied."""
    place = torch.arange(new, dtype=torch.float64, device=rows.device) * (len(rows) - 1) / (new - 1)
    below = place.floor().long()
    above = (below + 1).clamp(max=len(rows) - 1)
    share = (place - below)[:, None]
    exact = rows.double()
    return (exact[below] * (1 - share) + exact[above] * share).to(rows.dtype)


class LearnedGrid(PositionEncoding):
    r"""Adds a vector to every patch of an image, from a table that is resized to the image's grid.

    .. math:: x_{p} \leftarrow x_{p} + \mathrm{resize}(W, h \times w)_{\text{row}(p), \text{column}(p)}

    For a grid of the table's size, the table is used bit for bit. For other sizes the table is interpolated in float32
    or wider and rounded to its dtype, once for each size and call.

    - ViT, CLIP, DINOv2: ``LearnedGrid(14, 14, 768, prefix=1)``
    - DINOv2 with registers: ``LearnedGrid(37, 37, 768, prefix=1, antialias=True)``
    - DeiT: ``LearnedGrid(14, 14, 768, prefix=2)``
    - SigLIP: ``LearnedGrid(14, 14, 768)``
    - SigLIP 2 (NaFlex): ``LearnedGrid(16, 16, 768, mode="bilinear", antialias=True)``

    Use positions from `Positions.grid`, or from `Positions.packed_grids` for images of several sizes in one row. A
    table of height 1 without prefix also accepts positions of text.

    Args:
        height, width: the size of the table in patches.
        d_model: the width of the patch embeddings.
        prefix: the number of rows before the cells, for the first prefix tokens of a grid: 1 for a class token, 2 with
            a distillation token. Further prefix tokens, such as registers, have no vector.
        mode: the interpolation, ``"bicubic"`` or ``"bilinear"``.
        antialias: whether a smaller grid averages over the cells that it covers.
        align_corners: whether interpolation aligns the centres of the corner cells, instead of their outer corners.
        init_std: rows start as N(0, init_std**2).

    Limits:
        Interpolated tables work near the training sizes, and need some training for larger ones.

    Tested against:
        `transformers`' ViT, DINOv2 with and without registers, and SigLIP 2, forward and gradients.

    >>> grid = LearnedGrid(14, 14, 768, prefix=1)
    >>> grid.embed(torch.zeros(2, 1 + 10 * 20, 768), Positions.grid(10, 20, prefix=1)).shape
    torch.Size([2, 201, 768])
    """

    info = EncodingInfo(
        name="learned_grid",
        aliases=("vit", "learned_2d", "interpolated"),
        kind="absolute",
        parameters="(prefix + height x width) x d_model",
        cost_of_tokens="the table resized once per size, one row looked up, d_model additions",
        cost_of_pairs="nothing",
        extrapolation="the table is interpolated for other grid sizes; quality falls with the difference in size",
        used_by="ViT, DeiT, CLIP, DINOv2, SigLIP 2",
        paper="Dosovitskiy 2020, arXiv 2010.11929",
    )

    def __init__(
        self,
        height: int,
        width: int,
        d_model: int,
        *,
        prefix: int = 0,
        mode: Interpolation = "bicubic",
        antialias: bool = False,
        align_corners: bool = False,
        init_std: Real = INIT_STD,
    ) -> None:
        super().__init__()
        self.height = whole("height", height, 1, remedy="pass the rows of the grid, such as height=14")
        self.width = whole("width", width, 1, remedy="pass the columns of the grid, such as width=14")
        d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the patch embeddings")
        self.prefix = whole("prefix", prefix, 0, remedy="use prefix=1 for a class token")
        one_of("mode", mode, get_args(Interpolation))
        self.mode: Interpolation = mode
        self.antialias, self.align_corners = flag("antialias", antialias), flag("align_corners", align_corners)
        self.init_std = real("init_std", init_std, low=0, remedy="init_std=0.02")
        self.weight = nn.Parameter(torch.empty(self.grid.num_tokens, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> PositionEncoding:
        """Build the encoding for tokens in one row, unless `height` and `width` are given.

        A `ModelShape` has no grid.
        """
        return build(cls, {"d_model": shape.d_model, "height": 1, "width": shape.max_seq_len} | options)

    @property
    def grid(self) -> Grid:
        """The grid of the table's rows."""
        return Grid((self.height, self.width), self.prefix)

    @property
    def d_model(self) -> int:
        return self.weight.shape[1]

    def embed(self, x: Embeddings, positions: OptionalPositions = None) -> Embeddings:
        """Add the vector of each token's cell to `x`."""
        positions = require_embeddings(self, x, positions, self.d_model, single_axis=False)
        if positions.place_or_none is None:
            self._require_row(positions)
            return x + look_up(positions.index, self.weight)
        return x + look_up(positions.place_or_none, self.table(positions.grids))

    def table(self, grids: Sequence[Grid]) -> Float[Tensor, "places d_model"]:
        """Return the vectors of all tokens of these grids, one grid after another.

        >>> from locant.positions.grids import Grid
        >>> LearnedGrid(14, 14, 8).table([Grid((7, 7)), Grid((10, 20))]).shape
        torch.Size([249, 8])
        """
        parts = [part for grid in grids for part in self._rows_for(grid)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows_for(self, grid: Grid) -> list[Float[Tensor, "_ d_model"]]:
        if len(grid.sizes) != 2 or grid.prefix < self.prefix:
            got = f"got a grid of {grid}, expected height x width after {self.prefix} prefix tokens or more"
            raise ShapeError(got, f"Positions.grid(height, width, prefix={self.prefix})")
        if grid == self.grid:
            return [self.weight]
        without_rows = self.weight.new_zeros(grid.prefix - self.prefix, self.d_model)
        return [self.weight[: self.prefix], without_rows, self._resize_cells(grid.sizes)]

    def _resize_cells(self, sizes: tuple[int, ...]) -> Float[Tensor, "cells d_model"]:
        cells = self.weight[self.prefix :]
        if sizes == (self.height, self.width):
            return cells
        image = cells.to(torch.promote_types(cells.dtype, torch.float32)).T.unflatten(1, (self.height, self.width))
        resized = F.interpolate(
            image[None], list(sizes), mode=self.mode, align_corners=self.align_corners, antialias=self.antialias
        )
        return resized[0].flatten(1).T.to(cells.dtype)

    def _require_row(self, positions: Positions) -> None:
        """Raise unless these are positions of text, and the table is one row of cells."""
        if positions.axes != 1 or positions.denominator != 1 or self.height != 1 or self.prefix:
            got = f"got positions without a grid, {type(self).__name__}({self.extra_repr()}) needs its sizes"
            raise ShapeError(got, f"Positions.grid(height, width, prefix={self.prefix})")
        name, remedy = f"LearnedGrid(1, {self.width})", "use shorter windows, or Positions.grid(1, length)"
        positions.require_within(0, self.width - 1, name, remedy)

    def extra_repr(self) -> str:
        options = {"prefix": self.prefix, "antialias": self.antialias, "align_corners": self.align_corners}
        changed = "".join(f", {name}={value}" for name, value in options.items() if value)
        return f"{self.height}, {self.width}, d_model={self.d_model}{changed}, mode={self.mode!r}"
