"""The bytes of a file in blocks, whatever it is compressed with, in memory that does not grow with it.

A compressed stream is never opened as a whole: a block of output is asked for, and no more of the input is read than
it takes, so a file of some kilobytes that stands for terabytes costs time, not memory. gzip members and Zstandard
frames that follow each other are read to the end of the last one. A stream that breaks off is an error, also where it
breaks off inside the last checksum; so is what follows it and is none.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from locant.errors import InputError
from locant.text.prepare.pieces import Compression, Tally
from locant.text.reading import STDIN, Readable

__all__ = ["BLOCK", "File", "blocks", "call", "opened", "require_arrow", "unpacked"]

BLOCK = 4 * 2**20
"""Bytes that are read, split and encoded at a time."""


@runtime_checkable
class File(Readable, Protocol):
    """What can be read from anywhere; standard input only promises to be read from its beginning."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...


class _Tallied(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: Readable, tally: Tally) -> None:
        self._file = file
        self._tally = tally
        self.any = False

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._tally.add(data)
        self.any = self.any or bool(data)
        return data

    def readable(self) -> bool:
        return True


def call(path: str) -> str:
    """How a path is named in errors."""
    return "standard input" if path == STDIN else path


@contextmanager
def opened(path: str) -> Generator[File]:
    """A file, or standard input, to read bytes from.

    Raises:
        InputError: if it cannot be opened.
    """
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115  # closed below; errors of its readers are not those of opening
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot read {path}: {reason}", "a file that you may read") from None
    with file:
        yield file


@contextmanager
def unpacked(file: Readable, compression: Compression | None, name: str, tally: Tally) -> Generator[Readable]:
    """What a file holds; `tally` counts what is read of the file itself.

    Raises:
        InputError: in the block, for a stream that is damaged or breaks off.
    """
    tallied = _Tallied(file, tally)
    try:
        if compression == "gz":
            with gzip.GzipFile(fileobj=tallied, mode="rb") as unzipped:
                yield unzipped
        elif compression == "zst":
            arrow = require_arrow(name)
            with arrow.CompressedInputStream(arrow.PythonFile(tallied, mode="r"), "zstd") as stream:
                yield stream
        else:
            yield tallied
        if compression is not None and not tallied.any:
            raise EOFError("it is empty")
    except (EOFError, zlib.error, OSError) as error:
        if compression is None or (isinstance(error, OSError) and error.errno is not None):
            raise
        what = {"gz": "gzip", "zst": "Zstandard"}[compression]
        raise InputError(
            f"{name} is no whole {what} file: {error}", f"{'gzip -t' if compression == 'gz' else 'zstd -t'} on it"
        ) from None


def blocks(stream: Readable) -> Iterator[bytes]:
    """All that is left, some megabytes at a time."""
    while data := stream.read(BLOCK):
        yield data


def require_arrow(name: str) -> Any:  # an untyped package
    """`pyarrow`, which reads Parquet and Zstandard.

    Raises:
        InputError: if it is not installed, with the name of the extra that brings it.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{name} can only be read with pyarrow, which is not installed", "pip install 'locant[data]'")
    importlib.import_module("pyarrow.compute")
    return importlib.import_module("pyarrow")
