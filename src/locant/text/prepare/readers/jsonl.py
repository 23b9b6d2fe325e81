"""JSON lines: a record on each line, with the document in one of its fields.

A field is named by its key. Where no key is spelled so, a dot leads into a record within the record: ``meta.text``.
Null is an empty document.

What is not UTF-8 is read as U+FFFD; so is a lone surrogate, which only an escape can make. A line that is no record, or
has no such field, ends the run; blank lines are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from locant.errors import InputError
from locant.files import FaultError
from locant.text.prepare.byte_ranges import ByteRange, Tally
from locant.text.prepare.readers.streams import BLOCK, opened
from locant.text.prepare.readers.text import split_texts
from locant.text.reading import well_formed

__all__ = ["json_texts"]

LONGEST_LINE = 2**26
"""In bytes; a line is parsed as a whole."""


def json_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally) -> Iterator[bytes]:
    """The text of each line that begins in a byte range."""
    first, seen = None, 0
    for lines, unfinished, begin in split_texts(file, byte_range, tally, b"\n", LONGEST_LINE):
        first = begin if first is None else first
        for line in lines:
            try:
                if unfinished:
                    raise FaultError(f"has more than {LONGEST_LINE} bytes")
                if line.strip():
                    yield _text_of(line, byte_range.source.field)
            except FaultError as error:
                number = _lines_before(byte_range, first) + seen + 1
                cause = f"{byte_range.source.name}, line {number} (at byte {begin}) {error}"
                raise InputError(cause, "mending or removing that line") from None
            seen += 1
            begin += len(line) + 1


def _text_of(line: bytes, field: str) -> bytes:
    try:
        record = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise FaultError(f"is no JSON: {error}") from None
    text = _lookup(record, field)
    if text is None:
        return b""
    if not isinstance(text, str):
        raise FaultError(f"has a {type(text).__name__} in {field!r}, expected a string")
    return well_formed(text).encode()


def _lookup(record: Any, field: str) -> Any:  # whatever JSON holds
    if not isinstance(record, dict):
        raise FaultError(f"is a JSON {type(record).__name__}, expected an object")
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    if not inner or outer not in record:
        known = ", ".join(map(repr, [*record][:8])) or "none"
        raise FaultError(f"has no field {outer!r}; its fields are: {known}")
    return _lookup(record[outer], inner)


def _lines_before(byte_range: ByteRange, place: int) -> int:
    """Lines of the file before `place`; of a compressed one, which is one range, there are none."""
    if not byte_range.start:
        return 0
    with opened(byte_range.source) as file:
        count = 0
        while place > 0 and (data := file.read(min(BLOCK, place))):
            count += data.count(b"\n")
            place -= len(data)
    return count
