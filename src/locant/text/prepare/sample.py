"""Take samples of documents from all parts of the sources."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate

from locant.errors import InputError
from locant.text.prepare.byte_ranges import ByteRange, Source, Tally, cut
from locant.text.prepare.readers import documents

TRAINING_BYTES = 8 * 2**20
"""Bytes of text on which a tokenizer is trained, in two to three seconds."""

CHECKED_BYTES = 2**19
"""Bytes of text on which an engine is checked."""

BYTES_PER_PLACE = 2**15
"""Bytes that a sample takes from each place. They are enough for a few documents, and few enough for many places."""

MAX_UNPACKED = 2**26
"""The most bytes of text to unpack for an estimate of how much the files are compressed."""


@dataclass(kw_only=True)
class Sample:
    """Documents from all parts of the input, and the amount of input that they represent."""

    texts: list[bytes] = field(default_factory=list)
    """Whole documents, and beginnings of long documents."""
    bytes_read: int = 0
    """Bytes of the input that were read for the texts. `bytes_unpacked` is larger if the input is compressed."""
    bytes_unpacked: int = 0
    documents: int = 0
    """The number of documents that were read from files with several documents."""
    multi_document_bytes: int = 0
    """Bytes that were read from files with several documents."""
    is_all: bool = False
    """True if this is the whole input, so that counts are exact."""

    @property
    def size(self) -> int:
        """The number of bytes of the texts."""
        return sum(map(len, self.texts))

    def all_documents(self, sources: Sequence[Source]) -> int:
        """Return the number of documents of the input, which is an estimate unless `is_all`."""
        if self.is_all:
            return len(self.texts)
        single = sum(source.is_one_document and source.size != 0 for source in sources)
        rest = sum(source.size or 0 for source in sources if not source.is_one_document)
        return single + round(self.documents * rest / max(self.multi_document_bytes, 1))


def take_sample(sources: Sequence[Source], size: int, *, skip_bad: bool = False) -> Sample:
    """Return about `size` bytes of text from all parts of the sources, or the whole text if it is shorter.

    With `skip_bad`, unreadable input is left out.
    """
    ends = list(accumulate(source.size or 0 for source in sources))
    plain = all(source.compression is None and source.kind != "parquet" for source in sources)
    is_all = plain and (not ends or ends[-1] <= size)
    sample = Sample(is_all=is_all)
    whole = (byte_range for source in sources for byte_range in cut(source, max(source.size or 0, 1)))
    for byte_range in whole if is_all else _spaced_ranges(sources, ends, size):
        with suppress(InputError) if skip_bad else nullcontext():
            _add(sample, byte_range, None if is_all else BYTES_PER_PLACE, skip_bad)
    return sample


def _spaced_ranges(sources: Sequence[Source], ends: Sequence[int], size: int) -> Iterator[ByteRange]:
    """Yield the byte ranges that begin at evenly spaced places, without repetitions."""
    places, total = max(size // BYTES_PER_PLACE, 1), ends[-1]
    seen: set[tuple[str, int]] = set()
    for i in range(places):
        place = i * total // places
        number = bisect_right(ends, place)
        source = sources[number]
        end = source.size or 0
        begin = place - (ends[number] - end) if source.can_be_cut else 0
        if (source.path, begin) not in seen:
            seen.add((source.path, begin))
            yield ByteRange(source, begin, min(begin + BYTES_PER_PLACE, end) if source.can_be_cut else end)


def _add(sample: Sample, byte_range: ByteRange, limit: int | None, skip_bad: bool) -> None:
    """Add the first documents of a byte range to the sample, at most `limit` bytes."""
    source, tally, room, goes_on, unpacked = byte_range.source, Tally(), limit, False, sample.bytes_unpacked
    for batch in documents(byte_range, tally, skip_bad=skip_bad):
        for i, text in enumerate(batch.texts):
            if room is None or room > 0:
                if not (goes_on and i == 0):
                    sample.texts.append(b"")
                sample.texts[-1] += _beginning(text, room)
                room = None if room is None else room - len(text)
        goes_on = batch.unfinished
        sample.bytes_unpacked += sum(map(len, batch.texts))
        enough = room is not None and room <= 0
        # A reader of a compressed file reads ahead, so a short piece would not show how much the file is compressed.
        if enough and (source.compression is None or sample.bytes_unpacked > MAX_UNPACKED):
            break
    if not source.is_one_document:
        sample.multi_document_bytes += tally.bytes
        sample.documents += tally.documents
    is_ahead = source.is_one_document and source.compression is None  # its reader is a block ahead of its texts
    sample.bytes_read += sample.bytes_unpacked - unpacked if is_ahead else tally.bytes


def _beginning(text: bytes, size: int | None) -> bytes:
    """Return at most `size` bytes of the beginning of a text, without splitting a character."""
    if size is None or len(text) <= size:
        return text
    while size and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]
