"""A table of rows in a safetensors file, larger than memory, that is trained in place and returns to any checkpoint.

The file is mapped into memory. The system reads a page when one of its rows is used, and writes changed pages back.
Because the file changes during training, it alone is not a checkpoint. Before a row is changed for the first time after
a checkpoint, its old bytes are written to an *undo* file. To resume, `TableFile.open` writes them back. The table then
has the bits that it had at the checkpoint, even if the process was killed while it wrote.

An undo file holds records of a checksum, row numbers and old bytes. It is flushed to the disk before the rows change. A
record that was not written completely is ignored, because its rows had not been changed yet.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import MAX_WIDTH, Real, real, whole
from locant.errors import InputError, RangeError
from locant.files import flush, lock, replace_file, wrap_os_errors
from locant.spelling import dtype_name
from locant.tensors import as_dtype

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The dtypes of a table, and their names in safetensors."""
BLOCK_BYTES = 1 << 26
"""Bytes of new rows that are drawn and written at once."""
RECORD = struct.Struct("<IQ")
"""The checksum and the number of rows of a record."""
UNDO = re.compile(r"undo-(\d{12})")
STATE = "sum_of_squares"


class TableFile:
    """The rows of a table and one float32 of optimizer state for each, in a file that is mapped into memory.

    One process at a time may have it open. Copies of the file on other disks need the folder of undo files, too.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "table.safetensors"
    >>> file = TableFile.create(path, num_rows=1_000, width=8, std=0.02)
    >>> before = file.weight[3].clone()
    >>> file.save_rows(torch.tensor([3]))
    >>> file.weight[3] += 1
    >>> file.close()  # without a checkpoint
    >>> torch.equal(TableFile.open(path, step=0).weight[3], before)
    True
    """

    def __init__(
        self, path: Path, held: IO[bytes], file_map: mmap.mmap, weight: Tensor, state: Tensor, begin: int
    ) -> None:
        self.path = path
        self.weight = weight
        """The rows, ``num_rows width``. Changes go to the file. Call `save_rows` before a row is changed."""
        self.state = state
        """The optimizer state of each row."""
        self._release = weakref.finalize(self, held.close)
        self._map = file_map
        self._begin = begin
        self._is_saved = np.zeros(len(weight), dtype=np.bool_)
        self._undo: int | None = None
        self._undo_finalizer: weakref.finalize[..., TableFile] | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        num_rows: int,
        width: int,
        dtype: torch.dtype | str = torch.float32,
        std: Real = 0.0,
        seed: int = 0,
    ) -> TableFile:
        """Write a new table of normal numbers, block by block, and open it at the checkpoint of step 0.

        Args:
            std: standard deviation of the numbers. 0 writes no block, and the file takes up no space on most disks
                until its rows are trained.
        """
        path = Path(path)
        if path.exists() or _undo_folder(path).exists():
            raise InputError(f"got {path}, which exists, for a new table", "use TableFile.open, or another name")
        rows = whole("num_rows", num_rows, 1, 2**48, remedy="pass embedding.hashing.num_rows")
        width = whole("width", width, 1, MAX_WIDTH, remedy="width=128")
        kind = as_dtype(dtype, NAMES)
        std = real("std", std, low=0, remedy="std=0.02")
        header, begin, size = _header(rows, width, kind)
        generator = torch.Generator().manual_seed(whole("seed", seed, 0, remedy="seed=0"))
        step = max(1, BLOCK_BYTES // (width * kind.itemsize))
        with replace_file(path) as temporary, wrap_os_errors(path), temporary.open("wb") as file:
            file.write(header)
            file.truncate(begin + size)
            file.seek(begin + 4 * rows)
            for first in range(0, rows if std else 0, step):
                block = torch.empty(min(step, rows - first), width).normal_(std=std, generator=generator).to(kind)
                file.write(block.view(torch.uint8).numpy().tobytes())
        _undo_folder(path).mkdir()
        opened = cls._map_file(path)
        opened._begin_undo(0)
        return opened

    @classmethod
    def open(cls, path: Path | str, step: int | None = None) -> TableFile:
        """Map the table into memory, with the bits that it had at the checkpoint of `step`.

        Args:
            step: a checkpoint whose undo file still exists. Default: the latest one.

        Raises:
            InputError: the file is not such a table, or there is no such checkpoint.
        """
        path = Path(path)
        opened = cls._map_file(path)
        steps = opened.steps
        step = steps[-1] if step is None and steps else step
        if step is None or step not in steps:
            opened.close()
            if not steps:
                got = f"got {path} without undo files, so it can return to no checkpoint"
                raise InputError(got, f"copy the files of {_undo_folder(path)}, too, or create the table again")
            got = f"got step={step}, {path} can return to the steps {', '.join(map(str, steps))}"
            raise InputError(got, "pass one of them, or create the table again")
        for each in reversed(steps[steps.index(step) :]):
            for rows, weight, state in opened._records(each):
                opened.weight[rows] = weight
                opened.state[rows] = state
        opened._map.flush()
        for each in steps[steps.index(step) + 1 :]:
            opened._undo_path(each).unlink()
        opened._begin_undo(step)
        return opened

    @property
    def steps(self) -> list[int]:
        """The checkpoints that the table can return to, the oldest first."""
        matches = (UNDO.fullmatch(each.name) for each in _undo_folder(self.path).glob("undo-*"))
        return sorted(int(match[1]) for match in matches if match)

    def save_rows(self, rows: Int[Tensor, " rows"]) -> None:
        """Write the bytes of these rows to the undo file, unless they were written since the last checkpoint."""
        undo = self._require_open("rows to change")
        new = rows[torch.from_numpy(~self._is_saved[rows.numpy()])].unique()
        if not len(new):
            return
        parts = (new, self.weight[new].view(torch.uint8), self.state[new])
        payload = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        _write_all(undo, RECORD.pack(zlib.crc32(payload), len(new)) + payload)
        os.fsync(undo)
        self._is_saved[new.numpy()] = True

    def checkpoint(self, step: int) -> None:
        """Make the table of now a checkpoint. Call it before the rest of the model is saved, and `forget` afterwards.

        If the process is killed between both, the model's older checkpoint still has its table.
        """
        step = whole("step", step, 0, 10**12 - 1, remedy="step=100")
        self._require_open("a checkpoint to write")
        if self.steps and step <= self.steps[-1]:
            got = f"got step={step} after the checkpoint of step {self.steps[-1]}"
            raise RangeError(got, f"pass a step above {self.steps[-1]}, or TableFile.open(path, step=...) to go back")
        self._map.flush()
        self._begin_undo(step)

    def forget(self, before: int) -> None:
        """Remove the undo files of checkpoints before this step, to which the table can then not return."""
        self._require_open("checkpoints to remove")
        for step in self.steps[:-1]:
            if step < before:
                self._undo_path(step).unlink()

    def _require_open(self, what: str) -> int:
        """Return the open undo file. After `close`, another process may have the table open."""
        if self._undo is None:
            raise RangeError(f"got {what} in a table that is closed", "TableFile.open(path)")
        return self._undo

    def advise(self, rows: Int[Tensor, " rows"]) -> None:
        """Ask the system to read the pages of these rows. It reads many at once, and this does not wait for them."""
        if not hasattr(mmap, "MADV_WILLNEED"):  # not on Windows
            return
        size = self.weight.shape[1] * self.weight.dtype.itemsize
        first = self._begin + rows.numpy() * size
        pages = np.unique(np.concatenate([first, first + size - 1]) // mmap.PAGESIZE)
        for page in pages.tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)

    def close(self) -> None:
        """Write changed pages to the disk. The table can still be read."""
        self._map.flush()
        self._close_undo()
        self._release()

    @classmethod
    def _map_file(cls, path: Path) -> TableFile:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                names = {*file.keys()}
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is not an intact safetensors file: {error}", "use TableFile.create") from None
        if names != {"weight", STATE}:
            got = f"got {path} with the tensors {', '.join(sorted(names))}, expected weight and {STATE}"
            raise InputError(got, "use a file that TableFile.create has written")
        if not (folder := _undo_folder(path)).is_dir():
            raise InputError(f"got {path} without the folder of its undo files", f"copy {folder}, too")
        held = (folder / "lock").open("ab")  # the mapping would keep a lock on the table after `close`
        if lock(held) is False:
            held.close()
            raise InputError(f"got {path}, which is open already", "close() it, or end the process that trains it")
        with path.open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            fields, begin = json.loads(file.read(length)), 8 + length
            file_map = mmap.mmap(file.fileno(), 0)
        if hasattr(mmap, "MADV_RANDOM"):
            file_map.madvise(mmap.MADV_RANDOM)  # the system would read the neighbours of each row
        tensors = {
            name: torch.frombuffer(
                file_map, dtype=next(kind for kind, key in NAMES.items() if key == fields[name]["dtype"]),
                count=int(np.prod(fields[name]["shape"])), offset=begin + fields[name]["data_offsets"][0],
            ).view(fields[name]["shape"])
            for name in names
        }  # fmt: skip
        return cls(path, held, file_map, tensors["weight"], tensors[STATE], begin + fields["weight"]["data_offsets"][0])

    def _undo_path(self, step: int) -> Path:
        return _undo_folder(self.path) / f"undo-{step:012d}"

    def _begin_undo(self, step: int) -> None:
        """Begin an empty undo file."""
        self._close_undo()
        path = self._undo_path(step)
        self._undo = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
        self._undo_finalizer = weakref.finalize(self, os.close, self._undo)
        os.fsync(self._undo)
        flush(path.parent)
        self._is_saved[:] = False

    def _close_undo(self) -> None:
        if self._undo_finalizer is not None:
            self._undo_finalizer()
        self._undo = self._undo_finalizer = None

    def _records(self, step: int) -> Iterator[tuple[Tensor, Float[Tensor, "rows width"], Float[Tensor, " rows"]]]:
        """Yield the rows and old bytes of each complete record."""
        (num_rows, width), kind = self.weight.shape, self.weight.dtype
        with self._undo_path(step).open("rb") as file:
            while len(head := file.read(RECORD.size)) == RECORD.size:
                checksum, count = RECORD.unpack(head)
                if not 0 < count <= num_rows:  # not written completely
                    return
                payload = file.read(count * (8 + width * kind.itemsize + 4))
                if zlib.crc32(payload) != checksum:
                    return
                content, split = bytearray(payload), count * (8 + width * kind.itemsize)
                yield (
                    torch.frombuffer(content, dtype=torch.int64, count=count),
                    torch.frombuffer(content[8 * count : split], dtype=kind).view(count, width),
                    torch.frombuffer(content[split:], dtype=torch.float32),
                )

    def __repr__(self) -> str:
        rows, width = self.weight.shape
        return f"TableFile({str(self.path)!r}, {rows} x {width} {dtype_name(self.weight.dtype)})"


def _header(rows: int, width: int, kind: torch.dtype) -> tuple[bytes, int, int]:
    """Return the header of a file, the place of its first tensor, and the bytes of its tensors."""
    state, weight = 4 * rows, rows * width * kind.itemsize
    fields = {  # the state first, so that both begin at a multiple of their item size
        STATE: {"dtype": "F32", "shape": [rows], "data_offsets": [0, state]},
        "weight": {"dtype": NAMES[kind], "shape": [rows, width], "data_offsets": [state, state + weight]},
    }
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, 8 + len(text), state + weight


def _undo_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.undo")


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
