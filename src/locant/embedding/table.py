"""Embedding tables: reading their rows, checking the ids of a look-up, and what tables cost in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.embedding.deferred_errors import Asked, DeferredErrors, raises_later
from locant.errors import RangeError, ShapeError
from locant.kernels.input_embedding import look_up
from locant.tensors import has_values, require_tensor

__all__ = ["Table", "TableSize", "WholeTable", "require_ids", "rows_of", "table_sizes"]


class Table(ABC):
    """How the rows of a weight are read, written and added to. It holds nothing itself; writing has no gradient."""

    @abstractmethod
    def rows(
        self,
        weight: Float[Tensor, "vocab_size d_model"],
        ids: Integer[Tensor, "*batch"],
        padding_idx: int | None,
        deferred: DeferredErrors,
    ) -> Float[Tensor, "*batch d_model"]:
        """The row of every id, which is checked now or noted in `deferred`; the padding row gets no gradient."""

    @abstractmethod
    def logits(
        self, weight: Float[Tensor, "vocab_size d_model"], x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """The product of every vector with every row."""

    @abstractmethod
    def draw(self, weight: Float[Tensor, "vocab_size d_model"], std: float, padding_idx: int | None) -> None:
        """Fill every row from N(0, std**2), and the padding row with zeros."""

    @abstractmethod
    def longer(self, weight: Float[Tensor, "vocab_size d_model"], num_rows: int) -> Float[Tensor, "num_rows d_model"]:
        """A copy with more rows, the new ones not written yet."""


class WholeTable(Table):
    """A weight that is all on one device; `locant.parallel` has one for rows split over several."""

    def rows(self, weight: Tensor, ids: Tensor, padding_idx: int | None, deferred: DeferredErrors) -> Tensor:
        return rows_of(ids, weight, "TokenEmbedding", "vocab_size", deferred, padding_idx)

    def logits(self, weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight)

    def draw(self, weight: Tensor, std: float, padding_idx: int | None) -> None:
        weight.normal_(std=std)
        if padding_idx is not None:
            weight[padding_idx].zero_()

    def longer(self, weight: Tensor, num_rows: int) -> Tensor:
        return torch.cat([weight, weight.new_empty(num_rows - weight.shape[0], weight.shape[1])])


def rows_of(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_rows width"],
    layer: str,
    limit: str,
    deferred: DeferredErrors,
    padding_idx: int | None = None,
) -> Float[Tensor, "*batch width"]:
    """The row of every id; a `RangeError` names the first that has none, on a GPU at a later call."""
    num_rows, later = weight.shape[0], raises_later(weight)
    if later:
        deferred.raise_arrived()
    ids = require_ids(ids, num_rows, layer, limit, weight.device, read=not later)
    if not later:
        return look_up(ids, weight, padding_idx)
    wrong = deferred.watch(Asked(ids=ids, layer=layer, limit=f"{limit}={num_rows}", num_rows=num_rows))
    rows = look_up(ids.masked_fill(wrong, 0), weight, padding_idx)
    return rows.masked_fill(wrong[..., None], torch.nan)


def require_ids(
    ids: Any, num_rows: int, layer: str, limit: str, device: torch.device, *, read: bool = True
) -> Int[Tensor, "*batch"]:
    """`ids` as int64; raises unless they are integers in ``0 .. num_rows - 1`` on `device`.

    Reads the smallest and largest id, which on an accelerator waits for it; without that a wrong id would end in a
    device-side assert that poisons the process. Not while compiling or capturing a graph: nothing may be read there.
    Nor without `read`, for look-ups that can cope with any id.
    """
    require_tensor("ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ShapeError(f"got ids of dtype {ids.dtype} for {layer}, expected integers", "ids.long()")
    if ids.device != device:
        raise ShapeError(f"got ids on {ids.device}, {layer} is on {device}", f"ids.to({str(device)!r})")
    ids = ids.long()
    if not read or not has_values(ids) or not ids.numel():
        return ids
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return ids
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= num_rows:
        place = tuple(((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist())
        got = f"got id {int(ids[place])} at {place}, {layer} has {limit}={num_rows}"
        raise RangeError(got, f"ids from 0 to {num_rows - 1}, or a larger {limit}")
    return ids


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """The shape and memory of one table of a model.

    >>> TableSize(name="token", shape=(32_000, 4_096)).num_bytes(torch.bfloat16) / 2**20
    250.0
    """

    name: str
    shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return torch.Size(self.shape).numel()

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.num_parameters * dtype.itemsize


def table_sizes(module: nn.Module) -> list[TableSize]:
    """The size of every parameter of `module`, which may be on the meta device.

    >>> [size.num_parameters for size in table_sizes(nn.Embedding(50_257, 768, device="meta"))]
    [38597376]
    """
    return [TableSize(name=name, shape=tuple(parameter.shape)) for name, parameter in module.named_parameters()]
