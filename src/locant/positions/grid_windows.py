"""`GridWindows`: a grid that is split into windows, which may be shifted, as in Swin. Attention stays in a window."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import shape_error, whole
from locant.errors import RangeError
from locant.positions.constant import Constant
from locant.positions.positions import Positions


class GridWindows:
    """The windows of a grid as rows of tokens, with their positions (Liu et al. 2021, section 3.2).

    With a `shift`, the tokens move up by `shift` rows and to the left by `shift` columns. Tokens at the edge wrap to
    the other side of the grid. A window there holds tokens from different sides. Each side is a document, so
    tokens of different sides do not attend to each other (https://arxiv.org/abs/2103.14030).

    Args:
        height, width: the size of the grid in tokens, multiples of `window`. Published models pad with zeros
            (``F.pad``), and their windows attend to this padding.
        window: the number of rows and of columns of a window.
        shift: a number below `window`. 0 does not shift.

    >>> windows = GridWindows(4, 6, 2, shift=1)
    >>> rows = windows.cut(torch.arange(4.0 * 6).view(1, 24, 1))
    >>> rows.shape, rows[0].flatten(), rows[-1].flatten()
    (torch.Size([6, 4, 1]), tensor([ 7.,  8., 13., 14.]), tensor([23., 18.,  5.,  0.]))
    >>> windows.positions().document[-1]
    tensor([0, 1, 2, 3])
    >>> torch.equal(windows.join(rows)[0, :, 0], torch.arange(24.0))
    True
    """

    def __init__(self, height: int, width: int, window: int, *, shift: int = 0) -> None:
        self.window = whole("window", window, 1, remedy="window=7")
        self.shift = whole("shift", shift, 0, self.window - 1, remedy=f"shift={self.window // 2}, half a window")
        self.height, self.width = (
            _check_side(name, size, self.window) for name, size in (("height", height), ("width", width))
        )
        slots = torch.arange(self.height * self.width, device="cpu").view(self.height, self.width)
        slots = self._to_windows(slots.roll((-self.shift, -self.shift), (0, 1)))
        row, column = (torch.arange(size, device="cpu") >= size - self.shift for size in (self.height, self.width))
        self._document = Constant(self._to_windows(2 * row.long()[:, None] + column.long()))
        self._slots, self._inverse = Constant(slots.flatten()), Constant(slots.flatten().argsort())

    def _to_windows(self, grid: Int[Tensor, "height width"]) -> Int[Tensor, "windows tokens"]:
        cells = grid.unflatten(1, (-1, self.window)).unflatten(0, (-1, self.window))
        return cells.transpose(1, 2).flatten(2).flatten(0, 1)

    @property
    def num_windows(self) -> int:
        return self.height * self.width // self.window**2

    def positions(self, batch: int = 1, *, device: torch.device | str | None = None) -> Positions:
        """Return the positions of the rows that `cut` makes of `batch` images, or one row if all rows are equal."""
        batch = whole("batch", batch, 0, remedy="pass the number of images")
        row = Positions.grid(self.window, self.window, device=device)
        if not self.shift:
            return row
        document = self._document.on(row.device).repeat(batch, 1)
        return dataclasses.replace(row.expand(len(document)), document_or_none=document)

    def cut(self, x: Float[Tensor, "batch cells d_model"]) -> Float[Tensor, "rows tokens d_model"]:
        """Reorder the tokens of row-major grids into one row of tokens per window of each image."""
        cells = self.height * self.width
        if x.ndim != 3 or x.shape[1] != cells:
            raise shape_error(
                "x", x, f"(batch, {cells}, d_model)", "x.flatten(1, 2) of (batch, height, width, d_model)"
            )
        return x[:, self._slots.on(x.device)].unflatten(1, (self.num_windows, -1)).flatten(0, 1)

    def join(self, rows: Float[Tensor, "rows tokens d_model"]) -> Float[Tensor, "batch cells d_model"]:
        """Undo `cut`."""
        if rows.ndim != 3 or rows.shape[1] != self.window**2 or rows.shape[0] % self.num_windows:
            expected = f"(batch * {self.num_windows}, {self.window**2}, d_model)"
            raise shape_error("rows", rows, expected, "pass the rows of windows.cut(x)")
        return rows.unflatten(0, (-1, self.num_windows)).flatten(1, 2)[:, self._inverse.on(rows.device)]

    def __repr__(self) -> str:
        return f"GridWindows({self.height}, {self.width}, {self.window}, shift={self.shift})"


def _check_side(name: str, size: int, window: int) -> int:
    size = whole(name, size, 1, remedy="pass the tokens of a side of the grid")
    if size % window:
        more = size + -size % window
        raise RangeError(
            f"got {size} for {name}, expected a multiple of {window}", f"pad with F.pad and use {name}={more}"
        )
    return size
