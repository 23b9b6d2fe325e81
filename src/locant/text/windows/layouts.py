"""Layouts of windows (sliding windows of documents, or packed rows), and batches of windows.

A document of n tokens has n - 1 targets. Windows begin a stride apart until no targets are left, and the last window
may hold fewer than `length` targets. Nothing is stored per window. For many documents, one integer per document is
stored.

Packed rows hold several documents, each with its own positions, and as few empty slots as possible. A document is cut
into pieces. Only the last piece may be shorter than a row. Pieces are assigned to rows by best fit decreasing: the
longest piece first, and each piece to the row that it fills up most. Pieces of one size are placed together, so the
work grows with the number of different sizes. Pieces are packed in blocks of 2**20, so that a row holds neighbours of
the corpus. Rows are in the order of their first pieces. Measured on two CPU cores: a million documents of 700 tokens on
average (log-normal) take 0.15 s to pack into rows of 2,048, and fewer than one slot in a thousand stays empty. With one
window per document, 70 of 100 slots stay empty.

A data loader reads a whole batch from `Windows` with one call, and passes it to its ``collate_fn`` as a sequence of
windows, `BatchOfWindows`. `collate` returns the batch itself, so no window is made. A plain `DataLoader` uses
`torch.utils.data.default_collate`, which looks up the type of the first window in a table. So windows have a special
type with an entry in that table, and so does `Positions`. Any other ``collate_fn`` gets windows, which are made on
access.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypedDict, cast

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from locant.errors import InputError
from locant.positions import Positions
from locant.positions.documents import PADDING
from locant.text.windows.tokens import Tokens, gather, places, require_ids, to_one_axis

IGNORED_TARGET = -100
"""The value of `targets` in empty slots. It is the default `ignore_index` of `torch.nn.functional.cross_entropy`."""

BLOCK = 2**20  # the number of pieces that are packed together; the rows depend on it


class Batch(TypedDict):
    """The fields of a window or of a batch of windows. A single window has no batch axis in `ids` and `targets`."""

    ids: Int[Tensor, "*batch length"]
    targets: Int[Tensor, "*batch length"]
    positions: Positions


FIELDS = ["ids", "targets", "positions"]


class _Window(dict[str, Any]):
    """A window of a batch. `default_collate` recognises the batch by this type."""

    __slots__ = ("_fields",)

    def __init__(self, ids: Tensor, targets: Tensor, positions: Positions) -> None:
        super().__init__(ids=ids, targets=targets, positions=positions)
        self._fields = ids, targets, positions

    def is_unchanged(self) -> bool:
        return [*self] == FIELDS and all(map(operator.is_, self.values(), self._fields))


class BatchOfWindows(Sequence[Any]):
    """The windows of a batch that was read with one call. ``windows["ids"]`` is a field of the whole batch.

    A window is a dict, or a pair ``(inputs, targets)``, and is made on access. Its tensors are views of the batch.

    >>> ids = torch.tensor([[1, 2], [3, 4]])
    >>> windows = BatchOfWindows(Batch(ids=ids, targets=ids + 1, positions=Positions.arange(2)))
    >>> len(windows), windows[1]["ids"].tolist(), windows["ids"].tolist()
    (2, [3, 4], [[1, 2], [3, 4]])
    """

    def __init__(self, batch: Batch, as_tuple: bool = False) -> None:
        self._batch, self._as_tuple = batch, as_tuple
        self._windows: list[Any] = []

    def __len__(self) -> int:
        return len(self._batch["ids"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return cast(dict[str, Any], self._batch)[index]
        ids, targets = self._batch["ids"], self._batch["targets"]
        if not self._windows and index == 0:  # `default_collate` reads only the first window
            self._windows.append(self._window(0, ids[0], targets[0]))
        elif (count := len(self._windows)) < len(ids):
            rows = zip(ids[count:].unbind(), targets[count:].unbind(), strict=True)
            self._windows += [self._window(number, *row) for number, row in enumerate(rows, start=count)]
        return self._windows[index]

    def _window(self, number: int, ids: Tensor, targets: Tensor) -> Any:
        if self._as_tuple:
            return ids, targets
        positions = self._batch["positions"]
        if positions.batch > 1:
            index, document = (each[number : number + 1] for each in (positions.index, positions.document))
            positions = Positions(index, document, None, 0, int(index.max()))
        return _Window(ids, targets, positions)

    def keys(self) -> list[str]:
        """Return the names of the fields, so that ``**windows`` passes the fields of the whole batch."""
        return FIELDS

    def whole(self) -> Any:
        """Return the batch as a dict or a pair, or ``None`` if a field of a window was added, replaced or removed."""
        if self._as_tuple:
            return self._batch["ids"], self._batch["targets"]
        return self._batch if all(window.is_unchanged() for window in self._windows) else None

    def __repr__(self) -> str:
        return f"BatchOfWindows({len(self)} of length {self._batch['ids'].shape[1]})"


def collate(batch: Any) -> Any:
    """Return a batch unchanged if it was read as a whole, else stack a list of windows (dicts or pairs)."""
    if isinstance(batch, BatchOfWindows) and (whole := batch.whole()) is not None:
        return whole
    if isinstance(batch, dict):
        return dict(batch)
    if isinstance(batch[0], tuple):
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))
    return {
        "ids": torch.stack([item["ids"] for item in batch]),
        "targets": torch.stack([item["targets"] for item in batch]),
        "positions": _stack_positions([item["positions"] for item in batch]),
    }


def _collate_windows(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Collate for `default_collate`: return the batch if it was read as a whole, else collate the windows as dicts."""
    if isinstance(batch, BatchOfWindows) and (whole := batch.whole()) is not None:
        return whole
    return torch_collate([dict(window) for window in batch], collate_fn_map=collate_fn_map)


def _stack_positions(rows: Sequence[Positions]) -> Positions:
    """Return one row if all rows count from 0, else all rows in one batch."""
    if all(row.start == 0 for row in rows):
        return rows[0]
    highs = [row.max_index for row in rows if row.max_index is not None]
    index, document = torch.cat([row.index for row in rows]), torch.cat([row.document for row in rows])
    return Positions(index, document, None, 0, max(highs) if len(highs) == len(rows) else None)


default_collate_fn_map[_Window] = _collate_windows
default_collate_fn_map[Positions] = lambda batch, collate_fn_map=None: _stack_positions(batch)


class DocumentWindows:
    """Windows of one length, a stride apart, within each document. `offsets` has the bounds of the documents."""

    def __init__(
        self, offsets: Integer[np.ndarray, " offsets"], length: int, stride: int, *, drop_last: bool, pad_id: int
    ) -> None:
        self.length, self.stride, self.pad_id = length, stride, pad_id
        self.offsets = offsets
        targets = np.diff(offsets) - 1
        if drop_last:
            counts = np.where(targets >= length, 1 + (targets - length) // stride, 0)
        else:
            until_covered = (
                1 - np.minimum(length - targets, 0) // stride
            )  # rounds up, because the last window may be padded
            while_any_left = -(-targets // stride)  # the smaller count if the stride is longer than the window
            counts = np.where(targets > 0, np.minimum(until_covered, while_any_left), 0)
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
        """A hash that identifies these documents."""
        return hashlib.blake2b(self.offsets.astype("<i8").tobytes(), digest_size=16).hexdigest()

    def full_batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch | None:
        """Read full windows of a single document with one native call. Return ``None`` if this is not possible."""
        if len(self.offsets) > 2:
            return None
        rows = gather(tokens.memory, windows, None, self.length, step=self.stride)
        return None if rows is None else self._full(*rows)

    def batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch:
        """Return the windows with these numbers, which must exist."""
        starts, sizes = self._locate(windows)
        if sizes.min(initial=self.length) == self.length:
            rows = gather(tokens.memory, starts, None, self.length)
            return self._full(*(rows or self._read(tokens, starts)))
        rows = gather(tokens.memory, starts, sizes, self.length, pad_id=self.pad_id)
        ids, targets, index, document = map(torch.from_numpy, rows or self._read_padded(tokens, starts, sizes))
        return Batch(ids=ids, targets=targets, positions=Positions(index, document, None, 0, int(sizes.max()) - 1))

    def _full(self, ids: np.ndarray, targets: np.ndarray) -> Batch:
        return Batch(ids=torch.from_numpy(ids), targets=torch.from_numpy(targets), positions=self._full_positions)

    def _read(self, tokens: Tokens, starts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Read windows with NumPy, as the native call does. Raise `RangeError` if an id is negative."""
        width = self.length + 1
        if starts.max(initial=0) <= len(tokens) - width:
            rows = tokens.rows(starts, width)
        else:  # fill with zeros beyond the end of the text
            sizes = np.minimum(len(tokens) - starts, width)
            ids = tokens.slices(starts, sizes)
            rows = np.zeros((len(starts), width), dtype=ids.dtype)
            rows[np.arange(width) < sizes[:, None]] = ids
        require_ids(rows)
        # Two separate arrays. With two views of one array, writing to the inputs would change the targets.
        return rows[:, :-1].astype(np.int64, order="C"), rows[:, 1:].astype(np.int64, order="C")

    def _read_padded(self, tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
        """Read padded rows, with the index and document of each slot, as `Positions.from_mask` makes them."""
        ids, targets = self._read(tokens, starts)
        slots = np.arange(self.length)
        beyond = slots >= sizes[:, None]
        np.putmask(ids, beyond, self.pad_id)
        np.putmask(targets, beyond, IGNORED_TARGET)
        return ids, targets, np.minimum(slots, sizes[:, None] - 1), -beyond.astype(np.int64)

    def _locate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start of each window, and its number of targets."""
        if len(self.offsets) == 2:  # one document: no search
            starts = windows * self.stride
            return starts, np.minimum(self.length, self.offsets[1] - 1 - starts)
        document = np.searchsorted(self._ends, windows, side="right")
        within = windows - np.where(document > 0, self._ends[document - 1], 0)
        starts = self.offsets[document] + within * self.stride
        return starts, np.minimum(self.length, self.offsets[document + 1] - 1 - starts)


def document_offsets(documents: Any, size: int) -> Int[np.ndarray, " offsets"]:
    """Check and return the offsets of the documents: the start of each document, and the end."""
    offsets = to_one_axis("documents", documents)
    # Checked before anything is subtracted or narrowed, because differences of unsigned integers wrap around.
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != size or (offsets[1:] < offsets[:-1]).any():
        ends = f"{len(offsets)} offsets" + (f" from {offsets[0]} to {offsets[-1]}" if len(offsets) else "")
        cause = f"got {ends}, expected increasing offsets from 0 to {size}"
        raise InputError(cause, "pass the start of each document, and the end")
    return offsets.astype(np.int64, copy=False)


class Packing:
    """Rows of pieces of documents. Each piece needs two integers of memory, and each row needs one."""

    def __init__(self, offsets: Int[np.ndarray, " offsets"], length: int, *, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        targets = np.maximum(np.diff(offsets) - 1, 0)
        counts = -(-targets // length)  # pieces of each document
        before = places(np.zeros_like(counts), counts) * length
        starts = np.repeat(offsets[:-1], counts) + before
        sizes = np.minimum(np.repeat(targets, counts) - before, length)
        blocks = [best_fit(sizes[first : first + BLOCK], length) for first in range(0, len(sizes), BLOCK)]
        rows_before = np.cumsum([0, *(int(rows.max()) + 1 for rows in blocks)])
        row = np.concatenate([rows + before for rows, before in zip(blocks, rows_before, strict=False)] or [sizes])
        order = _stable_order(row)  # pieces of one row stay in the order of the corpus
        self._starts, self._sizes = starts[order], sizes[order]
        self._rows = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=int(rows_before[-1])))])
        self.slots_used = int(sizes.sum())

    def __len__(self) -> int:
        return len(self._rows) - 1

    @cached_property
    def digest(self) -> str:
        """A hash that identifies these rows."""
        content = hashlib.blake2b(digest_size=16)
        for part in (self._starts, self._sizes, self._rows):
            content.update(part.astype("<i8").tobytes())
        return content.hexdigest()

    def batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch:
        """Return the rows with these numbers, which must exist."""
        counts = self._rows[windows + 1] - self._rows[windows]
        number = places(np.zeros_like(counts), counts)  # the number of each piece within its row
        pieces = np.repeat(self._rows[windows], counts) + number
        sizes = self._sizes[pieces]
        used = np.add.reduceat(sizes, np.cumsum(counts) - counts) if len(windows) else counts
        real = np.arange(self.length) < used[:, None]
        slices = require_ids(tokens.slices(self._starts[pieces], sizes + 1))
        ends = np.cumsum(sizes + 1)
        ids, targets = np.delete(slices, ends - 1), np.delete(slices, ends - sizes - 1)
        index = _fill_rows(real, places(np.zeros_like(sizes), sizes), 0)
        document = _fill_rows(real, np.repeat(number, sizes), PADDING)
        positions = Positions(index, document, None, 0, int(sizes.max(initial=1)) - 1)
        ids, targets = _fill_rows(real, ids, self.pad_id), _fill_rows(real, targets, IGNORED_TARGET)
        return Batch(ids=ids, targets=targets, positions=positions)


def best_fit(sizes: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """Return the row of each piece, by best fit with the longest first. Rows are numbered by their first pieces.

    Pieces of one size are placed together, because the tightest row for the first piece stays the tightest.

    >>> best_fit(np.array([3, 5, 2, 4, 1]), 6)
    array([0, 1, 2, 2, 1])
    """
    longest_first = _stable_order(capacity - sizes)
    row = np.empty(len(sizes), dtype=np.int64)
    room = _Room(capacity)
    for pieces in np.split(longest_first, np.flatnonzero(np.diff(sizes[longest_first])) + 1):
        while len(pieces):
            size = int(sizes[pieces[0]])
            left, rows = room.take(size, len(pieces))
            per_row = left // size
            assigned = np.repeat(rows, per_row)[: len(pieces)]
            row[pieces[: len(assigned)]] = assigned
            full, rest = divmod(len(assigned), per_row)
            room.put(left - per_row * size, rows[:full])
            room.put(left - rest * size, rows[full:])
            pieces = pieces[len(assigned) :]
    first = np.empty(room.opened, dtype=np.int64)
    first[row[::-1]] = np.arange(len(row))[::-1]  # if a place has several values, the last one is kept
    is_first = np.zeros(len(row), dtype=np.int64)
    is_first[first] = 1
    return (np.cumsum(is_first) - 1)[first][row]


class _Room:
    """Rows that are not full, grouped by their remaining room, and the number of opened rows."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[int, list[np.ndarray]] = {}
        self._lefts: list[int] = []
        self.opened = 0

    def take(self, size: int, pieces: int) -> tuple[int, Int[np.ndarray, " rows"]]:
        """Return the smallest sufficient room, and rows with this room, but at most as many rows as the pieces need."""
        place = bisect_left(self._lefts, size)
        if place == len(self._lefts):
            needed = -(-pieces // (self._capacity // size))
            self.opened += needed
            return self._capacity, np.arange(self.opened - needed, self.opened)
        left = self._lefts[place]
        stacks = self._rows[left]
        rows = stacks.pop()
        needed = -(-pieces // (left // size))
        if len(rows) > needed:
            stacks.append(rows[needed:])
        if not stacks:
            del self._rows[left], self._lefts[place]
        return left, rows[:needed]

    def put(self, left: int, rows: Int[np.ndarray, " rows"]) -> None:
        """Add rows that have this much room left."""
        if not left or not len(rows):
            return
        if left not in self._rows:
            self._rows[left] = []
            insort(self._lefts, left)
        self._rows[left].append(rows)


def _stable_order(values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the stable `np.argsort` of non-negative numbers. NumPy sorts 16 bits at a time in linear time."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(values.max(initial=0)).bit_length(), 16):
        digit = (values >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _fill_rows(real: Bool[np.ndarray, "batch length"], values: np.ndarray, filler: int) -> torch.Tensor:
    """Return rows with the values in the `real` slots, and the filler in the others."""
    rows = np.full(real.shape, filler, dtype=np.int64)
    rows[real] = values
    return torch.from_numpy(rows)
