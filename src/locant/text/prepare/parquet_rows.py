"""Read the texts of Parquet files: one row group after the other, and some rows of a group at a time.

The field is the name of a column. A dot separates the names of nested records (``meta.text``). Null is an empty
document. A value that occurs in many rows is in memory once. A group whose metadata state more than `MAX_ROW_GROUP`
bytes of text is an error.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from locant.errors import InputError, Remedy
from locant.text.prepare.byte_ranges import BLOCK, ByteRange, Source, Tally, blocks, range_blocks
from locant.text.prepare.compression import open_unpacked, require_arrow

MAX_ROW_GROUP = 2**30
"""The largest number of bytes of text in a row group. A dictionary counts once."""

ROWS = 4096
"""The largest number of rows that are read at a time."""

REMEDY = Remedy("{} of another column", field="NAME")


def parquet_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally) -> Iterator[bytes]:
    """Yield the text of each row of the row groups that begin in a byte range."""
    source, start, stop = byte_range
    if source.compression is None:  # read twice: the hash needs the bytes in order
        for _ in range_blocks(file, byte_range, tally, start):
            pass
        yield from _texts(file, source, start, stop, file.seek(0, os.SEEK_END))
        return
    with tempfile.TemporaryFile() as whole, open_unpacked(file, source, tally) as stream:
        for data in blocks(stream):
            whole.write(data)
        size = whole.tell()
        yield from _texts(whole, source, 0, size, size)


def _texts(file: IO[bytes], source: Source, start: int, stop: int, size: int) -> Iterator[bytes]:
    """Yield the rows of the groups that begin between `start` and `stop` in an uncompressed file of `size` bytes."""
    arrow = require_arrow(source.name)
    from pyarrow import parquet

    try:
        whole = parquet.ParquetFile(file)
        names = [whole.schema.column(i).path for i in range(len(whole.schema))]
        if source.field not in names:
            cause = f"{source.name} has no column {source.field!r}; its columns are: {', '.join(map(repr, names[:8]))}"
            raise InputError(cause, REMEDY)
        leaf = whole.schema.column(names.index(source.field))
        if leaf.physical_type != "BYTE_ARRAY" or leaf.max_repetition_level:
            cause = f"{source.name} has {leaf.physical_type} in {source.field!r}, expected one text in each row"
            raise InputError(cause, REMEDY)
        # Read as dictionaries, so that memory holds a value only once, even if it occurs in many rows.
        table = parquet.ParquetFile(file, metadata=whole.metadata, read_dictionary=[source.field], pre_buffer=False)
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            columns = [group.column(i) for i in range(group.num_columns)]
            pages = [page for one in columns for page in (one.data_page_offset, one.dictionary_page_offset) if page]
            if not start <= min(max(min(pages, default=0), 0), size - 1) < stop:
                continue
            column = columns[names.index(source.field)]
            if (bytes_of_text := column.total_uncompressed_size) > MAX_ROW_GROUP:
                cause = f"row group {number} has {bytes_of_text} bytes of text, expected {MAX_ROW_GROUP} at most"
                raise InputError(f"{source.name}, {cause}", "write the file with smaller row groups")
            rows = max(min(BLOCK * column.num_values // max(bytes_of_text, 1), ROWS), 1)  # about a block
            for batch in table.iter_batches(rows, row_groups=[number], columns=[source.field], use_threads=False):
                yield from _values(batch.column(0), arrow)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        message = str(error).splitlines()[0]
        raise InputError(f"{source.name} cannot be read as Parquet: {message}", "write the file again") from None


def _values(array: Any, arrow: Any) -> Iterator[bytes]:
    """Yield the values of a column of bytes or text, which may be nested in records. Null becomes an empty value."""
    while arrow.types.is_struct(array.type):
        array = arrow.compute.struct_field(array, [0])  # null if the record is null
    if arrow.types.is_dictionary(array.type):
        values = array.dictionary.cast(arrow.large_binary()).to_pylist()
        for place in array.indices.to_pylist():
            yield b"" if place is None else values[place] or b""
    else:
        for value in array.cast(arrow.large_binary()).to_pylist():
            yield value or b""
