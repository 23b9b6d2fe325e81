"""Texts between separators, from anywhere in a file and in constant memory.

Documents are what `bytes.split` gives: separators are found from left to right and do not overlap. A separator such
as two newlines can overlap with itself, and then which of three newlines belong to it depends on all before them. So
a range that begins in the middle is read from an earlier place on that no separator can cover (`clean_start`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, NamedTuple

from locant.text.prepare.readers.streams import BLOCK, ByteRange, Tally, blocks, changed, range_blocks, unpacked

__all__ = ["SplitTexts", "clean_start", "split_texts"]

BOM = codecs.BOM_UTF8


class SplitTexts(NamedTuple):
    """Texts in order; where `unfinished`, the last one goes on as the first of the next ones.

    `begin` is where the first one stands in the file (of a text that goes on: where it goes on).
    """

    texts: list[bytes]
    unfinished: bool
    begin: int


def split_texts(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    """The texts between separators that begin in a byte range, those of more than `longest` bytes in parts.

    Without a separator, all of it is one.
    """
    if separator is None or byte_range.source.compression is not None:
        return _of_stream(file, byte_range, tally, separator, longest)
    return _of_range(file, byte_range, tally, separator, longest)


def _of_range(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes, longest: int
) -> Iterator[SplitTexts]:
    """Of a range of a file in which one can go back and forth."""
    _, start, stop = byte_range

    def read(low: int, high: int) -> bytes:
        file.seek(low)
        return file.read(high - low)

    def behind() -> Iterator[bytes]:
        file.seek(stop)
        size = 4096  # a document that has begun usually ends soon
        while data := file.read(min(size, BLOCK)):
            yield data
            size *= 2

    origin = len(BOM) if read(0, len(BOM)) == BOM else 0
    tally.add(read(start, max(min(origin, stop), start)))
    begin = clean_start(read, origin, max(start - len(separator), origin), separator)
    within = range_blocks(file, byte_range, tally, begin)
    yield from _split(within, behind(), separator, begin=begin, first=start, longest=longest)


def _of_stream(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    """Of what can only be read from its beginning to its end."""
    counted = tally.bytes
    with unpacked(file, byte_range.source, tally) as stream:
        head = b""
        while len(head) < len(BOM) and (more := stream.read(BLOCK)):
            head += more
        origin = len(BOM) if head.startswith(BOM) else 0
        within = chain([head[origin:]], blocks(stream))
        if separator is not None:
            yield from _split(within, (), separator, begin=origin, first=origin, longest=longest)
        else:
            last = b""
            for data in within:
                if last:
                    yield SplitTexts([last], True, origin)
                    origin += len(last)
                last = data
            if last:
                yield SplitTexts([last], False, origin)
    if tally.bytes - counted != byte_range.stop:
        raise changed(byte_range)


def clean_start(read: Callable[[int, int], bytes], origin: int, position: int, separator: bytes) -> int:
    """The largest place from `origin` up to `position` that certainly lies in no separator but at its beginning."""
    size = len(separator)
    while position > origin:
        low = max(position - size + 1, origin)
        found = read(low, position + size - 1).find(separator)
        if found < 0:
            return position
        position = low + found
    return origin


def _split(
    found: Iterable[bytes], more: Iterable[bytes], separator: bytes, *, begin: int, first: int, longest: int
) -> Iterator[SplitTexts]:
    """The texts that begin in `found`, which stands at `begin`, a clean start, but none that begins before `first`.

    `more` is what comes after `found`, read only as far as the last text goes.
    """
    # Of the document whose end was not seen: its bytes, from `begin` on, whether a part was given, or it is dropped.
    rest, goes_on, dropping = b"", False, begin < first
    keep = len(separator) - 1  # bytes that may be the beginning of a separator

    def behind() -> Iterator[tuple[bytes, int]]:
        if not dropping and (rest or goes_on):  # else the next document begins there
            yield from ((block, 1) for block in more)

    for block, most in chain(((block, -1) for block in found), behind()):
        *texts, rest = (rest + block).split(separator, most)
        dropped = 0
        while dropping and dropped < len(texts):
            begin += len(texts[dropped]) + len(separator)
            dropped += 1
            dropping = begin < first
        if kept := texts[dropped:]:
            yield SplitTexts(kept, False, begin)
            begin += sum(map(len, kept)) + len(kept) * len(separator)
        if texts and most == 1:
            return
        goes_on = goes_on and not texts
        if len(rest) >= longest + keep:
            size = len(rest) - keep
            if not dropping:
                yield SplitTexts([rest[:size]], True, begin)
            rest, begin, goes_on = rest[size:], begin + size, True
    if not dropping and (rest or goes_on):
        yield SplitTexts([rest], False, begin)
