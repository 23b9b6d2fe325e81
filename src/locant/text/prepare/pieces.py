"""What is to be read, as data: a file that was found, and a piece of one that a single task reads.

A document belongs to the piece in which it begins, so the pieces of a file can be read apart from each other, in any
order, and give every document once. Both classes hold nothing but strings and numbers (`dataclasses.asdict` of one is
JSON), so they can be written into a plan and sent to another machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from locant.errors import RangeError

__all__ = ["Batch", "Compression", "Kind", "Piece", "Source", "Tally", "cut"]

Kind = Literal["text", "jsonl", "parquet"]
Compression = Literal["gz", "zst"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, as it was when it was found; ``-`` is standard input, of which size and time are unknown."""

    path: str
    size: int | None
    mtime_ns: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    """What stands between the documents of a text; ``None`` says that the file is one document."""
    field: str
    """The key (JSON lines) or column (Parquet) that holds the text."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The bytes `start` to `stop` of a file, and how to read the documents that begin there.

    Standard input, whose end is unknown, has ``stop=None``. The range counts the bytes of the file as it lies on the
    disk; a compressed file is one piece. In Parquet, a row group belongs to the piece in which its data begin.
    """

    path: str
    start: int
    stop: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    field: str


class Batch(NamedTuple):
    """Documents in order. Where `unfinished`, the last one goes on as the first of the next batch."""

    texts: list[bytes]
    unfinished: bool


@dataclass(kw_only=True)
class Tally:
    """What was read of a piece so far, and, once its documents are exhausted, the hash of its range of the file."""

    bytes: int = 0
    """Bytes of the range on the disk, compressed ones as they are."""
    documents: int = 0
    empty: int = 0
    """Documents without a byte, which are left out."""
    _hash: Any = field(default_factory=hashlib.sha256, repr=False)

    def add(self, data: bytes | memoryview) -> None:
        """Count and hash the next bytes of the range."""
        self.bytes += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        """Of all bytes that were added."""
        return self._hash.hexdigest()


def cut(source: Source, piece_bytes: int) -> list[Piece]:
    """The pieces of a file, of `piece_bytes` each but the last. An empty file has none.

    Only files in which a document can be found from the middle are cut: text with a separator, JSON lines, Parquet.

    Raises:
        RangeError: for a piece of no bytes.
    """
    if piece_bytes < 1:
        raise RangeError(f"got pieces of {piece_bytes} bytes, expected at least 1", "some millions")
    whole = source.compression is not None or (source.kind == "text" and source.separator is None)
    if source.size is None:
        return [_piece(source, 0, None)]
    step = max(source.size, 1) if whole else piece_bytes
    return [_piece(source, start, min(start + step, source.size)) for start in range(0, source.size, step)]


def _piece(source: Source, start: int, stop: int | None) -> Piece:
    return Piece(
        path=source.path,
        start=start,
        stop=stop,
        kind=source.kind,
        compression=source.compression,
        separator=source.separator,
        field=source.field,
    )
