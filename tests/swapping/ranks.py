"""What each process of a sharded, swapped model finds out."""

from __future__ import annotations

import torch

import locant
from tests.swapping.families import Family, tiny
from tests.swapping.work import ids, shard

__all__ = ["losses_on_two"]


def losses_on_two(name: str, sharded: bool = True) -> list[float]:
    """The losses of three steps of plain gradient descent."""
    model = tiny(Family("llama", "LlamaForCausalLM"))
    torch.manual_seed(0)
    if name == "own":
        locant.swap(model, angles="float32")
    else:
        locant.swap(model, locant.Kerple(4))
    if sharded:
        shard(model)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
