"""Attention of few queries over many keys on a CPU, by ``native/decode.c``: what it takes, and how it is told.

Every key and value is read once for all query heads that share it, in one parallel region of torch's own threads, with
scores, softmax and sums in float32. Results do not depend on the number of threads.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from locant.kernels import native

__all__ = ["decode", "takes"]

FUNCTION = "locant_decode"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_QUERIES = 8
"""With more, matrix products that hold a tile of scores are faster."""
FEWEST_KEYS = 16
"""For each query."""
WIDEST = 1_024
"""Of a head."""

pack = struct.Struct("=24q2d6q").pack
"""``Task`` in C."""


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether it is the way for queries and values like these, on a CPU."""
    few = q.shape[2] <= MOST_QUERIES and FEWEST_KEYS * q.shape[2] <= v.shape[2]
    return few and q.dtype in DTYPES and max(q.shape[3], v.shape[3]) <= WIDEST and native.has(FUNCTION)


def decode(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What `locant.kernels.distance_attention` says of these: the output, and every query's log-sum-exp."""
    q, k, v, table = (_in_rows(x) for x in (q, k, v, table))
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out, sums = q.new_empty(batch, heads, queries, value_dim), table.new_empty(batch, heads, queries)
    size = q.element_size()
    steps = [size * step for x in (q, k, v, out) for step in x.stride()[:3]]
    table_step = table.stride(0) if len(table) > 1 else 0
    packed = pack(
        native.threads(), native.DTYPES[q.dtype],
        batch, kv_heads, heads // kv_heads, queries, keys, head_dim, value_dim,
        *steps, table_step, first, last, scale, softcap or 0.0,
        *(x.data_ptr() for x in (q, k, v, out, table, sums)),
    )  # fmt: skip
    if native.function(FUNCTION)(packed):
        raise MemoryError("no memory for parts of attention")
    return out, sums


def _in_rows(x: Tensor) -> Tensor:
    """With the last dimension side by side in memory, as it is read; torch keeps zeros without memory."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 and x.data_ptr() else torch.empty(x.shape, dtype=x.dtype).copy_(x)
