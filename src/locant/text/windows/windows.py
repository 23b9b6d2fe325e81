"""`Windows`: a text's token ids, cut into pieces of one length for training and evaluation.

Window number i holds `length` inputs and, for each of them, the id that follows it. The targets of a text are
``ids[1:]``, and at ``stride == length`` every one of them appears in exactly one window: the last window is not
lost, it is filled up on the right. Where it is filled up, the target is -100 (which
`torch.nn.functional.cross_entropy` ignores), the input is `pad_id`, and the position is padding (document -1).

Nothing is cut ahead of time. A batch is one fancy index into a strided view of the array, so building `Windows` costs
nothing per token, a memory-mapped array stays on the disk, and ids are widened to int64 only as they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypedDict

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.utils.data import Dataset

from locant.errors import InputError, RangeError, ShapeError
from locant.positions import Positions

__all__ = ["IGNORED_TARGET", "Batch", "Windows"]

IGNORED_TARGET = -100
"""The target where there is none: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""

Mode = Literal["flat", "document", "packed"]


class Batch(TypedDict):
    """What a window or a batch of windows holds; a single window has no batch axis in `ids` and `targets`."""

    ids: Int[Tensor, "*batch length"]
    targets: Int[Tensor, "*batch length"]
    positions: Positions


class Windows(Dataset[Batch]):
    """A map-style dataset of windows over a one-dimensional array of token ids.

    Args:
        store_or_ids: NumPy array, memory-mapped array, tensor or list of integers. It is not copied, except a list.
        length: inputs per window.
        stride: from the start of one window to the next; default: `length`. A smaller one makes windows overlap, a
            larger one skips the targets between them.
        mode: ``"flat"`` cuts through the whole array. ``"document"`` lets no window reach beyond its document.
            ``"packed"`` is not built yet.
        documents: where each document begins, and the end: n + 1 offsets for n documents, from 0 to the number of
            ids; document mode only. A document of fewer than two tokens has no target, and no window.
        drop_last: drop the windows that would have to be filled up: the last of the text, or of each document.
        pad_id: the input id where a window is filled up. No attention reaches it, but the embedding looks it up.

    Positions count from 0 in each window, in document mode too: nothing before the window can be attended to,
    so where the window stood in its document says nothing that a model could use, and a table of `length`
    positions suffices. In a batch they have one row if no window is filled up, else a row for each window.

    Raises:
        InputError: fewer than two tokens, no window at all, an unknown mode, or documents that do not fit.
        RangeError: a length or stride below 1. ShapeError: ids that are not one axis of integers.

    Building costs one or two integers per document. It can be pickled for the workers of a data loader; a
    contiguous part of a memory-mapped file is then opened again by its name and not sent.

    >>> windows = Windows([10, 11, 12, 13, 14, 15], length=4)
    >>> len(windows), windows[0]["ids"].tolist(), windows[0]["targets"].tolist()
    (2, [10, 11, 12, 13], [11, 12, 13, 14])
    >>> windows[1]["ids"].tolist(), windows[1]["targets"].tolist(), windows[1]["positions"].document.tolist()
    ([14, 0, 0, 0], [15, -100, -100, -100], [[0, -1, -1, -1]])
    >>> loader = torch.utils.data.DataLoader(windows, batch_size=2, collate_fn=windows.collate)
    >>> next(iter(loader))["ids"].shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        store_or_ids: Integer[np.ndarray, " n"] | Integer[Tensor, " n"] | Sequence[int],
        length: int,
        stride: int | None = None,
        mode: Mode = "flat",
        *,
        documents: Integer[np.ndarray, " offsets"] | Integer[Tensor, " offsets"] | Sequence[int] | None = None,
        drop_last: bool = False,
        pad_id: int = 0,
    ) -> None:
        self.length = _at_least("length", length, 1)
        self.stride = self.length if stride is None else _at_least("stride", stride, 1)
        self.mode = mode
        self.pad_id = _at_least("pad_id", pad_id, 0)
        self._ids = _integers("ids", store_or_ids)
        if len(self._ids) < 2:
            raise InputError(
                f"got {len(self._ids)} tokens, expected 2 or more: an input and its target", "a longer text"
            )
        self._view = _strided(self._ids, self.length + 1)
        self._offsets = _offsets(mode, documents, len(self._ids))
        self._ends = np.cumsum(_counts(np.diff(self._offsets) - 1, self.length, self.stride, drop_last))
        if not len(self):
            longest = int(np.diff(self._offsets).max(initial=0))
            needed = self.length + 1 if drop_last else 2
            raise InputError(
                f"got a longest document of {longest} tokens, expected {needed} or more for a window",
                "a longer text, or a shorter length" if drop_last else "longer documents",
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: SupportsIndex) -> Batch:
        """One window: ``ids`` and ``targets`` of shape ``[length]``, ``positions`` with one row."""
        batch = self.__getitems__([index])
        return {"ids": batch["ids"][0], "targets": batch["targets"][0], "positions": batch["positions"]}

    def __getitems__(self, indices: Sequence[SupportsIndex] | Integer[np.ndarray, " batch"]) -> Batch:
        """A whole batch of windows: ``ids`` and ``targets`` of shape ``[batch, length]``."""
        starts, sizes = self._locate(self._checked(indices))
        rows = self._read(starts)
        # Two arrays of their own: as two views of one, writing to the inputs would change the targets.
        ids = np.array(rows[:, :-1], dtype=np.int64, order="C")
        targets = np.array(rows[:, 1:], dtype=np.int64, order="C")
        real = np.arange(self.length) < sizes[:, None]
        if not real.all():
            ids[~real] = self.pad_id
            targets[~real] = IGNORED_TARGET
        positions = _positions(torch.from_numpy(real))
        return {"ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets), "positions": positions}

    def collate(self, batch: Batch | Sequence[Batch]) -> Batch:
        """For ``DataLoader(windows, collate_fn=windows.collate)``: a batch as it is, a list of windows stacked."""
        if isinstance(batch, Mapping):
            return batch
        real = torch.cat([item["positions"].document != -1 for item in batch])
        return {
            "ids": torch.stack([item["ids"] for item in batch]),
            "targets": torch.stack([item["targets"] for item in batch]),
            "positions": _positions(real),
        }

    def __repr__(self) -> str:
        shape = f"{len(self)} of length {self.length}, stride {self.stride}, {self.mode}"
        return f"Windows({shape}, over {len(self._ids)} tokens)"

    def _checked(self, indices: Sequence[SupportsIndex] | Integer[np.ndarray, " batch"]) -> Int[np.ndarray, " batch"]:
        numbers = np.array([operator.index(index) for index in indices], dtype=np.int64)
        outside = (numbers < -len(self)) | (numbers >= len(self))
        if outside.any():
            raise _WindowError(f"got window {numbers[outside][0]}, expected one of {len(self)}", f"0..{len(self) - 1}")
        return np.where(numbers < 0, numbers + len(self), numbers)

    def _locate(
        self, windows: Int[np.ndarray, " batch"]
    ) -> tuple[Int[np.ndarray, " batch"], Int[np.ndarray, " batch"]]:
        """Where each window begins in the array, and how many targets it holds."""
        document = np.searchsorted(self._ends, windows, side="right")
        within = windows - np.where(document > 0, self._ends[document - 1], 0)
        starts = self._offsets[document] + within * self.stride
        return starts, np.minimum(self.length, self._offsets[document + 1] - 1 - starts)

    def _read(self, starts: Int[np.ndarray, " batch"]) -> Integer[np.ndarray, "batch length_plus_1"]:
        """The ids from each start on; beyond the end of the array the last id is repeated."""
        within = np.minimum(starts, len(self._view) - 1)
        rows = self._view[within]
        beyond = starts - within
        if not beyond.any():
            return rows
        return np.take_along_axis(rows, np.minimum(np.arange(self.length + 1) + beyond[:, None], self.length), axis=1)

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in self.__dict__.items() if name != "_view"}
        return {**state, "_ids": _MappedFile.behind(self._ids) or self._ids}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if isinstance(state["_ids"], _MappedFile):
            self._ids = state["_ids"].open()
        self._view = _strided(self._ids, self.length + 1)


class _WindowError(RangeError, IndexError):
    """An `IndexError` too, by which Python knows the end of a sequence."""


@dataclass(frozen=True)
class _MappedFile:
    """Where a memory-mapped array lies, to be opened by another process instead of being sent to it."""

    path: str
    dtype: np.dtype
    offset: int
    size: int

    @classmethod
    def behind(cls, array: np.ndarray) -> _MappedFile | None:
        """The file behind an array, if all of the array is one stretch of it as it is on the disk."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c" or not array.flags.c_contiguous:
            return None
        offset = root.offset + array.ctypes.data - root.ctypes.data
        return cls(str(root.filename), array.dtype, offset, array.size)

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.size,))


def _at_least(name: str, value: Any, low: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low:
        raise RangeError(f"got {value!r} for {name}, expected an integer of {low} or more", "a number of tokens")
    return number


def _integers(name: str, values: Any) -> np.ndarray:
    """One axis of integers, sharing the memory of arrays and of tensors on the host."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asanyarray(values)
    except ValueError:
        raise ShapeError(
            f"got {name} of uneven shape, expected one axis of integers", "one document at a time"
        ) from None
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ShapeError(
            f"got {name} of shape {array.shape} and dtype {array.dtype}, expected one axis of integers",
            "the array that Tokenizer.encode returns" if name == "ids" else "a list of offsets",
        )
    return array if array.size else array.astype(np.int64)


def _strided(ids: np.ndarray, width: int) -> np.ndarray:
    """Every stretch of `width` ids, as a view; a text that is shorter is copied and filled up to one."""
    if len(ids) < width:
        ids = np.pad(ids, (0, width - len(ids)), mode="edge")
    return np.lib.stride_tricks.sliding_window_view(ids, width)


def _offsets(mode: Mode, documents: Any, size: int) -> Int[np.ndarray, " offsets"]:
    """Where the documents begin, and the end; in flat mode everything is one document."""
    if mode == "packed":
        raise InputError("got mode='packed', which is not built yet", "mode='document', or mode='flat'")
    if mode not in ("flat", "document"):
        raise InputError(f"got mode={mode!r}, expected 'flat' or 'document'", "mode='flat'")
    if mode == "flat":
        if documents is not None:
            raise InputError("got documents in flat mode, which looks at no boundary", "mode='document'")
        return np.array([0, size])
    if documents is None:
        raise InputError("got mode='document' without documents", "documents=[0, ..., len(ids)], where each begins")
    offsets = _integers("documents", documents).astype(np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 0).any():
        ends = f"{len(offsets)} offsets" + (f" from {offsets[0]} to {offsets[-1]}" if len(offsets) else "")
        raise InputError(
            f"got {ends}, expected them to rise from 0 to {size}", "where each document begins, and the end"
        )
    return offsets


def _counts(
    targets: Int[np.ndarray, " documents"], length: int, stride: int, drop_last: bool
) -> Int[np.ndarray, " documents"]:
    """How many windows each document has, given how many targets."""
    if drop_last:
        return np.where(targets >= length, 1 + (targets - length) // stride, 0)
    until_covered = 1 - np.minimum(length - targets, 0) // stride  # rounds up: the last may be filled up
    while_any_left = -(-targets // stride)  # binds where the stride is longer than the window
    return np.where(targets > 0, np.minimum(until_covered, while_any_left), 0)


def _positions(real: Bool[Tensor, "batch length"]) -> Positions:
    return Positions.arange(real.shape[1]) if bool(real.all()) else Positions.from_mask(real)
