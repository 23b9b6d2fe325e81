"""Parquet: a document in each row of a column.

A column within records is named with dots: ``meta.text``. Null is an empty document.

A file is read row group by row group, and a group some rows at a time. A value that stands in many rows is held once;
a group that claims to hold more than `LARGEST` bytes is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO, Any

from locant.errors import InputError
from locant.text.prepare.byte_ranges import ByteRange, Source, Tally
from locant.text.prepare.readers.streams import BLOCK, blocks, range_blocks, require_arrow, unpacked

__all__ = ["parquet_texts"]

LARGEST = 2**30
"""The most bytes that the text of one row group may hold, dictionaries counted once."""

ROWS = 4096
"""The most rows that are read at a time."""

ANOTHER = "field='NAME' (--field NAME) of another column"


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

    with _arrow_errors(arrow, source):
        known = parquet.ParquetFile(file)
        column = _column(known.schema, source)
        # As dictionaries: a value that stands in many rows comes once.
        found = parquet.ParquetFile(file, metadata=known.metadata, read_dictionary=[source.field], pre_buffer=False)
        for number in range(found.num_row_groups):
            begin = min(max(_begin(found.metadata.row_group(number)), 0), size - 1)
            if start <= begin < stop:
                rows = _rows(found.metadata.row_group(number).column(column), number, source)
                for batch in found.iter_batches(rows, row_groups=[number], columns=[source.field], use_threads=False):
                    yield from _values(batch.column(0), arrow)


@contextmanager
def _arrow_errors(arrow: Any, source: Source) -> Generator[None]:  # an untyped package
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0]
        raise InputError(f"{source.name} cannot be read as Parquet: {said}", "writing the file again") from None


def _column(schema: Any, source: Source) -> int:
    """Which of the leaves of the schema the field is."""
    names = [schema.column(i).path for i in range(len(schema))]
    if source.field not in names:
        cause = f"{source.name} has no column {source.field!r}; its columns are: {', '.join(map(repr, names[:8]))}"
        raise InputError(cause, ANOTHER)
    number = names.index(source.field)
    leaf = schema.column(number)
    if leaf.physical_type != "BYTE_ARRAY" or leaf.max_repetition_level:
        cause = f"{source.name} has {leaf.physical_type} in {source.field!r}, expected one text in each row"
        raise InputError(cause, ANOTHER)
    return number


def _begin(group: Any) -> int:
    """Where the data of a row group begin, dictionaries included."""
    columns = [group.column(number) for number in range(group.num_columns)]
    places = [place for one in columns for place in (one.data_page_offset, one.dictionary_page_offset) if place]
    return min(places, default=0)


def _rows(column: Any, number: int, source: Source) -> int:
    """How many rows to read at a time: about a block."""
    size = column.total_uncompressed_size
    if size > LARGEST:
        cause = f"{source.name}, row group {number} has {size} bytes of text, expected {LARGEST} at most"
        raise InputError(cause, "writing the file with smaller row groups")
    return max(min(BLOCK * column.num_values // max(size, 1), ROWS), 1)


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
