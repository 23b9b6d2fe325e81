"""What windows and batches of them hold: sliding windows of documents, or packed rows; and how windows become a batch.

A document of n tokens has n - 1 targets. Windows begin a stride apart until none of its targets is left; the last one
may hold fewer than `length`. Nothing is stored per window: for many documents, one integer per document.

Packed rows hold several documents, each with positions of its own, and as few empty slots as possible. A document is
cut into pieces of which only the last may be shorter than a row. Pieces are assigned to rows by best fit decreasing:
the longest first, each to the row that it fills up most. Pieces of one size are placed together, so the work grows with
the number of different sizes. It is done in blocks of 2**20 pieces, so that a row holds neighbours of the corpus; rows
are in the order of their first pieces. Measured on two CPU cores: a million documents of 700 tokens on average
(log-normal) take 0.15 s to pack into rows of 2 048, and fewer than one slot in a thousand stays empty; one window per
document leaves 70 in a hundred.

A data loader fetches a whole batch from `Windows` by one call, and hands it to its ``collate_fn`` as the sequence of
its windows, `BatchOfWindows`. `collate` takes the batch out again, so no window is ever made. A plain `DataLoader` uses
`torch.utils.data.default_collate`, which looks up the type of the first window in a table: the windows have a type of
their own with an entry in that table, as `Positions` has. Any other function gets windows, made when it asks for them.
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
from locant.text.windows.tokens import Tokens, gather, one_axis, places, require_ids

IGNORED_TARGET = -100
"""The target where there is none: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""

BLOCK = 2**20  # pieces that are packed together; part of the definition: another number gives other rows


class Batch(TypedDict):
    """What a window or a batch of windows holds; a single window has no batch axis in `ids` and `targets`."""

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
    """The windows of a batch that was read by one call; by name, as ``windows["ids"]``, a field of all of them.

    A window is a dict, or a pair ``(inputs, targets)``, and is made when it is asked for. Its tensors are views of
    those of the batch.

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
        if not self._windows and index == 0:  # `default_collate` asks for the first one alone
            self._windows.append(self._window(0, ids[0], targets[0]))
        elif (made := len(self._windows)) < len(ids):
            rows = zip(ids[made:].unbind(), targets[made:].unbind(), strict=True)
            self._windows += [self._window(number, *row) for number, row in enumerate(rows, start=made)]
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
        """The names of the fields, so that ``**windows`` passes those of the whole batch."""
        return FIELDS

    def whole(self) -> Any:
        """The batch, as a dict or a pair; ``None`` if a field of a window was added, replaced or removed."""
        if self._as_tuple:
            return self._batch["ids"], self._batch["targets"]
        return self._batch if all(window.is_unchanged() for window in self._windows) else None

    def __repr__(self) -> str:
        return f"BatchOfWindows({len(self)} of length {self._batch['ids'].shape[1]})"


def collate(batch: Any) -> Any:
    """A batch that was read whole or is one already; a list of windows stacked, dicts or pairs."""
    if isinstance(batch, BatchOfWindows) and (whole := batch.whole()) is not None:
        return whole
    if isinstance(batch, dict):
        return dict(batch)
    if isinstance(batch[0], tuple):
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))
    return {
        "ids": torch.stack([item["ids"] for item in batch]),
        "targets": torch.stack([item["targets"] for item in batch]),
        "positions": _stacked([item["positions"] for item in batch]),
    }


def _collate_windows(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """For `default_collate`: the batch if it was read whole, else what it makes of any dicts."""
    if isinstance(batch, BatchOfWindows) and (whole := batch.whole()) is not None:
        return whole
    return torch_collate([dict(window) for window in batch], collate_fn_map=collate_fn_map)


def _stacked(rows: Sequence[Positions]) -> Positions:
    """One row where all are the same count from 0, else a row for each."""
    if all(row.start == 0 for row in rows):
        return rows[0]
    highs = [row.max_index for row in rows if row.max_index is not None]
    index, document = torch.cat([row.index for row in rows]), torch.cat([row.document for row in rows])
    return Positions(index, document, None, 0, max(highs) if len(highs) == len(rows) else None)


default_collate_fn_map[_Window] = _collate_windows
default_collate_fn_map[Positions] = lambda batch, collate_fn_map=None: _stacked(batch)


class DocumentWindows:
    """Windows of one length, a stride apart, within each document, from one offset to the next."""

    def __init__(
        self, offsets: Integer[np.ndarray, " offsets"], length: int, stride: int, *, drop_last: bool, pad_id: int
    ) -> None:
        self.length, self.stride, self.pad_id = length, stride, pad_id
        self.offsets = offsets
        targets = np.diff(offsets) - 1
        if drop_last:
            counts = np.where(targets >= length, 1 + (targets - length) // stride, 0)
        else:
            until_covered = 1 - np.minimum(length - targets, 0) // stride  # rounds up: the last may be filled up
            while_any_left = -(-targets // stride)  # binds where the stride is longer than the window
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
        return Batch(ids=ids, targets=targets, positions=Positions(where[0], where[1], None, 0, int(sizes.max()) - 1))

    def _full(self, ids: np.ndarray, targets: np.ndarray) -> Batch:
        return Batch(ids=torch.from_numpy(ids), targets=torch.from_numpy(targets), positions=self._full_positions)

    def _read(self, tokens: Tokens, starts: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the native call gives, with NumPy; raises if an id is negative."""
        width = self.length + 1
        if starts.max(initial=0) <= len(tokens) - width:
            rows = tokens.rows(starts, width)
        else:  # beyond the end of the text there are zeros
            sizes = np.minimum(len(tokens) - starts, width)
            ids = tokens.slices(starts, sizes)
            rows = np.zeros((len(starts), width), dtype=ids.dtype)
            rows[np.arange(width) < sizes[:, None]] = ids
        require_ids(rows)
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


class Packing:
    """Rows of pieces of documents; costs two integers per piece, and one per row."""

    def __init__(self, offsets: Int[np.ndarray, " offsets"], length: int, *, pad_id: int) -> None:
        self.length, self.pad_id = length, pad_id
        targets = np.maximum(np.diff(offsets) - 1, 0)
        counts = -(-targets // length)  # of pieces of each document
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
        """Tells these rows from others."""
        content = hashlib.blake2b(digest_size=16)
        for part in (self._starts, self._sizes, self._rows):
            content.update(part.astype("<i8").tobytes())
        return content.hexdigest()

    def batch(self, tokens: Tokens, windows: Int[np.ndarray, " batch"]) -> Batch:
        """The rows of these numbers, which have to exist."""
        counts = self._rows[windows + 1] - self._rows[windows]
        number = places(np.zeros_like(counts), counts)  # of each piece within its row
        pieces = np.repeat(self._rows[windows], counts) + number
        sizes = self._sizes[pieces]
        used = np.add.reduceat(sizes, np.cumsum(counts) - counts) if len(windows) else counts
        real = np.arange(self.length) < used[:, None]
        read = require_ids(tokens.slices(self._starts[pieces], sizes + 1))
        ends = np.cumsum(sizes + 1)
        ids, targets = np.delete(read, ends - 1), np.delete(read, ends - sizes - 1)
        index = _filled(real, places(np.zeros_like(sizes), sizes), 0)
        document = _filled(real, np.repeat(number, sizes), PADDING)
        positions = Positions(index, document, None, 0, int(sizes.max(initial=1)) - 1)
        ids, targets = _filled(real, ids, self.pad_id), _filled(real, targets, IGNORED_TARGET)
        return Batch(ids=ids, targets=targets, positions=positions)


def best_fit(sizes: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """The row of each piece, by best fit with the longest first; rows are numbered by their first pieces.

    Pieces of one size are placed together: after the first, the tightest row that takes one is the tightest still.

    >>> best_fit(np.array([3, 5, 2, 4, 1]), 6)
    array([0, 1, 2, 2, 1])
    """
    longest_first = _stable_order(capacity - sizes)
    row = np.empty(len(sizes), dtype=np.int64)
    room = _Room(capacity)
    for its in np.split(longest_first, np.flatnonzero(np.diff(sizes[longest_first])) + 1):
        while len(its):
            size = int(sizes[its[0]])
            left, rows = room.take(size, len(its))
            each = left // size
            placed = np.repeat(rows, each)[: len(its)]
            row[its[: len(placed)]] = placed
            full, rest = divmod(len(placed), each)
            room.put(left - each * size, rows[:full])
            room.put(left - rest * size, rows[full:])
            its = its[len(placed) :]
    first = np.empty(room.opened, dtype=np.int64)
    first[row[::-1]] = np.arange(len(row))[::-1]  # of several values for one place, the last one stays
    is_first = np.zeros(len(row), dtype=np.int64)
    is_first[first] = 1
    return (np.cumsum(is_first) - 1)[first][row]


class _Room:
    """Rows that are not full, by the room that they have left, and how many were opened."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[int, list[np.ndarray]] = {}
        self._lefts: list[int] = []
        self.opened = 0

    def take(self, size: int, pieces: int) -> tuple[int, Int[np.ndarray, " rows"]]:
        """Rows with the least room that is enough, and how much that is: no more of them than the pieces need."""
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
        """Rows that have this much room left."""
        if not left or not len(rows):
            return
        if left not in self._rows:
            self._rows[left] = []
            insort(self._lefts, left)
        self._rows[left].append(rows)


def _stable_order(values: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """`np.argsort` of numbers that are not negative, by 16 bits at a time, which NumPy sorts in linear time."""
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(values.max(initial=0)).bit_length(), 16):
        digit = (values >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _filled(real: Bool[np.ndarray, "batch length"], values: np.ndarray, filler: int) -> torch.Tensor:
    """Rows that hold the values where there are any, and the filler behind them."""
    rows = np.full(real.shape, filler, dtype=np.int64)
    rows[real] = values
    return torch.from_numpy(rows)
