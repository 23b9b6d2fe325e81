"""Read the texts of JSON lines.

The field is a key. A dot separates the keys of nested records (``meta.text``), unless a key contains the dot. Null is
an empty document. Bytes that are not UTF-8 become U+FFFD, and so do lone surrogates, which only an escape can make. A
line that is not a record or lacks the field raises an error. With `skip_bad` it is skipped and counted instead. Blank
lines are ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import IO, Any

from locant.errors import InputError, Remedy
from locant.files import FaultError
from locant.shell import shell_path
from locant.text.prepare.byte_ranges import BLOCK, ByteRange, Source, Tally, open_source
from locant.text.prepare.compression import TOOLS
from locant.text.prepare.separators import split_texts
from locant.text.prepare.text_encodings import is_clean
from locant.text.reading import STDIN, well_formed

LONGEST_LINE = 2**26
"""The largest size of a line in bytes. A line is parsed as a whole."""

ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"""The beginning of a JSON array of records, on one line or on several."""


def json_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally, skip_bad: bool = False) -> Iterator[bytes]:
    """Yield the text of each line that begins in a byte range. Bad lines raise an error or are skipped and counted."""
    first, seen, field, goes_on = None, 0, byte_range.source.field, False
    for lines, unfinished, begin in split_texts(file, byte_range, tally, b"\n", LONGEST_LINE):
        first = begin if first is None else first
        for number, line in enumerate(lines):
            if goes_on and number == 0:  # the rest of a line that was skipped
                begin += len(line) + 1
                continue
            try:
                if unfinished:
                    raise FaultError(f"has more than {LONGEST_LINE} bytes")
                if line.strip():
                    try:
                        record = json.loads(_decode(line, byte_range.source, tally))
                    except (ValueError, RecursionError) as error:
                        raise FaultError(f"is not JSON: {error}") from None
                    text = _lookup(record, field)
                    if not isinstance(text, str | None):
                        raise FaultError(f"has a {type(text).__name__} in {field!r}, expected a string")
                    yield well_formed(text or "").encode()
            except FaultError as error:
                if skip_bad:
                    tally.skipped += 1
                    begin += len(line) + 1
                    continue
                number = _count_lines_before(byte_range, first) + seen + 1
                cause = f"{byte_range.source.name}, line {number} (at byte {begin}) {error}"
                remedy = Remedy("correct or remove that line and run again, or pass {}", skip_bad=True)
                if number == 1 and ARRAY.match(line):
                    cause = f"{byte_range.source.name} is a JSON array, expected one record in each line"
                    remedy = _to_lines(byte_range.source)
                raise InputError(cause, remedy) from None
            seen += 1
            begin += len(line) + 1
        goes_on = unfinished


def _decode(line: bytes, source: Source, tally: Tally) -> str:
    """Decode a line, and count it if it has bytes that its encoding does not define."""
    text = line.decode(errors="replace")
    if "\ufffd" in text and not is_clean([line], source.encoding is not None):
        tally.not_utf8 += 1
    return text


def _to_lines(source: Source) -> str:
    """Return the remedy for a JSON array: a command that writes each element on a line."""
    if source.path == STDIN:
        return "pipe it through jq -c '.[]' first"
    file = shell_path(source.path)
    if source.compression is None:
        return f"jq -c '.[]' {file} > {shell_path(f'{source.path}.jsonl')}"
    new = shell_path(f"{os.path.splitext(source.path)[0]}.jsonl")  # noqa: PTH122  # a path is a str here
    return f"{TOOLS[source.compression][1]} -dc {file} | jq -c '.[]' > {new}"


def _lookup(record: Any, field: str) -> Any:  # any JSON
    if not isinstance(record, dict):
        raise FaultError(f"is a JSON {type(record).__name__}, expected an object")
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    if not inner or outer not in record:
        fields = ", ".join(map(repr, [*record][:8])) or "none"
        raise FaultError(f"has no field {outer!r}; its fields are: {fields}")
    return _lookup(record[outer], inner)


def _count_lines_before(byte_range: ByteRange, place: int) -> int:
    """Return the number of lines before `place`, or 0 if the range begins the file, as for compressed files."""
    if not byte_range.start:
        return 0
    with open_source(byte_range.source) as file:
        count = 0
        while place > 0 and (data := file.read(min(BLOCK, place))):
            count += data.count(b"\n")
            place -= len(data)
    return count
