"""Finding the documents between separators, from anywhere in a file and in constant memory.

Documents are what `bytes.split` gives: separators are found from left to right and do not overlap. A separator such
as two newlines can overlap with itself, and then which of three newlines belong to it depends on all before them. So
whoever begins in the middle goes back to a place that no separator can cover (`clean_start`), and comes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Parts", "clean_start", "split"]

Read = Callable[[int, int], bytes]
"""Bytes `start` to `stop` of a file, fewer at its end."""


class Parts(NamedTuple):
    """Documents in order; where `unfinished`, the last one goes on as the first of the next `Parts`.

    `begin` is where the first one stands in the file (of a document that goes on: where it goes on).
    """

    texts: list[bytes]
    unfinished: bool
    begin: int


def clean_start(read: Read, origin: int, position: int, separator: bytes) -> int:
    """The largest place from `origin` up to `position` that certainly lies in no separator but at its beginning.

    One step for a separator that cannot overlap with itself. For one that can, a step for each that overlaps with the
    next: long runs only cost time.
    """
    size = len(separator)
    while position > origin:
        low = max(position - size + 1, origin)
        found = read(low, position + size - 1).find(separator)
        if found < 0:
            return position
        position = low + found
    return origin


def split(
    blocks: Iterable[bytes], more: Iterable[bytes], separator: bytes, *, begin: int, first: int, longest: int
) -> Iterator[Parts]:
    """The documents that begin in `blocks`.

    Args:
        blocks: consecutive bytes from a clean start on.
        more: what comes after them, read only as far as the last document goes.
        separator: at least one byte.
        begin: where the first of the bytes stands in the file.
        first: documents that begin before this place are left out.
        longest: how many bytes of a document are kept before they are handed out as a part.
    """
    splitter = _Splitter(separator, begin, first, longest)
    for block in blocks:
        yield from splitter.add(block)
    if not splitter.dropping and (splitter.rest or splitter.open):  # else the next document begins behind the blocks
        for block in more:
            *whole, rest = (splitter.rest + block).split(separator, 1)
            if whole:
                splitter.rest = whole[0]
                break
            splitter.rest = rest
            yield from splitter.spill()
    yield from splitter.end()


class _Splitter:
    """The state between two blocks: the bytes of a document whose end was not seen."""

    def __init__(self, separator: bytes, begin: int, first: int, longest: int) -> None:
        self.separator = separator
        self.begin = begin  # where `rest` begins
        self.rest = b""
        self.open = False  # whether a part of the document of `rest` was handed out before
        self.first = first
        self.longest = longest
        self.dropping = begin < first

    def add(self, block: bytes) -> Iterator[Parts]:
        *texts, self.rest = (self.rest + block).split(self.separator)
        begin, dropped = self.begin, 0
        self.begin += sum(map(len, texts)) + len(texts) * len(self.separator)
        while self.dropping and dropped < len(texts):
            begin += len(texts[dropped]) + len(self.separator)
            dropped += 1
            self.dropping = begin < self.first
        if texts[dropped:]:
            yield Parts(texts[dropped:], False, begin)
        self.open = self.open and not texts
        yield from self.spill()

    def spill(self) -> Iterator[Parts]:
        """Hand out a part, all but what may be the beginning of a separator."""
        keep = len(self.separator) - 1
        if len(self.rest) >= self.longest + keep:
            size = len(self.rest) - keep
            if not self.dropping:
                yield Parts([self.rest[:size]], True, self.begin)
            self.rest, self.begin, self.open = self.rest[size:], self.begin + size, True

    def end(self) -> Iterator[Parts]:
        if not self.dropping and (self.rest or self.open):
            yield Parts([self.rest], False, self.begin)
