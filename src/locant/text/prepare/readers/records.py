"""Texts of records: a field of each line of JSON, or a column of each row of Parquet.

A field is named by its key, a column by its name; a dot leads into a record within the record: ``meta.text``, unless a
key is spelled so. Null is an empty document.

In JSON, what is not UTF-8 is read as U+FFFD; so is a lone surrogate, which only an escape can make. A line that is no
record, or has no such field, ends the run; blank lines are ignored.

Parquet is read row group by row group, and a group some rows at a time. A value that stands in many rows is held once;
a group that claims to hold more than `LARGEST` bytes is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from locant.errors import InputError
from locant.files import FaultError
from locant.text.prepare.readers.streams import (
    BLOCK,
    ByteRange,
    Source,
    Tally,
    blocks,
    opened,
    range_blocks,
    require_arrow,
    unpacked,
)
from locant.text.prepare.readers.text import split_texts
from locant.text.reading import well_formed

__all__ = ["json_texts", "parquet_texts"]


LONGEST_LINE = 2**26
"""In bytes; a line is parsed as a whole."""

LARGEST = 2**30
"""The most bytes that the text of one row group may hold, dictionaries counted once."""

ROWS = 4096
"""The most rows that are read at a time."""

ANOTHER = "field='NAME' (--field NAME) of another column"


def json_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally) -> Iterator[bytes]:
    """The text of each line that begins in a byte range."""
    first, seen, field = None, 0, byte_range.source.field
    for lines, unfinished, begin in split_texts(file, byte_range, tally, b"\n", LONGEST_LINE):
        first = begin if first is None else first
        for line in lines:
            try:
                if unfinished:
                    raise FaultError(f"has more than {LONGEST_LINE} bytes")
                if line.strip():
                    try:
                        record = json.loads(line.decode(errors="replace"))
                    except (ValueError, RecursionError) as error:
                        raise FaultError(f"is no JSON: {error}") from None
                    text = _lookup(record, field)
                    if not isinstance(text, str | None):
                        raise FaultError(f"has a {type(text).__name__} in {field!r}, expected a string")
                    yield well_formed(text or "").encode()
            except FaultError as error:
                number = _lines_before(byte_range, first) + seen + 1
                cause = f"{byte_range.source.name}, line {number} (at byte {begin}) {error}"
                raise InputError(cause, "mending or removing that line") from None
            seen += 1
            begin += len(line) + 1


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


def parquet_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally) -> Iterator[bytes]:
    """The text of each row of the row groups that begin in a byte range."""
    source, start, stop = byte_range
    if source.compression is None:  # it is counted and hashed by itself: rows are not read in the order of the bytes
        for _ in range_blocks(file, byte_range, tally, start):
            pass
        yield from _texts(file, source, start, stop, file.seek(0, os.SEEK_END))
        return
    with tempfile.TemporaryFile() as whole, unpacked(file, source, tally) as stream:
        for data in blocks(stream):
            whole.write(data)
        size = whole.tell()
        yield from _texts(whole, source, 0, size, size)


def _texts(file: IO[bytes], source: Source, start: int, stop: int, size: int) -> Iterator[bytes]:
    """The rows of the groups that begin at `start` to `stop` of an uncompressed file of `size` bytes."""
    arrow = require_arrow(source.name)
    from pyarrow import parquet

    try:
        whole = parquet.ParquetFile(file)
        names = [whole.schema.column(i).path for i in range(len(whole.schema))]
        if source.field not in names:
            cause = f"{source.name} has no column {source.field!r}; its columns are: {', '.join(map(repr, names[:8]))}"
            raise InputError(cause, ANOTHER)
        leaf = whole.schema.column(names.index(source.field))
        if leaf.physical_type != "BYTE_ARRAY" or leaf.max_repetition_level:
            cause = f"{source.name} has {leaf.physical_type} in {source.field!r}, expected one text in each row"
            raise InputError(cause, ANOTHER)
        # As dictionaries: a value that stands in many rows comes once.
        table = parquet.ParquetFile(file, metadata=whole.metadata, read_dictionary=[source.field], pre_buffer=False)
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            columns = [group.column(i) for i in range(group.num_columns)]
            pages = [page for one in columns for page in (one.data_page_offset, one.dictionary_page_offset) if page]
            if not start <= min(max(min(pages, default=0), 0), size - 1) < stop:
                continue
            column = columns[names.index(source.field)]
            if (bytes_of_text := column.total_uncompressed_size) > LARGEST:
                cause = f"row group {number} has {bytes_of_text} bytes of text, expected {LARGEST} at most"
                raise InputError(f"{source.name}, {cause}", "writing the file with smaller row groups")
            rows = max(min(BLOCK * column.num_values // max(bytes_of_text, 1), ROWS), 1)  # about a block
            for batch in table.iter_batches(rows, row_groups=[number], columns=[source.field], use_threads=False):
                yield from _values(batch.column(0), arrow)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0]
        raise InputError(f"{source.name} cannot be read as Parquet: {said}", "writing the file again") from None


def _values(array: Any, arrow: Any) -> Iterator[bytes]:
    """The values of a column of bytes or text, by itself or within records; null is empty."""
    while arrow.types.is_struct(array.type):
        array = arrow.compute.struct_field(array, [0])  # null where the record is
    if arrow.types.is_dictionary(array.type):
        values = array.dictionary.cast(arrow.large_binary()).to_pylist()
        for place in array.indices.to_pylist():
            yield b"" if place is None else values[place] or b""
    else:
        for value in array.cast(arrow.large_binary()).to_pylist():
            yield value or b""
