"""8-bit token tables for inference, with a code for every number and a scale for every row.

A row is divided by its largest entry, so that it fills the range of the code, and rounded to nearest. ``int8`` has
equal steps of 1/127 of the largest entry. ``fp8`` (E4M3, https://arxiv.org/abs/2209.05433) has steps of 1/8 of a power
of two. Codes and scales are stored as integers, which `.to` and `.half` of a model do not convert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import one_of, short_repr
from locant.embedding.table import require_ids
from locant.embedding.token import TokenEmbedding
from locant.errors import RangeError

CODES: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""The dtype of each code, and its largest number."""

ROWS = 2**13
"""The number of rows that are widened at once."""


class QuantisationError(NamedTuple):
    """The rounding error of a table.

    Args:
        relative: the root mean square of the error, divided by the root mean square of the entries.
        largest: the largest error, divided by the largest entry of its row.
    """

    relative: float
    largest: float


class QuantisedEmbedding(nn.Module):
    """A quantised `TokenEmbedding`, which replaces the original in a model. It needs a quarter of float32's memory.

    It has no gradients.

    Args:
        table: the embedding to quantise, which is not changed.
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
            got = f"got {short_repr(table)} for table, expected a TokenEmbedding"
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
        self.error = self._measure_error(weight)

    @property
    def vocab_size(self) -> int:
        return self.codes.shape[0]

    @property
    def d_model(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """The bytes of the codes and the scales."""
        return self.codes.nbytes + self.scale_bits.nbytes

    def forward(self, ids: Integer[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Return the (scaled) row of every id, in the dtype of the original table."""
        ids = require_ids(ids, self.vocab_size, "QuantisedEmbedding", "vocab_size", self.codes.device)
        rows = self._widen(self.codes[ids], self.scale_bits[ids]).to(self.dtype)
        return rows if self._factor is None else rows * self._factor

    def logits(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        """Return the scores of all tokens. One block of rows at a time is converted to the dtype of `x`."""
        return torch.cat([F.linear(x, rows.to(x.dtype)) for rows in self._rows()], -1)

    def _widen(self, codes: Tensor, scale_bits: Tensor) -> Tensor:
        return codes.view(CODES[self.code][0]).float() * scale_bits.view(torch.float32)

    def _rows(self) -> Iterator[Tensor]:
        parts = zip(self.codes.split(ROWS), self.scale_bits.split(ROWS), strict=True)
        return (self._widen(*part) for part in parts)

    def _measure_error(self, weight: Tensor) -> QuantisationError:
        squares, size, largest = 0.0, 0.0, 0.0
        for rows, quantised in zip(weight.split(ROWS), self._rows(), strict=True):
            error = (quantised - rows.float()).double()
            squares += float(error.square().sum())
            size += float(rows.double().square().sum())
            most = rows.double().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
            largest = max(largest, float((error.abs().amax(1) / most).max()))
        return QuantisationError((squares / size) ** 0.5 if size else 0.0, largest)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}, code={self.code!r}"
