"""Attention's output and log-sum-exp as they are, and behind them the gradient of what its biases were looked up in.

FlexAttention adds up what a look-up's gradient is with an atomic addition for every pair of tokens: 4 billion of them
for 16 384 tokens and 32 heads, in whatever order programs come. So it is given what needs no gradient. That gradient
follows from what attention has returned, by kernels that only add up in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import LocantError
from locant.kernels.distance_gradient.pairs import Biases, Pairs

__all__ = ["with_gradients"]


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
        found = distance_gradient(onto_y, grad_lse, q, k, v, lse, *rest, *ctx.numbers)
        both = (None if x is None else onto_x.to(x.dtype) for x, onto_x in zip(rest, found, strict=False))
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
    found = triton.gradients(grad, grad_lse, q, k, v, lse, biases, pairs, scale, softcap)
    return _or_empty(found[0], q), _or_empty(found[1], q)


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
