"""The same on a CPU by ``native/embedding.c``: what it takes, how it is told, and what dropout takes away.

Forward it is one parallel region of torch's own threads, backward one for the sums in the order of the slots and one
for every table whose rows are gathered; a few tokens start none. Random bits are torch's, drawn before.

Results have the same bits in every run and on any number of threads: what dropout takes away follows from a seed, and
every sum has an order. That over the width of a token is in `reference`. Backward, everything is added in the order of
the slots: all sequences of slot 0, then of slot 1. Slots are cut into chunks; the sums for gamma, beta and few segments
are those of the chunks. Sums are float32, rounded once to the dtype of the table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int16
from torch import Tensor

from locant.errors import RangeError
from locant.kernels import native
from locant.kernels.input_embedding.reference import Operands

FORWARD, BACKWARD = "locant_embed", "locant_embed_backward"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BUFFERS = 3
"""Rows of float32 that each thread works in, as in C."""
CHUNK = 512
"""Tokens of a chunk, unless there are more sequences."""
FEW = 4
"""Segments that have sums of chunks; the rows of more are added like those of tokens."""

pack = struct.Struct("=31q2d14qd5q").pack
"""``Task`` in C."""

Forward = tuple[Tensor, Tensor, Tensor]
"""The result, and each token's mean and reciprocal deviation (empty without a norm)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of token, position, segment, gamma and beta; empty where none was asked for."""


def forward(o: Operands) -> Forward:
    """The result, and what `backward` takes again; raises for an id without a row."""
    y, mean, rstd = empty_forward(o)
    if y.numel():
        _call(FORWARD, o, y, mean, rstd, empty_backward(o, [False] * len(o.learned)))
    return y, mean, rstd


def backward(grad: Tensor, mean: Tensor, rstd: Tensor, o: Operands, needs: list[bool]) -> Gradients:
    """What `grad` on the result means for every table and for the norm's weight and bias, where `needs` says so."""
    gradients = empty_backward(o, needs)
    if not grad.numel():
        return tuple(each.zero_() for each in gradients)  # type: ignore[return-value]
    if grad.dtype not in DTYPES:
        grad = grad.float()
    _call(BACKWARD, o, _in_rows(grad), mean.contiguous(), rstd.contiguous(), gradients)
    return gradients


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


def _call(name: str, o: Operands, out: Tensor, mean: Tensor, rstd: Tensor, gradients: Gradients) -> None:
    """`out` is the result to be written, or the gradient on it; `gradients` that are not wanted are empty."""
    batch, seq_len = o.ids.shape
    of_token, of_position, of_segment, of_gamma, of_beta = gradients
    index, segments = o.position_index, o.segments
    run = _first_of_run(index) if of_position.numel() else None
    if of_position.numel() and run is None and index is not None:
        index = index.expand(o.ids.shape)
    few = len(of_segment) <= FEW
    if not few and segments is None:
        segments = torch.zeros_like(o.ids)
    token = _Table(o.token, o.ids, of_token, gathered=True)
    position = _Table(None if index is None else o.position, index, of_position, gathered=run is None)
    segment = _Table(o.segment, segments, of_segment, gathered=not few)
    gamma, beta = (None if table is None else table.float().contiguous() for table in (o.gamma, o.beta))
    gamma = torch.ones(o.width) if gamma is None and beta is not None else gamma
    drawn = draw(o, o.seed) if o.dropping and o.seed is not None else None
    threads, slots, sums = native.threads(), slots_of_chunk(batch), 2 + few * len(of_segment)
    in_slots = name == BACKWARD and (o.eps is not None or run is not None or sums > 2)
    buffers = torch.empty(threads * BUFFERS * o.width)
    along = torch.empty(2 * o.num_tokens if in_slots else 0)
    partial = torch.empty(-(-seq_len // slots) * sums * o.width if in_slots else 0)
    batch_step, seq_step = (step * out.element_size() for step in out.stride()[:2])
    packed = pack(
        threads, batch, seq_len, o.width, native.DTYPES[o.token.dtype],
        *token.packed(), *position.packed(), *segment.packed(),
        index is not None and index.shape[0] == 1, -1 if run is None else run, slots,
        -1 if o.padding_idx is None else o.padding_idx, o.eps is not None, o.scale, o.eps or 0.0,
        _place(gamma), _place(beta), _place(mean), _place(rstd),
        _place(out), native.DTYPES[out.dtype], batch_step, seq_step,
        *((0,) * 6 if drawn is None else (_place(drawn.bits), _place(drawn.limits), *drawn[2:])),
        1 / (1 - o.p), _place(buffers), _place(along), _place(partial), _place(of_gamma), _place(of_beta),
    )  # fmt: skip
    if not native.function(name)(packed):
        require_rows(o)


def slots_of_chunk(batch: int) -> int:
    """How many slots, each with the tokens of all sequences, make a chunk."""
    return max(CHUNK // max(batch, 1), 1)


class _Table:
    """``Table`` in C, and what it points to."""

    def __init__(self, rows: Tensor | None, ids: Tensor | None, gradient: Tensor, *, gathered: bool) -> None:
        self.rows = None if rows is None else _in_rows(rows)
        self.ids = None if ids is None else ids.contiguous()
        self.gradient = gradient
        room = len(gradient) + ids.numel() if gathered and ids is not None and gradient.numel() else 0
        self.sorted = torch.empty(room, dtype=torch.int64)

    def packed(self) -> tuple[int, ...]:
        if self.rows is None:
            return (0,) * 7
        step, dtype = self.rows.stride(0) * self.rows.element_size(), native.DTYPES[self.rows.dtype]
        places = _place(self.ids), _place(self.gradient), _place(self.sorted)
        return self.rows.data_ptr(), step, dtype, len(self.rows), *places


def _first_of_run(index: Int[Tensor, "#batch seq"] | None) -> int | None:
    """Where positions begin that go up in steps of one and are those of every row of the batch."""
    if index is None or index.shape[0] != 1:
        return None
    first = int(index[0, 0])
    return first if torch.equal(index[0], torch.arange(first, first + index.shape[1])) else None


def _place(x: Tensor | None) -> int:
    """Its address, or 0 if there is nothing of it."""
    return 0 if x is None or not x.numel() else x.data_ptr()


def _in_rows(x: Tensor) -> Tensor:
    """With the elements of a row side by side in memory, as C reads them."""
    return x if native.is_in_rows(x) else torch.empty(x.shape, dtype=x.dtype).copy_(x)


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
            bits = drawn.bits[place : place + keep[part].numel()].view(keep[part].shape)
            torch.ge(bits, drawn.limits[part, None], out=keep[part])
    return keep.view(*o.ids.shape, o.width)
