"""Reading: from a range of a file's bytes to the documents that begin there, in batches; and a sample of all of them.

`documents` asks `text` or `records`, which get their bytes from `streams`.

A text is one document, or what stands between separators, found from left to right as `bytes.split` does. A line of
JSON and a row of Parquet are one each. Documents without a byte are left out: what follows the last separator, a blank
line, null. White space is a document. A byte order mark at the beginning of a file is dropped, and everything else is
kept as it stands, carriage returns and bytes that are not UTF-8 included.

A document that is longer than a batch comes in parts, the last text of a batch that is `unfinished` and the first of
the next one; a part may end within a letter. `Engine.stream`, which knows where a text may be cut, takes such batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from locant.text.prepare.readers.records import json_texts, parquet_texts
from locant.text.prepare.readers.streams import BLOCK, ByteRange, Source, Tally, cut, opened
from locant.text.prepare.readers.text import SplitTexts, split_texts

__all__ = ["CHECKED_BYTES", "TRAINING_BYTES", "Batch", "Sample", "documents", "take_sample"]


OVERHEAD = 40  # bytes that Python takes for a short text besides its own

TRAINING_BYTES = 8 * 2**20
"""What a tokenizer learns from: two to three seconds of training."""

CHECKED_BYTES = 2**19
"""What an engine is checked on."""

STRETCH = 2**15
"""Bytes from each place: enough for a few documents, few enough for a sample of many places."""

MOST = 2**26
"""Bytes of text that are unpacked to learn how far files are compressed."""


class Batch(NamedTuple):
    """Documents in order. Where `unfinished`, the last one goes on as the first of the next batch."""

    texts: list[bytes]
    unfinished: bool


def documents(byte_range: ByteRange, tally: Tally) -> Iterator[Batch]:
    """The documents that begin in a byte range, in order, in batches of about a megabyte.

    `tally` has the hash of the range when all documents were taken.
    """
    source = byte_range.source
    with opened(source) as file:
        if source.kind == "parquet":
            yield from _gathered(parquet_texts(file, byte_range, tally), tally)
        elif source.kind == "jsonl":
            yield from _gathered(json_texts(file, byte_range, tally), tally)
        else:
            separator = None if source.separator is None else source.separator.encode(errors="surrogateescape")
            yield from _without_empty(split_texts(file, byte_range, tally, separator, BLOCK), tally)


def _gathered(texts: Iterable[bytes], tally: Tally) -> Iterator[Batch]:
    """Texts in batches of about a block; a longer text in parts. Empty ones are left out."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        tally.documents += bool(text)
        for begin in range(0, len(text), BLOCK):
            end = begin + BLOCK
            batch.append(text[begin:end])
            size += len(batch[-1]) + OVERHEAD
            if size >= BLOCK or end < len(text):
                yield Batch(batch, end < len(text))
                batch, size = [], 0
    if batch:
        yield Batch(batch, False)


def _without_empty(found: Iterable[SplitTexts], tally: Tally) -> Iterator[Batch]:
    """Without the documents that have no byte; the end of one that had some may have none."""
    goes_on = False
    for texts, unfinished, _ in found:
        kept = [text for i, text in enumerate(texts) if text or (goes_on and i == 0)]
        tally.documents += len(kept) - goes_on
        if kept:
            yield Batch(kept, unfinished)
        goes_on = unfinished


@dataclass(kw_only=True)
class Sample:
    """Documents from all over the input, and what they stand for."""

    texts: list[bytes] = field(default_factory=list)
    """Whole documents, and beginnings of long ones."""
    read: int = 0
    """Bytes of the input that were read for them; `unpacked` is more where it is compressed."""
    unpacked: int = 0
    documents: int = 0
    """In files with several, of which `of_many` bytes were read."""
    of_many: int = 0
    is_all: bool = False
    """Whether that was all there is, so that counts are exact."""

    @property
    def size(self) -> int:
        """Bytes of the texts."""
        return sum(map(len, self.texts))

    def all_documents(self, sources: Sequence[Source]) -> int:
        """How many documents the input has, or about."""
        if self.is_all:
            return len(self.texts)
        single = sum(source.is_one_document and source.size != 0 for source in sources)
        rest = sum(source.size or 0 for source in sources if not source.is_one_document)
        return single + round(self.documents * rest / max(self.of_many, 1))


def take_sample(sources: Sequence[Source], size: int) -> Sample:
    """About `size` bytes of text from all over the sources; all of them, where they are no larger."""
    ends = list(accumulate(source.size or 0 for source in sources))
    plain = all(source.compression is None and source.kind != "parquet" for source in sources)
    is_all = plain and (not ends or ends[-1] <= size)
    sample = Sample(is_all=is_all)
    whole = (byte_range for source in sources for byte_range in cut(source, max(source.size or 0, 1)))
    for byte_range in whole if is_all else _spread(sources, ends, size):
        _add(sample, byte_range, None if is_all else STRETCH)
    return sample


def _spread(sources: Sequence[Source], ends: Sequence[int], size: int) -> Iterator[ByteRange]:
    """The byte ranges that begin at evenly spread places, each once."""
    places, total = max(size // STRETCH, 1), ends[-1]
    seen: set[tuple[str, int]] = set()
    for i in range(places):
        place = i * total // places
        number = bisect_right(ends, place)
        source = sources[number]
        end = source.size or 0
        begin = place - (ends[number] - end) if source.can_be_cut else 0
        if (source.path, begin) not in seen:
            seen.add((source.path, begin))
            yield ByteRange(source, begin, min(begin + STRETCH, end) if source.can_be_cut else end)


def _add(sample: Sample, byte_range: ByteRange, limit: int | None) -> None:
    """The first documents of a byte range, no more than `limit` bytes of them."""
    source, tally, room, goes_on, unpacked = byte_range.source, Tally(), limit, False, sample.unpacked
    for batch in documents(byte_range, tally):
        for i, text in enumerate(batch.texts):
            if room is None or room > 0:
                if not (goes_on and i == 0):
                    sample.texts.append(b"")
                sample.texts[-1] += _beginning(text, room)
                room = None if room is None else room - len(text)
        goes_on = batch.unfinished
        sample.unpacked += sum(map(len, batch.texts))
        enough = room is not None and room <= 0
        # Less of a compressed file would say little of how far it is compressed: it is read some way ahead.
        if enough and (source.compression is None or sample.unpacked > MOST):
            break
    if not source.is_one_document:
        sample.of_many += tally.bytes
        sample.documents += tally.documents
    is_ahead = source.is_one_document and source.compression is None  # its reader has read a block more than it gave
    sample.read += sample.unpacked - unpacked if is_ahead else tally.bytes


def _beginning(text: bytes, size: int | None) -> bytes:
    """At most `size` bytes, and no part of a character."""
    if size is None or len(text) <= size:
        return text
    while size and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]
