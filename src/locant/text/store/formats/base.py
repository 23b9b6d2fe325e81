"""`StoreFormat`, the base class of formats of token stores, and `ExportSource`, from which stores are written.

The content of files is not trusted: their sizes are checked first, and ids are compared with the vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer

from locant.arguments import whole
from locant.errors import InputError, RangeError, Remedy
from locant.files import FaultError, NewFile
from locant.text.tokenizer import Tokenizer

DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
HEAD = 4096
BLOCK = 1 << 20
"""The number of tokens that are held at a time."""

IDS_AT_A_TIME = 1 << 19
"""The number of ids that are checked, narrowed, hashed and written at a time. They fit into the cache of a core."""

SMALL_VOCABULARY = 65_500
"""The vocabulary size from which Megatron-LM uses four bytes per token.

The last ids below 2**16 stay free for padding.
"""

MAX_SIZE = 2**63 - 1
"""The upper limit of sizes of files, and of counts in files."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Arguments of `TokenStore` for files that do not contain this information.

    >>> StoreOptions(dtype="uint32").token_dtype
    dtype('<u4')
    """

    dtype: str | np.dtype | None = None
    tokenizer: Tokenizer | str | Path | None = None
    end_of_text: int | None = None

    @property
    def token_dtype(self) -> np.dtype:
        """The dtype of the tokens, little-endian (default: uint16)."""
        try:
            dtype = np.dtype("uint16" if self.dtype is None else self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in DTYPES or dtype.byteorder == ">":
            cause = f"got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}, little-endian"
            raise InputError(cause, Remedy("pass {}, which nanoGPT writes", dtype="uint16"))
        return dtype.newbyteorder("<")


class StoreFormat:
    """One token store on disk. A subclass is a format: it reads a store in `__init__`, and writes one in `write`.

    The files of this base class hold only tokens, after an optional header. It checks their sizes and, if the tokenizer
    is known, every id. It finds documents by the id that ends each of them. A format that has an index of documents,
    hashes or a tokenizer overrides `offsets`, `verify` or `load_tokenizer`.

    Args:
        files: the files of tokens, one for each shard.
        dtype: the dtype of the tokens in the files.
        options: the arguments of the caller.
        header: number of bytes before the tokens in each file, a multiple of the size of a token.
        tokens: the number of tokens of each file. Default: computed from its size.

    An example is in `locant.formats`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        dtype: np.dtype,
        options: StoreOptions,
        *,
        header: int = 0,
        tokens: Int[np.ndarray, " shards"] | None = None,
    ) -> None:
        self.files = [os.path.abspath(path) for path in files]  # noqa: PTH100  # it may change its folder
        self.dtype = dtype
        self.header = header
        counts = [_count(path, dtype, header) for path in self.files] if tokens is None else tokens
        self.tokens: Int[np.ndarray, " shards"] = np.asarray(counts, dtype=np.int64)
        """The number of tokens of each file."""
        source = options.tokenizer
        self._tokenizer = source if source is None or isinstance(source, Tokenizer) else Tokenizer.load(source)
        self.vocab_size: int | None = self._tokenizer.vocab_size if self._tokenizer else None
        largest = self.vocab_size - 1 if self.vocab_size else int(np.iinfo(dtype).max)
        end = options.end_of_text
        remedy = "pass the id after each document"
        self.end_of_text = None if end is None else whole("end_of_text", end, 0, largest, remedy=remedy)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        """Write a store of this format into an empty folder, and return the dtype of its tokens."""
        raise InputError(f"got {cls.__name__}, a format that can be read but not written", Remedy(to="locant"))

    @property
    def identity(self) -> str:
        """A SHA-256 that is equal only for the same store."""
        return _hash_of([self.fingerprint, *(f"{path} {Path(path).stat().st_mtime_ns}" for path in self.files)])

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the facts that are cheap to read: dtype, tokenizer, sizes, and the beginnings of the files."""
        tokenizer = self._tokenizer.fingerprint if self._tokenizer else ""
        heads = [head_of(path).hex() for path in self.files]
        return _hash_of([self.dtype.str, tokenizer, str(self.end_of_text), str(self.tokens.tolist()), *heads])

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        """Return the token at which each document of a shard begins, and the end."""
        path, tokens = self.files[shard], int(self.tokens[shard])
        if self.end_of_text is None:
            raise InputError(
                f"{path} does not say where its documents begin",
                Remedy("pass {}, the id after each document", end_of_text=...),
            )
        ends = np.flatnonzero(self.read(shard, 0, tokens) == self.end_of_text) + 1
        if tokens and (not len(ends) or int(ends[-1]) != tokens):
            ends = np.append(ends, tokens)  # the last document has no end
        return np.concatenate([[0], ends]).astype(np.int64)

    def all_offsets(self) -> Int[np.ndarray, " offsets"]:
        """Return the token at which each document of the whole store begins, and the end."""
        starts = np.cumsum(self.tokens) - self.tokens
        parts = [self.offsets(shard)[1:] + start for shard, start in enumerate(starts.tolist())]
        return np.concatenate([np.zeros(1, dtype=np.int64), *parts])

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the ids. A store with a `vocab_size` has a tokenizer."""
        if self._tokenizer is None:
            raise InputError("got a store of another program, which has no tokenizer", Remedy(tokenizer=...))
        return self._tokenizer

    def verify(self) -> None:
        """Read everything, and raise `InputError` if anything is wrong."""
        for shard in range(len(self.files)):
            self.check(shard, damage_remedy(self.files[shard]))

    def check(self, shard: int, remedy: str) -> str:
        """Check the size and the ids of the file of a shard, in constant memory, and return its SHA-256."""
        path, tokens = self.files[shard], int(self.tokens[shard])
        size = self.header + tokens * self.dtype.itemsize
        if (length := require_file(path, remedy)) != size:
            raise InputError(f"{path} has {length} bytes, expected {size}", remedy)
        header = bytearray(self.header)
        _fill(memoryview(header), path, 0)
        digest = hashlib.sha256(header)
        for first in range(0, tokens, BLOCK):
            ids = self.read(shard, first, min(first + BLOCK, tokens))
            if fault := _unknown_id(ids, self.vocab_size, first):
                raise InputError(f"{path} has {fault}", remedy)
            digest.update(ids.data)
        return digest.hexdigest()

    def read(self, shard: int, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Read tokens of a shard into a new array."""
        ids = np.empty(stop - start, dtype=self.dtype)
        _fill(ids.data.cast("B"), self.files[shard], self.header + start * self.dtype.itemsize)
        return ids


@dataclass(frozen=True)
class ExportSource:
    """A store that is exported. It yields the tokens in order, and checks every id against the vocabulary.

    `format` is the name of the store's current format. `progress` is called with the number of finished tokens.
    """

    store: StoreFormat
    format: str
    vocab_size: int
    tokenizer: Tokenizer | None
    progress: Callable[[int], object]

    @property
    def dtype(self) -> np.dtype:
        """An unsigned dtype of two bytes if they suffice for the vocabulary, else of four bytes."""
        if self.vocab_size > 2**32:
            raise InputError(
                f"got ids up to {self.vocab_size - 1}, which need more than four bytes", "pass another dtype"
            )
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @property
    def shards(self) -> range:
        return range(len(self.store.files))

    def blocks(self) -> Iterator[Integer[np.ndarray, " tokens"]]:
        """Yield all tokens, in blocks."""
        for shard in self.shards:
            yield from self.shard_blocks(shard)

    def shard_blocks(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the tokens of one shard from `start` to `stop` (default: all), in blocks."""
        before = int(self.store.tokens[:shard].sum())
        stop = int(self.store.tokens[shard]) if stop is None else stop
        for first in range(start, stop, BLOCK):
            ids = self.store.read(shard, first, min(first + BLOCK, stop))
            require_known(ids, self.vocab_size, before + first)
            yield ids
            self.progress(before + first + len(ids))

    def documents(self, shard: int) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Yield the documents of a shard, in blocks, for `ShardWriter.append`. Long documents come in parts.

        Each item has the ids, the length of each document, and whether the first document continues the previous one.
        """
        offsets = self.store.offsets(shard)
        first = 0
        while first < len(offsets) - 1:
            last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BLOCK, side="right")) - 1)
            start, stop = int(offsets[first]), int(offsets[last])
            if stop - start <= BLOCK:
                ids = next(self.shard_blocks(shard, start, stop), np.zeros(0, self.store.dtype))
                yield ids, np.diff(offsets[first : last + 1]), False
            else:
                for part, ids in enumerate(self.shard_blocks(shard, start, stop)):
                    yield ids, np.array([len(ids)]), part > 0
            first = last

    def write_tokens(self, path: Path, shard: int | None = None) -> None:
        """Write a file that holds only the tokens of one shard or of all shards, as `dtype`."""
        with NewFile(path) as file:
            for ids in self.blocks() if shard is None else self.shard_blocks(shard):
                file.write(ids.astype(self.dtype).data.cast("B"))
            file.fsync()
            file.publish()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of stored tokens: uint16 below 65,500 vocabulary entries, else int32, as in Megatron-LM."""
    if not 1 <= vocab_size <= 2**31:
        raise RangeError(f"got a vocabulary of {vocab_size} entries, expected 1 to 2**31", "use another tokenizer")
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


def require_known(ids: Integer[np.ndarray, " tokens"], vocab_size: int, place: int) -> None:
    """Raise `RangeError` if an id is not in the vocabulary. `place` is the place of the first id, for the message."""
    if fault := _unknown_id(ids, vocab_size, place):
        raise RangeError(f"got {fault}", "use the tokenizer that made the ids")


def _unknown_id(ids: np.ndarray, vocab_size: int | None, place: int) -> str:
    """Describe the first id that is negative or not in the vocabulary, with its place, or return an empty text."""
    # Read as unsigned, a negative id is large, so one pass finds both kinds.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    dtype_size = int(np.iinfo(ids.dtype).max) + 1
    size = vocab_size or dtype_size
    for first in range(0, len(ids), IDS_AT_A_TIME):
        block = unsigned[first : first + IDS_AT_A_TIME]
        if int(block.max()) >= min(size, dtype_size):
            at = first + int(np.argmax(block >= min(size, dtype_size)))
            return f"id {ids[at]} at place {place + at}, expected ids within 0..{size - 1}"
    return ""


def sha256_of(content: bytes | memoryview) -> str:
    """Return the SHA-256 of the content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def require_file(path: str | Path, remedy: str) -> int:
    """Return the size of a regular file. Raise `InputError` for other files, such as pipes, which would block."""
    try:
        is_file, size = os.path.isfile(path), os.stat(path).st_size  # noqa: PTH113, PTH116  # strings, for their speed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
    if not is_file:
        raise InputError(f"got {path}, which is not a file", remedy)
    return size


def read_file(path: str | Path, size: int, remedy: str) -> bytes:
    """Return the content of a file. Raise `InputError` unless it has exactly `size` bytes."""
    if (length := require_file(path, remedy)) == size:
        try:
            with open(path, "rb") as file:  # noqa: PTH123  # a string, for its speed
                content = file.read(size)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
        if (length := len(content)) == size:
            return content
    raise InputError(f"{path} has {length} bytes, expected {size}", remedy)


def only_file(path: Path, suffix: str) -> Path:
    """Return `path`, or the only file with this suffix if it is a folder. Several files are an error."""
    if not path.is_dir():
        return path
    files = sorted(path.glob(f"*{suffix}"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:4]) or "none"
        raise InputError(
            f"got {path}, expected one file that ends with {suffix}, found {names}", "pass one of its files"
        )
    return files[0]


def head_of(path: str | Path) -> bytes:
    """Return the first bytes of a file."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", damage_remedy(path)) from None


def _fill(view: memoryview, path: str, at: int) -> None:
    """Fill `view` with the bytes of a file that begin at `at`."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            # The system may read less than requested.
            while view:
                count = os.preadv(handle, [view], at) if hasattr(os, "preadv") else _copy(handle, view, at)
                if not count:
                    raise InputError(f"{path} ends at byte {at}, expected {at + len(view)} bytes", damage_remedy(path))
                view, at = view[count:], at + count
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "open the store again") from None


def _copy(handle: int, view: memoryview, at: int) -> int:
    """Read like `os.preadv`, which Windows lacks, but with a copy."""
    os.lseek(handle, at, os.SEEK_SET)
    data = os.read(handle, len(view))
    view[: len(data)] = data
    return len(data)


def _count(path: str, dtype: np.dtype, header: int) -> int:
    size = require_file(path, damage_remedy(path))
    if size < header or (size - header) % dtype.itemsize:
        cause = f"{path} has {size} bytes, which is not a whole number of {dtype.name} tokens"
        raise InputError(cause, "pass another dtype")
    return (size - header) // dtype.itemsize


def require(holds: object, fault: str) -> None:
    """Raise `FaultError` unless `holds`. The caller adds the name of the file."""
    if not holds:
        raise FaultError(fault)


def damage_remedy(path: str | Path) -> str:
    """Return the remedy for a damaged file."""
    return f"get a fresh copy of {path}"


def _hash_of(parts: Sequence[str]) -> str:
    return sha256_of("\n".join(parts).encode(errors="surrogateescape"))
