"""Reading a piece: its bytes, the documents between them, and what was read."""

from __future__ import annotations

import codecs
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator

from locant.errors import InputError
from locant.text.prepare.pieces import Batch, Piece, Tally
from locant.text.prepare.records import LINE, gathered, json_texts, parquet_texts
from locant.text.prepare.splitting import Parts, clean_start, split
from locant.text.prepare.streams import BLOCK, File, blocks, call, opened, unpacked
from locant.text.reading import Readable

__all__ = ["SNIFFED", "documents", "require_text"]

SNIFFED = 8192
"""How much of a file is looked at to tell text from other things."""


def require_text(data: bytes, name: str) -> None:
    """Refuse what begins like UTF-16 or like a binary file."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{name} begins like UTF-16, expected UTF-8", "iconv -f UTF-16 -t UTF-8 on it first")
    if (zero := data.find(0, 0, SNIFFED)) >= 0:
        raise InputError(f"{name} is binary: byte {zero} is NUL, expected text in UTF-8", "a text file")


def documents(piece: Piece, tally: Tally | None = None) -> Iterator[Batch]:
    """The documents that begin in a piece, in order, in batches of some megabytes.

    Args:
        piece: what to read.
        tally: counts on, and has the hash of the range of the file when all documents were taken.

    Raises:
        InputError: for a file that cannot be read, is damaged, has become shorter, or has a bad record in it.
    """
    tally = Tally() if tally is None else tally
    with opened(piece.path) as file:
        if piece.kind == "parquet":
            yield from gathered(_parquet(file, piece, tally), tally)
        elif piece.kind == "jsonl":
            yield from gathered(json_texts(_parts(file, piece, tally, b"\n", LINE), piece), tally)
        else:
            separator = None if piece.separator is None else piece.separator.encode(errors="surrogateescape")
            yield from _texts(_parts(file, piece, tally, separator, BLOCK), tally)


def _texts(parts: Iterable[Parts], tally: Tally) -> Iterator[Batch]:
    """Without the documents that have no byte; the end of one that had some may have none."""
    goes_on = False
    for texts, unfinished, _ in parts:
        kept = [text for i, text in enumerate(texts) if text or (goes_on and i == 0)]
        tally.empty += len(texts) - len(kept)
        tally.documents += len(kept) - goes_on
        if kept:
            yield Batch(kept, unfinished)
        goes_on = unfinished


def _parts(file: File, piece: Piece, tally: Tally, separator: bytes | None, longest: int) -> Iterator[Parts]:
    """The documents of a text, or the lines of a file."""
    if piece.compression is None and separator is not None and piece.stop is not None:
        return _ranged(file, piece, tally, separator, longest)
    return _streamed(file, piece, tally, separator, longest)


def _ranged(file: File, piece: Piece, tally: Tally, separator: bytes, longest: int) -> Iterator[Parts]:
    """Of a range of a file in which one can go back and forth."""
    start, stop = piece.start, piece.stop or 0

    def read(low: int, high: int) -> bytes:
        file.seek(low)
        return file.read(high - low)

    def within(begin: int) -> Iterator[bytes]:
        for low in range(begin, stop, BLOCK):
            data = read(low, min(low + BLOCK, stop))
            if len(data) < min(BLOCK, stop - low):
                raise _changed(piece)
            tally.add(memoryview(data)[max(start - low, 0) :])
            yield data

    def behind() -> Iterator[bytes]:
        file.seek(stop)
        size = 4096  # a document that has begun usually ends soon
        while data := file.read(min(size, BLOCK)):
            yield data
            size *= 2

    origin = len(codecs.BOM_UTF8) if read(0, 3) == codecs.BOM_UTF8 else 0
    tally.add(read(start, max(min(origin, stop), start)))
    begin = clean_start(read, origin, max(start - len(separator), origin), separator)
    yield from split(within(begin), behind(), separator, begin=begin, first=start, longest=longest)


def _streamed(file: File, piece: Piece, tally: Tally, separator: bytes | None, longest: int) -> Iterator[Parts]:
    """Of what can only be read from its beginning to its end."""
    name, counted = call(piece.path), tally.bytes
    with unpacked(file, piece.compression, name, tally) as stream:
        data = _filled(stream)
        require_text(data, name)
        origin = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        pieces = _chained(data[origin:], stream)
        if separator is None:
            yield from _whole(pieces, origin)
        else:
            yield from split(pieces, (), separator, begin=origin, first=origin, longest=longest)
    if piece.stop is not None and tally.bytes - counted != piece.stop:
        raise _changed(piece)


def _changed(piece: Piece) -> InputError:
    return InputError(f"{piece.path} has changed: it had {piece.stop} bytes or more", "the same again, on a quiet file")


def _filled(stream: Readable) -> bytes:
    """The first bytes of a stream, which may come in smaller portions: enough to look at."""
    data = b""
    while len(data) < SNIFFED and (more := stream.read(BLOCK)):
        data += more
    return data


def _chained(data: bytes, stream: Readable) -> Iterator[bytes]:
    if data:
        yield data
    yield from blocks(stream)


def _whole(pieces: Iterable[bytes], begin: int) -> Iterator[Parts]:
    """All of it is one document."""
    held = b""
    for data in pieces:
        if held:
            yield Parts([held], True, begin)
            begin += len(held)
        held = data
    if held:
        yield Parts([held], False, begin)


def _parquet(file: File, piece: Piece, tally: Tally) -> Iterator[bytes]:
    """The texts of a Parquet file, whose bytes are counted and hashed by themselves: rows are not read in order."""
    stop = piece.stop or 0
    if piece.compression is not None:
        with tempfile.TemporaryFile() as whole, unpacked(file, piece.compression, piece.path, tally) as stream:
            for data in blocks(stream):
                whole.write(data)
            size = whole.tell()
            yield from parquet_texts(whole, dataclasses.replace(piece, start=0, stop=None), size)
        return
    file.seek(piece.start)
    for low in range(piece.start, stop, BLOCK):
        data = file.read(min(BLOCK, stop - low))
        if len(data) < min(BLOCK, stop - low):
            raise _changed(piece)
        tally.add(data)
    yield from parquet_texts(file, piece, file.seek(0, os.SEEK_END))
