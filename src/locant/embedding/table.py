"""Embedding tables: reading their rows, checking the ids of a look-up, and what tables cost in memory.

An id without a row is an error. On a GPU an assertion on the device would end the process' use of it, and asking the
device before every look-up would make the host wait. So the first token that has no row is noted there, and the note is
read once it is on the host: at a later call, or when the caller waits for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from locant.errors import RangeError, ShapeError
from locant.kernels.look_up import look_up
from locant.kernels.transforms import is_exporting, is_transforming
from locant.positions.checks import integers
from locant.spelling import dtype_name
from locant.tensors import has_values, require_tensor

NO_FAULT = 2**63 - 1
"""In the place of the number of the first token without a row, where all have one."""

Ids = Integer[Tensor, "*batch"] | Integer[np.ndarray, "*batch"] | Sequence[Any]
"""What is looked up; ids of a tokenizer come as an array, or as a list."""

Fill = Callable[[Tensor], Tensor]
"""Writes fresh rows into a tensor, and returns it."""


class Table:
    """How the rows of a weight are read, written and added to, which here is all on one device.

    `locant.parallel` has one for rows split over several. It holds nothing itself; writing has no gradient.
    """

    def rows(
        self,
        weight: Float[Tensor, "vocab_size d_model"],
        ids: Integer[Tensor, "*batch"],
        padding_idx: int | None,
        deferred: DeferredErrors,
    ) -> Float[Tensor, "*batch d_model"]:
        """The row of every id, which is checked now or noted in `deferred`; the padding row gets no gradient."""
        return rows_of(ids, weight, "TokenEmbedding", "vocab_size", deferred, padding_idx)

    def logits(
        self, weight: Float[Tensor, "vocab_size d_model"], x: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """The product of every vector with every row."""
        return F.linear(x, weight)

    def draw(self, weight: Float[Tensor, "vocab_size d_model"], fill: Fill, padding_idx: int | None) -> None:
        """Fill every row with what `fill` draws, and the padding row with zeros."""
        fill(weight)
        if padding_idx is not None:
            weight[padding_idx].zero_()

    def longer(self, weight: Float[Tensor, "vocab_size d_model"], num_rows: int) -> Float[Tensor, "num_rows d_model"]:
        """A copy with more rows, the new ones not written yet."""
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
    """The row of every id; a `RangeError` names the first that has none, on a GPU at a later call.

    There its row is NaN. In a graph nothing is checked. Ids that have rows are read by `read`.
    """
    num_rows = weight.shape[0]
    if not weight.is_cuda or torch.compiler.is_compiling() or is_exporting() or is_transforming():
        return read(require_ids(ids, num_rows, layer, limit, weight.device), weight, padding_idx)
    deferred.raise_arrived()
    ids = require_ids(ids, num_rows, layer, limit, weight.device, look=False)
    wrong = deferred.watch(ids, num_rows, f"{layer} has {limit}={num_rows}")
    return read(ids.masked_fill(wrong, 0), weight, padding_idx).masked_fill(wrong[..., None], torch.nan)


def ids_of(ids: Ids, module: nn.Module, name: str = "ids") -> Tensor:
    """A tensor as it is; a list or an array as one where the module's tables are."""
    if isinstance(ids, Tensor):
        return ids
    return integers(name, ids, next(itertools.chain(module.parameters(), module.buffers())).device)


def require_ids(
    ids: Any, num_rows: int, layer: str, limit: str, device: torch.device, *, look: bool = True
) -> Int[Tensor, "*batch"]:
    """`ids` as int64; raises unless they are integers in ``0 .. num_rows - 1`` on `device`.

    Looks at the smallest and largest id, which on an accelerator waits for it; without that a wrong id would end in a
    device-side assert that poisons the process. Not while compiling or capturing a graph: nothing may be read there.
    """
    require_tensor("ids", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ShapeError(f"got ids of dtype {dtype_name(ids.dtype)} for {layer}, expected integers", "ids.long()")
    if ids.device != device:
        raise ShapeError(f"got ids on {ids.device}, {layer} is on {device}", f"ids.to({str(device)!r})")
    ids = ids.long()
    if not look or not has_values(ids) or not ids.numel():
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
class _Note:
    """Ids that were looked up in a table, and the number of the first that has no row there."""

    ids: Int[Tensor, "*batch"]
    num_rows: int
    table: str
    version: int | None
    first: Int[Tensor, ""]
    arrived: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        """Whether it can be read without waiting; a graph's capture would end if an event were asked meanwhile."""
        return self.arrived is None or (not torch.cuda.is_current_stream_capturing() and self.arrived.query())

    def raise_fault(self) -> None:
        """Name the id, without its value where others may have taken its place by now."""
        number = int(self.first)
        if number == NO_FAULT:
            return
        place = tuple(map(int, np.unravel_index(number, (number + 1, *self.ids.shape[1:]))))
        value = int(self.ids.flatten()[number])
        unchanged = self.version is not None and self.version == _version(self.ids)
        bad = f"id {value}" if unchanged and not 0 <= value < self.num_rows else "a bad id"
        remedy = "ids within the table; the output of that token was NaN, all others are right"
        raise RangeError(f"got {bad} at {place} in an earlier call, {self.table}", remedy)


def _version(ids: Tensor) -> int | None:
    """Goes up when something is written; tensors of inference mode have none."""
    return None if ids.is_inference() else ids._version


class DeferredErrors:
    """The notes that are on their way; a copy of it, or a pickle, begins with none."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()

    def __reduce__(self) -> tuple[type[DeferredErrors], tuple[()]]:
        return DeferredErrors, ()

    def watch(self, ids: Int[Tensor, "*batch"], num_rows: int, table: str) -> Bool[Tensor, "*batch"]:
        """Which of the ids have no row; remembers to read which is the first, and what an error then says of the table.

        Not while a graph is captured: there is no later call in it.
        """
        wrong = (ids < 0) | (ids >= num_rows)
        if not ids.numel() or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return wrong
        numbers, arrived = torch.arange(ids.numel(), device=ids.device), None
        first = torch.where(wrong.flatten(), numbers, NO_FAULT).amin()
        if first.is_cuda:
            first = torch.empty_like(first, device="cpu", pin_memory=True).copy_(first, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        version = _version(ids)
        note = _Note(ids=ids, num_rows=num_rows, table=table, version=version, first=first, arrived=arrived)
        self._notes.append(note)
        return wrong

    def raise_arrived(self) -> None:
        """Raise for the first fault that is known by now, without waiting."""
        while self._notes and self._notes[0].has_arrived():
            self._notes.popleft().raise_fault()

    def raise_all(self) -> None:
        """Wait for all notes, and raise for the first fault."""
        while self._notes:
            note = self._notes.popleft()
            if note.arrived is not None:
                note.arrived.synchronize()
            note.raise_fault()


class RaisesLater(nn.Module):
    """A module that looks up ids, on a GPU without waiting to check them."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred_errors = DeferredErrors()

    def raise_deferred_errors(self) -> None:
        """Wait for the GPU, and raise if an id, position or segment of an earlier call had no row.

        Without it, the first later call that finds such an error finished on the device raises it.
        """
        for part in self.modules():
            if isinstance(part, RaisesLater):
                part._deferred_errors.raise_all()


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
        """Its bytes in the usual dtypes, by their names."""
        return {dtype_name(dtype): self.num_bytes(dtype) for dtype in (torch.float32, torch.bfloat16)}


def table_sizes(module: nn.Module) -> list[TableSize]:
    """The size of every parameter of `module`, which may be on the meta device.

    >>> [size.num_parameters for size in table_sizes(nn.Embedding(50_257, 768, device="meta"))]
    [38597376]
    """
    return [TableSize(name=name, shape=tuple(parameter.shape)) for name, parameter in module.named_parameters()]
