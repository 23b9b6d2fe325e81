"""CoPE's bias in one pass over the products of queries and keys, for calls without gradients on a CPU.

`locant.positions.encodings.cope` has the formula in plain operations, and this returns the same bits. Only the products
and their exponentials of some queries are stored at a time, so few that a cache of the processor holds them.
"""

from __future__ import annotations

import struct

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locant.kernels import native
from locant.kernels.exact_dot import MAX_FEW, exact_dot, exact_scores, round_to_grid
from locant.kernels.transforms import is_plain_eager

FUNCTION = "locant_cope"
CHUNK_ELEMENTS = 2**17
"""The number of products of queries and keys that are stored at a time."""

pack = struct.Struct("=6q2d4Q").pack
"""``Task`` of ``native/cope.c``."""


def supports(q: Tensor, k: Tensor, weight: Tensor) -> bool:
    """Return whether `contextual_bias` supports these tensors. They are not empty and not in float64."""
    if not (is_plain_eager() and native.has(FUNCTION) and q.numel() and k.numel()):
        return False
    tensors = (q, k, weight)
    plain = all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return plain and all(x.dtype in native.DTYPES and x.dtype != torch.float64 for x in tensors)


def contextual_bias(
    q: Float[Tensor, "batch heads query dim"],
    k: Float[Tensor, "batch kv_heads key dim"],
    weight: Float[Tensor, "embeddings dim"],
    mask: Bool[Tensor, "#batch 1 query key"],
    scale: float,
    grid: float,
) -> Float[Tensor, "batch heads query key"]:
    """Return each query's product with the interpolated embedding of the count of every key, in float32.

    Args:
        q, k: queries and keys, whose slots are in the order of tokens.
        weight: the embeddings of the counts.
        mask: the keys whose gates count.
        scale: the factor of the products in the gates.
        grid: the unit to which gates are rounded.
    """
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    groups, out = heads // kv_heads, q.new_empty(batch, heads, queries, keys, dtype=torch.float32)
    products, mask = exact_dot(q, weight, torch.float32).contiguous(), mask.contiguous()
    is_few = groups * queries <= MAX_FEW
    together = max(1, CHUNK_ELEMENTS // (groups * queries * keys)) if is_few else 1  # key heads
    for b in range(batch):
        row_mask = mask[min(b, len(mask) - 1)]
        for first in range(0, kv_heads, together):
            of_k = slice(first, first + together)
            of_q = slice(first * groups, (first + together) * groups)
            part = (products[b, of_q], row_mask, out[b, of_q], scale, grid)
            if is_few:
                _write_rows(exact_scores(q[b : b + 1, of_q], k[b : b + 1, of_k], torch.float32), 0, *part)
                continue
            rows, columns = round_to_grid(q[b, of_q]).flatten(0, 1), round_to_grid(k[b, first]).mT
            size = max(1, CHUNK_ELEMENTS // keys)
            store = rows.new_empty(min(size, len(rows)), keys)
            for start in range(0, len(rows), size):
                some = rows[start : start + size]
                _write_rows(torch.mm(some, columns, out=store[: len(some)]), start, *part)
    return out


def _write_rows(
    scores: Tensor, first: int, products: Tensor, mask: Tensor, out: Tensor, scale: float, grid: float
) -> None:
    """Write the bias of some rows. A row is a query of a head."""
    (queries, keys), embeddings = out.shape[1:], products.shape[-1]
    decays = scores.mul_(-scale).exp_().contiguous()
    packed = pack(
        native.threads(), decays.numel() // keys, first, queries, keys, embeddings, grid, embeddings - 1.0,
        decays.data_ptr(), products.data_ptr(), mask.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.function(FUNCTION)(packed)
