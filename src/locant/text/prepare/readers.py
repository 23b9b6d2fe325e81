"""The documents of each kind of file, in batches of about a megabyte, and samples of them.

**Texts** lie between separators, found from anywhere in a file and in constant memory. Documents are what `bytes.split`
gives: separators are found from left to right and do not overlap. A separator such as two newlines can overlap with
itself, and then which of three newlines belong to it depends on all before them. So a range that begins in the middle
is read from an earlier place on that no separator can cover (`clean_start`). A byte order mark at the beginning of a
file is dropped, and everything else is kept as it stands, carriage returns and bytes that are not UTF-8 included.

**Records** are lines of JSON or rows of Parquet. A field is named by its key, a column by its name; a dot leads into a
record within the record: ``meta.text``, unless a key is spelled so. Null is an empty document. In JSON, what is not
UTF-8 is read as U+FFFD; so is a lone surrogate, which only an escape can make. A line that is no record, or has no such
field, ends the run, or is skipped and counted if `skip_bad` says so; blank lines are ignored. Parquet is read row group
by row group, and a group some rows at a time. A value that stands in many rows is held once; a group that claims to
hold more than `LARGEST` bytes is refused.

A document of no bytes is none. One that is longer than a batch comes in parts, the last text of a batch that is
`unfinished` and the first of the next one; a part may end within a letter. `Engine.stream`, which knows where a text
may be cut, takes such batches.
"""

from __future__ import annotations

import codecs
import json
import os
import tempfile
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
    ByteRange,
    Source,
    Tally,
    blocks,
    changed,
    cut,
    opened,
    range_blocks,
    require_arrow,
    unpacked,
)
from locant.text.reading import well_formed

BOM = codecs.BOM_UTF8

REPLACEMENT = "\ufffd".encode()
"""What a character is read as that its encoding does not define."""

OVERHEAD = 40
"""Bytes that Python takes for a short text besides its own."""

LONGEST_LINE = 2**26
"""In bytes; a line is parsed as a whole."""

LARGEST = 2**30
"""The most bytes that the text of one row group may hold, dictionaries counted once."""

ROWS = 4096
"""The most rows that are read at a time."""

ANOTHER = Remedy("{} of another column", field="NAME")

TRAINING_BYTES = 8 * 2**20
"""What a tokenizer learns from: two to three seconds of training."""

CHECKED_BYTES = 2**19
"""What an engine is checked on."""

STRETCH = 2**15
"""Bytes from each place: enough for a few documents, few enough for a sample of many places."""

MOST = 2**26
"""Bytes of text that are unpacked to learn how far files are compressed."""


class Batch(NamedTuple):
    """Documents in order. Where `unfinished`, the last one goes on as the first of the next batch."""

    texts: list[bytes]
    unfinished: bool


def documents(byte_range: ByteRange, tally: Tally, *, skip_bad: bool = False) -> Iterator[Batch]:
    """The documents that begin in a byte range, in order, in batches of about a megabyte.

    `tally` has the hash of the range when all documents were taken, and how many are not of their encoding. With
    `skip_bad`, it counts the lines of JSON that were skipped; a file that breaks off is an error all the same.
    """
    goes_on, decoder, is_counted = False, codecs.getincrementaldecoder("utf-8")(), False
    for texts, unfinished in _batches(byte_range, tally, skip_bad):
        yield Batch(texts, unfinished)
        if byte_range.source.kind == "jsonl":  # whose lines were counted
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
    """Whether texts are UTF-8, or were of the encoding that they were read in."""
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
            yield from _gathered(parquet_texts(file, byte_range, tally), tally)
        elif source.kind == "jsonl":
            yield from _gathered(json_texts(file, byte_range, tally, skip_bad), tally)
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
            size += len(batch[-1]) + OVERHEAD
            if size >= BLOCK or end < len(text):
                yield Batch(batch, end < len(text))
                batch, size = [], 0
    if batch:
        yield Batch(batch, False)


def _without_empty(batches: Iterable[SplitTexts], tally: Tally) -> Iterator[Batch]:
    """Without the documents that have no byte; the end of one that had some may have none."""
    goes_on = False
    for texts, unfinished, _ in batches:
        texts = [text for i, text in enumerate(texts) if text or (goes_on and i == 0)]
        tally.documents += len(texts) - goes_on
        if texts:
            yield Batch(texts, unfinished)
        goes_on = unfinished


class SplitTexts(NamedTuple):
    """As `Batch`; `begin` is where the first text stands in the file, or goes on."""

    texts: list[bytes]
    unfinished: bool
    begin: int


def split_texts(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes | None, longest: int
) -> Iterator[SplitTexts]:
    """The texts between separators (or the only one) that begin in a byte range, in parts of `longest` bytes."""
    if separator is None or not byte_range.source.can_be_cut:
        return _of_stream(file, byte_range, tally, separator, longest)
    return _of_range(file, byte_range, tally, separator, longest)


def _of_range(
    file: IO[bytes], byte_range: ByteRange, tally: Tally, separator: bytes, longest: int
) -> Iterator[SplitTexts]:
    _, start, stop = byte_range

    def read(low: int, high: int) -> bytes:
        file.seek(low)
        return file.read(high - low)

    def behind() -> Iterator[bytes]:
        file.seek(stop)
        size = 4096  # a document that has begun usually ends soon
        while data := file.read(min(size, BLOCK)):
            yield data
            size *= 2

    origin = len(BOM) if read(0, len(BOM)) == BOM else 0
    tally.add(read(start, max(min(origin, stop), start)))
    begin = clean_start(read, origin, max(start - len(separator), origin), separator)
    within = range_blocks(file, byte_range, tally, begin)
    yield from _split(within, behind(), separator, begin=begin, first=start, longest=longest)


def _of_stream(
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
    """The largest place from `origin` up to `position` that certainly lies in no separator but at its beginning."""
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
    """The texts that begin in `within`, which stands at `begin`, a clean start, but none that begins before `first`.

    `more` is what comes after it, read only as far as the last text goes.
    """
    # Of the document whose end was not seen: its bytes, from `begin` on, whether a part was given, or it is dropped.
    rest, goes_on, dropping = b"", False, begin < first
    keep = len(separator) - 1  # bytes that may be the beginning of a separator

    def behind() -> Iterator[tuple[bytes, int]]:
        if not dropping and (rest or goes_on):  # else the next document begins there
            yield from ((block, 1) for block in more)

    for block, most in chain(((block, -1) for block in within), behind()):
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
    """The text of each line that begins in a byte range; bad lines are an error, or skipped and counted."""
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
                        raise FaultError(f"is no JSON: {error}") from None
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
                raise InputError(cause, remedy) from None
            seen += 1
            begin += len(line) + 1
        goes_on = unfinished


def _decoded(line: bytes, source: Source, tally: Tally) -> str:
    """A line as text; one with bytes that are not of its encoding is counted."""
    text = line.decode(errors="replace")
    if "\ufffd" in text and not _is_clean([line], source.encoding is not None):
        tally.not_utf8 += 1
    return text


def _lookup(record: Any, field: str) -> Any:  # whatever JSON holds
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
                raise InputError(f"{source.name}, {cause}", "write the file with smaller row groups")
            rows = max(min(BLOCK * column.num_values // max(bytes_of_text, 1), ROWS), 1)  # about a block
            for batch in table.iter_batches(rows, row_groups=[number], columns=[source.field], use_threads=False):
                yield from _values(batch.column(0), arrow)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0]
        raise InputError(f"{source.name} cannot be read as Parquet: {said}", "write the file again") from None


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


@dataclass(kw_only=True)
class Sample:
    """Documents from all over the input, and what they stand for."""

    texts: list[bytes] = field(default_factory=list)
    """Whole documents, and beginnings of long ones."""
    read: int = 0
    """Bytes of the input that were read for them; `unpacked` is more where it is compressed."""
    unpacked: int = 0
    documents: int = 0
    """In files with several, of which `of_many` bytes were read."""
    of_many: int = 0
    is_all: bool = False
    """Whether that was all there is, so that counts are exact."""

    @property
    def size(self) -> int:
        """Bytes of the texts."""
        return sum(map(len, self.texts))

    def all_documents(self, sources: Sequence[Source]) -> int:
        """How many documents the input has, or about."""
        if self.is_all:
            return len(self.texts)
        single = sum(source.is_one_document and source.size != 0 for source in sources)
        rest = sum(source.size or 0 for source in sources if not source.is_one_document)
        return single + round(self.documents * rest / max(self.of_many, 1))


def take_sample(sources: Sequence[Source], size: int, *, skip_bad: bool = False) -> Sample:
    """About `size` bytes of text from all over the sources; all of them, where they are no larger.

    With `skip_bad`, what cannot be read is left out.
    """
    ends = list(accumulate(source.size or 0 for source in sources))
    plain = all(source.compression is None and source.kind != "parquet" for source in sources)
    is_all = plain and (not ends or ends[-1] <= size)
    sample = Sample(is_all=is_all)
    whole = (byte_range for source in sources for byte_range in cut(source, max(source.size or 0, 1)))
    for byte_range in whole if is_all else _spread(sources, ends, size):
        with suppress(InputError) if skip_bad else nullcontext():
            _add(sample, byte_range, None if is_all else STRETCH, skip_bad)
    return sample


def _spread(sources: Sequence[Source], ends: Sequence[int], size: int) -> Iterator[ByteRange]:
    """The byte ranges that begin at evenly spread places, each once."""
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
    """The first documents of a byte range, no more than `limit` bytes of them."""
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
        # Less of a compressed file would say little of how far it is compressed: it is read some way ahead.
        if enough and (source.compression is None or sample.unpacked > MOST):
            break
    if not source.is_one_document:
        sample.of_many += tally.bytes
        sample.documents += tally.documents
    is_ahead = source.is_one_document and source.compression is None  # its reader has read a block more than it gave
    sample.read += sample.unpacked - unpacked if is_ahead else tally.bytes


def _beginning(text: bytes, size: int | None) -> bytes:
    """At most `size` bytes, and no part of a character."""
    if size is None or len(text) <= size:
        return text
    while size and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]
