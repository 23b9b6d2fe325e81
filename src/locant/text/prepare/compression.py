"""Decompress source files (.gz, .zst, .bz2, .xz), and recode them to UTF-8.

Memory does not grow with the size of a compressed file. A read takes only the compressed input that one block of output
needs. So a file of a few kilobytes that expands to terabytes costs time but not memory. If a file has several members
or frames, all of them are read. A truncated stream is an error, even if only its checksum is incomplete. Other bytes
after the last member are also an error.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from locant.errors import InputError
from locant.extras import require
from locant.text.prepare.byte_ranges import BLOCK, Compression, Source, Tally, open_source
from locant.text.reading import Readable

COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}

TOOLS = {"gz": ("gzip", "gzip"), "zst": ("Zstandard", "zstd"), "bz2": ("bzip2", "bzip2"), "xz": ("xz", "xz")}
"""The name of each compression, and the program that tests and unpacks its files."""

MOST_DAMAGED = 2**26
"""Unpacked bytes that are checked for damage if a compressed file seems to be binary."""


def require_undamaged(source: Source) -> None:
    """Raise `InputError` if a compressed file is damaged within the first `MOST_DAMAGED` bytes of its content."""
    size = 0
    with open_source(source) as file, open_decompressed(file, source, Tally()) as stream:
        while size < MOST_DAMAGED and (data := stream.read(BLOCK)):
            size += len(data)


class _CountedFile(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: Readable, tally: Tally) -> None:
        self._file, self._tally = file, tally

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._tally.add(data)
        return data

    def readable(self) -> bool:
        return True


class _DecompressedStream:
    """The content of all members of a compressed file, read with the decompressors of Python's library.

    The library's own readers are not used, because they ignore bytes after the last member.
    """

    def __init__(self, file: Readable, start: Callable[[], Any], pad: bytes) -> None:
        self._file, self._start, self._pad = file, start, pad
        self._member, self._rest = start(), b""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, or no bytes at the end of the last member."""
        while True:
            if self._member.eof:
                self._rest = (self._member.unused_data or self._file.read(BLOCK)).lstrip(self._pad)
                while not self._rest:
                    if not (more := self._file.read(BLOCK)):
                        return b""
                    self._rest = more.lstrip(self._pad)
                self._member = self._start()
            elif self._member.needs_input and not self._rest:
                self._rest = self._file.read(BLOCK)
                if not self._rest:
                    raise EOFError("it is truncated")
            data, self._rest = self._member.decompress(self._rest, size), b""
            if data:
                return data


class _Utf8Stream:
    """A stream that is converted to UTF-8. Bytes that its encoding does not define become U+FFFD."""

    def __init__(self, stream: Readable, encoding: str) -> None:
        self._stream, self._decoder, self._rest = stream, codecs.getincrementaldecoder(encoding)("replace"), b""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, or no bytes at the end."""
        while not self._rest:
            data = self._stream.read(size)
            self._rest = self._decoder.decode(data, final=not data).encode(errors="replace")
            if not data:
                break
        size = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


@contextmanager
def open_unpacked(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    """Open the decompressed content of a file, as UTF-8 if it is text. `tally` counts the bytes of the file itself."""
    with open_decompressed(file, source, tally) as stream:
        yield stream if source.encoding is None else _Utf8Stream(stream, source.encoding)


@contextmanager
def open_decompressed(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    """Open the decompressed content of a file in its own encoding. `tally` counts the bytes of the file itself."""
    tallied = _CountedFile(file, tally)
    if source.compression is None:
        yield tallied
        return
    before = tally.bytes
    try:
        if source.compression == "gz":
            with gzip.GzipFile(fileobj=tallied, mode="rb") as unzipped:
                yield unzipped
        elif source.compression == "bz2":
            yield _DecompressedStream(tallied, bz2.BZ2Decompressor, b"")
        elif source.compression == "xz":
            yield _DecompressedStream(tallied, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), b"\0")
        else:
            arrow = require_arrow(source.name)
            with arrow.CompressedInputStream(arrow.PythonFile(tallied, mode="r"), "zstd") as stream:
                yield stream
        if tally.bytes == before:
            raise EOFError("it is empty")
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what, tool = TOOLS[source.compression]
        raise InputError(f"{source.name} is not a complete {what} file: {error}", f"test it with {tool} -t") from None


def require_arrow(name: str) -> Any:  # an untyped package
    """Return `pyarrow`, which reads Parquet and Zstandard."""
    arrow = require("pyarrow", f"reading {name}")
    importlib.import_module("pyarrow.compute")
    return arrow
