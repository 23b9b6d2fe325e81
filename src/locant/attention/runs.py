"""Rows made of a few runs of tokens that count plainly: packed documents, padded rows. Each run is a row of its own.

Where the bias follows from the distance, every run is attention that `distance_attention` computes without any mask,
and all of them look into one table. Found out by looking through the positions, so on a CPU only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from locant.attention.distance import distance_attention
from locant.attention.visibility import seen_distances
from locant.positions import Positions
from locant.positions.documents import PADDING
from locant.tensors import readable

__all__ = ["Run", "attend_by_runs", "longest_run", "runs_of"]

SHORTEST = 128
"""Tokens of a run, on average: with shorter ones, tiles of queries are fewer calls."""

Run = tuple[int, bool]
"""How many tokens, and whether they are a document (else padding)."""


def runs_of(positions: Positions) -> list[list[Run]] | None:
    """The runs of each row, of the only row where all are alike; ``None`` where rows are no such thing.

    >>> runs_of(Positions.packed([200, 300], length=600))
    [[(200, True), (300, True), (100, False)]]
    """
    if positions.order_or_none is not None or not readable(positions.index) or not positions.index.numel():
        return None
    index, document = positions.index, positions.document
    first = torch.ones_like(document, dtype=torch.bool)
    first[:, 1:] = document.diff() != 0
    counts_on = (index.diff() == 1) | first[:, 1:] | (document[:, 1:] == PADDING)
    alike = bool((document == document[:1]).all())
    if int(first.sum()) * SHORTEST > document.numel() or not bool(counts_on.all()):
        return None
    rows = [_runs(document[row], first[row]) for row in range(1 if alike else positions.batch)]
    found = [row for row in rows if row is not None]
    return found if len(found) == len(rows) and any(real for row in found for _, real in row) else None


def longest_run(rows: list[list[Run]]) -> int:
    """The most tokens of a document."""
    return max(length for row in rows for length, real in row if real)


def attend_by_runs(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: list[list[Run]], causal: bool, window: int | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of every run to itself; `table` has an entry for each distance within the longest."""
    if len(rows) == 1:
        return _row(q, k, v, table, rows[0], causal, window, scale)
    by_row = zip(q.split(1), k.split(1), v.split(1), rows, strict=True)
    return torch.cat([_row(a, b, c, table, row, causal, window, scale) for a, b, c, row in by_row])


def _row(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, row: list[Run], causal: bool, window: int | None, scale: float
) -> Tensor:
    lengths, middle = [length for length, _ in row], table.shape[1] // 2
    by_run = zip(*(_Parts.apply(x, lengths) for x in (q, k, v)), strict=True)
    parts: list[Tensor] = []
    for (length, real), (q_part, k_part, v_part) in zip(row, by_run, strict=True):
        if not real:
            parts.append(q.new_zeros(*q.shape[:2], length, v.shape[-1]))
            continue
        entries = table[:, middle - length + 1 : middle + length]
        first, last = seen_distances(0, length, length, causal, window)
        parts.append(distance_attention(q_part, k_part, v_part, entries, first, last, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class _Parts(torch.autograd.Function):
    """``x.split(lengths, dim=2)``, with a gradient that autocast leaves alone: on a CPU it cannot join float16."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        return x.split(lengths, dim=2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", enabled=False):
            return torch.cat(grads, dim=2), None


def _runs(document: Tensor, first: Tensor) -> list[Run] | None:
    """Of one row; ``None`` where a document comes back after another, and sees what it was before."""
    starts = first.nonzero().flatten()
    named = document[starts].tolist()
    documents = [each for each in named if each != PADDING]
    if len(set(documents)) < len(documents):
        return None
    ends = [*starts.tolist(), len(document)]
    return [(b - a, name != PADDING) for (a, b), name in zip(pairwise(ends), named, strict=True)]
