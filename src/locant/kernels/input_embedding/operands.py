"""What the operation is given, under one name: tables, where to read them, and what happens to the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["MAX_NORMED", "NO_FAULT", "Operands"]

MAX_NORMED = 2**15
"""Bytes of a token, as float32 or float64, that a GPU's kernel can norm: one program holds all of it."""

NO_FAULT = 2**63 - 1
"""What a table that had all rows has in the place of the number of the first token without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """One row of each table per token: ``dropout(norm(scale * token[id] + segment[part] + position[index]))``.

    All ids are int64, and all tables have the dtype and device of `token`, except that `position` may be float32
    where the others are narrower: vectors that follow from a formula are not rounded before they are added.
    """

    ids: Int[Tensor, "batch seq"]
    token: Float[Tensor, "vocab_size d_model"]
    position_index: Int[Tensor, "#batch seq"] | None = None
    position: Float[Tensor, "num_positions d_model"] | None = None
    segments: Int[Tensor, "batch seq"] | None = None
    """``None`` with a segment table: all tokens are in segment 0."""
    segment: Float[Tensor, "num_segments d_model"] | None = None
    gamma: Float[Tensor, " d_model"] | None = None
    beta: Float[Tensor, " d_model"] | None = None
    seed: Int[Tensor, " one"] | None = None
    """What the dropped entries follow from; ``None`` for no dropout."""
    scale: float = 1.0
    padding_idx: int | None = None
    eps: float | None = None
    """Of the LayerNorm; ``None`` for no norm."""
    p: float = 0.0
    """The probability that an entry is dropped."""

    @property
    def width(self) -> int:
        return self.token.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()

    @property
    def accumulator(self) -> torch.dtype:
        """What sums are formed in: float32, or float64 for float64."""
        return torch.promote_types(self.token.dtype, torch.float32)

    @property
    def dropping(self) -> bool:
        return self.seed is not None and self.p > 0
