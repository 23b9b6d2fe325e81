"""Sliding windows over a text, or over each of its documents: where they begin and how many targets they hold.

A document of n tokens has n - 1 targets. Windows begin a stride apart until none of its targets is left; the last one
may hold fewer than `length`. Nothing is stored per window: for many documents, one integer per document.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer

from locant.errors import InputError
from locant.positions import Positions
from locant.text.windows.collation import IGNORED_TARGET, Batch, whole_batch
from locant.text.windows.native import gather
from locant.text.windows.tokens import Tokens, one_axis, require_ids

__all__ = ["DocumentWindows", "document_offsets"]


class DocumentWindows:
    """Windows of one length, a stride apart, within each document, from one offset to the next."""

    def __init__(
        self, offsets: Integer[np.ndarray, " offsets"], length: int, stride: int, *, drop_last: bool, pad_id: int
    ) -> None:
        self.length, self.stride, self.pad_id = length, stride, pad_id
        self.offsets = offsets
        targets = np.diff(offsets) - 1
        counts = _counts(targets, length, stride, drop_last)
        self._ends = np.cumsum(counts)
        last = np.minimum(length, targets - (counts - 1) * stride)  # only these may hold fewer than `length`
        self.slots_used = int(np.where(counts > 0, (counts - 1) * length + last, 0).sum())

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def _full_positions(self) -> Positions:
        return Positions.arange(self.length)

    @cached_property
    def digest(self) -> str:
        """Tells these documents from others."""
        return hashlib.blake2b(self.offsets.astype("<i8").tobytes(), digest_size=16).hexdigest()

    def full_batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch | None:
        """Windows of one document by one native call, which also finds out whether all of them exist and are full."""
        if len(self.offsets) > 2:
            return None
        rows = gather(tokens.memory, windows, None, self.length, step=self.stride)
        return None if rows is None else self._full(*rows)

    def batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch:
        """The windows of these numbers, which have to exist."""
        starts, sizes = self._locate(windows)
        if sizes.min(initial=self.length) == self.length:
            rows = gather(tokens.memory, starts, None, self.length)
            return self._full(*(rows or self._read(tokens, starts)))
        rows = gather(tokens.memory, starts, sizes, self.length, pad_id=self.pad_id)
        ids, targets, *where = map(torch.from_numpy, rows or self._read_padded(tokens, starts, sizes))
        return whole_batch(ids, targets, Positions(where[0], where[1], None, 0, int(sizes.max()) - 1))

    def _full(self, ids: np.ndarray, targets: np.ndarray) -> Batch:
        return whole_batch(torch.from_numpy(ids), torch.from_numpy(targets), self._full_positions)

    def _read(self, tokens: Tokens, starts: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the native call gives, with NumPy; raises if an id is negative."""
        rows = require_ids(_rows(tokens, starts, self.length + 1))
        # Two arrays of their own: as two views of one, writing to the inputs would change the targets.
        return rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")

    def _read_padded(self, tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same of rows that are filled up, with what `Positions.from_mask` makes of them."""
        ids, targets = self._read(tokens, starts)
        slots = np.arange(self.length)
        beyond = slots >= sizes[:, None]
        np.putmask(ids, beyond, self.pad_id)
        np.putmask(targets, beyond, IGNORED_TARGET)
        return ids, targets, np.minimum(slots, sizes[:, None] - 1), -beyond.astype(np.int64)

    def _locate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each window begins, and how many targets it holds."""
        if len(self.offsets) == 2:  # one document: no search
            starts = windows * self.stride
            return starts, np.minimum(self.length, self.offsets[1] - 1 - starts)
        document = np.searchsorted(self._ends, windows, side="right")
        within = windows - np.where(document > 0, self._ends[document - 1], 0)
        starts = self.offsets[document] + within * self.stride
        return starts, np.minimum(self.length, self.offsets[document + 1] - 1 - starts)


def document_offsets(documents: Any, size: int) -> Int[np.ndarray, " offsets"]:
    """Where the documents begin, and the end, checked."""
    offsets = one_axis("documents", documents)
    # Before anything is subtracted or narrowed: differences of unsigned integers wrap around.
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != size or (offsets[1:] < offsets[:-1]).any():
        ends = f"{len(offsets)} offsets" + (f" from {offsets[0]} to {offsets[-1]}" if len(offsets) else "")
        cause = f"got {ends}, expected them to rise from 0 to {size}"
        raise InputError(cause, "where each document begins, and the end")
    return offsets.astype(np.int64, copy=False)


def _counts(targets: np.ndarray, length: int, stride: int, drop_last: bool) -> Int[np.ndarray, " documents"]:
    """How many windows each document has, given how many targets."""
    if drop_last:
        return np.where(targets >= length, 1 + (targets - length) // stride, 0)
    until_covered = 1 - np.minimum(length - targets, 0) // stride  # rounds up: the last may be filled up
    while_any_left = -(-targets // stride)  # binds where the stride is longer than the window
    return np.where(targets > 0, np.minimum(until_covered, while_any_left), 0)


def _rows(tokens: Tokens, starts: Int[np.ndarray, " rows"], width: int) -> Integer[np.ndarray, "rows width"]:
    """The ids from each start on; beyond the end of the text there are zeros."""
    if starts.max(initial=0) <= len(tokens) - width:
        return tokens.rows(starts, width)
    sizes = np.minimum(len(tokens) - starts, width)
    ids = tokens.slices(starts, sizes)
    rows = np.zeros((len(starts), width), dtype=ids.dtype)
    rows[np.arange(width) < sizes[:, None]] = ids
    return rows
