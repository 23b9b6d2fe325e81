"""The rows of a table that are nearest to a vector: every row is looked at, a block of rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

__all__ = ["MEASURES", "Nearest", "nearest_rows"]

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
    """The `k` best rows for each vector but those in `left_out`; arithmetic is float32 (float64 for float64)."""
    parts = [
        _nearest(weight, some, k, measure, out)
        for some, out in zip(vectors.split(QUERIES), left_out.split(QUERIES), strict=True)
    ]
    return Nearest(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _nearest(weight: Tensor, vectors: Tensor, k: int, measure: str, left_out: Tensor) -> Nearest:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    vectors = vectors.to(dtype)
    vectors = F.normalize(vectors, dim=1) if measure == "cosine" else vectors
    best = vectors.new_empty(len(vectors), 0)
    ids = left_out.new_empty(len(vectors), 0)
    block = max(1, ENTRIES // max(len(vectors), weight.shape[1]))
    for start in range(0, len(weight), block):
        rows = weight[start : start + block].to(dtype)
        scores = vectors @ (F.normalize(rows, dim=1) if measure == "cosine" else rows).T
        numbers = torch.arange(start, start + len(rows), device=weight.device)
        scores = scores.masked_fill((numbers == left_out[..., None]).any(1), -torch.inf)
        best, ids = torch.cat([best, scores], 1), torch.cat([ids, numbers.expand(scores.shape)], 1)
        best, place = best.topk(min(k, best.shape[1]))
        ids = ids.gather(1, place)
    return Nearest(ids, best)
