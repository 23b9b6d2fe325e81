"""A sample of the input: stretches from places spread evenly over all of it, the same ones for the same input.

The default tokenizer learns from it, a fast engine is checked on it, and a dry run counts it. Where a document cannot
be found from the middle (compressed files, a text that is one document) stretches are beginnings of files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from locant.text.prepare.byte_ranges import ByteRange, Source, Tally, cut
from locant.text.prepare.readers import documents

__all__ = ["CHECKED_BYTES", "TRAINING_BYTES", "Sample", "take_sample"]

TRAINING_BYTES = 8 * 2**20
"""What a tokenizer learns from: two to three seconds of training."""

CHECKED_BYTES = 2**19
"""What an engine is checked on."""

STRETCH = 2**15
"""Bytes from each place: enough for a few documents, few enough for a sample of many places."""

MOST = 2**26
"""Bytes of text that are unpacked to learn how far files are compressed."""


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
