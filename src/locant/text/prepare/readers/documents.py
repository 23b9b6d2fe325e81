"""The documents of a byte range, in batches.

A text is one document, or what stands between separators, found from left to right as `bytes.split` does. A line of
JSON and a row of Parquet are one each. Documents without a byte are left out: what follows the last separator, a blank
line, null. White space is a document. A byte order mark at the beginning of a file is dropped, and everything else is
kept as it stands, carriage returns and bytes that are not UTF-8 included.

A document that is longer than a batch comes in parts, the last text of a batch that is `unfinished` and the first of
the next one; a part may end within a letter. `Engine.stream`, which knows where a text may be cut, takes such batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from locant.text.prepare.byte_ranges import ByteRange, Tally
from locant.text.prepare.readers.jsonl import json_texts
from locant.text.prepare.readers.parquet import parquet_texts
from locant.text.prepare.readers.streams import BLOCK, opened
from locant.text.prepare.readers.text import SplitTexts, split_texts

__all__ = ["Batch", "documents"]

_OVERHEAD = 40  # bytes that Python takes for a short text besides its own


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
            size += len(batch[-1]) + _OVERHEAD
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
