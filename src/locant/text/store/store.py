"""`TokenStore`: token ids on disk that are read like one array.

Opening a store reads its manifest and asks the system for the size of every file. A shard is mapped into memory when it
is first read, so a slice loads only its own pages, which all processes of a machine share.

If a mapped file shrinks, or its disk fails, the process ends with SIGBUS, which Python cannot catch. Stores never
change, so only another program can cause this. If files may vanish (on a network file system), use ``mode="read"``. It
reads and copies every slice with a system call, and a failure is an `InputError`.

Measured on two CPU cores: 10 000 shards open in 0.07 s, and a store of 100 000 files, whose manifest has 29 MB, in
0.04 s. A window of 257 tokens takes 2 µs from a mapped shard, 13 to 20 µs from a shard that is not mapped yet, and
11 µs in ``mode="read"``. A shard is written, hashed and flushed at 500 MB/s.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
from jaxtyping import Int, Integer

from locant.arguments import one_of
from locant.errors import InputError, RangeError, Remedy
from locant.files import new_folder, write_whole
from locant.text.store.formats import FORMATS, ExportSource, StoreFormat, StoreOptions
from locant.text.store.formats.locant import TOKENIZER, LocantFormat, Manifest
from locant.text.tokenizer import Tokenizer

Mode = Literal["map", "read"]

BLOCK = 1 << 16

MAPS = 1 << 15
"""The number of shards that stay mapped: half of the number of maps that Linux allows a process."""

PLACES_MAPS = hasattr(mmap, "MAP_PRIVATE")
"""True if the system maps a file at a given address. Windows does not, so `numpy` maps the files there."""
if PLACES_MAPS:
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    _LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value
MAP_FIXED = 0x10  # on Linux and the BSDs; Python's module lacks the name


class TokenStore:
    """The token ids of a corpus, in files that are mapped into memory.

    >>> import tempfile
    >>> from locant.text.store import ShardWriter, write_manifest
    >>> folder, tokenizer = Path(tempfile.mkdtemp()), Tokenizer.bytes()
    >>> with ShardWriter(folder, 0, tokenizer.vocab_size) as writer:
    ...     writer.append(tokenizer.encode("one and two"), np.array([4, 7]))
    ...     shard = writer.close()
    >>> write_manifest(folder, shards=[shard], tokenizer=tokenizer, end_of_text=None, sources=[], options={})
    >>> store = TokenStore(folder)
    >>> len(store), store[0], store[4:7], store.documents
    (11, 111, array([ 97, 110, 100], dtype=uint16), array([ 0,  4, 11]))
    >>> store.verify()
    >>> store.tokenizer.decode(store[8:])
    'two'

    Args:
        path: a folder that `prepare` made, or a store of another program in the given `format`.
        format: ``"nanogpt"``: a file that holds only tokens. ``"megatron"``: two files, ``PATH.bin`` and ``PATH.idx``.
            ``"datatrove"``: a file ``.ds`` with its ``.ds.index``, or a folder of such files. Or the name of a
            registered format, see `locant.formats`.
        mode: ``"map"``, or ``"read"`` for files that may shrink while they are read (see the module).
        dtype: the dtype of the tokens, for files that do not state it (files of nanoGPT, and files of datatrove without
            metadata). Default: uint16.
        tokenizer: the tokenizer of a store of another program, which does not contain one.
        end_of_text: the id after each document, for files that do not state where documents begin.

    A slice that lies in one shard is a read-only view, and any other slice is a copy. A store can be pickled.
    Unpickling opens it again, and raises an error if it has changed. Two stores are equal if their manifests are equal.

    Raises:
        InputError: there is no store, it is not finished, or the size of a file differs from the manifest.
        RangeError: the format or mode is unknown.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: str = "locant",  # noqa: A002  # what the field calls it
        mode: Mode = "map",
        dtype: str | np.dtype | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        end_of_text: int | None = None,
    ) -> None:
        if not isinstance(path, (str, Path)) or not str(path) or "\0" in str(path):
            raise InputError(f"got {path!r} as a store, expected a path", "pass the folder that locant prepare made")
        self.path = Path(path)
        self.format = format
        self.mode: Mode = one_of("mode", mode, ("map", "read"))  # type: ignore[assignment]
        self._options = {"dtype": dtype, "tokenizer": tokenizer, "end_of_text": end_of_text}
        self.contents: StoreFormat = FORMATS.find(format)(self.path, StoreOptions(**self._options))  # type: ignore[call-arg]
        """The store as its format reads it: its files and their properties."""
        self.dtype: np.dtype = self.contents.dtype
        """The dtype of the tokens: uint16 or int32 in a locant store."""
        self.vocab_size: int | None = self.contents.vocab_size
        """One more than the largest possible id, or ``None`` if it is not known."""
        self.end_of_text: int | None = self.contents.end_of_text
        """The id after each document, if one was appended."""
        self.shard_starts: Int[np.ndarray, " offsets"] = np.concatenate([[0], np.cumsum(self.contents.tokens)])
        """The token at which each shard begins, and the end."""
        self.shard_starts.setflags(write=False)
        self._starts: list[int] = self.shard_starts.tolist()
        # A weak reference, so that the array keeps the files mapped, but the store does not.
        self._side_by_side: tuple[Callable[[], np.ndarray | None], np.ndarray] = (lambda: None, self.shard_starts)
        self._map = lru_cache(MAPS)(partial(_map_shard, self.contents))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return one id as an `int`, or a slice as an array."""
        if isinstance(index, slice):
            places = range(*index.indices(len(self)))
            return self._read(places) if places.step > 0 else self._read(places[::-1])[::-1]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise RangeError(f"got place {number} of {len(self)} tokens", f"use {-len(self)} to {len(self) - 1}")
        start = number % len(self)
        return int(self._read(range(start, start + 1))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), BLOCK):
            yield from self[start : start + BLOCK].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype=dtype, copy=copy)

    @property
    def shards(self) -> Shards:
        """The shards as arrays, each mapped on use (not in ``mode="read"``). Shard k begins at ``shard_starts[k]``."""
        return Shards(self._map if self.mode == "map" else None, len(self.contents.files))

    def side_by_side(self) -> tuple[Integer[np.ndarray, " elements"], Int[np.ndarray, " offsets"]]:
        """Map all shards into one array, and return it with the place where each shard begins.

        Zeros may lie between shards. Mapping takes some 15 µs per shard and no memory. While the array is in use, every
        call returns the same array.

        Raises:
            InputError: the store has ``mode="read"``, or more shards than a process may map.
        """
        if not self.can_lie_side_by_side:
            cause = f"got {len(self.shards)} shards in mode {self.mode!r} to map side by side"
            raise InputError(cause, "use slices")
        mapped, begins = self._side_by_side
        ids = mapped()
        if ids is None:
            contents = self.contents
            ids, begins = map_side_by_side(contents.files, self.dtype, contents.tokens.tolist(), contents.header)
            begins.setflags(write=False)
            self._side_by_side = weakref.ref(ids), begins
        return ids, begins

    @property
    def can_lie_side_by_side(self) -> bool:
        """Return whether `side_by_side` can map the store."""
        return self.mode == "map" and len(self.contents.files) <= (MAPS if PLACES_MAPS else 1)

    @property
    def manifest(self) -> Manifest:
        """The content of `store.json`: sources, options, hashes.

        Raises:
            InputError: the store has another format, which has no manifest.
        """
        if not isinstance(self.contents, LocantFormat):
            raise InputError(f"got a store of format {self.format!r}, which has no manifest", Remedy(format="locant"))
        return self.contents.manifest

    @cached_property
    def documents(self) -> Int[np.ndarray, " offsets"]:
        """The place where each document begins, and the end: n + 1 offsets for n documents. Read on first use."""
        documents = self.contents.all_offsets()
        documents.setflags(write=False)
        return documents

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return self.contents.load_tokenizer()

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of the shards and the tokenizer, which does not depend on the sources."""
        return self.contents.fingerprint

    @property
    def identity(self) -> str:
        """A SHA-256 of the manifest. Stores with equal hashes are equal, including their sources and options."""
        return self.contents.identity

    def verify(self) -> None:
        """Read everything, and raise `InputError` if a hash, an index, an id or the tokenizer has changed."""
        self.contents.verify()

    def __eq__(self, other: object) -> bool:
        return self.identity == other.identity if isinstance(other, TokenStore) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        shards = len(self.contents.files)
        shape = f"{len(self):,} tokens, {self.dtype.name}, {shards} shard{'s' * (shards != 1)}"
        return f"TokenStore({str(self.path)!r}, {shape})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"format": self.format, "mode": self.mode, **self._options}
        return _open_again, (os.path.abspath(self.path), options, self.identity)  # noqa: PTH100

    def _read(self, places: range) -> Integer[np.ndarray, " tokens"]:
        """Return the ids at increasing places, shard after shard. From a map, ids between the places are not read."""
        start, step, stop = places.start, places.step, places[-1] + 1 if places else places.start
        parts: list[np.ndarray] = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            begin, end = self._starts[number], min(self._starts[number + 1], stop)
            if self.mode == "map":
                parts.append(self._map(number)[start - begin : end - begin : step])
            else:  # reads the ids between the places, too
                end = end if step == 1 else min(end, start + BLOCK)
                end -= (end - start - 1) % step  # end at the last place
                ids = self.contents.read(number, start - begin, end - begin)
                parts.append(ids if step == 1 else ids[::step].copy())
            start += len(parts[-1]) * step
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=self.dtype), *parts])


class Shards(Sequence[np.ndarray]):
    """One array for each shard, mapped on access."""

    def __init__(self, mapped: Callable[[int], np.ndarray] | None, count: int) -> None:
        self._mapped, self._count = mapped, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        try:
            number = range(len(self))[index]
        except IndexError:
            raise IndexError(f"got shard {index} of {len(self)}") from None  # a sequence ends with this error
        if self._mapped is None:
            raise InputError(
                f"got shard {number} of a store in mode 'read', which maps no shards", "use slices, or mode='map'"
            )
        return self._mapped(number)


def _open_again(path: str, options: dict[str, Any], identity: str) -> TokenStore:
    store = TokenStore(path, **options)
    if store.identity != identity:
        raise InputError(f"{path} was rewritten after it was opened", "open it again everywhere")
    return store


def _map_shard(contents: StoreFormat, number: int) -> np.ndarray:
    count = int(contents.tokens[number])
    array, begins = map_side_by_side([contents.files[number]], contents.dtype, [count], contents.header)
    return array[begins[0] : begins[0] + count]


class _Maps:
    """Pages of files at consecutive addresses, mapped as long as an array refers to them.

    Python's `mmap`, which `numpy.memmap` uses, keeps a file descriptor for each map (until 3.13), and a process
    may often have only 1,024 of them. It also cannot place maps at consecutive addresses. This class reserves one range
    of addresses for all files, and each file begins on a new page. The rest of its last page reads as zeros.
    """

    def __init__(self, paths: Sequence[str], dtype: np.dtype, sizes: Sequence[int], header: int) -> None:
        self._address: int | None = None
        self._unmap = _LIBC.munmap  # when the interpreter ends, names of the module vanish in any order
        pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        self.begins = (np.cumsum([0, *pages]) + header) // dtype.itemsize
        """The places in the array where the tokens of each file begin."""
        self._size = sum(pages)
        self._address = _mmap(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        place = self._address
        for path, size, room in zip(paths, sizes, pages, strict=True):
            if size:
                handle = os.open(path, os.O_RDONLY)
                try:
                    # Checked again, because reading a map beyond the end of a shrunken file ends the process.
                    _require_size(path, os.fstat(handle).st_size, size)
                    _mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, handle)
                finally:
                    os.close(handle)
            place += room
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (self._address, True),  # it cannot be written to
            "shape": (self._size // dtype.itemsize,),
            "typestr": dtype.str,
        }

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._size)


def _require_size(path: str, now: int, size: int) -> None:
    if now != size:
        raise InputError(f"{path} has {now} bytes, expected {size}", "copy the file again")


def _mmap(place: int | None, size: int, protection: int, flags: int, handle: int) -> int:
    address = _LIBC.mmap(place, size, protection, flags, handle, 0)
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def map_side_by_side(
    paths: Sequence[str], dtype: np.dtype, tokens: Sequence[int], header: int = 0
) -> tuple[Integer[np.ndarray, " elements"], Int[np.ndarray, " files_plus_1"]]:
    """Map files with these numbers of tokens into one array. Return it with the place where each file's tokens begin.

    Between the tokens of two files the array has zeros, and the `header` bytes of the second file. All files stay
    mapped as long as the array, or a slice of it, exists. If a file has another size, `InputError` is raised.
    """
    if not any(tokens):
        return np.frombuffer(b"", dtype), np.zeros(len(tokens) + 1, dtype=np.int64)
    try:
        if not PLACES_MAPS:
            ((path, count),) = zip(paths, tokens, strict=True)
            _require_size(path, Path(path).stat().st_size, header + count * dtype.itemsize)
            return np.memmap(path, dtype, "r"), np.array([header // dtype.itemsize, header // dtype.itemsize + count])
        maps = _Maps(paths, dtype, [header + count * dtype.itemsize for count in tokens], header)
    except OSError as error:
        where = paths[0] if error.filename is None else error.filename
        raise InputError(f"cannot map {where}: {error.strerror}", "open the store again, or use mode='read'") from None
    return np.asarray(maps), maps.begins


@dataclass(frozen=True, kw_only=True)
class Export:
    """The summary of an exported store."""

    output: str
    to: str
    files: list[str]
    tokens: int
    dtype: str

    def __str__(self) -> str:
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        return f"{self.output}: {self.tokens:,} tokens as {self.dtype}, {self.to}, {files}"


def export_store(
    store: TokenStore, output: Path, *, to: str, progress: Callable[[int], object] | None = None
) -> Export:
    """Write a store in another format, into a new folder that appears when it is complete.

    A tokenizer is copied, and every id is checked against its vocabulary.

    `to` is the name of the format, see `locant.formats`. `progress` is called with the number of finished tokens.

    Raises:
        InputError: the folder is in use, the system refuses to write, or the store lacks documents that the format
            needs. The format ``locant`` also needs a tokenizer.
        RangeError: the format is unknown, or an id is not in the vocabulary.
    """
    target = FORMATS.find(to)
    vocab_size = store.vocab_size
    tokenizer = None if vocab_size is None else store.tokenizer
    if not vocab_size:  # use the smallest vocabulary that has every id
        for first in range(0, len(store), BLOCK):
            ids = store[first : first + BLOCK]
            if int(ids.min()) < 0:
                raise InputError(f"{store.path} has negative ids", "pass another dtype")
            vocab_size = max(vocab_size or 0, int(ids.max()) + 1)
    with new_folder(output) as folder:
        source = ExportSource(store.contents, store.format, vocab_size or 1, tokenizer, progress or (lambda done: None))
        dtype = target.write(source, folder)
        if tokenizer is not None and not (folder / TOKENIZER).exists():
            write_whole(folder / TOKENIZER, tokenizer.to_json())
        files = sorted(path.name for path in folder.iterdir())
    return Export(output=str(output), to=to, files=files, tokens=len(store), dtype=dtype.name)
