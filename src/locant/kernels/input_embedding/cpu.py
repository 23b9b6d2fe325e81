"""The same on a CPU: some hundred tokens at a time, so that all that lies between tables and result stays in cache.

What costs on a CPU is fresh memory, not arithmetic. The plain modules write five arrays as large as the result in the
forward pass, three with dropout on top, and as many in the backward pass. Here the result is written once; the
backward pass looks the rows up again instead of keeping their sum, and adds the gradient of each token to its row
while it is in cache.

Where the parts are cut depends on the shapes alone, and every sum is formed in the order of the tokens or as a tree of
element-wise additions: the same bits come out in every run and on any number of threads. In float32 and float64 the
forward pass without dropout gives the bits of the plain modules. Gradients of 16-bit tables are summed in float32 and
rounded once.

Dropout compares 16 random bits with a threshold. The threshold of a token is drawn between the two whole numbers next
to ``p * 2**16``, so that the probability of each entry is p to the last bit of a float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding.operands import Operands

__all__ = ["Gradients", "backward", "forward", "kept"]

PART = 393_216
"""Entries in one part: 512 tokens of width 768, which is 1.5 MiB in float32."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of token, position, segment, gamma and beta; empty where none was asked for."""


@dataclass(frozen=True)
class Part:
    """Some whole rows of the batch, or a stretch of one: ``rows`` times the slots ``first:last``."""

    start: int
    """The first token, counted over the whole batch."""
    rows: int
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + len(self))

    def __len__(self) -> int:
        return self.rows * (self.last - self.first)


def _parts(o: Operands) -> Iterator[Part]:
    batch, seq_len = o.ids.shape
    if not o.num_tokens:
        return
    tokens = max(PART // max(o.width, 1), 1)
    if tokens >= seq_len:
        step = tokens // seq_len
        for row in range(0, batch, step):
            yield Part(row * seq_len, min(step, batch - row), 0, seq_len)
        return
    for row in range(batch):
        for first in range(0, seq_len, tokens):
            yield Part(row * seq_len + first, 1, first, min(first + tokens, seq_len))


def forward(
    o: Operands,
) -> tuple[Float[Tensor, "batch seq d_model"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """The result, and each token's mean and reciprocal deviation (empty without a norm)."""
    _require_rows(o)
    y = o.token.new_empty(*o.ids.shape, o.width)
    flat = y.view(o.num_tokens, o.width)
    normed = o.num_tokens if o.eps is not None else 0
    mean, rstd = (o.token.new_empty(normed, dtype=o.accumulator) for _ in range(2))
    rows, dropout = _Rows(_with_small_tables_widened(o)), _Dropout(o)
    gamma, beta = _wide(o.gamma, o), _wide(o.beta, o)
    in_place = o.eps is None and y.dtype == o.accumulator
    for part in _parts(o):
        out = flat[part.tokens]
        x = rows.read(part, out if in_place else None)
        if o.eps is not None:
            x, part_mean, part_rstd = torch.native_layer_norm(x, (o.width,), gamma, beta, o.eps)
            mean[part.tokens], rstd[part.tokens] = part_mean.flatten(), part_rstd.flatten()
        dropout.apply(x)
        if not in_place:
            out.copy_(x)
    return y, mean, rstd  # not a view of what is returned: some wrappers of modules warn of views


def backward(
    grad: Float[Tensor, "batch seq d_model"],
    mean: Float[Tensor, " tokens"],
    rstd: Float[Tensor, " tokens"],
    o: Operands,
    needs: list[bool],
) -> Gradients:
    """What `grad` on the result means for every table and for the norm's weight and bias, where `needs` says so."""
    flat = grad.reshape(o.num_tokens, o.width)
    rows, dropout, sums = _Rows(o), _Dropout(o), _Sums(o, needs)
    gamma, beta = _wide(o.gamma, o), _wide(o.beta, o)
    g = o.token.new_empty(rows.longest, o.width, dtype=o.accumulator)
    for part in _parts(o):
        dy = flat[part.tokens]
        if o.eps is None or o.dropping or dy.dtype != g.dtype or not dy.is_contiguous():  # what follows overwrites it
            dy = g[: len(part)].copy_(dy)
            dropout.apply(dy)
        if o.eps is not None:
            x = rows.read(part, None)
            m, r = mean[part.tokens, None], rstd[part.tokens, None]
            sums.add_to_norm(dy, x, m, r)
            only_x = [True, False, False]
            dy = torch.ops.aten.native_layer_norm_backward(dy, x, (o.width,), m, r, gamma, beta, only_x)[0]
        sums.add_to_tables(part, dy)
    return sums.gradients()


# ---------------------------------------------------------------------- reading


class _Rows:
    """Reads the sum of token, position and segment for one part after another."""

    def __init__(self, o: Operands) -> None:
        self.o = o
        self.ids = o.ids.reshape(-1)
        self.longest = max((len(part) for part in _parts(o)), default=0)
        self.run = _run(o.position_index)
        self.index = None if o.position_index is None else o.position_index.expand(o.ids.shape).reshape(-1)
        self.segments = None if o.segments is None else o.segments.reshape(-1)
        self.x = o.token.new_empty(self.longest, o.width, dtype=o.accumulator)
        self.found = {table.dtype: table.new_empty(self.longest, o.width) for table in _tables(o)}

    def read(self, part: Part, into: Tensor | None) -> Float[Tensor, "tokens d_model"]:
        """The sum for a part, in memory that the next part reuses, or in `into`."""
        o = self.o
        x = self.x[: len(part)] if into is None else into
        if o.token.dtype == x.dtype:
            torch.index_select(o.token, 0, self.ids[part.tokens], out=x)
        else:
            x.copy_(self._look_up(o.token, self.ids[part.tokens]))
        if o.scale != 1:
            x.mul_(o.scale)
        if o.position is not None and self.index is not None:
            if self.run is not None:  # consecutive rows need not be collected first
                stretch = o.position[self.run + part.first : self.run + part.last]
                x.view(part.rows, -1, o.width).add_(stretch)
            else:
                x.add_(self._look_up(o.position, self.index[part.tokens]))
        if o.segment is not None:
            x.add_(o.segment[0] if self.segments is None else self._look_up(o.segment, self.segments[part.tokens]))
        return x

    def _look_up(self, table: Tensor, ids: Tensor) -> Tensor:
        return torch.index_select(table, 0, ids, out=self.found[table.dtype][: len(ids)])


def _tables(o: Operands) -> list[Tensor]:
    return [table for table in (o.token, o.position, o.segment) if table is not None]


def _run(index: Tensor | None) -> int | None:
    """Where positions begin that go up in steps of one and are those of every row of the batch."""
    if index is None or index.shape[0] != 1 or not index.numel():
        return None
    first = int(index[0, 0])
    counting = torch.arange(first, first + index.shape[1], device=index.device)
    return first if torch.equal(index[0], counting) else None


def _wide(table: Tensor | None, o: Operands) -> Tensor | None:
    return None if table is None else table.to(o.accumulator)


def _with_small_tables_widened(o: Operands) -> Operands:
    """Rows that are read many times each are converted once. Not backward, where they would crowd the cache."""
    position, segment = (
        _wide(table, o) if table is not None and 16 * table.shape[0] <= o.num_tokens else table
        for table in (o.position, o.segment)
    )
    return replace(o, position=position, segment=segment)


def _require_rows(o: Operands) -> None:
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


class _Dropout:
    """Drops the entries of one part after another; parts of the same sizes lose the same ones again."""

    def __init__(self, o: Operands) -> None:
        self.p = o.p
        self.generator: torch.Generator | None = None
        if o.dropping and o.seed is not None:
            self.generator = torch.Generator().manual_seed(int(o.seed))

    def apply(self, x: Float[Tensor, "tokens d_model"]) -> None:
        """Multiplies with 0 or ``1 / (1 - p)``, in place."""
        if self.generator is not None:
            x.mul_(_keep(x.shape[0], x.shape[1], self.p, self.generator)).mul_(1 / (1 - self.p))


def _keep(tokens: int, width: int, p: float, generator: torch.Generator) -> Bool[Tensor, "tokens d_model"]:
    count = tokens * width
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[:count].view(tokens, width)
    whole = int(p * 2**16)
    one_more = torch.rand(tokens, 1, dtype=torch.float64, generator=generator) < p * 2**16 - whole
    return bits >= (one_more + (whole - 2**15)).to(torch.int16)


def kept(o: Operands) -> Bool[Tensor, "batch seq d_model"]:
    """Which entries of the result dropout leaves."""
    dropout = _Dropout(o)
    if dropout.generator is None:
        return torch.ones(*o.ids.shape, o.width, dtype=torch.bool)
    parts = [_keep(len(part), o.width, o.p, dropout.generator) for part in _parts(o)]
    return torch.cat([torch.empty(0, o.width, dtype=torch.bool), *parts]).view(*o.ids.shape, o.width)


# ---------------------------------------------------------------------- gradients


class _Sums:
    """What has been added up so far, in float32 or float64."""

    def __init__(self, o: Operands, needs: list[bool]) -> None:
        self.o = o
        self.needs = needs
        token, position, segment, gamma, beta = needs
        self.rows = _Rows(o)  # for its flat ids alone
        longest = self.rows.longest
        self.ids, self.used = _compact(self.rows.ids, o) if token else (self.rows.ids, None)
        self.token = self._zeros(_height(o.token, self.used)) if token else None
        self.position = self._zeros(_height(o.position)) if position else None
        self.segment = self._zeros(_height(o.segment)) if segment else None
        self.gamma = self._zeros(longest) if gamma else None
        self.beta = self._zeros(longest) if beta else None
        self.first = self.rows.ids.new_zeros(longest)

    def _zeros(self, height: int) -> Tensor:
        return self.o.token.new_zeros(height, self.o.width, dtype=self.o.accumulator)

    def add_to_norm(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        """One sum per slot of a part, which are added up at the end."""
        if self.beta is not None:
            self.beta[: len(dy)].add_(dy)
        if self.gamma is not None:
            self.gamma[: len(dy)].addcmul_(dy, (x - mean).mul_(rstd))

    def add_to_tables(self, part: Part, dx: Tensor) -> None:
        """`dx` may be overwritten."""
        if self.segment is not None:
            segments = self.rows.segments
            self.segment.index_add_(0, self.first[: len(dx)] if segments is None else segments[part.tokens], dx)
        if self.token is not None:
            self.token.index_add_(0, self.ids[part.tokens], dx, alpha=self.o.scale)
        if self.position is None or self.rows.index is None:
            return
        if self.rows.run is None:
            self.position.index_add_(0, self.rows.index[part.tokens], dx)
        else:
            stretch = self.position[self.rows.run + part.first : self.rows.run + part.last]
            stretch.add_(_total(dx.view(part.rows, -1, self.o.width)))

    def gradients(self) -> Gradients:
        """Each in the dtype of what it is the gradient of."""
        o = self.o
        token = self._token()
        gamma, beta = (None if sums is None else _total(sums) for sums in (self.gamma, self.beta))
        of = (o.token, o.position, o.segment, o.gamma, o.beta)
        sums = (token, self.position, self.segment, gamma, beta)
        found = [
            o.token.new_empty(0) if total is None or table is None else total.to(table.dtype)
            for total, table in zip(sums, of, strict=True)
        ]
        return found[0], found[1], found[2], found[3], found[4]

    def _token(self) -> Tensor | None:
        if self.token is None:
            return None
        grad = self.token
        if self.used is not None:
            grad = torch.zeros_like(self.o.token, memory_format=torch.contiguous_format)
            grad.index_copy_(0, self.used, self.token.to(self.o.token.dtype))
        if self.o.padding_idx is not None:
            grad[self.o.padding_idx] = 0
        return grad


def _compact(ids: Int[Tensor, " tokens"], o: Operands) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " used"] | None]:
    """For narrow tables, ids among those in use: a second table in float32 need not have a row for all."""
    if o.token.dtype == o.accumulator:
        return ids, None
    used, compact = torch.unique(ids, return_inverse=True)
    return compact, used


def _height(table: Tensor | None, used: Tensor | None = None) -> int:
    return 0 if table is None else table.shape[0] if used is None else used.shape[0]


def _total(rows: Float[Tensor, "count *entry"]) -> Float[Tensor, "*entry"]:  # noqa: UP037  # not a name
    """The sum over the first axis, as a tree of element-wise additions, which no number of threads can reorder.

    Overwrites `rows`.
    """
    count = rows.shape[0]
    if not count:
        return rows.sum(0)
    while count > 1:
        half = count // 2
        rows[:half].add_(rows[count - half : count])
        count -= half
    return rows[0]
