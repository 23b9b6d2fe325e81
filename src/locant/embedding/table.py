"""Read the rows of embedding tables, check the ids of a look-up, and compute the memory that tables need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.embedding.deferred_errors import DeferredErrors
from locant.errors import RangeError, ShapeError
from locant.kernels.look_up import look_up
from locant.kernels.transforms import is_exporting, is_transforming
from locant.positions.checks import to_int64
from locant.spelling import dtype_name
from locant.tensors import has_values, host_can_read, require_tensor

Ids = Integer[Tensor, "*batch"] | Integer[np.ndarray, "*batch"] | Sequence[Any]
"""Token ids. A tokenizer returns an array, and lists are accepted, too."""

Fill = Callable[[Tensor], Tensor]
"""A function that writes fresh rows into a tensor and returns it."""


class Table:
    """The methods that read, write and append the rows of a weight on one device.

    `locant.parallel` has a subclass for rows that are split over several devices. The object has no state, and writing
    has no gradient.
    """

    def rows(
        self,
        weight: Float[Tensor, "vocab_size d_model"],
        ids: Integer[Tensor, "*batch"],
        padding_idx: int | None,
        deferred: DeferredErrors,
    ) -> Float[Tensor, "*batch d_model"]:
        """Return the row of every id. Ids are checked now or by `deferred`. The padding row does not get a gradient."""
        return rows_of(ids, weight, "TokenEmbedding", "vocab_size", deferred, padding_idx, read=self.read)

    def read(
        self, ids: Int[Tensor, "*batch"], weight: Float[Tensor, "num_rows width"], padding_idx: int | None = None
    ) -> Float[Tensor, "*batch width"]:
        """Return the row of every id, all of which are valid."""
        return look_up(ids, weight, padding_idx)

    def read_present(
        self, ids: Int[Tensor, "*batch"], weight: Float[Tensor, "num_rows width"]
    ) -> Float[Tensor, "*batch width"]:
        """Return the row of every id, and zeros for -1."""
        if ids.device != weight.device:
            got = f"got rows on {ids.device} of a table on {weight.device}"
            raise ShapeError(got, "move the module, or set embedding.table = locant.embedding.SparseTable()")
        absent = ids < 0
        if host_can_read(absent) and not bool(absent.any()):
            return self.read(ids, weight)
        return self.read(ids.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0)

    def logits(
        self, weight: Float[Tensor, "vocab_size d_model"], x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """Return the product of every vector with every row."""
        return F.linear(x, weight)

    def initialize(self, weight: Float[Tensor, "vocab_size d_model"], fill: Fill, padding_idx: int | None) -> None:
        """Fill every row with `fill`, and the padding row with zeros."""
        fill(weight)
        if padding_idx is not None:
            weight[padding_idx].zero_()

    def extended_copy(
        self, weight: Float[Tensor, "vocab_size d_model"], num_rows: int
    ) -> Float[Tensor, "num_rows d_model"]:
        """Return a copy with more rows. The new rows are not initialized."""
        return torch.cat([weight, weight.new_empty(num_rows - weight.shape[0], weight.shape[1])])


def rows_of(
    ids: Integer[Tensor, "*batch"],
    weight: Float[Tensor, "num_rows width"],
    layer: str,
    limit: str,
    deferred: DeferredErrors,
    padding_idx: int | None = None,
    read: Callable[[Tensor, Tensor, int | None], Tensor] = look_up,
) -> Float[Tensor, "*batch width"]:
    """Return the row of every id. Raise `RangeError` for the first id without a row.

    On a GPU the row of such an id is NaN, and a later call raises the error. In a graph, ids are not checked.
    `read` looks up the valid ids.
    """
    num_rows = weight.shape[0]
    if not weight.is_cuda or torch.compiler.is_compiling() or is_exporting() or is_transforming():
        return read(require_ids(ids, num_rows, layer, limit, weight.device), weight, padding_idx)
    deferred.raise_arrived()
    ids = require_ids(ids, num_rows, layer, limit, weight.device, look=False)
    wrong = deferred.watch(ids, num_rows, f"{layer} has {limit}={num_rows}")
    return read(ids.masked_fill(wrong, 0), weight, padding_idx).masked_fill(wrong[..., None], torch.nan)


def ids_on_device(ids: Ids, module: nn.Module, name: str = "ids") -> Tensor:
    """Return a tensor unchanged, and a list or an array as a tensor on the module's device."""
    if isinstance(ids, Tensor):
        return ids
    return to_int64(name, ids, next(itertools.chain(module.parameters(), module.buffers())).device)


def as_int64(ids: Any, layer: str) -> Int[Tensor, "*batch"]:
    """Return `ids` as int64. Raise `ShapeError` unless they are integers.

    Convert ids before they are compared: torch compares bytes with 258,880 modulo 256.
    """
    require_tensor("ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ShapeError(f"got ids of dtype {dtype_name(ids.dtype)} for {layer}, expected integers", "ids.long()")
    return ids.long()


def require_ids(
    ids: Any, num_rows: int, layer: str, limit: str, device: torch.device, *, look: bool = True
) -> Int[Tensor, "*batch"]:
    """Return `ids` as int64. Raise an error unless they are integers in ``0 .. num_rows - 1`` on `device`.

    The check reads the smallest and largest id, so the host waits for an accelerator. Without the check, a wrong id
    would cause a device-side assertion, after which the process cannot use the device. While a graph is compiled or
    captured, values must not be read, so ids are not checked.
    """
    ids = as_int64(ids, layer)
    if ids.device != device:
        raise ShapeError(f"got ids on {ids.device}, but {layer} is on {device}", f"ids.to({str(device)!r})")
    if not look or not has_values(ids) or not ids.numel():
        return ids
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return ids
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= num_rows:
        place = tuple(((ids < 0) | (ids >= num_rows)).nonzero()[0].tolist())
        got = f"got id {int(ids[place])} at {place}, {layer} has {limit}={num_rows}"
        raise RangeError(got, f"use ids from 0 to {num_rows - 1}, or a larger {limit}")
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

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return the bytes of the table in the usual dtypes, by their names."""
        return {dtype_name(dtype): self.num_bytes(dtype) for dtype in (torch.float32, torch.bfloat16)}


def table_sizes(module: nn.Module) -> list[TableSize]:
    """Return the size of every parameter of `module`, which may be on the meta device.

    >>> [size.num_parameters for size in table_sizes(nn.Embedding(50_257, 768, device="meta"))]
    [38597376]
    """
    return [TableSize(name=name, shape=tuple(parameter.shape)) for name, parameter in module.named_parameters()]
