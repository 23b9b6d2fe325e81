"""The input embedding by torch's operators, chunk by chunk: the bits that the native kernel has to have.

Backward, everything is added in the order of the slots: all sequences of slot 0, then of slot 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.input_embedding import reference
from locant.kernels.input_embedding.native import (
    FEW,
    Forward,
    Gradients,
    empty_forward,
    kept,
    require_rows,
    slots_of_chunk,
)
from locant.kernels.input_embedding.reference import Operands

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(o: Operands) -> Forward:
    """The result, and what `backward` takes again; raises for an id without a row."""
    require_rows(o)
    y, mean, rstd = empty_forward(o)
    keep = kept(o).transpose(0, 1) if o.dropping else None
    for slots, part in _chunks(o):
        x = reference.sum_of_rows(part)
        if o.eps is not None:
            m, r = reference.moments(x, o.eps)
            _by_slot(mean, o)[slots], _by_slot(rstd, o)[slots] = m, r
            x = reference.normed(x, m, r, o)
        y.transpose(0, 1)[slots] = x if keep is None else reference.dropped(x, keep[slots], o.p)
    return y, mean, rstd


@torch.no_grad()
def backward(grad: Tensor, mean: Tensor, rstd: Tensor, o: Operands, needs: list[bool]) -> Gradients:
    """What `grad` on the result means for every table and for the norm's weight and bias, where `needs` says so."""
    require_rows(o)
    keep = kept(o).transpose(0, 1) if o.dropping else None
    sums = _Sums(o, needs)
    for slots, part in _chunks(o):
        g = grad.transpose(0, 1)[slots].to(o.accumulator)
        g = g if keep is None else reference.dropped(g, keep[slots], o.p)
        if o.eps is not None:
            r = _by_slot(rstd, o)[slots]
            x = (reference.sum_of_rows(part) - _by_slot(mean, o)[slots]) * r
            sums.add_to_norm(g, x)
            g = g if o.gamma is None else g * o.gamma.to(g.dtype)
            g = (g - reference.mean_over_width(g) - x * reference.mean_over_width(g * x)) * r
        sums.add_to_tables(g, part)
    return sums.gradients()


def _chunks(o: Operands) -> Iterator[tuple[slice, Operands]]:
    """Some slots, and what is read for their tokens: a row of ids for each slot."""
    seq_len = o.ids.shape[1] if o.num_tokens else 0
    step = slots_of_chunk(o.ids.shape[0])
    for first in range(0, seq_len, step):
        slots = slice(first, min(first + step, seq_len))
        read = o.position_index, o.segments
        index, segments = (None if ids is None else ids.expand(o.ids.shape).mT[slots] for ids in read)
        yield slots, replace(o, ids=o.ids.mT[slots], position_index=index, segments=segments)


def _by_slot(of_tokens: Float[Tensor, " tokens"], o: Operands) -> Float[Tensor, "seq batch 1"]:
    return of_tokens.view(o.ids.shape).mT[..., None]


class _Sums:
    """What has been added up so far, in float32 or float64."""

    def __init__(self, o: Operands, needs: list[bool]) -> None:
        self.o = o
        self.used = torch.unique(o.ids)  # a second table in float32 need not have a row for all
        heights = len(self.used), *(0 if table is None else len(table) for table in (o.position, o.segment)), 1, 1
        self.token, self.position, self.segment, self.gamma, self.beta = (
            None if table is None or not need else self._zeros(height)
            for table, need, height in zip(o.learned, needs, heights, strict=True)
        )

    def _zeros(self, height: int) -> Tensor:
        return self.o.token.new_zeros(height, self.o.width, dtype=self.o.accumulator)

    def add_to_norm(self, g: Float[Tensor, "slots batch d_model"], x: Float[Tensor, "slots batch d_model"]) -> None:
        """`g` is the gradient on the normed sum, `x` that sum before gamma."""
        together = torch.zeros(g.shape[:2], dtype=torch.long)
        for total, rows in ((self.gamma, g * x), (self.beta, g)):
            if total is not None:
                total.add_(_add(self._zeros(1), together, rows))

    def add_to_tables(self, g: Float[Tensor, "slots batch d_model"], part: Operands) -> None:
        """`g` is the gradient on the sum of the rows."""
        if self.token is not None:
            _add(self.token, torch.searchsorted(self.used, part.ids.contiguous()), g * self.o.scale)
        if self.position is not None and part.position_index is not None:
            _add(self.position, part.position_index, g)
        if self.segment is not None:
            segments = torch.zeros_like(part.ids) if part.segments is None else part.segments
            few = len(self.segment) <= FEW
            here = _add(self._zeros(len(self.segment)) if few else self.segment, segments, g)
            self.segment = self.segment.add_(here) if few else here

    def gradients(self) -> Gradients:
        """Each in the dtype of what it is the gradient of."""
        o, token = self.o, None
        if self.token is not None:
            token = torch.zeros_like(o.token, memory_format=torch.contiguous_format)
            token.index_copy_(0, self.used, self.token.to(o.token.dtype))
            if o.padding_idx is not None:
                token[o.padding_idx] = 0
        of_norm = (None if total is None else total[0] for total in (self.gamma, self.beta))
        token, position, segment, gamma, beta = (
            o.token.new_empty(0) if total is None or table is None else total.to(table.dtype)
            for total, table in zip((token, self.position, self.segment, *of_norm), o.learned, strict=True)
        )
        return token, position, segment, gamma, beta


def _add(sums: Float[Tensor, "rows d_model"], to: Int[Tensor, "slots batch"], g: Tensor) -> Tensor:
    """Each row of `g` to its sum, in their order."""
    return sums.index_add_(0, to.flatten(), g.flatten(0, 1))
