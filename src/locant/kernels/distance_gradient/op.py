"""Attention's output and log-sum-exp as they are, and behind them the gradient of the table that a bias came out of.

FlexAttention adds up what a look-up's gradient is with an atomic addition for every pair of tokens: 4 billion of them
for 16 384 tokens and 32 heads, in whatever order programs come. So it is given a table that needs no gradient. That
gradient follows from what attention has returned, by kernels that only add up in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import LocantError
from locant.kernels.distance_gradient.pairs import Pairs

__all__ = ["with_table_gradient"]


def with_table_gradient(
    y: Float[Tensor, "batch heads query value_dim"],
    lse: Float[Tensor, "batch heads query"],
    q: Float[Tensor, "batch heads query head_dim"],
    k: Float[Tensor, "batch kv_heads key head_dim"],
    v: Float[Tensor, "batch kv_heads key value_dim"],
    table: Float[Tensor, "heads distances"],
    pairs: Pairs,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query"]]:
    """`y` and `lse`, computed with `table` as a constant, whose gradients now reach `table` as well.

    Args:
        y, lse: ``softmax(cap(q k^T scale) + bias) v`` and the log-sum-exp of the scores, on CUDA.
        table: the bias of a pair is the entry of its distance.
        scale, softcap: of the scores.
    """
    tensors = (y, lse, q.detach(), k.detach(), v.detach(), table, pairs.queries, pairs.keys, pairs.some)
    return _Passed.apply(*tensors, pairs.first, pairs.low, pairs.high, pairs.offset, scale, softcap)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(lse, *rest[:7])
        ctx.numbers = rest[7:]
        ctx.set_materialize_grads(False)
        return y.view_as(y), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_lse = grads
        lse, q, k, v, *rest = ctx.saved_tensors
        onto_y = q.new_zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
        found = distance_gradient(onto_y, grad_lse, q, k, v, lse, *rest, *ctx.numbers).to(rest[0].dtype)
        return grad, grad_lse, None, None, None, found, *[None] * 9


@torch.library.custom_op(
    "locant::distance_gradient",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor table, Tensor? queries, "
    "Tensor? keys, Tensor? some, SymInt first, SymInt low, SymInt high, SymInt? offset, float scale, float? softcap) "
    "-> Tensor",
)
def distance_gradient(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, table: Tensor,
    queries: Tensor | None, keys: Tensor | None, some: Tensor | None, first: int, low: int, high: int,
    offset: int | None, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The gradient of the table in float32."""
    from locant.kernels.distance_gradient import triton

    pairs = Pairs(first, low, high, offset, queries, keys, some)
    return triton.table_gradient(grad, grad_lse, q, k, v, lse, table, pairs, scale, softcap)


@distance_gradient.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, table: Tensor, *_: Any
) -> Tensor:
    return torch.empty_like(table, dtype=torch.float32, memory_format=torch.contiguous_format)


def _no_second(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
    got = "got a gradient of the gradient of a bias through backend='flex', which has those of first order"
    raise LocantError(got, "backend='eager', which is made of plain operations")


distance_gradient.register_autograd(_no_second)
