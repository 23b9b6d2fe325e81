"""`embed`, `rotate` and `bias` of an encoding in one module, for compilers, and positions to call them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from locant import PositionEncoding, Positions

HEADS, HEAD_DIM, D_MODEL = 4, 6, 7
LENGTHS = (2, 3, 8, 9, 30, 51)
"""In `tests/known_bugs`, a slow test of entry 37 takes more, for every encoding."""


class AllMethods(nn.Module):
    """A module that calls all three methods, at given positions or at default ones, which the graph builds."""

    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, x: Tensor, q: Tensor, k: Tensor, positions: Positions | None = None) -> tuple[Tensor | None, ...]:
        rotated = self.encoding.rotate(q, k, positions)
        return self.encoding.embed(x, positions), *rotated, self.encoding.bias(q, k, positions)


def tokens(n: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, n, D_MODEL), torch.randn(batch, HEADS, n, HEAD_DIM), torch.randn(batch, 2, n, HEAD_DIM)


def require_same(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for ours, wanted in zip(actual, expected, strict=True):
        assert (ours is None) == (wanted is None)
        if ours is not None and wanted is not None:
            assert ours.dtype == wanted.dtype
            assert torch.equal(ours, wanted)


PLACES: dict[str, Callable[[int], Positions | None]] = {
    "built in the graph": lambda n: None,
    "arange": lambda n: Positions.arange(n),
    "behind a cache": lambda n: Positions.after(3 * n, n),
    "packed": lambda n: Positions.packed([n // 2, n - n // 2]),
    "padded": lambda n: Positions.from_mask(torch.arange(n)[None] >= torch.tensor([[0], [n // 3]])),
}
