"""Attach the gradient of biases that are looked up by distance to the output and log-sum-exp of attention.

FlexAttention sums the gradient of a look-up with an atomic addition for every pair of tokens: 4 billion additions for
16,384 tokens and 32 heads, in a random order. So FlexAttention uses constant biases. Kernels that only sum in registers
compute the gradients of the biases from the results of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locant.errors import LocantError

__all__ = ["FLAGGED", "Biases", "Pairs", "Tokens", "with_gradients"]

FLAGGED = 128
"""Tokens in a block of `Pairs.some`."""

Tokens = Int[Tensor, "#batch 3 seq"]
"""The index, the document (-1 for padding) and the order of every token."""


@dataclass(frozen=True)
class Pairs:
    """The distances of pairs of tokens, and the pairs that the mask allows.

    If both sides count one by one, `offset` determines them. Otherwise `queries` and `keys` do.

    Args:
        first: the distance (query index minus key index) of the first entry of a table or of `Biases.row_of`.
        low, high: a pair is allowed if both tokens are in one document and their orders differ by `low` to `high`.
        offset: the index of the first query minus the index of the first key.
        queries: the tokens of the queries, if there is no offset.
        keys: the tokens of the keys. ``None`` means the same tokens as the queries.
        some: whether a block of `FLAGGED` queries and `FLAGGED` keys has an allowed pair. ``None`` means any block may.
    """

    first: int
    low: int
    high: int
    offset: int | None = None
    queries: Tokens | None = None
    keys: Int[Tensor, "#batch 3 keys"] | None = None
    some: Bool[Tensor, "#batch q_blocks k_blocks"] | None = None


@dataclass(frozen=True)
class Biases:
    """Biases of scores that are looked up by distance: entries of a table, or numbers of each query and each key.

    Args:
        of_query: a table with an entry for every distance. With `row_of`, a number for every query and every row.
        of_key: a number for every key and every row. ``None`` means that keys have no such numbers.
        row_of: the row of every distance, beginning with `Pairs.first`. Smaller distances use the first row, and larger
            distances use the last row. The distances of a row are contiguous. ``None`` means that `of_query` is a
            table.
    """

    of_query: Float[Tensor, "heads distances"] | Float[Tensor, "batch heads query rows"] | None
    of_key: Float[Tensor, "batch heads key rows"] | None = None
    row_of: Int[Tensor, " distances"] | None = None


def with_gradients(
    y: Float[Tensor, "batch heads query value_dim"],
    lse: Float[Tensor, "batch heads query"],
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    biases: Biases,
    pairs: Pairs,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query"]]:
    """Return `y` and `lse`, which were computed with constant `biases`, with gradients for these biases.

    Args:
        y, lse: ``softmax(cap(q k^T scale) + bias) v`` and the log-sum-exp of the scores, on CUDA.
        scale, softcap: the scale and the soft cap of the scores.
    """
    bias_tensors = biases.of_query, biases.of_key, biases.row_of
    tensors = (y, lse, q.detach(), k.detach(), v.detach(), *bias_tensors, pairs.queries, pairs.keys, pairs.some)
    return _AttachGradient.apply(*tensors, pairs.first, pairs.low, pairs.high, pairs.offset, scale, softcap)


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(lse, *rest[:9])
        ctx.numbers = rest[9:]
        ctx.set_materialize_grads(False)
        return y.view_as(y), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_lse = grads
        lse, q, k, v, *rest = ctx.saved_tensors
        grad_y = q.new_zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
        gradients = distance_gradient(grad_y, grad_lse, q, k, v, lse, *rest, *ctx.numbers)
        both = (None if x is None else gradient.to(x.dtype) for x, gradient in zip(rest, gradients, strict=False))
        return grad, grad_lse, None, None, None, *both, *[None] * 10


@torch.library.custom_op(
    "locant::distance_gradient",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor? of_query, "
    "Tensor? of_key, Tensor? row_of, Tensor? queries, Tensor? keys, Tensor? some, SymInt first, SymInt low, "
    "SymInt high, SymInt? offset, float scale, float? softcap) -> (Tensor, Tensor)",
)
def distance_gradient(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, of_query: Tensor | None,
    of_key: Tensor | None, row_of: Tensor | None, queries: Tensor | None, keys: Tensor | None, some: Tensor | None,
    first: int, low: int, high: int, offset: int | None, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `of_query` and `of_key` in float32. The gradient of ``None`` is an empty tensor."""
    from locant.kernels.distance_gradient import triton

    biases, pairs = Biases(of_query, of_key, row_of), Pairs(first, low, high, offset, queries, keys, some)
    of_query, of_key = triton.gradients(grad, grad_lse, q, k, v, lse, biases, pairs, scale, softcap)
    return _or_empty(of_query, q), _or_empty(of_key, q)


@distance_gradient.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, of_query: Tensor | None,
    of_key: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_query, grad_key = (
        None if x is None else torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        for x in (of_query, of_key)
    )
    return _or_empty(grad_query, q), _or_empty(grad_key, q)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def _raise_second_order(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
    got = "got a gradient of the gradient of a bias through backend='flex', which supports only first-order gradients"
    raise LocantError(got, "backend='eager', which uses plain operations")


distance_gradient.register_autograd(_raise_second_order)
