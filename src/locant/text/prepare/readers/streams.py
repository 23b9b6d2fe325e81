"""What is to be read, as data: a source, and the range of its bytes that is read at a time; and its bytes, in blocks.

A document belongs to the range in which it begins, so the ranges of a file can be read apart from each other, in any
order, and give every document once.

Whatever a file is compressed with, it is read in memory that does not grow with it: no more of a compressed input is
read than a block of output takes, so a file of some kilobytes that stands for terabytes costs time, not memory. gzip
members and Zstandard frames that follow each other are read to the end of the last one. A stream that breaks off is an
error, also inside the last checksum; so is what follows it and is none.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from locant.errors import InputError
from locant.text.reading import STDIN, Readable

__all__ = [
    "BLOCK", "ByteRange", "Compression", "Kind", "Source", "Tally", "blocks", "changed", "cut", "opened",
    "range_blocks", "require_arrow", "unpacked",
]  # fmt: skip

Kind = Literal["text", "jsonl", "parquet"]
Compression = Literal["gz", "zst"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, as it was when it was found; ``-`` is standard input."""

    path: str
    size: int | None
    """In bytes; ``None`` for standard input until it was read."""
    mtime_ns: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    """What stands between the documents of a text; ``None`` says that the file is one document."""
    field: str
    """The key (JSON lines) or column (Parquet) that holds the text."""
    copy: str | None = dataclasses.field(default=None, compare=False)
    """The file that standard input was copied to."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def file(self) -> str:
        """Where its bytes are."""
        return self.copy or self.path

    @property
    def is_one_document(self) -> bool:
        """Whether nothing separates documents in it."""
        return self.kind == "text" and self.separator is None

    @property
    def can_be_cut(self) -> bool:
        """Whether a document can be found from the middle: in text with a separator, JSON lines and Parquet."""
        return self.compression is None and not self.is_one_document

    def to_json(self) -> dict[str, Any]:
        """What a plan and a manifest keep of it: all but where a copy is."""
        return {name: value for name, value in vars(self).items() if name != "copy"}


class ByteRange(NamedTuple):
    """The bytes `start` to `stop` of a file on the disk; a row group of Parquet belongs to where its data begin."""

    source: Source
    start: int
    stop: int


class Tally:
    """What was read of a byte range so far, and, once its documents are exhausted, the hash of all of it."""

    def __init__(self) -> None:
        self.bytes = 0  # on the disk, compressed ones as they are
        self.documents = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        """Count and hash the next bytes of the range."""
        self.bytes += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        """Of all bytes that were added."""
        return self._hash.hexdigest()


def cut(source: Source, size: int) -> list[ByteRange]:
    """A source in ranges of `size` bytes each but the last, or in one if it cannot be cut; an empty file has none."""
    end = source.size or 0
    step = size if source.can_be_cut else max(end, 1)
    return [ByteRange(source, start, min(start + step, end)) for start in range(0, end, step)]


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
        self._file, self._tally = file, tally

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
