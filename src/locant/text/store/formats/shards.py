"""One shard of a store: a file of tokens, and its index of documents in Megatron-LM's format, version 1.

========================  ======================================================================
34 bytes                  magic, version, code of the token dtype, number of sequences n, m + 1
n times int32             tokens of each sequence
n times int64             the byte of the file of tokens at which it begins
(m + 1) times int64       where each of m documents begins among the sequences, and the end
========================  ======================================================================

In locant's files a document is one sequence, so m = n. Files of other programs may cut a document into several
sequences. All numbers are little-endian. The sequences of a file must follow one another without a gap, and no memory
is allocated before the counts have been compared with the size of the file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer

from locant.arguments import short_repr
from locant.errors import InputError, RangeError, ShapeError
from locant.files import FaultError, NewFile
from locant.text.store.formats.base import (
    IDS_AT_A_TIME,
    damage_remedy,
    read_file,
    require,
    require_file,
    require_known,
    token_dtype,
)

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron-LM's codes of integer dtypes (6 and 7 are floating point)."""
DTYPE_CODES = {np.dtype(name): code for code, name in CODES.items()}
MAX_LENGTH = 2**31 - 1
LENGTHS = 1 << 17
"""The number of document lengths that are in memory at a time."""

MANIFEST = "store.json"
"""The file of a store that is written last. No shards are added to a folder that has it."""


def shard_name(number: int) -> str:
    """Return the name of a shard, without a suffix."""
    return f"shard-{number:05d}"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The size of a file and the SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The numbers of tokens and documents of a shard, and its two files."""

    tokens: int
    documents: int
    bin: FileRecord
    idx: FileRecord


def index_size(documents: int) -> int:
    """Return the size in bytes of an index in which each document is one sequence."""
    return HEADER.size + 12 * documents + 8 * (documents + 1)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The number of tokens of each sequence, and the sequence at which each document begins.

    The end is the last entry.
    """

    dtype: np.dtype
    sequences: Int[np.ndarray, " sequences"]
    documents: Int[np.ndarray, " offsets"]

    @property
    def offsets(self) -> Int[np.ndarray, " offsets"]:
        """The token at which each document begins, and the end."""
        return _starts(self.sequences)[self.documents]


def read_index(path: str | Path) -> Index:
    """Read an index. Raise `InputError` if it is not an index, or contradicts itself."""
    remedy = damage_remedy(path)
    size = require_file(path, remedy)
    try:
        require(size >= index_size(0), f"it has {size} bytes, fewer than an empty one")
        return _index(read_file(path, size, remedy))
    except FaultError as fault:
        raise InputError(f"{path} is not an intact index: {fault}", remedy) from None


def _index(content: bytes) -> Index:
    magic, version, code, n, offsets = HEADER.unpack_from(content)
    require(magic == MAGIC, f"it begins with {magic!r}, expected {MAGIC!r}")
    require(version == VERSION, f"it has version {version}, expected {VERSION}")
    require(code in CODES, f"its tokens have the dtype of code {code}, expected one of {', '.join(map(str, CODES))}")
    size = HEADER.size + 12 * n + 8 * offsets
    require(not len(content) == size + n > size, "it has a mode for each sequence, as for pictures among text")
    needed = f"it has {len(content)} bytes, expected {size} for {n} sequences and {offsets} offsets"
    require(offsets and len(content) == size, needed)
    dtype, sequences = np.dtype(CODES[code]), np.frombuffer(content, "<i4", n, HEADER.size)
    pointers = np.frombuffer(content, "<i8", n, HEADER.size + 4 * n)
    documents = np.frombuffer(content, "<i8", offsets, HEADER.size + 12 * n)
    require((sequences >= 0).all(), "a sequence has a negative length")
    starts = _starts(sequences)
    starts *= dtype.itemsize
    require(np.array_equal(starts[:-1], pointers), "its sequences overlap, or leave a gap")
    require(documents[0] == 0 and documents[-1] == n, "its documents do not cover its sequences")
    require((documents[1:] >= documents[:-1]).all(), "its documents are not in order")
    return Index(dtype=dtype, sequences=sequences, documents=documents)


def _starts(lengths: np.ndarray) -> Int[np.ndarray, " offsets"]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


class IndexWriter:
    """Write an index in constant memory.

    Lengths are written immediately, and the rest is computed from them at the end.
    """

    def __init__(self, file: NewFile, dtype: np.dtype) -> None:
        self.documents = 0
        self._file = file
        self._dtype = dtype
        self._last = np.zeros(0, dtype=np.int64)  # not written yet, because it may still grow
        file.write(bytes(HEADER.size))

    def append(self, lengths: Integer[np.ndarray, " documents"], *, continues: bool) -> None:
        """Add documents. With `continues`, the first document continues the previous one.

        Raise `RangeError`, and add no document, if one is too long.
        """
        if not len(lengths):
            return
        numbers = lengths.astype(np.int64)  # a copy
        if continues:
            numbers[0] += self._last[0]
        else:
            numbers = np.concatenate([self._last, numbers])
        if (longest := int(numbers.max())) > MAX_LENGTH:
            cause = f"got a document of {longest} tokens, more than an index can hold ({MAX_LENGTH})"
            raise RangeError(cause, "use a separator that cuts it into shorter documents")
        self._append(numbers[:-1], "<i4")
        self._last = numbers[-1:]
        self.documents += len(lengths) - continues

    def finish(self) -> str:
        """Write the rest of the index, and return the SHA-256 of the whole file."""
        self._append(self._last, "<i4")
        header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self._dtype], self.documents, self.documents + 1)
        self._file.overwrite(header, at=0)
        digest = hashlib.sha256(header)
        for lengths in self._blocks():
            digest.update(lengths.tobytes())
        begin = 0
        for lengths in self._blocks():
            starts = begin + self._dtype.itemsize * _starts(lengths)
            begin = int(starts[-1])
            digest.update(self._append(starts[:-1]))
        for first in range(0, self.documents + 1, LENGTHS):
            digest.update(self._append(np.arange(first, min(first + LENGTHS, self.documents + 1))))
        return digest.hexdigest()

    def _append(self, numbers: np.ndarray, dtype: str = "<i8") -> bytes:
        data = numbers.astype(dtype).tobytes()
        self._file.write(data)
        return data

    def _blocks(self) -> Iterator[np.ndarray]:
        for first in range(0, self.documents, LENGTHS):
            size = 4 * min(LENGTHS, self.documents - first)
            yield np.frombuffer(self._file.read(size, at=HEADER.size + 4 * first), "<i4")


class ShardWriter:
    """Write the tokens and the index of one shard. Both files appear when `close` returns, or neither.

    The names of the files come from the shard's `number` in the store, or from `name`. Every id must be below
    `vocab_size`, which decides the dtype, see `token_dtype`. If writing fails, no files are left.
    """

    def __init__(self, folder: Path, number: int, vocab_size: int, *, name: str | None = None) -> None:
        self.tokens = 0
        """The number of tokens so far."""
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        if (folder / MANIFEST).exists():
            raise InputError(f"got {folder}, which holds a finished store", "use another folder")
        name = name or shard_name(number)
        self._digest = hashlib.sha256()
        self._bin = NewFile(folder / f"{name}.bin")
        try:
            self._idx = NewFile(folder / f"{name}.idx")
        except BaseException:
            self._bin.discard()
            raise
        self._index = IndexWriter(self._idx, self._dtype)

    @property
    def documents(self) -> int:
        """The number of documents so far."""
        return self._index.documents

    def append(
        self, ids: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " docs"], *, continues: bool = False
    ) -> None:
        """Add documents: the tokens of all documents in one array, and the length of each document, which may be 0.

        With `continues`, the first document continues the last document of the previous call.

        Raises:
            RangeError: an id is not in the vocabulary. ShapeError: the lengths do not add up to the number of ids.
                If an error is raised, no document is added.
        """
        for name, array in (("ids", ids), ("lengths", lengths)):
            if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                raise ShapeError(
                    f"got {short_repr(array)} for {name}, expected one axis of integers", "use a NumPy array"
                )
        # Lengths that are too large are rejected first, so that the sum cannot overflow.
        fits = not len(lengths) or (int(lengths.min()) >= 0 and int(lengths.max()) <= len(ids))
        if not fits or int(lengths.sum(dtype=np.int64)) != len(ids):
            remedy = "pass a length for each document, so that all tokens are counted"
            raise ShapeError(f"got {len(ids)} ids, but lengths that do not add up to this number", remedy)
        if continues and not self.documents:
            raise ShapeError("got continues=True, but there is no previous document", "continues=False")
        require_known(ids, self._vocab_size, self.tokens)
        self._index.append(lengths, continues=continues)
        self.tokens += len(ids)
        for first in range(0, len(ids), IDS_AT_A_TIME):
            data = np.ascontiguousarray(ids[first : first + IDS_AT_A_TIME], dtype=self._dtype).data.cast("B")
            self._digest.update(data)
            self._bin.write(data)

    def close(self) -> ShardRecord:
        """Flush both files to disk and rename them, tokens first, so that no index exists without its tokens."""
        digest = self._index.finish()
        self._bin.fsync()
        self._idx.fsync()
        self._bin.publish(flush_folder=False)
        self._idx.publish()
        return ShardRecord(
            tokens=self.tokens,
            documents=self.documents,
            bin=FileRecord(size=self._bin.size, sha256=self._digest.hexdigest()),
            idx=FileRecord(size=self._idx.size, sha256=digest),
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._bin.discard()
        self._idx.discard()
