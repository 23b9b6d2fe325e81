"""Errors found on a GPU, raised later without waiting for it.

An assertion on the device ends the process' use of it, and asking the device before every look-up makes the host wait.
So the first token that has no row is noted there, and the note is read once it is on the host: at a later call, or when
the caller waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from locant.errors import RangeError
from locant.kernels.transforms import is_exporting, is_transforming

__all__ = ["Asked", "DeferredErrors", "RaisesLater", "raises_later"]

NO_FAULT = 2**63 - 1
"""In the place of the number of the first token without a row, where all have one."""


def raises_later(table: Tensor) -> bool:
    """Whether ids for this table are checked without waiting for its device. In a graph nothing is checked."""
    return table.is_cuda and not (torch.compiler.is_compiling() or is_exporting() or is_transforming())


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The ids that were looked up in one table, of `num_rows` rows; `limit` is its size as the error words it."""

    ids: Int[Tensor, "*batch"]
    layer: str
    limit: str
    num_rows: int

    def at(self, number: int, version: int | None) -> str:
        """This token's id as the error words it, without its value where others may have taken its place by now."""
        place = tuple(map(int, np.unravel_index(number, (number + 1, *self.ids.shape[1:]))))
        value = int(self.ids.flatten()[number])
        unchanged = version is not None and version == _version(self.ids)
        bad = f"id {value}" if unchanged and not 0 <= value < self.num_rows else "a bad id"
        return f"{bad} at {place}"


@dataclass(frozen=True)
class _Note:
    first: Int[Tensor, ""]
    asked: Asked
    version: int | None
    arrived: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        """Whether it can be read without waiting; a graph's capture would end if an event were asked meanwhile."""
        return self.arrived is None or (not torch.cuda.is_current_stream_capturing() and self.arrived.query())

    def raise_fault(self) -> None:
        first, asked = int(self.first), self.asked
        if first != NO_FAULT:
            got = f"got {asked.at(first, self.version)} in an earlier call"
            remedy = "ids within the table; the output of that token was NaN, all others are right"
            raise RangeError(f"{got}, {asked.layer} has {asked.limit}", remedy)


def _version(ids: Tensor) -> int | None:
    """Goes up when something is written; tensors of inference mode have none."""
    return None if ids.is_inference() else ids._version


class DeferredErrors:
    """The notes that are on their way; a copy of it, or a pickle, begins with none."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()

    def __reduce__(self) -> tuple[type[DeferredErrors], tuple[()]]:
        return DeferredErrors, ()

    def watch(self, asked: Asked) -> Bool[Tensor, "*batch"]:
        """Which of the ids have no row; remembers to read which is the first.

        Not while a graph is captured: there is no later call in it.
        """
        ids = asked.ids
        wrong = (ids < 0) | (ids >= asked.num_rows)
        if not ids.numel() or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return wrong
        numbers, arrived = torch.arange(ids.numel(), device=ids.device), None
        first = torch.where(wrong.flatten(), numbers, NO_FAULT).amin()
        if first.is_cuda:
            first = torch.empty_like(first, device="cpu", pin_memory=True).copy_(first, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._notes.append(_Note(first, asked, _version(ids), arrived))
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
