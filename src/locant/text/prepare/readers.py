"""Read the documents of each kind of file, in batches of about a megabyte.

`separators`, `json_lines` and `parquet_rows` read the texts of each kind. A document without bytes is left out. A
document that is longer than a batch comes in parts: the last text of an `unfinished` batch, and the first text of the
next batch. A part may end in the middle of a character. `Engine.stream` accepts such batches, because it knows where a
text may be cut.
"""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from locant.errors import InputError, Remedy
from locant.text.prepare.byte_ranges import BLOCK, ByteRange, Source, Tally, open_source
from locant.text.prepare.json_lines import json_texts
from locant.text.prepare.parquet_rows import parquet_texts
from locant.text.prepare.separators import SplitTexts, split_texts
from locant.text.prepare.sources import require_its_kind
from locant.text.prepare.text_encodings import is_clean

OVERHEAD = 40
"""Bytes that Python needs for a short text in addition to its content."""


class Batch(NamedTuple):
    """Documents in order. If `unfinished`, the first text of the next batch continues the last document."""

    texts: list[bytes]
    unfinished: bool


def documents(byte_range: ByteRange, tally: Tally, *, skip_bad: bool = False) -> Iterator[Batch]:
    """Yield the documents that begin in a byte range, in order, in batches of about a megabyte.

    When all documents are read, `tally` has the hash of the range, and the number of documents with bytes that their
    encoding does not define. With `skip_bad`, it also counts the skipped lines of JSON. A truncated file is an error
    even then.
    """
    goes_on, decoder, is_counted = False, codecs.getincrementaldecoder("utf-8")(), False
    for texts, unfinished in _batches(byte_range, tally, skip_bad):
        yield Batch(texts, unfinished)
        if byte_range.source.kind == "jsonl":  # lines of JSON are already counted
            continue
        recoded = byte_range.source.encoding is not None
        if goes_on or unfinished or not is_clean(texts, recoded):
            for number, text in enumerate(texts):
                if number or not goes_on:
                    decoder.reset()
                    is_counted = False
                last = not unfinished or number < len(texts) - 1
                if not is_counted and not is_clean([text], recoded, decoder, last):
                    is_counted = True
                    tally.not_utf8 += 1
        goes_on = unfinished


def _batches(byte_range: ByteRange, tally: Tally, skip_bad: bool) -> Iterator[Batch]:
    source = byte_range.source
    with open_source(source) as file:
        if source.kind == "parquet":
            yield from _to_batches(parquet_texts(file, byte_range, tally), tally)
        elif source.kind == "jsonl":
            yield from _to_batches(json_texts(file, byte_range, tally, skip_bad), tally)
        else:
            separator = None if source.separator is None else source.separator.encode(errors="surrogateescape")
            yield from _without_empty(split_texts(file, byte_range, tally, separator, BLOCK), tally)


def _to_batches(texts: Iterable[bytes], tally: Tally) -> Iterator[Batch]:
    """Yield texts in batches of about a block, without empty texts. Longer texts come in parts."""
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


def _without_empty(batches: Iterable[SplitTexts], tally: Tally) -> Iterator[Batch]:
    """Yield batches without empty documents. The last part of a document that has bytes may be empty."""
    goes_on = False
    for texts, unfinished, _ in batches:
        texts = [text for i, text in enumerate(texts) if text or (goes_on and i == 0)]
        tally.documents += len(texts) - goes_on
        if texts:
            yield Batch(texts, unfinished)
        goes_on = unfinished


def without_text(cause: str, sources: Sequence[Source], skip_bad: bool) -> InputError:
    """Return the error for sources that gave no text. It counts the broken ones, and states the fault of the first."""
    faults = [fault for source in sources if skip_bad and (fault := _fault(source)) is not None]
    if not faults:
        why = "no input has a document that can be used" if skip_bad else "the inputs have no documents"
        return InputError(f"{cause}: {why}", Remedy("pass other paths, {} or {}", separator=..., field=...))
    skipped = "1 file was skipped as broken" if len(faults) == 1 else f"{len(faults)} files were skipped as broken"
    remedy = faults[0].remedy
    if isinstance(remedy, Remedy) and "skip_bad" in remedy.arguments:
        remedy = "repair it and run again"
    return InputError(f"{cause}: {skipped}: {faults[0].cause}", remedy)


def _fault(source: Source) -> InputError | None:
    """Return the error for which a source is skipped, as a whole or in part, or ``None`` if it can be read."""
    try:
        with warnings.catch_warnings(action="ignore"):  # these warnings were given when the file was found
            require_its_kind(source, [])
        for _ in documents(ByteRange(source, 0, source.size or 0), Tally()):
            pass
    except InputError as error:
        return error
    return None
