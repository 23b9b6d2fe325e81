"""Split the texts of a file at separators, from any place of the file and in constant memory.

Documents are the parts that `bytes.split` returns. It finds separators from left to right, and they do not overlap. If
a separator is two newlines and a text has three, the text before them decides which two are the separator. So a range
that begins in the middle of a file is read from an earlier place that cannot be inside a separator (`clean_start`). A
byte order mark at the beginning of a file is dropped. All other bytes are kept, including carriage returns and bytes
that are not UTF-8.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, NamedTuple

from locant.text.prepare.byte_ranges import BLOCK, ByteRange, Tally, blocks, change_error, range_blocks
from locant.text.prepare.compression import open_unpacked

BOM = codecs.BOM_UTF8


class SplitTexts(NamedTuple):
    """A `Batch`, with the place in the file at which its first text or part of a text begins."""

    texts: list[bytes]
    unfinished: bool
    begin: int


def split_texts(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    """Yield the texts between separators (or the only text) that begin in a byte range, in parts of `longest` bytes."""
    if separator is None or not byte_range.source.can_be_cut:
        return _split_stream(file, byte_range, tally, separator, longest)
    return _split_range(file, byte_range, tally, separator, longest)


def _split_range(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes, longest: int
) -> Iterator[SplitTexts]:
    _, start, stop = byte_range

    def read(low: int, high: int) -> bytes:
        file.seek(low)
        return file.read(high - low)

    def read_after() -> Iterator[bytes]:
        file.seek(stop)
        size = 4096  # a document that has begun usually ends soon
        while data := file.read(min(size, BLOCK)):
            yield data
            size *= 2

    origin = len(BOM) if read(0, len(BOM)) == BOM else 0
    tally.add(read(start, max(min(origin, stop), start)))
    begin = clean_start(read, origin, max(start - len(separator), origin), separator)
    within = range_blocks(file, byte_range, tally, begin)
    yield from _split(within, read_after(), separator, begin=begin, first=start, longest=longest)


def _split_stream(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    counted = tally.bytes
    with open_unpacked(file, byte_range.source, tally) as stream:
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
        raise change_error(byte_range)


def clean_start(read: Callable[[int, int], bytes], origin: int, position: int, separator: bytes) -> int:
    """Return the last place between `origin` and `position` that cannot be inside a separator."""
    size = len(separator)
    while position > origin:
        low = max(position - size + 1, origin)
        place = read(low, position + size - 1).find(separator)
        if place < 0:
            return position
        position = low + place
    return origin


def _split(
    within: Iterable[bytes], more: Iterable[bytes], separator: bytes, *, begin: int, first: int, longest: int
) -> Iterator[SplitTexts]:
    """Yield the texts that begin in `within`, except texts that begin before `first`.

    The bytes of `within` begin at `begin`, a clean start. The bytes of `more` follow them. Only the bytes up to
    the end of the last text are read.
    """
    # The unfinished document: its bytes, which begin at `begin`, whether a part was yielded, and whether to drop it.
    rest, goes_on, dropping = b"", False, begin < first
    keep = len(separator) - 1  # bytes that may be the beginning of a separator

    def blocks_after() -> Iterator[tuple[bytes, int]]:
        if not dropping and (rest or goes_on):  # otherwise the next document begins here
            yield from ((block, 1) for block in more)

    for block, most in chain(((block, -1) for block in within), blocks_after()):
        *texts, rest = (rest + block).split(separator, most)
        dropped = 0
        while dropping and dropped < len(texts):
            begin += len(texts[dropped]) + len(separator)
            dropped += 1
            dropping = begin < first
        if finished := texts[dropped:]:
            yield SplitTexts(finished, False, begin)
            begin += sum(map(len, finished)) + len(finished) * len(separator)
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
