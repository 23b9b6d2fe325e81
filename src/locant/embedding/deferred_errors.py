"""Report ids without a row that were looked up on a GPU, without making the host wait.

An id without a row is an error. On a GPU, a failed assertion on the device would make it unusable for the process, and
a check before every look-up would make the host wait. So the device records the first token without a row. The host
reads the record when it has arrived, at a later call or when the caller waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from locant.errors import RangeError

NO_FAULT = 2**63 - 1
"""The recorded number if all tokens have rows."""


@dataclass(frozen=True, kw_only=True)
class _Note:
    """Ids that were looked up in a table, and the number of the first id without a row."""

    ids: Int[Tensor, "*batch"]
    num_rows: int
    table: str
    version: int | None
    first: Int[Tensor, ""]
    arrived: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        """Return True if the note can be read without waiting. Querying an event would end the capture of a graph."""
        return self.arrived is None or (not torch.cuda.is_current_stream_capturing() and self.arrived.query())

    def raise_fault(self) -> None:
        """Raise `RangeError` for the id. Its value is left out if the tensor may have been overwritten since."""
        number = int(self.first)
        if number == NO_FAULT:
            return
        place = tuple(map(int, np.unravel_index(number, (number + 1, *self.ids.shape[1:]))))
        value = int(self.ids.flatten()[number])
        unchanged = self.version is not None and self.version == _version(self.ids)
        bad = f"id {value}" if unchanged and not 0 <= value < self.num_rows else "a bad id"
        remedy = "use ids within the table; the output of that token was NaN, all others are right"
        raise RangeError(f"got {bad} at {place} in an earlier call, {self.table}", remedy)


def _version(ids: Tensor) -> int | None:
    """Return a number that grows with each write, or ``None`` for tensors of inference mode."""
    return None if ids.is_inference() else ids._version


class DeferredErrors:
    """A queue of notes that have not been read. Copies and pickles begin empty."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()

    def __reduce__(self) -> tuple[type[DeferredErrors], tuple[()]]:
        return DeferredErrors, ()

    def watch(self, ids: Int[Tensor, "*batch"], num_rows: int, table: str) -> Bool[Tensor, "*batch"]:
        """Return a mask of the ids that have no row. Note the first of them, and the table's name for an error.

        While a graph is captured, no id is noted, because a graph has no later call.
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
        """Raise the first error that has arrived, without waiting."""
        while self._notes and self._notes[0].has_arrived():
            self._notes.popleft().raise_fault()

    def raise_all(self) -> None:
        """Wait for all notes, and raise the first error."""
        while self._notes:
            note = self._notes.popleft()
            if note.arrived is not None:
                note.arrived.synchronize()
            note.raise_fault()


class DeferredErrorModule(nn.Module):
    """A module that looks up ids, and on a GPU does not wait until they are checked."""

    def __init__(self) -> None:
        super().__init__()
        self._deferred_errors = DeferredErrors()

    def raise_deferred_errors(self) -> None:
        """Wait for the GPU, and raise `RangeError` if an id, position or segment of an earlier call had no row.

        Without this, a later call raises the error, as soon as the device has reported it.
        """
        for part in self.modules():
            if isinstance(part, DeferredErrorModule):
                part._deferred_errors.raise_all()
