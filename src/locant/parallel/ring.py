"""Ring attention: keys and values go round the ranks, one shard at a time.

A rank attends with its queries to the shard that it holds, while it sends that shard on and receives the next. The
outputs of all shards are joined by their log-sum-exp (`locant.attention.merge`). The backward pass goes round once
more: with the log-sum-exp of the whole row at hand, the gradients of one shard follow from that shard alone. They
travel on with it, and are complete when it is back where it belongs.

So a rank holds, beside its own tensors, one shard of keys and values that it uses and one that arrives.
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
class Sent:
    """Tensors on their way to the next rank, and those that arrive from the one before."""

    outgoing: tuple[Tensor, ...]  # held until they have arrived
    incoming: tuple[Tensor, ...]
    work: list[Work]

    def wait(self) -> tuple[Tensor, ...]:
        for each in self.work:
            each.wait()
        return self.incoming


class Ring:
    """The ranks of a group in a circle."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def send(self, *tensors: Tensor) -> Sent:
        """Hand these to the next rank, without waiting; all ranks do so together."""
        if self.world == 1:
            return Sent(tensors, tensors, [])
        outgoing = tuple(x.contiguous() for x in tensors)
        incoming = tuple(torch.empty_like(x) for x in outgoing)
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.world) for step in (1, -1))
        calls = [dist.P2POp(dist.isend, x, after, self.group) for x in outgoing]
        calls += [dist.P2POp(dist.irecv, x, before, self.group) for x in incoming]
        return Sent(outgoing, incoming, dist.batch_isend_irecv(calls))

    def shards(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The tensors of every rank, with its number, from this rank backwards."""
        for step in range(self.world):
            sent = self.send(*tensors) if step < self.world - 1 else None
            yield (self.rank - step) % self.world, tensors
            tensors = tensors if sent is None else sent.wait()


@dataclass(frozen=True)
class Call:
    """What one call of attention is, but for the tensors that need a gradient."""

    ring: Ring
    positions: Positions
    everyone: Positions
    options: dict[str, Any]

    @property
    def learned(self) -> list[Tensor]:
        """Parameters, and what was read of hidden states, of which every rank has that of all keys."""
        encoding, read = self.options["encoding"], (self.positions.read.of_query, self.everyone.read.of_key)
        parameters = () if encoding is None else encoding.parameters()
        return [x for x in (*read, *parameters) if x is not None and x.requires_grad]

    def detached(self) -> Call:
        """The same call, in which what was read is a leaf: queries and keys may have been read together."""
        query, key = (
            None if x is None else x.detach().requires_grad_(x.requires_grad)
            for x in (self.positions.read.of_query, self.everyone.read.of_key)
        )
        positions = dataclasses.replace(self.positions, read=self.positions.read._replace(of_query=query))
        everyone = dataclasses.replace(self.everyone, read=self.everyone.read._replace(of_key=key))
        return dataclasses.replace(self, positions=positions, everyone=everyone)

    def shard(self, owner: int) -> Positions:
        """The positions of the keys of a rank."""
        return self.everyone.slice(owner * self.positions.seq_len, (owner + 1) * self.positions.seq_len)

    def part(self, q: Tensor, k: Tensor, v: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """The output over the keys of one shard, and its log-sum-exp."""
        where = {"positions": self.positions, "k_positions": self.shard(owner)}
        return attend(q, k, v, return_lse=True, **where, **self.options)


def ring_attention(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, positions: Positions, everyone: Positions, options: dict[str, Any]
) -> tuple[Float[Tensor, "batch heads query value_dim"], Float[Tensor, "batch heads query"]]:
    """Output and log-sum-exp of this rank's queries over the keys of all ranks."""
    call = Call(ring, positions, everyone, options)
    with torch.no_grad():  # what is refused is refused before anything is sent, which other ranks would wait for
        where = {"positions": positions.slice(0, 1), "k_positions": call.shard(ring.rank).slice(0, 1)}
        attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], return_lse=True, **where, **options)
    return _RingAttention.apply(q, k, v, call, *call.learned)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *learned: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)  # rounded once, when all parts are joined
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
        """Each part is computed again; in `merge` its output weighs ``exp(lse_part - lse)``."""
        call: Call = ctx.call
        q, k, v, y, lse = ctx.saved_tensors
        grad_y, grad_lse = grads[0].to(y.dtype), grads[1]
        rest = grad_lse - (grad_y * y).sum(-1)
        here = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, y.dtype)) for x in (q, *call.learned)]
        sent = Sent((), tuple(torch.zeros_like(x, dtype=y.dtype) for x in (k, v)), [])
        for owner, shard in call.ring.shards(k, v):
            q_grad, k_grad, v_grad, *learned = _part_gradients(call, (q, *shard), owner, lse, grad_y, rest)
            for total, grad in zip(here, (q_grad, *learned), strict=True):
                total += grad
            k_total, v_total = sent.wait()
            sent = call.ring.send(k_total + k_grad, v_total + v_grad)
        q_grad, *learned = (total.to(x.dtype) for total, x in zip(here, (q, *call.learned), strict=True))
        k_grad, v_grad = (total.to(x.dtype) for total, x in zip(sent.wait(), (k, v), strict=True))
        return q_grad, k_grad, v_grad, None, *learned


def _part_gradients(
    call: Call, tensors: tuple[Tensor, ...], owner: int, lse: Tensor, grad_y: Tensor, rest: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys, values and parameters from the keys of one shard."""
    call = call.detached()
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        y_part, lse_part = call.part(q, k, v, owner)
    weight = torch.where(lse_part.isneginf(), 0.0, (lse_part.detach() - lse).exp())
    owed_lse = weight * (rest + (grad_y * y_part.detach()).sum(-1))
    owed_y = (weight[..., None] * grad_y).to(y_part.dtype)
    return torch.autograd.grad(
        (y_part, lse_part), (q, k, v, *call.learned), (owed_y, owed_lse), allow_unused=True, materialize_grads=True
    )
