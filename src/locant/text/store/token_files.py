"""Files of token ids: how many bytes an id takes, reading them without trust in what they hold, and mapping them."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from locant.errors import InputError, RangeError

__all__ = [
    "BLOCK", "MAX_SIZE", "map_side_by_side", "read_file", "require_file", "require_known", "sha256_of", "token_dtype",
    "unknown_id",
]  # fmt: skip

SMALL_VOCABULARY = 65_500
"""From this size on, Megatron-LM takes four bytes for a token; the last ids below 2**16 stay free for its padding."""

BLOCK = 1 << 19
"""Ids that are checked, narrowed, hashed and written at a time: they fit into the cache of a core."""

MAX_SIZE = 2**63 - 1
"""No file, and no count in one, is larger."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value
MAP_FIXED = 0x10  # on Linux and the BSDs alike; Python's module does not name it


def token_dtype(vocab_size: int) -> np.dtype:
    """How the tokens of a vocabulary are stored: uint16 below 65 500 entries, else int32, as in Megatron-LM."""
    if not 1 <= vocab_size <= 2**31:
        raise RangeError(f"got a vocabulary of {vocab_size} entries, expected 1 to 2**31", "another tokenizer")
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


def require_known(ids: Integer[np.ndarray, " tokens"], vocab_size: int, place: int) -> None:
    """Raise a `RangeError` if an id is not in the vocabulary; `place` is where the ids begin, for the message."""
    if fault := unknown_id(ids, vocab_size, place):
        raise RangeError(f"got {fault}", "the tokenizer that made the ids")


def unknown_id(ids: np.ndarray, vocab_size: int | None, place: int) -> str:
    """The first id that is negative or not in the vocabulary, where it is, and what was expected; else nothing."""
    # Read as unsigned, a negative id is a large one, so that one pass finds both.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    of_dtype = int(np.iinfo(ids.dtype).max) + 1
    size = vocab_size or of_dtype
    for first in range(0, len(ids), BLOCK):
        block = unsigned[first : first + BLOCK]
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
    found = require_file(path, remedy)
    if found == size:
        try:
            with open(path, "rb") as file:  # noqa: PTH123  # a string, for its speed
                content = file.read(size)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}", remedy) from None
        found = len(content)
        if found == size:
            return content
    raise InputError(f"{path} has {found} bytes, expected {size}", remedy)


class _Maps:
    """Pages of files, side by side, mapped as long as an array refers to them.

    Python's own `mmap`, and with it `numpy.memmap`, keeps a file descriptor for each map (until 3.13), of which a
    process often may have only 1 024, and it cannot place one map beside another. Here a range of addresses is reserved
    for all, and each file begins on a page of its own; what is left of its last page reads as zeros.
    """

    def __init__(self, paths: Sequence[str], dtype: np.dtype, sizes: Sequence[int], header: int) -> None:
        self._address: int | None = None
        self._unmap = _LIBC.munmap  # kept: when the interpreter ends, names of the module vanish in any order
        pages = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        self.begins = (np.cumsum([0, *pages]) + header) // dtype.itemsize
        """Where the tokens of each file begin in the array."""
        self._size = sum(pages)
        self._address = _mmap(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        place = self._address
        for path, size, room in zip(paths, sizes, pages, strict=True):
            if size:
                handle = os.open(path, os.O_RDONLY)
                try:
                    # Asked for again: past the end of a file that has shrunk since, reading a map ends the process.
                    found = os.fstat(handle).st_size
                    if found != size:
                        raise InputError(f"{path} has {found} bytes, expected {size}", "a fresh copy of it")
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


def _mmap(place: int | None, size: int, protection: int, flags: int, handle: int) -> int:
    address = _LIBC.mmap(place, size, protection, flags, handle, 0)
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def map_side_by_side(
    paths: Sequence[str], dtype: np.dtype, tokens: Sequence[int], header: int = 0
) -> tuple[Integer[np.ndarray, " elements"], Int[np.ndarray, " files_plus_1"]]:
    """Files of so many tokens each as one array, and where in it the tokens of each begin.

    Between the end of one file and the tokens of the next the array has zeros, and the `header` bytes of each file. All
    stay mapped as long as the array, or a slice of it, lives. A file of another size is an `InputError`.
    """
    if not any(tokens):
        return np.frombuffer(b"", dtype), np.zeros(len(tokens) + 1, dtype=np.int64)
    try:
        maps = _Maps(paths, dtype, [header + count * dtype.itemsize for count in tokens], header)
    except OSError as error:
        where = paths[0] if error.filename is None else error.filename
        raise InputError(f"cannot map {where}: {error.strerror}", "opening the store again, or mode='read'") from None
    return np.asarray(maps), maps.begins
