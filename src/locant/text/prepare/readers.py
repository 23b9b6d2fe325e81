"""Read the documents of each kind of file, in batches of about a megabyte, and take samples of them.

**Texts** lie between separators. They can be read from any place of a file, in constant memory. Documents are the parts
that `bytes.split` returns: separators are found from left to right and do not overlap. A separator such as two newlines
can overlap with itself, so which of three newlines belong to it depends on all text before them. So a range that begins
in the middle of a file is read from an earlier place that no separator can cover (`clean_start`). A byte order mark at
the beginning of a file is dropped. All other bytes are kept, including carriage returns and bytes that are not UTF-8.

**Records** are lines of JSON or rows of Parquet. The field is a key or the name of a column. A dot leads into a nested
record (``meta.text``), unless a key has this name. Null is an empty document. In JSON, bytes that are not UTF-8 are
read as U+FFFD, and so are lone surrogates, which only an escape can make. A line that is not a record, or lacks the
field, ends the run. With `skip_bad` it is skipped and counted instead. Blank lines are ignored. Parquet is read row
group by row group, and some rows of a group at a time. A value that occurs in many rows is held once. A group that
claims to hold more than `LARGEST` bytes is an error.

A document without bytes is left out. A document that is longer than a batch comes in parts: the last text of an
`unfinished` batch, and the first text of the next batch. A part may end within a letter. `Engine.stream` accepts such
batches, because it knows where a text may be cut.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import IO, Any, NamedTuple

from locant.errors import InputError, Remedy
from locant.files import FaultError
from locant.text.prepare.sources import (
    BLOCK,
    TOOLS,
    ByteRange,
    Source,
    Tally,
    blocks,
    changed,
    cut,
    opened,
    range_blocks,
    require_arrow,
    require_its_kind,
    unpacked,
)
from locant.text.reading import STDIN, well_formed

BOM = codecs.BOM_UTF8

REPLACEMENT = "\ufffd".encode()
"""The replacement for characters that their encoding does not define."""

OVERHEAD = 40
"""Bytes that Python needs for a short text in addition to its content."""

LONGEST_LINE = 2**26
"""The most bytes of a line, which is parsed as a whole."""

LARGEST = 2**30
"""The most bytes that the text of one row group may hold, dictionaries counted once."""

ARRAY = re.compile(rb"\s*\[\s*(\{|$)")
"""The beginning of a JSON array of records, in one line or in several lines."""

ROWS = 4096
"""The most rows that are read at a time."""

ANOTHER = Remedy("{} of another column", field="NAME")

TRAINING_BYTES = 8 * 2**20
"""Bytes of text on which a tokenizer is trained, in two to three seconds."""

CHECKED_BYTES = 2**19
"""Bytes of text on which an engine is checked."""

STRETCH = 2**15
"""Bytes of a sample from each place: enough for a few documents, and few enough for many places."""

MOST = 2**26
"""Bytes of text that are unpacked to estimate how much files are compressed."""


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
        if goes_on or unfinished or not _is_clean(texts, recoded):
            for number, text in enumerate(texts):
                if number or not goes_on:
                    decoder.reset()
                    is_counted = False
                last = not unfinished or number < len(texts) - 1
                if not is_counted and not _is_clean([text], recoded, decoder, last):
                    is_counted = True
                    tally.not_utf8 += 1
        goes_on = unfinished


def _is_clean(texts: list[bytes], recoded: bool, decoder: Any = None, last: bool = True) -> bool:
    """Return True if texts are UTF-8, or were valid in the encoding from which they were recoded."""
    data = b"\n".join(texts)
    if recoded:
        return REPLACEMENT not in data
    try:
        data.decode() if decoder is None else decoder.decode(data, last)
    except UnicodeDecodeError:
        return False
    return True


def _batches(byte_range: ByteRange, tally: Tally, skip_bad: bool) -> Iterator[Batch]:
    source = byte_range.source
    with opened(source) as file:
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


class SplitTexts(NamedTuple):
    """A `Batch` with the place in the file where its first text, or part of a text, begins."""

    texts: list[bytes]
    unfinished: bool
    begin: int


def split_texts(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    """Yield the texts between separators (or the only text) that begin in a byte range, in parts of `longest` bytes."""
    if separator is None or not byte_range.source.can_be_cut:
        return _split_stream(file, byte_range, tally, separator, longest)
    return _split_range(file, byte_range, tally, separator, longest)


def _split_range(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes, longest: int
) -> Iterator[SplitTexts]:
    _, start, stop = byte_range

    def read(low: int, high: int) -> bytes:
        file.seek(low)
        return file.read(high - low)

    def read_after() -> Iterator[bytes]:
        file.seek(stop)
        size = 4096  # a document that has begun usually ends soon
        while data := file.read(min(size, BLOCK)):
            yield data
            size *= 2

    origin = len(BOM) if read(0, len(BOM)) == BOM else 0
    tally.add(read(start, max(min(origin, stop), start)))
    begin = clean_start(read, origin, max(start - len(separator), origin), separator)
    within = range_blocks(file, byte_range, tally, begin)
    yield from _split(within, read_after(), separator, begin=begin, first=start, longest=longest)


def _split_stream(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    counted = tally.bytes
    with unpacked(file, byte_range.source, tally) as stream:
        head = b""
        while len(head) < len(BOM) and (more := stream.read(BLOCK)):
            head += more
        origin = len(BOM) if head.startswith(BOM) else 0
        within = chain([head[origin:]], blocks(stream))
        if separator is not None:
            yield from _split(within, (), separator, begin=origin, first=origin, longest=longest)
        else:
            last = b""
            for data in within:
                if last:
                    yield SplitTexts([last], True, origin)
                    origin += len(last)
                last = data
            if last:
                yield SplitTexts([last], False, origin)
    if tally.bytes - counted != byte_range.stop:
        raise changed(byte_range)


def clean_start(read: Callable[[int, int], bytes], origin: int, position: int, separator: bytes) -> int:
    """Return the largest place from `origin` to `position` that certainly is not inside a separator."""
    size = len(separator)
    while position > origin:
        low = max(position - size + 1, origin)
        place = read(low, position + size - 1).find(separator)
        if place < 0:
            return position
        position = low + place
    return origin


def _split(
    within: Iterable[bytes], more: Iterable[bytes], separator: bytes, *, begin: int, first: int, longest: int
) -> Iterator[SplitTexts]:
    """Yield the texts that begin in `within`, except texts that begin before `first`.

    The bytes of `within` begin at `begin`, a clean start. The bytes of `more` follow them, and are read only up to the
    end of the last text.
    """
    # The unfinished document: its bytes from `begin` on, whether a part of it was yielded, and whether it is dropped.
    rest, goes_on, dropping = b"", False, begin < first
    keep = len(separator) - 1  # bytes that may be the beginning of a separator

    def blocks_after() -> Iterator[tuple[bytes, int]]:
        if not dropping and (rest or goes_on):  # else the next document begins at this place
            yield from ((block, 1) for block in more)

    for block, most in chain(((block, -1) for block in within), blocks_after()):
        *texts, rest = (rest + block).split(separator, most)
        dropped = 0
        while dropping and dropped < len(texts):
            begin += len(texts[dropped]) + len(separator)
            dropped += 1
            dropping = begin < first
        if finished := texts[dropped:]:
            yield SplitTexts(finished, False, begin)
            begin += sum(map(len, finished)) + len(finished) * len(separator)
        if texts and most == 1:
            return
        goes_on = goes_on and not texts
        if len(rest) >= longest + keep:
            size = len(rest) - keep
            if not dropping:
                yield SplitTexts([rest[:size]], True, begin)
            rest, begin, goes_on = rest[size:], begin + size, True
    if not dropping and (rest or goes_on):
        yield SplitTexts([rest], False, begin)


def json_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally, skip_bad: bool = False) -> Iterator[bytes]:
    """Yield the text of each line that begins in a byte range. Bad lines are an error, or are skipped and counted."""
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
                        record = json.loads(_decoded(line, byte_range.source, tally))
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
                number = _lines_before(byte_range, first) + seen + 1
                cause = f"{byte_range.source.name}, line {number} (at byte {begin}) {error}"
                remedy = Remedy("mend or remove that line and run the same again, or pass {}", skip_bad=True)
                if number == 1 and ARRAY.match(line):
                    cause = f"{byte_range.source.name} is a JSON array, expected one record in each line"
                    remedy = _to_lines(byte_range.source)
                raise InputError(cause, remedy) from None
            seen += 1
            begin += len(line) + 1
        goes_on = unfinished


def _decoded(line: bytes, source: Source, tally: Tally) -> str:
    """Decode a line, and count it if it has bytes that its encoding does not define."""
    text = line.decode(errors="replace")
    if "\ufffd" in text and not _is_clean([line], source.encoding is not None):
        tally.not_utf8 += 1
    return text


def _to_lines(source: Source) -> str:
    """Return a remedy for a JSON array: the command that writes a line for each of its elements."""
    if source.path == STDIN:
        return "pipe it through jq -c '.[]' first"
    file = shlex.quote(source.path)
    if source.compression is None:
        return f"jq -c '.[]' {file} > {shlex.quote(f'{source.path}.jsonl')}"
    new = shlex.quote(f"{os.path.splitext(source.path)[0]}.jsonl")  # noqa: PTH122  # a path is a str here
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


def _lines_before(byte_range: ByteRange, place: int) -> int:
    """Return the number of lines before `place`, or 0 if the range begins the file, as in compressed files."""
    if not byte_range.start:
        return 0
    with opened(byte_range.source) as file:
        count = 0
        while place > 0 and (data := file.read(min(BLOCK, place))):
            count += data.count(b"\n")
            place -= len(data)
    return count


def parquet_texts(file: IO[bytes], byte_range: ByteRange, tally: Tally) -> Iterator[bytes]:
    """Yield the text of each row of the row groups that begin in a byte range."""
    source, start, stop = byte_range
    if source.compression is None:  # counted and hashed separately, because rows are not read in the order of bytes
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
    """Yield the rows of the groups that begin from `start` to `stop` in an uncompressed file of `size` bytes."""
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
        # Read as dictionaries, so that a value that occurs in many rows is held once.
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
    """Yield the values of a column of bytes or text, which may be nested in records. Null is empty."""
    while arrow.types.is_struct(array.type):
        array = arrow.compute.struct_field(array, [0])  # null if the record is null
    if arrow.types.is_dictionary(array.type):
        values = array.dictionary.cast(arrow.large_binary()).to_pylist()
        for place in array.indices.to_pylist():
            yield b"" if place is None else values[place] or b""
    else:
        for value in array.cast(arrow.large_binary()).to_pylist():
            yield value or b""


def without_text(cause: str, sources: Sequence[Source], skip_bad: bool) -> InputError:
    """Return the error for sources that gave no text. It counts the broken ones, and states the fault of the first."""
    faults = [fault for source in sources if skip_bad and (fault := _fault(source)) is not None]
    if not faults:
        why = "no input has a document that can be used" if skip_bad else "the inputs have no documents"
        return InputError(f"{cause}: {why}", Remedy("pass other paths, {} or {}", separator=..., field=...))
    skipped = "1 file was skipped as broken" if len(faults) == 1 else f"{len(faults)} files were skipped as broken"
    remedy = faults[0].remedy
    if isinstance(remedy, Remedy) and "skip_bad" in remedy.arguments:
        remedy = "mend it and run the same again"
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


@dataclass(kw_only=True)
class Sample:
    """Documents from all parts of the input, and the amount of input that they represent."""

    texts: list[bytes] = field(default_factory=list)
    """Whole documents, and beginnings of long documents."""
    read: int = 0
    """Bytes of the input that were read for the texts. `unpacked` is larger if the input is compressed."""
    unpacked: int = 0
    documents: int = 0
    """The number of documents in files with several documents. `of_many` bytes of these files were read."""
    of_many: int = 0
    is_all: bool = False
    """Whether this is the whole input, so that counts are exact."""

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
        return single + round(self.documents * rest / max(self.of_many, 1))


def take_sample(sources: Sequence[Source], size: int, *, skip_bad: bool = False) -> Sample:
    """Return about `size` bytes of text from all parts of the sources, or all text if there is not more.

    With `skip_bad`, unreadable input is left out.
    """
    ends = list(accumulate(source.size or 0 for source in sources))
    plain = all(source.compression is None and source.kind != "parquet" for source in sources)
    is_all = plain and (not ends or ends[-1] <= size)
    sample = Sample(is_all=is_all)
    whole = (byte_range for source in sources for byte_range in cut(source, max(source.size or 0, 1)))
    for byte_range in whole if is_all else _spaced_ranges(sources, ends, size):
        with suppress(InputError) if skip_bad else nullcontext():
            _add(sample, byte_range, None if is_all else STRETCH, skip_bad)
    return sample


def _spaced_ranges(sources: Sequence[Source], ends: Sequence[int], size: int) -> Iterator[ByteRange]:
    """Yield the byte ranges that begin at evenly spaced places, each range once."""
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


def _add(sample: Sample, byte_range: ByteRange, limit: int | None, skip_bad: bool) -> None:
    """Add the first documents of a byte range to the sample, at most `limit` bytes."""
    source, tally, room, goes_on, unpacked = byte_range.source, Tally(), limit, False, sample.unpacked
    for batch in documents(byte_range, tally, skip_bad=skip_bad):
        for i, text in enumerate(batch.texts):
            if room is None or room > 0:
                if not (goes_on and i == 0):
                    sample.texts.append(b"")
                sample.texts[-1] += _beginning(text, room)
                room = None if room is None else room - len(text)
        goes_on = batch.unfinished
        sample.unpacked += sum(map(len, batch.texts))
        enough = room is not None and room <= 0
        # A compressed file is read ahead, so less of it would not show how much it is compressed.
        if enough and (source.compression is None or sample.unpacked > MOST):
            break
    if not source.is_one_document:
        sample.of_many += tally.bytes
        sample.documents += tally.documents
    is_ahead = source.is_one_document and source.compression is None  # its reader is a block ahead of its texts
    sample.read += sample.unpacked - unpacked if is_ahead else tally.bytes


def _beginning(text: bytes, size: int | None) -> bytes:
    """Return at most `size` bytes of the beginning, without a part of a character."""
    if size is None or len(text) <= size:
        return text
    while size and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]
