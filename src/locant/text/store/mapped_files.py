"""Files of tokens, mapped into memory: one, or many side by side in one array."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from locant.errors import InputError

__all__ = ["map_side_by_side"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value
MAP_FIXED = 0x10  # on Linux and the BSDs alike; Python's module does not name it


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
                _map_file(path, size, place)
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


def _map_file(path: str, size: int, place: int) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        # Asked for again: past the end of a file that has shrunk since, reading a map ends the process.
        found = os.fstat(handle).st_size
        if found != size:
            raise InputError(f"{path} has {found} bytes, expected {size}", "a fresh copy of it")
        _mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, handle)
    finally:
        os.close(handle)


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

    Between the end of one file and the tokens of the next the array has zeros, and the `header` bytes that stand before
    the tokens of each file. All files stay mapped as long as the array, or a slice of it, lives.

    Raises:
        InputError: a file has another size, or the system refuses.
    """
    if not any(tokens):
        return np.frombuffer(b"", dtype), np.zeros(len(tokens) + 1, dtype=np.int64)
    try:
        maps = _Maps(paths, dtype, [header + count * dtype.itemsize for count in tokens], header)
    except OSError as error:
        where = paths[0] if error.filename is None else error.filename
        raise InputError(f"cannot map {where}: {error.strerror}", "opening the store again, or mode='read'") from None
    return np.asarray(maps), maps.begins
