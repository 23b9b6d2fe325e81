"""`StoreFormat`, the base class of formats of token stores, and `ExportSource`, from which they are written.

Files are read without trust in what they hold: their sizes are compared first, and ids with the vocabulary.
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
"""Tokens that are held at a time."""

CHECKED = 1 << 19
"""Ids that are checked, narrowed, hashed and written at a time: they fit into the cache of a core."""

SMALL_VOCABULARY = 65_500
"""From this size on, Megatron-LM takes four bytes for a token; the last ids below 2**16 stay free for its padding."""

MAX_SIZE = 2**63 - 1
"""No file, and no count in one, is larger."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What the caller of `TokenStore` gives for files that do not contain it.

    >>> StoreOptions(dtype="uint32").token_dtype
    dtype('<u4')
    """

    dtype: str | np.dtype | None = None
    tokenizer: Tokenizer | str | Path | None = None
    end_of_text: int | None = None

    @property
    def token_dtype(self) -> np.dtype:
        """The dtype of the tokens, little-endian; uint16 if none was given."""
        try:
            dtype = np.dtype("uint16" if self.dtype is None else self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in DTYPES or dtype.byteorder == ">":
            cause = f"got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}, little-endian"
            raise InputError(cause, Remedy("{}, as nanoGPT writes", dtype="uint16"))
        return dtype.newbyteorder("<")


class StoreFormat:
    """One token store on the disk. A subclass is a format: it reads a store in `__init__`, and makes one in `write`.

    Its files hold the tokens and nothing else, but for a header. It checks their sizes and, where the tokenizer is
    known, every id; it finds documents by the id that ends each of them. A format that has an index of documents,
    hashes or a tokenizer overrides `offsets`, `verify` or `load_tokenizer`.

    Args:
        files: the files of tokens, one for each shard.
        dtype: of the tokens in them.
        options: what the caller gave.
        header: bytes before the tokens in each file, a multiple of the bytes of a token.
        tokens: how many tokens each file holds; default: by its size.

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
        self.files = [os.path.abspath(path) for path in files]  # noqa: PTH100  # a program may change its folder
        self.dtype = dtype
        self.header = header
        counts = [_count(path, dtype, header) for path in self.files] if tokens is None else tokens
        self.tokens: Int[np.ndarray, " shards"] = np.asarray(counts, dtype=np.int64)
        """How many each file holds."""
        given = options.tokenizer
        self._tokenizer = given if given is None or isinstance(given, Tokenizer) else Tokenizer.load(given)
        self.vocab_size: int | None = self._tokenizer.vocab_size if self._tokenizer else None
        largest = self.vocab_size - 1 if self.vocab_size else int(np.iinfo(dtype).max)
        end = options.end_of_text
        remedy = "the id that stands after each document"
        self.end_of_text = None if end is None else whole("end_of_text", end, 0, largest, remedy=remedy)

    @classmethod
    def write(cls, source: ExportSource, folder: Path) -> np.dtype:
        """Write a store of this format into an empty folder; the dtype of its tokens."""
        raise InputError(f"got {cls.__name__}, a format that can be read and not written", Remedy(to="locant"))

    @property
    def identity(self) -> str:
        """A SHA-256; where it is the same, so is the store."""
        return _hash_of([self.fingerprint, *(f"{path} {Path(path).stat().st_mtime_ns}" for path in self.files)])

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the tokens and where documents begin, as far as it costs little: sizes, and how files begin."""
        tokenizer = self._tokenizer.fingerprint if self._tokenizer else ""
        heads = [head_of(path).hex() for path in self.files]
        return _hash_of([self.dtype.str, tokenizer, str(self.end_of_text), str(self.tokens.tolist()), *heads])

    def offsets(self, shard: int) -> Int[np.ndarray, " offsets"]:
        """Where each document of a shard begins, and the end."""
        path, tokens = self.files[shard], int(self.tokens[shard])
        if self.end_of_text is None:
            raise InputError(
                f"{path} does not say where its documents begin", Remedy("{}, the id after each", end_of_text=...)
            )
        ends = np.flatnonzero(self.read(shard, 0, tokens) == self.end_of_text) + 1
        if tokens and (not len(ends) or int(ends[-1]) != tokens):
            ends = np.append(ends, tokens)  # the last document was not ended
        return np.concatenate([[0], ends]).astype(np.int64)

    def all_offsets(self) -> Int[np.ndarray, " offsets"]:
        """Where each document of the whole store begins, and the end."""
        starts = np.cumsum(self.tokens) - self.tokens
        parts = [self.offsets(shard)[1:] + start for shard, start in enumerate(starts.tolist())]
        return np.concatenate([np.zeros(1, dtype=np.int64), *parts])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids; a store has one if it has a `vocab_size`."""
        if self._tokenizer is None:
            raise InputError("got a store of another program, which has no tokenizer", Remedy(tokenizer=...))
        return self._tokenizer

    def verify(self) -> None:
        """Read everything, and raise an `InputError` where something is not as it should be."""
        for shard in range(len(self.files)):
            self.check(shard, fresh(self.files[shard]))

    def check(self, shard: int, remedy: str) -> str:
        """Read the file of a shard, in constant memory, and check its size and ids; its SHA-256."""
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
        """Some tokens of a shard, in an array of their own."""
        ids = np.empty(stop - start, dtype=self.dtype)
        _fill(ids.data.cast("B"), self.files[shard], self.header + start * self.dtype.itemsize)
        return ids


@dataclass(frozen=True)
class ExportSource:
    """The store that a format writes anew: its tokens in order, every id checked against the vocabulary.

    `format` is the name of the store's own format; `progress` is called with how many tokens are done.
    """

    store: StoreFormat
    format: str
    vocab_size: int
    tokenizer: Tokenizer | None
    progress: Callable[[int], object]

    @property
    def dtype(self) -> np.dtype:
        """Two bytes as long as they suffice for the vocabulary, else four."""
        if self.vocab_size > 2**32:
            raise InputError(
                f"got ids up to {self.vocab_size - 1}, which take more than four bytes", "pass another dtype"
            )
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @property
    def shards(self) -> range:
        return range(len(self.store.files))

    def blocks(self) -> Iterator[Integer[np.ndarray, " tokens"]]:
        """All tokens, some at a time."""
        for shard in self.shards:
            yield from self.shard_blocks(shard)

    def shard_blocks(self, shard: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """The tokens of one shard, or those from `start` to `stop`, some at a time."""
        before = int(self.store.tokens[:shard].sum())
        stop = int(self.store.tokens[shard]) if stop is None else stop
        for first in range(start, stop, BLOCK):
            ids = self.store.read(shard, first, min(first + BLOCK, stop))
            require_known(ids, self.vocab_size, before + first)
            yield ids
            self.progress(before + first + len(ids))

    def documents(self, shard: int) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """The documents of a shard, some at a time, as `ShardWriter.append` takes them, long ones in parts.

        The ids, how many each document has, and whether the first goes on where the last one ended.
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
        """Write a file of nothing but tokens, as `dtype`: those of one shard, or all."""
        with NewFile(path) as file:
            for ids in self.blocks() if shard is None else self.shard_blocks(shard):
                file.write(ids.astype(self.dtype).data.cast("B"))
            file.settle()
            file.publish()


def token_dtype(vocab_size: int) -> np.dtype:
    """How the tokens of a vocabulary are stored: uint16 below 65 500 entries, else int32, as in Megatron-LM."""
    if not 1 <= vocab_size <= 2**31:
        raise RangeError(f"got a vocabulary of {vocab_size} entries, expected 1 to 2**31", "use another tokenizer")
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


def require_known(ids: Integer[np.ndarray, " tokens"], vocab_size: int, place: int) -> None:
    """Raise a `RangeError` if an id is not in the vocabulary; `place` is where the ids begin, for the message."""
    if fault := _unknown_id(ids, vocab_size, place):
        raise RangeError(f"got {fault}", "use the tokenizer that made the ids")


def _unknown_id(ids: np.ndarray, vocab_size: int | None, place: int) -> str:
    """The first id that is negative or not in the vocabulary, where it is, and what was expected; else nothing."""
    # Read as unsigned, a negative id is a large one, so that one pass finds both.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    of_dtype = int(np.iinfo(ids.dtype).max) + 1
    size = vocab_size or of_dtype
    for first in range(0, len(ids), CHECKED):
        block = unsigned[first : first + CHECKED]
        if int(block.max()) >= min(size, of_dtype):
            at = first + int(np.argmax(block >= min(size, of_dtype)))
            return f"id {ids[at]} at place {place + at}, expected ids within 0..{size - 1}"
    return ""


def sha256_of(content: bytes | memoryview) -> str:
    """Its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def require_file(path: str | Path, remedy: str) -> int:
    """The size of a regular file, or an `InputError`: opening a pipe would wait for whatever writes to it."""
    try:
        is_file, size = os.path.isfile(path), os.stat(path).st_size  # noqa: PTH113, PTH116  # strings, for their speed
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
    if not is_file:
        raise InputError(f"got {path}, which is not a file", remedy)
    return size


def read_file(path: str | Path, size: int, remedy: str) -> bytes:
    """The whole content of a file that has exactly `size` bytes; else an `InputError`."""
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
    """The one file with this suffix, if `path` is a folder; several (such as two splits) are not joined unasked."""
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
    """How a file begins."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(HEAD)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", fresh(path)) from None


def _fill(view: memoryview, path: str, at: int) -> None:
    """Read a file from byte `at` on into all of `view`."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            # The system may read less than it was asked for.
            while view:
                count = os.preadv(handle, [view], at) if hasattr(os, "preadv") else _copy(handle, view, at)
                if not count:
                    raise InputError(f"{path} ends at byte {at}, expected {at + len(view)} bytes", fresh(path))
                view, at = view[count:], at + count
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "open the store again") from None


def _copy(handle: int, view: memoryview, at: int) -> int:
    """As `os.preadv`, which Windows lacks, by a copy."""
    os.lseek(handle, at, os.SEEK_SET)
    data = os.read(handle, len(view))
    view[: len(data)] = data
    return len(data)


def _count(path: str, dtype: np.dtype, header: int) -> int:
    size = require_file(path, fresh(path))
    if size < header or (size - header) % dtype.itemsize:
        raise InputError(f"{path} has {size} bytes, which is no number of {dtype.name} tokens", "pass another dtype")
    return (size - header) // dtype.itemsize


def require(holds: object, fault: str) -> None:
    """Raise the fault of a file, to which whoever knows its name adds that."""
    if not holds:
        raise FaultError(fault)


def fresh(path: str | Path) -> str:
    """The remedy where a file is not as it was."""
    return f"a fresh copy of {path}"


def _hash_of(parts: Sequence[str]) -> str:
    return sha256_of("\n".join(parts).encode(errors="surrogateescape"))
