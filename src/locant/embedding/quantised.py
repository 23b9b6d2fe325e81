"""Token tables of 8 bits for inference: a code for every number, and a scale for every row.

A row is divided by its largest entry, so that it fills the range of the code, and rounded to the nearest. ``int8`` has
steps of one size, 1/127 of the largest; ``fp8`` (E4M3, https://arxiv.org/abs/2209.05433) has steps of 1/8 of a power of
two. Codes and scales are kept as integers, which no `.to` or `.half` of a model converts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import one_of, shown
from locant.embedding.table import require_ids
from locant.embedding.token import TokenEmbedding
from locant.errors import RangeError

CODES: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""The dtype of a code, and the largest number it holds."""

ROWS = 2**13
"""Rows that are widened at once."""


class QuantisationError(NamedTuple):
    """What rounding moved: all entries together, over their root mean square; and one, over the largest of its row."""

    relative: float
    largest: float


class QuantisedEmbedding(nn.Module):
    """A `TokenEmbedding` in a quarter of the memory of float32, without gradients; it takes its place in a model.

    Args:
        table: what is quantised; it stays as it is.
        code: ``"int8"`` or ``"fp8"``.

    >>> table = TokenEmbedding(1_000, 64)
    >>> small = QuantisedEmbedding(table)
    >>> small(torch.tensor([[1, 2]])).shape, small.num_bytes, table.weight.nbytes
    (torch.Size([1, 2, 64]), 68000, 256000)
    >>> small.error.relative < 0.01
    True
    """

    codes: Tensor
    scale_bits: Tensor

    @torch.no_grad()
    def __init__(self, table: TokenEmbedding, code: Literal["int8", "fp8"] = "int8") -> None:
        super().__init__()
        if not isinstance(table, TokenEmbedding):
            got = f"got {shown(table)} for table, expected a TokenEmbedding"
            raise RangeError(got, "QuantisedEmbedding(TokenEmbedding.from_pretrained(folder))")
        dtype, reach = CODES[one_of("code", code, CODES)]
        weight = table.weight.detach()
        self.code = code
        self.dtype = weight.dtype
        self._factor = None if table.scale is None else table.factor()
        codes, scales = [], []
        for rows in weight.split(ROWS):
            wide = rows.float()
            scale = wide.abs().amax(1, keepdim=True) / reach
            even = wide / scale.masked_fill(scale == 0, 1)
            codes.append((even.round() if dtype == torch.int8 else even).to(dtype).view(torch.int8))
            scales.append(scale.view(torch.int32))
        self.register_buffer("codes", torch.cat(codes))
        self.register_buffer("scale_bits", torch.cat(scales))
        self.error = self._measured(weight)

    @property
    def vocab_size(self) -> int:
        return self.codes.shape[0]

    @property
    def d_model(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """What the codes and the scales take."""
        return self.codes.nbytes + self.scale_bits.nbytes

    def forward(self, ids: Integer[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """The (scaled) row of every id, in the dtype of the table that was quantised."""
        ids = require_ids(ids, self.vocab_size, "QuantisedEmbedding", "vocab_size", self.codes.device)
        rows = self._widened(self.codes[ids], self.scale_bits[ids]).to(self.dtype)
        return rows if self._factor is None else rows * self._factor

    def logits(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        """Scores of all tokens; a block of rows at a time has the dtype of `x`."""
        return torch.cat([F.linear(x, rows.to(x.dtype)) for rows in self._rows()], -1)

    def _widened(self, codes: Tensor, scale_bits: Tensor) -> Tensor:
        return codes.view(CODES[self.code][0]).float() * scale_bits.view(torch.float32)

    def _rows(self) -> Iterator[Tensor]:
        parts = zip(self.codes.split(ROWS), self.scale_bits.split(ROWS), strict=True)
        return (self._widened(*part) for part in parts)

    def _measured(self, weight: Tensor) -> QuantisationError:
        moved, size, largest = 0.0, 0.0, 0.0
        for rows, ours in zip(weight.split(ROWS), self._rows(), strict=True):
            off = (ours - rows.float()).double()
            moved += float(off.square().sum())
            size += float(rows.double().square().sum())
            most = rows.double().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
            largest = max(largest, float((off.abs().amax(1) / most).max()))
        return QuantisationError((moved / size) ** 0.5 if size else 0.0, largest)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}, code={self.code!r}"
