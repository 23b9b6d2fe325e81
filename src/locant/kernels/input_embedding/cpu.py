"""The same on a CPU by torch's operators: where no native kernel takes the tables, and what that one agrees with.

Both give the same bits, forward and backward, in every run and on any number of threads: what dropout takes away
follows from a seed, and every sum has an order. That over the width of a token is in `reference`. Backward, everything
is added in the order of the slots: all sequences of slot 0, then of slot 1. Slots are cut into chunks, which are
computed one after another in memory that stays in cache; the sums for gamma, beta and few segments are those of the
chunks. Sums are float32 (float64 for float64), rounded once to the dtype of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding import reference
from locant.kernels.input_embedding.reference import Operands

CHUNK = 512
"""Tokens of a chunk, unless there are more sequences."""

FEW = 4
"""Segments that have sums of chunks; the rows of more are added like those of tokens."""

Forward = tuple[Tensor, Tensor, Tensor]
"""The result, and each token's mean and reciprocal deviation (empty without a norm)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of token, position, segment, gamma and beta; empty where none was asked for."""


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


def empty_forward(o: Operands) -> Forward:
    """Memory for what `forward` gives."""
    normed = o.num_tokens if o.eps is not None else 0
    mean, rstd = (o.token.new_empty(normed, dtype=o.accumulator) for _ in range(2))
    return o.token.new_empty(*o.ids.shape, o.width), mean, rstd


def empty_backward(o: Operands, needs: list[bool]) -> Gradients:
    """Memory for what `backward` gives."""
    token, position, segment, gamma, beta = (
        o.token.new_empty(0)
        if table is None or not need
        else torch.empty_like(table, memory_format=torch.contiguous_format)
        for table, need in zip(o.learned, needs, strict=True)
    )
    return token, position, segment, gamma, beta


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


def slots_of_chunk(batch: int) -> int:
    """How many slots, each with the tokens of all sequences, make a chunk."""
    return max(CHUNK // max(batch, 1), 1)


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


def require_rows(o: Operands) -> None:
    """Raise unless every id has its row: memory behind a table is never read, compiled or not."""
    looked_up = [
        ("token", o.ids, o.token),
        ("position", o.position_index, o.position),
        ("segment", o.segments, o.segment),
    ]
    for name, ids, table in looked_up:
        if ids is None or table is None or not ids.numel():
            continue
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= table.shape[0]:
            raise RangeError(
                f"got {name} id {low if low < 0 else high}, the {name} table has {table.shape[0]} rows",
                f"ids from 0 to {table.shape[0] - 1}",
            )


# ---------------------------------------------------------------------- dropout

# 16 random bits of each entry are compared with a limit. That of a token is drawn between the two whole numbers next
# to ``p * 2**16``, so that the probability of each entry is p to the last bit of a float64. Bits are drawn for some
# hundred tokens, then their limits, and so on; where these parts are cut depends on the shapes alone.

PART = 393_216
"""Entries in one part: 512 tokens of width 768."""


class Drawn(NamedTuple):
    """An entry is dropped if its bits are below the limit of its token."""

    bits: Int16[Tensor, " places"]
    limits: Int16[Tensor, " tokens"]
    of_group: int
    """Tokens that parts are cut from: some whole rows of the batch, or one."""
    of_part: int
    group_step: int
    """How far in `bits` from one group to the next, and from one part to the next."""
    part_step: int

    def parts(self) -> Iterator[tuple[slice, int]]:
        """The tokens of each part, and where its bits begin."""
        tokens = len(self.limits)
        for group, start in enumerate(range(0, tokens, self.of_group)):
            last = min(start + self.of_group, tokens)
            for part, first in enumerate(range(start, last, self.of_part)):
                place = group * self.group_step + part * self.part_step
                yield slice(first, min(first + self.of_part, last)), place


def draw(o: Operands, seed: Tensor) -> Drawn:
    """What follows from the seed; memory of the size of the result in 16 bits."""
    seq_len, width, tokens = o.ids.shape[1], o.width, o.num_tokens
    fit = max(PART // max(width, 1), 1)
    of_group = of_part = max(fit // max(seq_len, 1) * seq_len, 1)
    if fit < seq_len:
        of_group, of_part = seq_len, fit
    part_step, rest = _words(of_part * width), _words(of_group % of_part * width)
    group_step = of_group // of_part * part_step + rest
    places = tokens // of_group * group_step + _words(tokens % of_group * width)
    bits, limits = torch.empty(places, dtype=torch.int16), torch.empty(tokens, dtype=torch.int16)
    drawn = Drawn(bits, limits, of_group, of_part, group_step, part_step)
    generator = torch.Generator().manual_seed(int(seed))
    whole = int(o.p * 2**16)
    for part, place in drawn.parts():
        count = part.stop - part.start
        some = bits[place : place + _words(count * width)]
        some.view(torch.int64).random_(-(2**63), None, generator=generator)
        one_more = torch.rand(count, dtype=torch.float64, generator=generator) < o.p * 2**16 - whole
        limits[part] = (one_more + (whole - 2**15)).to(torch.int16)
    return drawn


def _words(entries: int) -> int:
    """Four are drawn at a time."""
    return -(-entries // 4) * 4


def kept(o: Operands) -> Bool[Tensor, "batch seq d_model"]:
    """Which entries of the result are left."""
    keep = torch.ones(o.num_tokens, o.width, dtype=torch.bool)
    if o.dropping and o.seed is not None:
        drawn = draw(o, o.seed)
        for part, place in drawn.parts():
            bits = drawn.bits[place : place + keep[part].numel()].view(-1, o.width)
            torch.ge(bits, drawn.limits[part, None], out=keep[part])
    return keep.view(*o.ids.shape, o.width)
