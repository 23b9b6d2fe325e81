"""The bytes of a file in blocks, whatever it is compressed with, in memory that does not grow with it.

No more of a compressed input is read than a block of output takes, so a file of some kilobytes that stands for
terabytes costs time, not memory. gzip members and Zstandard frames that follow each other are read to the end of the
last one. A stream that breaks off is an error, also inside the last checksum; so is what follows it and is none.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from locant.errors import InputError
from locant.text.prepare.byte_ranges import ByteRange, Source, Tally
from locant.text.reading import Readable

__all__ = ["BLOCK", "blocks", "changed", "opened", "range_blocks", "require_arrow", "unpacked"]

BLOCK = 2**20
"""Bytes that are read, split and encoded at a time; Ctrl-C has to wait for an engine to encode them."""


@contextmanager
def opened(source: Source) -> Generator[IO[bytes]]:
    """The file of a source, to read from anywhere."""
    try:
        file = Path(source.file).open("rb")  # noqa: SIM115  # closed below; errors of its readers are not those of opening
    except OSError as error:
        raise InputError(f"cannot read {source.name}: {error.strerror or error}", "a file that you may read") from None
    with file:
        yield file


class _Tallied(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: Readable, tally: Tally) -> None:
        self._file = file
        self._tally = tally

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._tally.add(data)
        return data

    def readable(self) -> bool:
        return True


@contextmanager
def unpacked(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    """What a file holds; `tally` counts what is read of the file itself."""
    tallied = _Tallied(file, tally)
    if source.compression is None:
        yield tallied
        return
    before = tally.bytes
    try:
        if source.compression == "gz":
            with gzip.GzipFile(fileobj=tallied, mode="rb") as unzipped:
                yield unzipped
        else:
            arrow = require_arrow(source.name)
            with arrow.CompressedInputStream(arrow.PythonFile(tallied, mode="r"), "zstd") as stream:
                yield stream
        if tally.bytes == before:
            raise EOFError("it is empty")
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what, tool = {"gz": ("gzip", "gzip"), "zst": ("Zstandard", "zstd")}[source.compression]
        raise InputError(f"{source.name} is no whole {what} file: {error}", f"{tool} -t on it") from None


def blocks(stream: Readable) -> Iterator[bytes]:
    """All that is left, block by block."""
    while data := stream.read(BLOCK):
        yield data


def range_blocks(file: IO[bytes], byte_range: ByteRange, tally: Tally, begin: int) -> Iterator[bytes]:
    """A byte range, block by block, from `begin` on, which may lie before it: that is not counted."""
    _, start, stop = byte_range
    file.seek(begin)
    for low in range(begin, stop, BLOCK):
        data = file.read(min(BLOCK, stop - low))
        if len(data) < min(BLOCK, stop - low):
            raise changed(byte_range)
        tally.add(memoryview(data)[max(start - low, 0) :])
        yield data


def changed(byte_range: ByteRange) -> InputError:
    """The error for a file that has become shorter, or longer where all of it was to be read."""
    source, _, stop = byte_range
    return InputError(f"{source.name} has changed: it had {stop} bytes or more", "the same again, on a quiet file")


def require_arrow(name: str) -> Any:  # an untyped package
    """`pyarrow`, which reads Parquet and Zstandard."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{name} can only be read with pyarrow, which is not installed", "pip install 'locant[data]'")
    importlib.import_module("pyarrow.compute")
    return importlib.import_module("pyarrow")
