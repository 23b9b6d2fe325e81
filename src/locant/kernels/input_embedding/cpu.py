"""The same on a CPU by torch's operators: where no native kernel takes the tables, and what that one agrees with.

Both give the same bits, forward and backward, in every run and on any number of threads: every sum has an order. That
over the width of a token is in `reference`. Backward, the tokens of a slot follow each other (all sequences of slot 0,
then of slot 1), and slots are cut into chunks. In this order are added the rows of positions that count up, and those
of gamma, beta and few segments, which are sums of each chunk and then of the chunks. All other rows are added in the
order of the batch. Sums are float32 (float64 for float64), rounded once to the dtype of the table.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding import reference
from locant.kernels.input_embedding.dropout import kept
from locant.kernels.input_embedding.operands import Operands

__all__ = ["FEW", "Gradients", "backward", "empty_forward", "first_of_run", "forward", "require_rows", "slots_of_chunk"]

CHUNK = 512
"""Tokens of a chunk, unless there are more sequences."""

FEW = 4
"""Segments whose sums are made in every chunk; the rows of more are added like those of tokens."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of token, position, segment, gamma and beta; empty where none was asked for."""


def forward(
    o: Operands,
) -> tuple[Float[Tensor, "batch seq d_model"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """The result, and each token's mean and reciprocal deviation (empty without a norm)."""
    require_rows(o)
    y, mean, rstd = empty_forward(o)
    with torch.no_grad():
        y.copy_(reference.input_embedding(o, kept(o) if o.dropping else None))
        if o.eps is not None:
            of_tokens = reference.moments(reference.sum_of_rows(o), o.eps)
            mean.copy_(of_tokens[0].flatten())
            rstd.copy_(of_tokens[1].flatten())
    return y, mean, rstd


def empty_forward(o: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what `forward` gives."""
    normed = o.num_tokens if o.eps is not None else 0
    mean, rstd = (o.token.new_empty(normed, dtype=o.accumulator) for _ in range(2))
    return o.token.new_empty(*o.ids.shape, o.width), mean, rstd


@torch.no_grad()
def backward(
    grad: Float[Tensor, "batch seq d_model"],
    mean: Float[Tensor, " tokens"],
    rstd: Float[Tensor, " tokens"],
    o: Operands,
    needs: list[bool],
) -> Gradients:
    """What `grad` on the result means for every table and for the norm's weight and bias, where `needs` says so."""
    require_rows(o)
    g = grad.to(o.accumulator)
    if o.dropping:
        g = g * kept(o) * (1 / (1 - o.p))
    gamma, beta = g, g
    if o.eps is not None:
        m, r = (of_tokens.view(*o.ids.shape, 1) for of_tokens in (mean, rstd))
        x = (reference.sum_of_rows(o) - m) * r
        gamma, beta = g * x, g
        g = g if o.gamma is None else g * o.gamma.to(g.dtype)
        g = (g - reference.mean_over_width(g) - x * reference.mean_over_width(g * x)) * r
    gradients = (
        _of_token(g, o) if needs[0] else None,
        _of_position(g, o) if needs[1] else None,
        _of_segment(g, o) if needs[2] else None,
        None if o.gamma is None or not needs[3] else _over_chunks(gamma, o).to(o.gamma.dtype),
        None if o.beta is None or not needs[4] else _over_chunks(beta, o).to(o.beta.dtype),
    )
    token, position, segment, gamma, beta = (g.new_empty(0) if found is None else found for found in gradients)
    return token, position, segment, gamma, beta


def _of_token(g: Float[Tensor, "batch seq d_model"], o: Operands) -> Tensor:
    token = _gathered(g * o.scale, o.ids, o.token)
    if o.padding_idx is not None:
        token[o.padding_idx] = 0
    return token


def _of_position(g: Float[Tensor, "batch seq d_model"], o: Operands) -> Tensor | None:
    if o.position is None or o.position_index is None:
        return None
    index = o.position_index.expand(o.ids.shape)
    if first_of_run(o.position_index) is None:
        return _gathered(g, index, o.position)
    return _gathered(_slots_first(g), _slots_first(index[..., None]), o.position)


def _of_segment(g: Float[Tensor, "batch seq d_model"], o: Operands) -> Tensor | None:
    if o.segment is None:
        return None
    segments = torch.zeros_like(o.ids) if o.segments is None else o.segments
    if o.segment.shape[0] > FEW:
        return _gathered(g, segments, o.segment)
    here = [_over_chunks(g.where((segments == row)[..., None], 0), o) for row in range(o.segment.shape[0])]
    return torch.stack(here).to(o.segment.dtype)


def _gathered(g: Tensor, ids: Int[Tensor, "*tokens"], table: Float[Tensor, "rows d_model"]) -> Tensor:
    """The sum for every row of a table, in the order of the tokens."""
    used, compact = torch.unique(ids, return_inverse=True)
    sums = g.new_zeros(len(used), table.shape[1]).index_add_(0, compact.flatten(), g.reshape(-1, table.shape[1]))
    zeros = torch.zeros_like(table, memory_format=torch.contiguous_format)
    return zeros.index_copy_(0, used, sums.to(table.dtype))


def _over_chunks(g: Float[Tensor, "batch seq d_model"], o: Operands) -> Float[Tensor, " d_model"]:
    """The sum of all tokens: of each chunk, and then of the chunks."""
    batch, seq_len = o.ids.shape
    chunk = (torch.arange(seq_len) // slots_of_chunk(batch)).repeat_interleave(batch)
    chunks = g.new_zeros(-(-seq_len // slots_of_chunk(batch)), o.width)
    chunks.index_add_(0, chunk, _slots_first(g))
    return chunks.new_zeros(1, o.width).index_add_(0, torch.zeros(len(chunks), dtype=torch.long), chunks)[0]


def _slots_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).flatten(0, 1)


def slots_of_chunk(batch: int) -> int:
    """How many slots, each with the tokens of all sequences, make a chunk."""
    return max(CHUNK // max(batch, 1), 1)


def first_of_run(index: Int[Tensor, "#batch seq"] | None) -> int | None:
    """Where positions begin that go up in steps of one and are those of every row of the batch."""
    if index is None or index.shape[0] != 1 or not index.numel():
        return None
    first = int(index[0, 0])
    counting = torch.arange(first, first + index.shape[1], device=index.device)
    return first if torch.equal(index[0], counting) else None


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
