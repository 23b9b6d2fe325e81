"""The heads that a module holds: all heads, or the share of one rank under tensor parallelism.

Random parameters are drawn for all heads, and each rank keeps the values for its heads. So ranks with the same seed
hold slices of one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import shape_error, short_repr, whole
from locant.deprecation import Renamed
from locant.errors import RangeError

MAX_HEADS = 2**20  # slopes and slices are computed head by head


def check_num_heads(num_heads: Any) -> int:
    """Check the number of query heads that a constructor received, and return it."""
    return whole("num_heads", num_heads, 1, MAX_HEADS, remedy="pass the number of query heads")


@dataclass(frozen=True)
class Heads:
    """The number of heads of a model, and the heads that this module holds."""

    num_heads: int
    indices: range

    @classmethod
    def of(cls, num_heads: int, head_slice: slice | None = None) -> Heads:
        """Return the heads that `head_slice` takes from a list of all heads, or all of them for ``None``."""
        num_heads = check_num_heads(num_heads)
        indices = range(num_heads) if head_slice is None else _slice_heads(num_heads, head_slice)
        if not indices:
            got = f"got {short_repr(head_slice)} for head_slice, expected a slice of some of {num_heads} heads"
            raise RangeError(got, f"slice(rank * n, (rank + 1) * n) with n = {num_heads} // number of ranks")
        return cls(num_heads, indices)

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, heads: slice | None) -> Heads:
        """Return a slice of the held heads, or all of them for ``None``."""
        return self if heads is None else Heads(self.num_heads, self.indices[heads])

    def to_global(self, held: Any) -> Any:
        """Convert the index of a head among the held heads to its index in the model. `held` may be a tensor."""
        return held if self._are_all() else held * self.indices.step + self.indices.start

    def to_local(self, number: Any) -> Any:
        """Convert the index of a head in the model to its index among the held heads, as the inverse of `to_global`."""
        return number if self._are_all() else (number - self.indices.start) // self.indices.step

    here = Renamed("to_local")

    def select(self, full: Tensor, dim: int = 0) -> Tensor:
        """Return the part of a tensor over all heads that belongs to the held heads."""
        return full.index_select(dim, torch.tensor(list(self.indices), device=full.device))

    def fill(self, parameter: Tensor, full: Tensor, dim: int = 0) -> None:
        """Set a parameter of the held heads from values for all heads. The parameter may have merged dimensions."""
        with torch.no_grad():
            parameter.copy_(self.select(full, dim).reshape(parameter.shape))

    def require(self, owner: nn.Module, q: Tensor) -> None:
        """Raise `ShapeError` unless `q` has the held heads."""
        if q.ndim != 4 or q.shape[1] != len(self):
            name, part = type(owner).__name__, "" if self._are_all() else ", and the head_slice of this rank"
            expected = f"(batch, {len(self)}, query, head_dim) by {name}({self})"
            raise shape_error("q", q, expected, f"build {name} with the number of query heads{part}")

    def _are_all(self) -> bool:
        # The compiler of torch 2.9 cannot compare two ranges.
        return len(self.indices) == self.num_heads and self.indices[0] == 0

    def __str__(self) -> str:
        if self._are_all():
            return f"num_heads={self.num_heads}"
        step = "" if self.indices.step == 1 else f", {self.indices.step}"
        return f"num_heads={self.num_heads}, head_slice=slice({self.indices.start}, {self.indices.stop}{step})"


def _slice_heads(num_heads: int, part: Any) -> range:
    """Return the heads in a slice, or no heads if `part` is not a slice or ends after the last head."""
    try:
        indices = range(num_heads)[part]
        return indices if max(part.start or 0, part.stop or 0) <= num_heads else range(0)
    except (TypeError, ValueError, IndexError, AttributeError):  # AttributeError: a number has no start
        return range(0)


def for_query_heads(
    k: Float[Tensor, "batch kv_heads key head_dim"], num_heads: int
) -> Float[Tensor, "batch heads key head_dim"]:
    """Return the keys that each query head attends to. Under grouped-query attention, neighbouring heads share keys."""
    require_query_heads(k, num_heads)
    return k if k.shape[1] == num_heads else k.repeat_interleave(num_heads // k.shape[1], dim=1)


def require_query_heads(k: Tensor, num_heads: int) -> None:
    """Raise `ShapeError` unless each key head has the same number of query heads."""
    if k.ndim != 4 or k.shape[1] == 0 or num_heads % k.shape[1]:
        expected = f"a number of heads that divides the {num_heads} query heads"
        raise shape_error("k", k, expected, f"use a number of key heads that divides {num_heads}")


def empty_linear(width: int, out: int) -> nn.Linear:
    """Return a linear layer without drawing random numbers. The caller draws weights for all heads and fills it."""
    return nn.Linear(width, out, device="meta").to_empty(device=torch.get_default_device())
