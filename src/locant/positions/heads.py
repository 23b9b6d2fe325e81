"""Which heads a module holds: all of them, or the share of one rank under tensor parallelism.

Parameters are drawn for all heads, and kept of those that it holds: ranks with one seed hold slices of one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import shape_error, shown, whole
from locant.errors import RangeError

MAX_HEADS = 2**20  # slopes and slices are made head by head


def heads_of(num_heads: Any) -> int:
    """The number of query heads, as a constructor was given it."""
    return whole("num_heads", num_heads, 1, MAX_HEADS, remedy="the number of query heads")


@dataclass(frozen=True)
class Heads:
    """The heads of a model, and those that live here."""

    num_heads: int
    mine: range

    @classmethod
    def of(cls, num_heads: int, head_slice: slice | None = None) -> Heads:
        """`head_slice` as for a list of all heads; ``None``: all of them."""
        num_heads = heads_of(num_heads)
        mine = range(num_heads) if head_slice is None else _cut(num_heads, head_slice)
        if not mine:
            got = f"got {shown(head_slice)} for head_slice, expected a slice of some of {num_heads} heads"
            raise RangeError(got, f"slice(rank * n, (rank + 1) * n) with n = {num_heads} // number of ranks")
        return cls(num_heads, mine)

    def __len__(self) -> int:
        return len(self.mine)

    def some(self, heads: slice | None) -> Heads:
        """Those of the heads here that a slice of them leaves; ``None``: all of them."""
        return self if heads is None else Heads(self.num_heads, self.mine[heads])

    def number(self, here: Any) -> Any:
        """The number in the model of a head that is here, which counts from 0; of one, or of a tensor of them."""
        return here if self._are_all() else here * self.mine.step + self.mine.start

    def here(self, number: Any) -> Any:
        """The index of a head of the model among those held here: the inverse of `number`."""
        return number if self._are_all() else (number - self.mine.start) // self.mine.step

    def own(self, full: Tensor, dim: int = 0) -> Tensor:
        """The part of a tensor over all heads that belongs to the heads here."""
        return full.index_select(dim, torch.tensor(list(self.mine), device=full.device))

    def fill(self, parameter: Tensor, full: Tensor, dim: int = 0) -> None:
        """Set a parameter of the heads here from its values for all heads; the parameter may merge dimensions."""
        with torch.no_grad():
            parameter.copy_(self.own(full, dim).reshape(parameter.shape))

    def require(self, owner: nn.Module, q: Tensor) -> None:
        """Raise unless `q` has the heads that are here."""
        if q.ndim != 4 or q.shape[1] != len(self):
            name, part = type(owner).__name__, "" if self._are_all() else ", and the head_slice of this rank"
            expected = f"(batch, {len(self)}, query, head_dim) by {name}({self})"
            raise shape_error("q", q, expected, f"{name} built with the number of query heads{part}")

    def _are_all(self) -> bool:
        # As many, from the first on. Two ranges are not compared: the compiler of torch 2.9 cannot do that.
        return len(self.mine) == self.num_heads and self.mine[0] == 0

    def __str__(self) -> str:
        if self._are_all():
            return f"num_heads={self.num_heads}"
        step = "" if self.mine.step == 1 else f", {self.mine.step}"
        return f"num_heads={self.num_heads}, head_slice=slice({self.mine.start}, {self.mine.stop}{step})"


def _cut(num_heads: int, part: Any) -> range:
    """The heads of a slice; none where it is no slice, or goes past the last, which Python cuts short."""
    try:
        mine = range(num_heads)[part]
        return mine if max(part.start or 0, part.stop or 0) <= num_heads else range(0)
    except (TypeError, ValueError, IndexError, AttributeError):  # AttributeError: a single number, which has no start
        return range(0)


def for_query_heads(
    k: Float[Tensor, "batch kv_heads key head_dim"], num_heads: int
) -> Float[Tensor, "batch heads key head_dim"]:
    """The keys that each query head attends to: under grouped-query attention, neighbouring heads share them."""
    if k.ndim != 4 or k.shape[1] == 0 or num_heads % k.shape[1]:
        expected = f"a number of heads that divides the {num_heads} query heads"
        raise shape_error("k", k, expected, "num_heads % k.shape[1] == 0")
    return k if k.shape[1] == num_heads else k.repeat_interleave(num_heads // k.shape[1], dim=1)


def blank_linear(width: int, out: int) -> nn.Linear:
    """A linear layer that draws no random numbers: its caller draws those of all heads, and fills it."""
    return nn.Linear(width, out, device="meta").to_empty(device=torch.get_default_device())
