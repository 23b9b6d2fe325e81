"""Source files, ranges of their bytes, and counts of the bytes and documents in a range.

A document belongs to the range in which it begins. So the ranges of a file can be read independently and in any order,
and together they yield every document once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from locant.errors import InputError
from locant.text.reading import STDIN, Readable

Kind = Literal["text", "jsonl", "parquet"]

Compression = Literal["gz", "zst", "bz2", "xz"]

BLOCK = 2**20
"""Bytes that are read, split and encoded at a time. Ctrl-C takes effect after an engine has encoded a block."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, with its size and time of change when it was found. The path ``-`` is standard input."""

    path: str
    size: int | None
    """The size in bytes, or ``None`` for standard input until it is read."""
    mtime_ns: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    """The separator of the documents of a text. ``None`` means that the file is one document."""
    field: str
    """The key (JSON lines) or column (Parquet) that holds the text."""
    encoding: str | None = None
    """The encoding of a text or of JSON lines. ``None`` means UTF-8."""
    copy: str | None = dataclasses.field(default=None, compare=False)
    """The path of a file with a copy of standard input."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def file(self) -> str:
        """The path of the file from which the bytes are read."""
        return self.copy or self.path

    @property
    def is_one_document(self) -> bool:
        return self.kind == "text" and self.separator is None

    @property
    def can_be_cut(self) -> bool:
        """Return whether reading can begin inside the file, as for text with a separator, JSON lines and Parquet."""
        return self.compression is None and self.encoding is None and not self.is_one_document

    def to_json(self) -> dict[str, Any]:
        """Return the fields that plans and manifests record. Leave out `copy`, and `encoding` for UTF-8."""
        fields = {name: value for name, value in vars(self).items() if name != "copy"}
        return {name: value for name, value in fields.items() if name != "encoding" or value is not None}


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of a file on disk.

    A row group of Parquet belongs to the range that contains its first byte.
    """

    source: Source
    start: int
    stop: int


def cut(source: Source, size: int) -> list[ByteRange]:
    """Cut a source into ranges of `size` bytes (the last may be shorter), or one range if it cannot be cut.

    An empty file has no ranges.
    """
    end = source.size or 0
    step = size if source.can_be_cut else max(end, 1)
    return [ByteRange(source, start, min(start + step, end)) for start in range(0, end, step)]


class Tally:
    """The counts of a byte range and the hash of its bytes. Both are complete after all its documents are read."""

    def __init__(self) -> None:
        self.bytes = 0  # on disk, without decompression
        self.documents = 0
        self.skipped = 0
        """The number of bad records that were left out: lines, documents that are too long, or whole files."""
        self.not_utf8 = 0
        """The number of documents with bytes that their encoding does not define."""
        self._hash = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        """Count and hash the next bytes of the range."""
        self.bytes += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def open_source(source: Source) -> Generator[IO[bytes]]:
    """Open the file of a source. It can be read from any place."""
    try:
        file = Path(source.file).open("rb")  # noqa: SIM115  # closed below; only errors of opening become InputError
    except OSError as error:
        raise InputError(
            f"cannot read {source.name}: {error.strerror or error}", "use a file that you may read"
        ) from None
    with file:
        yield file


def blocks(stream: Readable) -> Iterator[bytes]:
    """Yield the rest of a stream, block by block."""
    while data := stream.read(BLOCK):
        yield data


def range_blocks(file: IO[bytes], byte_range: ByteRange, tally: Tally, begin: int) -> Iterator[bytes]:
    """Yield the bytes from `begin` to the end of a range, block by block. Bytes before the range are not counted."""
    _, start, stop = byte_range
    file.seek(begin)
    for low in range(begin, stop, BLOCK):
        data = file.read(min(BLOCK, stop - low))
        if len(data) < min(BLOCK, stop - low):
            raise change_error(byte_range)
        tally.add(memoryview(data)[max(start - low, 0) :])
        yield data


def change_error(byte_range: ByteRange) -> InputError:
    """Return the error for a file that changed its size after it was found."""
    source, _, stop = byte_range
    return InputError(
        f"{source.name} has changed: it had {stop} bytes or more", "run again when nothing writes to the file"
    )
