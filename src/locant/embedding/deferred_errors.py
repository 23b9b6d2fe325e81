"""Errors found on a GPU, raised later without waiting for it.

A kernel cannot raise. An assertion on the device ends the process' use of it, and asking the device before every
look-up makes the host wait. So a kernel notes the first token that has no row, the note travels to the host behind the
kernel, and it is read once it is there: at the next call, or when the caller waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from locant.errors import RangeError
from locant.kernels.input_embedding import NO_FAULT

__all__ = ["Asked", "DeferredErrors"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The ids that were looked up in one table."""

    ids: Int[Tensor, "#batch seq"]
    what: str
    """What an id is called: ``"id"`` or ``"position"``."""
    layer: str
    limit: str
    """The size of the layer, as the error words it."""
    num_rows: int
    """Ids from 0 to one less than this have a row."""

    def at(self, row: int, slot: int, version: int | None) -> str:
        """The id as the error words it, without its value where other ids may have taken its place by now.

        Batches that are copied into the same memory one after the other, as for CUDA graphs, are not kept for this.
        """
        value = int(self.ids[row if self.ids.shape[0] > 1 else 0, slot])
        unchanged = version is not None and version == _version(self.ids)
        return f"{self.what} {value}" if unchanged and not 0 <= value < self.num_rows else f"a bad {self.what}"


@dataclass(frozen=True)
class _Note:
    first: Int[Tensor, " tables"]
    asked: list[Asked | None]
    versions: list[int | None]
    arrived: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        """Whether it can be read without waiting; a graph's capture would end if an event were asked meanwhile."""
        return self.arrived is None or (not torch.cuda.is_current_stream_capturing() and self.arrived.query())

    def raise_fault(self) -> None:
        for asked, version, first in zip(self.asked, self.versions, self.first.tolist(), strict=True):
            if asked is None or first == NO_FAULT:
                continue
            row, slot = divmod(first, asked.ids.shape[1])
            got = asked.at(row, slot, version)
            raise RangeError(
                f"got {got} at ({row}, {slot}) in an earlier call, {asked.layer} has {asked.limit}",
                "ids within the table; the output of that token was NaN, all others are right",
            )


def _version(ids: Tensor) -> int | None:
    """Goes up when something is written; tensors of inference mode have none."""
    return None if ids.is_inference() else ids._version


class DeferredErrors:
    """The notes that are on their way; a copy of it, or a pickle, begins with none."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()

    def __reduce__(self) -> tuple[type[DeferredErrors], tuple[()]]:
        return DeferredErrors, ()

    def watch(self, first: Int[Tensor, " tables"], asked: list[Asked | None]) -> None:
        """Remember to read `first`, the number of the first token without a row in each table.

        Not while a graph is captured or compiled: there is no later call in it.
        """
        versions = [None if one is None else _version(one.ids) for one in asked]
        if not first.is_cuda:
            self._notes.append(_Note(first, asked, versions, None))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        on_host = torch.empty_like(first, device="cpu", pin_memory=True).copy_(first, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._notes.append(_Note(on_host, asked, versions, arrived))

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
