"""Documents that are fields of records: JSON lines and Parquet.

A field is named by its key or column. Where no key is spelled so, a dot leads into a record within the record:
``meta.text``. Null is an empty document.

JSON is UTF-8 by definition, and what is not is read as U+FFFD; so is a lone surrogate, which only an escape can make.
A line that is no record, or has no such field, ends the run: nobody knows what it was meant to be. Blank lines are
nothing.

A Parquet file is read row group by row group, and a group some rows at a time. A value that stands in many rows is
held once, so a group takes the memory of what it holds, not of what it stands for; one that claims to hold more than
`LARGEST` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from locant.errors import InputError
from locant.text.prepare.pieces import Batch, Piece, Tally
from locant.text.prepare.splitting import Parts
from locant.text.prepare.streams import BLOCK, File, call, opened, require_arrow
from locant.text.reading import well_formed

__all__ = ["LARGEST", "LINE", "gathered", "json_texts", "parquet_texts"]

LARGEST = 2**30
"""The most bytes that the text of one row group may hold, dictionaries counted once."""

LINE = 2**26
"""The most bytes of a line of JSON, which is parsed as a whole."""

ROWS = 4096
"""The most rows of a Parquet file that are read at a time."""

_OVERHEAD = 40  # bytes that Python takes for a short text besides its own


def gathered(texts: Iterable[bytes], tally: Tally) -> Iterator[Batch]:
    """Texts in batches of about a block; a longer text in parts. Empty ones are left out."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        tally.documents += bool(text)
        tally.empty += not text
        for begin in range(0, len(text), BLOCK):
            end = begin + BLOCK
            batch.append(text[begin:end])
            size += len(batch[-1]) + _OVERHEAD
            if size >= BLOCK or end < len(text):
                yield Batch(batch, end < len(text))
                batch, size = [], 0
    if batch:
        yield Batch(batch, False)


# ------------------------------------------------------------------ JSON lines


class _UnusableError(ValueError):
    """What is wrong with a line."""


def json_texts(parts: Iterable[Parts], piece: Piece) -> Iterator[bytes]:
    """The text of each line.

    Raises:
        InputError: for a line that is too long, is no JSON, or has no text in the field; it is named by its number.
    """
    first, seen = None, 0
    for part in parts:
        first = part.begin if first is None else first
        begin = part.begin
        for line in part.texts:
            try:
                if part.unfinished:
                    raise _UnusableError(f"has more than {LINE} bytes")
                if line.strip():
                    yield _line_text(line, piece.field)
            except _UnusableError as error:
                number = _lines_before(piece, first) + seen + 1
                raise InputError(
                    f"{call(piece.path)}, line {number} (at byte {begin}) {error}", "mending or removing that line"
                ) from None
            seen += 1
            begin += len(line) + 1


def _line_text(line: bytes, field: str) -> bytes:
    try:
        record = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"is no JSON: {error}") from None
    text = _lookup(record, field)
    if text is None:
        return b""
    if not isinstance(text, str):
        raise _UnusableError(f"has a {type(text).__name__} in {field!r}, expected a string")
    return well_formed(text).encode()


def _lookup(record: Any, field: str) -> Any:  # whatever JSON holds
    if not isinstance(record, dict):
        raise _UnusableError(f"is a JSON {type(record).__name__}, expected an object")
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    if not inner or outer not in record:
        known = ", ".join(map(repr, [*record][:8])) or "none"
        raise _UnusableError(f"has no field {outer!r}; its fields are: {known}")
    return _lookup(record[outer], inner)


def _lines_before(piece: Piece, place: int) -> int:
    """Lines of the file before `place`; of a stream, which is one piece, there are none."""
    if not piece.start:
        return 0
    with opened(piece.path) as file:
        count = 0
        while place > 0 and (data := file.read(min(BLOCK, place))):
            count += data.count(b"\n")
            place -= len(data)
    return count


# ------------------------------------------------------------------ Parquet


def parquet_texts(file: File, piece: Piece, size: int) -> Iterator[bytes]:
    """The text of each row of the row groups that begin in the piece.

    Args:
        file: what a Parquet file is, uncompressed.
        piece: `start` and `stop` count the bytes of `file`.
        size: of the file.

    Raises:
        InputError: without pyarrow; for a file that is none, or has no text in the column.
    """
    arrow = require_arrow(call(piece.path))
    from pyarrow import parquet

    with _arrow_errors(arrow, piece):
        known = parquet.ParquetFile(file)
        column = _column(known.schema, piece)
        # As dictionaries: a value that stands in many rows comes once.
        found = parquet.ParquetFile(file, metadata=known.metadata, read_dictionary=[piece.field], pre_buffer=False)
        for number in range(found.num_row_groups):
            begin = min(max(_begin(found.metadata.row_group(number)), 0), size - 1)
            if piece.start <= begin and (piece.stop is None or begin < piece.stop):
                rows = _rows(found.metadata.row_group(number).column(column), number, piece)
                for batch in found.iter_batches(rows, row_groups=[number], columns=[piece.field], use_threads=False):
                    yield from _values(batch.column(0), arrow)


@contextmanager
def _arrow_errors(arrow: Any, piece: Piece) -> Generator[None]:  # an untyped package
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0]
        raise InputError(f"{call(piece.path)} cannot be read as Parquet: {said}", "writing the file again") from None


def _column(schema: Any, piece: Piece) -> int:
    """Which of the leaves of the schema the field is."""
    names = [schema.column(i).path for i in range(len(schema))]
    if piece.field not in names:
        known = ", ".join(map(repr, names[:8]))
        raise InputError(
            f"{call(piece.path)} has no column {piece.field!r}; its columns are: {known}", "field='NAME' (--field NAME)"
        )
    number = names.index(piece.field)
    leaf = schema.column(number)
    if leaf.physical_type != "BYTE_ARRAY" or leaf.max_repetition_level:
        raise InputError(
            f"{call(piece.path)} has {leaf.physical_type} in {piece.field!r}, expected one text in each row",
            "field='NAME' (--field NAME) of another column",
        )
    return number


def _begin(group: Any) -> int:
    """Where the data of a row group begin, dictionaries included."""
    places = []
    for number in range(group.num_columns):
        column = group.column(number)
        places += [column.data_page_offset]
        places += [column.dictionary_page_offset] if column.dictionary_page_offset else []
    return min(places, default=0)


def _rows(column: Any, number: int, piece: Piece) -> int:
    """How many rows to read at a time: about a block."""
    size = column.total_uncompressed_size
    if size > LARGEST:
        raise InputError(
            f"{call(piece.path)}, row group {number} has {size} bytes of text, expected {LARGEST} at most",
            "writing the file with smaller row groups",
        )
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
