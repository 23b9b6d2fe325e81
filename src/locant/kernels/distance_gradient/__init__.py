"""Attention's output and log-sum-exp as they are, and behind them the gradient of what its biases were looked up in.

FlexAttention adds up what a look-up's gradient is with an atomic addition for every pair of tokens: 4 billion of them
for 16 384 tokens and 32 heads, in whatever order programs come. So it is given what needs no gradient. That gradient
follows from what attention has returned, by kernels that only add up in registers.
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
"""Tokens of a block of `Pairs.some`."""

Tokens = Int[Tensor, "#batch 3 seq"]
"""The index, the document (-1 for padding) and the order of every token."""


@dataclass(frozen=True)
class Pairs:
    """Known beforehand where both sides count one by one, and have an `offset`; else by their tokens.

    Args:
        first: the distance (query index minus key index) of the first entry of a table, or of `Biases.row_of`.
        low, high: allowed are pairs of one document whose orders differ by no less than `low`, no more than `high`.
        offset: the index of the first query minus that of the first key.
        queries: the tokens, where there is no offset.
        keys: theirs; ``None`` where they are those of the queries.
        some: which blocks of `FLAGGED` queries and as many keys hold an allowed pair; ``None``: any may.
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
    """What is added to scores: for each pair an entry of a table, or of what its tokens have, by their distance.

    Args:
        of_query: a table with an entry for every distance; with `row_of`, a number of every query for every row.
        of_key: a number of every key for every row; ``None``: nothing is added.
        row_of: for every distance from `Pairs.first` on its row, for those before and behind the first and the last.
            A row has all distances between two of them. ``None`` for a table.
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
    """`y` and `lse`, computed with constant `biases`, whose gradients now reach these as well.

    Args:
        y, lse: ``softmax(cap(q k^T scale) + bias) v`` and the log-sum-exp of the scores, on CUDA.
        scale, softcap: of the scores.
    """
    looked_up = biases.of_query, biases.of_key, biases.row_of
    tensors = (y, lse, q.detach(), k.detach(), v.detach(), *looked_up, pairs.queries, pairs.keys, pairs.some)
    return _Passed.apply(*tensors, pairs.first, pairs.low, pairs.high, pairs.offset, scale, softcap)


class _Passed(torch.autograd.Function):
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
        onto_y = q.new_zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
        gradients = distance_gradient(onto_y, grad_lse, q, k, v, lse, *rest, *ctx.numbers)
        both = (None if x is None else onto_x.to(x.dtype) for x, onto_x in zip(rest, gradients, strict=False))
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
    """The gradients of `of_query` and `of_key` in float32, empty for what is not there."""
    from locant.kernels.distance_gradient import triton

    biases, pairs = Biases(of_query, of_key, row_of), Pairs(first, low, high, offset, queries, keys, some)
    of_query, of_key = triton.gradients(grad, grad_lse, q, k, v, lse, biases, pairs, scale, softcap)
    return _or_empty(of_query, q), _or_empty(of_key, q)


@distance_gradient.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, of_query: Tensor | None,
    of_key: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    onto_query, onto_key = (
        None if x is None else torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        for x in (of_query, of_key)
    )
    return _or_empty(onto_query, q), _or_empty(onto_key, q)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def _no_second(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
    got = "got a gradient of the gradient of a bias through backend='flex', which has those of first order"
    raise LocantError(got, "backend='eager', which is made of plain operations")


distance_gradient.register_autograd(_no_second)
