"""Rotary as it is usually written, with its frequencies in a buffer: the ancestor of most twins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locant import PositionEncoding, Positions
from locant.kernels.rotary import rotate_pairs
from tests.known_bugs.subjects import WIDTH

__all__ = ["BufferRotary", "GrowingRotary", "MultipliedRotary", "coarsely_reduced"]


class BufferRotary(PositionEncoding):
    """`inv_freq` is part of the module's state, and angles are computed in its dtype."""

    inv_freq: Tensor

    def __init__(self, head_dim: int = WIDTH, base: float = 10_000.0, *, persistent: bool = False) -> None:
        super().__init__()
        frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=persistent)

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        angle = positions.index[..., None].to(self.inv_freq.dtype) * self.inv_freq
        return angle.cos(), angle.sin()

    def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
        cos, sin = (table.to(torch.promote_types(q.dtype, torch.float32)) for table in self.cos_sin(positions))
        return rotate_pairs(q, cos, sin, "half"), rotate_pairs(k, cos, sin, "half")


class MultipliedRotary(BufferRotary):
    """The angles are a matrix product of frequencies and positions."""

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        angle = (self.inv_freq[:, None] @ positions.index[:, None, :].float()).transpose(1, 2)
        return angle.cos(), angle.sin()


class GrowingRotary(BufferRotary):
    """A buffer of cosines and sines that is replaced by a larger one when a sequence outgrows it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 1, 0, WIDTH // 2), persistent=False)

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        if positions.seq_len > self.table.shape[2]:
            self.table = torch.stack(super().cos_sin(positions))
        return self.table[0, :, : positions.seq_len], self.table[1, :, : positions.seq_len]


def coarsely_reduced(positions: Positions) -> tuple[Tensor, Tensor]:
    """Angles brought to -pi .. pi by subtracting whole circles in float32, as fast sines do."""
    angle = positions.index[..., None].float() * BufferRotary().inv_freq
    circle = torch.tensor(2 * math.pi, dtype=torch.float32)
    angle = angle - circle * torch.round(angle / circle)
    return angle.cos(), angle.sin()
