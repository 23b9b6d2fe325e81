"""The input of a transformer written down plainly; what every faster form has to agree with.

Arithmetic is float32 whatever the dtype of the tables (float64 for float64), rounded once at the end: token, segment
and position are added in this order, which is BERT's, the norm is that of `torch.nn.LayerNorm`, and an entry that
dropout keeps is multiplied by ``1 / (1 - p)``. A sum over the width is formed in `LANES` lanes, each added up from left
to right, which are then added by halves: an order that any machine can follow, so that they all get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

LANES = 32
"""As in ``native/embedding.c``."""


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

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What has gradients, in the order of all kernels."""
        return self.token, self.position, self.segment, self.gamma, self.beta


def input_embedding(
    o: Operands, keep: Bool[Tensor, "batch seq d_model"] | None = None
) -> Float[Tensor, "batch seq d_model"]:
    """The sum for every token, normed; `keep` says which entries dropout leaves.

    >>> import torch
    >>> input_embedding(Operands(ids=torch.tensor([[1]]), token=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), scale=2.0))
    tensor([[[6., 8.]]])
    """
    x = sum_of_rows(o)
    x = x if o.eps is None else normed(x, *moments(x, o.eps), o)
    return (x if keep is None else dropped(x, keep, o.p)).to(o.token.dtype)


def sum_of_rows(o: Operands) -> Float[Tensor, "batch seq d_model"]:
    """The rows of every token, scaled and added."""
    dtype = o.accumulator
    x = _rows(o.ids, o.token, dtype, o.padding_idx) * o.scale
    if o.segment is not None:
        x = x + (o.segment[0].to(dtype) if o.segments is None else _rows(o.segments, o.segment, dtype))
    if o.position is not None and o.position_index is not None:
        x = x + _rows(o.position_index, o.position, dtype)
    return x


def _rows(ids: Int[Tensor, "*batch"], table: Tensor, dtype: torch.dtype, padding_idx: int | None = None) -> Tensor:
    """Rows in the working precision; where a gradient is wanted, it is added up in that precision, too."""
    if torch.is_grad_enabled():
        return F.embedding(ids, table.to(dtype), padding_idx)
    return F.embedding(ids, table).to(dtype)


def normed(
    x: Float[Tensor, "*batch d_model"], mean: Float[Tensor, "*batch 1"], rstd: Float[Tensor, "*batch 1"], o: Operands
) -> Float[Tensor, "*batch d_model"]:
    """The norm of tokens whose moments are known."""
    x = (x - mean) * rstd
    x = x if o.gamma is None else x * o.gamma.to(x.dtype)
    return x if o.beta is None else x + o.beta.to(x.dtype)


def dropped(
    x: Float[Tensor, "*batch d_model"], keep: Bool[Tensor, "*batch d_model"], p: float
) -> Float[Tensor, "*batch d_model"]:
    """What is left of each entry."""
    return x * keep * (1 / (1 - p))


def moments(
    x: Float[Tensor, "*batch d_model"], eps: float
) -> tuple[Float[Tensor, "*batch 1"], Float[Tensor, "*batch 1"]]:
    """The mean of each token, and one over its deviation."""
    mean = mean_over_width(x)
    off = x - mean
    variance = mean_over_width(off * off) + eps
    return mean, 1 / variance.double().sqrt().to(x.dtype)  # torch's square roots of float32 are not all rounded right


def mean_over_width(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
    """The mean of each token, added up in lanes."""
    width = x.shape[-1]
    lanes = x.new_zeros(*x.shape[:-1], LANES)
    for some in F.pad(x, (0, -width % LANES)).split(LANES, -1):
        lanes = lanes + some
    while lanes.shape[-1] > 1:
        first, second = lanes.chunk(2, -1)
        lanes = first + second
    return lanes / width
