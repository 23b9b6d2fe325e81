"""Ring attention: each rank sends keys and values to the next rank, one shard at a time.

The queries of a rank attend to the shard that the rank has, while it sends this shard and receives the next shard. The
log-sum-exps of all shards combine their outputs (`locant.attention.merge`). The backward pass goes around the ring once
more. With the log-sum-exp of the whole row, the gradients of one shard depend only on this shard. They travel with the
shard and are complete when it is back on its own rank.

So a rank stores its own tensors, the shard of keys and values that it uses, and the shard that arrives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work

from locant.attention.attend import attend
from locant.attention.merge import merge
from locant.positions import Positions


@dataclass(frozen=True)
class Transfer:
    """Tensors that are being sent to the next rank, and tensors that arrive from the previous rank."""

    outgoing: tuple[Tensor, ...]  # kept until they have arrived
    incoming: tuple[Tensor, ...]
    work: list[Work]

    def wait(self) -> tuple[Tensor, ...]:
        for each in self.work:
            each.wait()
        return self.incoming


class Ring:
    """The ranks of a group, as a ring."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def send(self, *tensors: Tensor) -> Transfer:
        """Send tensors to the next rank, without waiting. All ranks must call this together."""
        if self.world == 1:
            return Transfer(tensors, tensors, [])
        outgoing = tuple(x.contiguous() for x in tensors)
        incoming = tuple(torch.empty_like(x) for x in outgoing)
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.world) for step in (1, -1))
        calls = [dist.P2POp(dist.isend, x, after, self.group) for x in outgoing]
        calls += [dist.P2POp(dist.irecv, x, before, self.group) for x in incoming]
        return Transfer(outgoing, incoming, dist.batch_isend_irecv(calls))

    def shards(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each rank and its tensors, beginning with this rank and going backwards."""
        for step in range(self.world):
            transfer = self.send(*tensors) if step < self.world - 1 else None
            yield (self.rank - step) % self.world, tensors
            tensors = tensors if transfer is None else transfer.wait()


@dataclass(frozen=True)
class Call:
    """One call of attention, without the tensors that need a gradient."""

    ring: Ring
    positions: Positions
    all_positions: Positions
    options: dict[str, Any]

    @property
    def learned_tensors(self) -> list[Tensor]:
        """Parameters and features that need a gradient. Every rank has the features of all keys."""
        encoding, read = self.options["encoding"], (self.positions.read.of_query, self.all_positions.read.of_key)
        parameters = () if encoding is None else encoding.parameters()
        return [x for x in (*read, *parameters) if x is not None and x.requires_grad]

    def detach_features(self) -> Call:
        """Return a call whose features are leaves, because queries and keys may share one result of `read`."""
        query, key = (
            None if x is None else x.detach().requires_grad_(x.requires_grad)
            for x in (self.positions.read.of_query, self.all_positions.read.of_key)
        )
        positions = dataclasses.replace(self.positions, read=self.positions.read._replace(of_query=query))
        all_positions = dataclasses.replace(self.all_positions, read=self.all_positions.read._replace(of_key=key))
        return dataclasses.replace(self, positions=positions, all_positions=all_positions)

    def shard(self, owner: int) -> Positions:
        """Return the positions of a rank's keys."""
        return self.all_positions.slice(owner * self.positions.seq_len, (owner + 1) * self.positions.seq_len)

    def part(self, q: Tensor, k: Tensor, v: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return the output over the keys of one shard, and its log-sum-exp."""
        positions = {"positions": self.positions, "k_positions": self.shard(owner)}
        return attend(q, k, v, return_lse=True, **positions, **self.options)


def ring_attention(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, positions: Positions, all_positions: Positions, options: dict[str, Any]
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query"]]:
    """Return the output and log-sum-exp of this rank's queries over the keys of all ranks."""
    call = Call(ring, positions, all_positions, options)
    with torch.no_grad():  # raise errors before anything is sent, because other ranks would wait for it
        first = {"positions": positions.slice(0, 1), "k_positions": call.shard(ring.rank).slice(0, 1)}
        attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], return_lse=True, **first, **options)
    return _RingAttention.apply(q, k, v, call, *call.learned_tensors)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *learned: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)  # rounded once, after all parts are merged
        y = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        for owner, (k_part, v_part) in call.ring.shards(k, v):
            y_part, lse_part = call.part(q, k_part, v_part, owner)
            y, lse = merge([(y, lse), (y_part.to(wide), lse_part)])
        ctx.call = call
        ctx.save_for_backward(q, k, v, y, lse)
        return y.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute each part again. Its output has the weight ``exp(lse_part - lse)`` in `merge`."""
        call: Call = ctx.call
        q, k, v, y, lse = ctx.saved_tensors
        grad_y, grad_lse = grads[0].to(y.dtype), grads[1]
        rest = grad_lse - (grad_y * y).sum(-1)
        totals = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, y.dtype)) for x in (q, *call.learned_tensors)]
        transfer = Transfer((), tuple(torch.zeros_like(x, dtype=y.dtype) for x in (k, v)), [])
        for owner, shard in call.ring.shards(k, v):
            q_grad, k_grad, v_grad, *learned = _part_gradients(call, (q, *shard), owner, lse, grad_y, rest)
            for total, grad in zip(totals, (q_grad, *learned), strict=True):
                total += grad
            k_total, v_total = transfer.wait()
            transfer = call.ring.send(k_total + k_grad, v_total + v_grad)
        q_grad, *learned = (total.to(x.dtype) for total, x in zip(totals, (q, *call.learned_tensors), strict=True))
        k_grad, v_grad = (total.to(x.dtype) for total, x in zip(transfer.wait(), (k, v), strict=True))
        return q_grad, k_grad, v_grad, None, *learned


def _part_gradients(
    call: Call, tensors: tuple[Tensor, ...], owner: int, lse: Tensor, grad_y: Tensor, rest: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and parameters from the keys of one shard."""
    call = call.detach_features()
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        y_part, lse_part = call.part(q, k, v, owner)
    weight = torch.where(lse_part.isneginf(), 0.0, (lse_part.detach() - lse).exp())
    part_grad_lse = weight * (rest + (grad_y * y_part.detach()).sum(-1))
    part_grad_y = (weight[..., None] * grad_y).to(y_part.dtype)
    outputs, inputs, grads = (y_part, lse_part), (q, k, v, *call.learned_tensors), (part_grad_y, part_grad_lse)
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)
