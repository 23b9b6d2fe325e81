"""The rows of a table that are nearest to a vector: every row is looked at, a block of rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.errors import RangeError

__all__ = ["MEASURES", "Nearest", "nearest_rows", "unit"]

MEASURES = ("cosine", "dot")
QUERIES = 1024
"""Vectors that are compared at once."""

ENTRIES = 2**22
"""Scores, and numbers of the table, that are in memory at once: 16 MiB of float32 each."""


class Nearest(NamedTuple):
    """Ids of the rows, the nearest first, and how near each is by the measure that was asked for."""

    ids: Int[Tensor, "*batch k"]
    scores: Float[Tensor, "*batch k"]


def nearest_rows(
    weight: Float[Tensor, "rows width"],
    vectors: Float[Tensor, "queries width"],
    k: int,
    measure: str,
    left_out: Int[Tensor, "queries _"],
) -> Nearest:
    """The `k` best rows for each vector but those in `left_out`; arithmetic is float32 (float64 for float64).

    Rows that are not finite come last, with NaN as their score.
    """
    vectors = vectors.to(torch.promote_types(weight.dtype, torch.float32))
    if not bool(vectors.isfinite().all()):
        raise RangeError("got a vector, or a row, with numbers that are not finite", "finite numbers")
    parts = [
        _nearest(weight, some, k, measure, out)
        for some, out in zip(vectors.split(QUERIES), left_out.split(QUERIES), strict=True)
    ]
    return Nearest(*(torch.cat(each) for each in zip(*parts, strict=True)))


def unit(vectors: Float[Tensor, "count width"]) -> Float[Tensor, "count width"]:
    """The vectors with length 1, whatever their length; zeros stay."""
    exponent = vectors.abs().amax(1, keepdim=True).frexp().exponent  # squares of huge and tiny numbers have no float
    return F.normalize(vectors * torch.exp2(-exponent.clamp(-126, 126).to(vectors.dtype)), dim=1)


def _nearest(weight: Tensor, vectors: Tensor, k: int, measure: str, left_out: Tensor) -> Nearest:
    vectors = unit(vectors) if measure == "cosine" else vectors
    last = torch.finfo(vectors.dtype).min
    best = vectors.new_empty(len(vectors), 0)
    ids = left_out.new_empty(len(vectors), 0)
    block = max(1, ENTRIES // max(len(vectors), weight.shape[1]))
    for start in range(0, len(weight), block):
        rows = weight[start : start + block].to(vectors.dtype)
        scores = vectors @ (unit(rows) if measure == "cosine" else rows).T
        scores = scores.where(rows.isfinite().all(1), last)
        numbers = torch.arange(start, start + len(rows), device=weight.device)
        scores = scores.masked_fill((numbers == left_out[..., None]).any(1), -torch.inf)
        best, ids = torch.cat([best, scores], 1), torch.cat([ids, numbers.expand(scores.shape)], 1)
        best, place = best.topk(min(k, best.shape[1]))
        ids = ids.gather(1, place)
    return Nearest(ids, best.masked_fill(best == last, torch.nan))
