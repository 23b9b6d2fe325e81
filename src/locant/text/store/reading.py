"""Tokens of one file: mapped into memory, or read."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from jaxtyping import Integer

from locant.errors import InputError

__all__ = ["map_tokens", "read_tokens"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.restype = ctypes.c_int
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value


class _Map:
    """Pages of a file, for as long as an array looks at them.

    Python's own `mmap`, and with it `numpy.memmap`, keeps a file descriptor for each map (up to version 3.12 without a
    choice), and a process often may have only 1 024 of them: too few for a store of many shards.
    """

    def __init__(self, handle: int, dtype: np.dtype, count: int) -> None:
        self._size = count * dtype.itemsize
        self._unmap = _LIBC.munmap  # kept: when the interpreter ends, names of the module vanish in any order
        self._address = _LIBC.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        if self._address == FAILED:
            self._address = None
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (self._address, True),  # it cannot be written to
            "shape": (count,),
            "typestr": dtype.str,
        }

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._size)


def map_tokens(path: str, dtype: np.dtype, tokens: int) -> Integer[np.ndarray, " tokens"]:
    """A file of so many tokens as an array; it stays mapped as long as the array, or a slice of it, lives.

    Raises:
        InputError: it has another size, or the system refuses.
    """
    if not tokens:
        return np.zeros(0, dtype=dtype)
    size = tokens * dtype.itemsize
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            # Asked for again: past the end of a file that has shrunk since, reading a map ends the process.
            found = os.fstat(handle).st_size
            if found == size:
                return np.asarray(_Map(handle, dtype, tokens))
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot map {path}: {error.strerror}", "opening the store again, or mode='read'") from None
    raise InputError(f"{path} has {found} bytes, expected {size}", "a fresh copy of it")


def read_tokens(path: str, dtype: np.dtype, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
    """Some tokens of a file, in an array of their own.

    Raises:
        InputError: the file does not have them, or the system refuses.
    """
    ids = np.empty(stop - start, dtype=dtype)
    view, at = ids.data.cast("B"), start * dtype.itemsize
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            # The system may read less than it was asked for.
            while view:
                count = os.preadv(handle, [view], at)
                if not count:
                    raise InputError(f"{path} ends at byte {at}, expected {at + len(view)} bytes", "a fresh copy of it")
                view, at = view[count:], at + count
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "opening the store again") from None
    return ids
