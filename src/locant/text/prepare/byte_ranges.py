"""What is to be read, as data: a source, and the range of its bytes that is read at a time.

A document belongs to the range in which it begins, so the ranges of a file can be read apart from each other, in any
order, and give every document once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from locant.text.reading import STDIN

__all__ = ["ByteRange", "Compression", "Kind", "Source", "Tally", "cut"]

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
