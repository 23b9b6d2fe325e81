"""What is to be read: the files that paths stand for, the ranges of bytes that are read at a time, and these bytes.

Sources are text (.txt, .md), JSON lines (.jsonl) and Parquet (.parquet), each also compressed (.gz, .zst); folders and
patterns stand for all such files in them, sorted by path; ``-`` is standard input. A file that is named twice, in
whatever way, is refused, and so is, before the work begins, what begins like a binary file or like UTF-16. A NUL within
the first `SNIFFED` bytes means a binary file; one further on, in some of a million web pages, is text.

A document belongs to the range in which it begins, so the ranges of a file can be read apart from each other, in any
order, and give every document once.

Whatever a file is compressed with, it is read in memory that does not grow with it: no more of a compressed input is
read than a block of output takes, so a file of some kilobytes that stands for terabytes costs time, not memory. gzip
members and Zstandard frames that follow each other are read to the end of the last one. A stream that breaks off is an
error, also inside the last checksum; so is what follows it and is none.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import hashlib
import importlib
import io
import os
import stat
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from locant.arguments import shown
from locant.errors import InputError
from locant.extras import require
from locant.files import NewFile
from locant.text.reading import STDIN, Readable, require_text, standard_input

Paths = str | Path | Iterable[str | Path]
Kind = Literal["text", "jsonl", "parquet"]
Compression = Literal["gz", "zst"]

KINDS: dict[str, Kind] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
SUFFIXES = f"{', '.join(KINDS)}, with or without {' or '.join(COMPRESSIONS)}"

FIELD = "text"
"""The key or column that holds the text, where none is named."""

SNIFFED = 8192
"""How much of a file is looked at to tell text from other things."""

BLOCK = 2**20
"""Bytes that are read, split and encoded at a time; Ctrl-C has to wait for an engine to encode them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, as it was when it was found; ``-`` is standard input."""

    path: str
    size: int | None
    """In bytes; ``None`` for standard input until it was read."""
    mtime_ns: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    """What stands between the documents of a text; ``None`` says that the file is one document."""
    field: str
    """The key (JSON lines) or column (Parquet) that holds the text."""
    copy: str | None = dataclasses.field(default=None, compare=False)
    """The file that standard input was copied to."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def file(self) -> str:
        """Where its bytes are."""
        return self.copy or self.path

    @property
    def is_one_document(self) -> bool:
        return self.kind == "text" and self.separator is None

    @property
    def can_be_cut(self) -> bool:
        """Whether a document can be found from the middle: in text with a separator, JSON lines and Parquet."""
        return self.compression is None and not self.is_one_document

    def to_json(self) -> dict[str, Any]:
        """What a plan and a manifest keep of it: all but where a copy is."""
        return {name: value for name, value in vars(self).items() if name != "copy"}


class ByteRange(NamedTuple):
    """The bytes `start` to `stop` of a file on the disk; a row group of Parquet belongs to where its data begin."""

    source: Source
    start: int
    stop: int


def cut(source: Source, size: int) -> list[ByteRange]:
    """A source in ranges of `size` bytes each but the last, or in one if it cannot be cut; an empty file has none."""
    end = source.size or 0
    step = size if source.can_be_cut else max(end, 1)
    return [ByteRange(source, start, min(start + step, end)) for start in range(0, end, step)]


class Tally:
    """What was read of a byte range so far, and, once its documents are exhausted, the hash of all of it."""

    def __init__(self) -> None:
        self.bytes = 0  # on the disk, compressed ones as they are
        self.documents = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        """Count and hash the next bytes of the range."""
        self.bytes += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def find_sources(paths: Paths, *, separator: str | None = None, field: str | None = None) -> list[Source]:
    """The files that the paths name, in the order of the paths; those of a folder or pattern sorted.

    Without a `separator` each text file is one document. With a `field`, standard input is read as JSON lines.

    Raises:
        InputError: for a path that is missing, of another kind, unreadable, empty of files, or there twice.
    """
    listed: list[Any] = [*paths] if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    if odd := [path for path in listed if not isinstance(path, (str, Path))]:
        raise InputError(f"got {shown(odd[0])} as a path, expected str or Path", "the path of a file or folder")
    names = [name for path in listed for name in _files_of(str(path))]
    if not names:
        raise InputError("got no path", "a file, a folder, or - for standard input")
    seen: dict[str, str] = {}
    for name in names:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            other = f" (as {seen[real]})" if seen[real] != name else ""
            raise InputError(f"got {'standard input' if name == STDIN else name} twice{other}", "naming it once")
        seen[real] = name
    return [_source(name, separator, field) for name in names]


def _files_of(path: str) -> list[str]:
    """The files that a path stands for."""
    if path == STDIN:
        return [path]
    if not path or "\0" in path:
        raise InputError(f"got {path!r}, which cannot be the name of a file", "the path of a text file")
    if (plain := str(Path(path))) != STDIN:
        path = plain  # "./a" and "a//" are what "a" is, and the same request
    if os.path.isdir(path):  # noqa: PTH112  # a path is a str here, as it was spelled
        return _within(path)
    if not os.path.exists(path) and glob.has_magic(path):  # noqa: PTH110
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207
        files = [name for one in matches for name in (_within(one) if os.path.isdir(one) else [one])]  # noqa: PTH112
        files = [*dict.fromkeys(name for name in files if _format(name))]  # `**` finds a folder and what is in it
        if not files:
            raise InputError(f"no file to read matches {path}", f"one that ends in {SUFFIXES}")
        return files
    return [path]


def _within(folder: str) -> list[str]:
    """All files of a folder that can be read, by their names; hidden ones are left alone, links are followed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", "a folder that you may read") from None

    files: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(place)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(place, name) for name in names if not name.startswith(".") and _format(name)]  # noqa: PTH118
    if not files:
        raise InputError(f"there is no file to read in {folder}", f"files that end in {SUFFIXES}")
    return sorted(files)


def _format(name: str) -> tuple[Kind, Compression | None] | None:
    """What a file is by the end of its name."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122
    compression = COMPRESSIONS.get(suffix)
    kind = KINDS.get(os.path.splitext(stem)[1] if compression else suffix)  # noqa: PTH122
    return None if kind is None else (kind, compression)


def _source(name: str, separator: str | None, field: str | None) -> Source:
    """A path as a source, which is looked at, but for standard input."""
    facts: dict[str, Any] = {"path": name, "separator": separator, "field": field or FIELD}
    if name == STDIN:
        return Source(size=None, mtime_ns=None, kind="text" if field is None else "jsonl", compression=None, **facts)
    try:
        status = os.stat(name)  # noqa: PTH116
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {name}: {reason}", "the path of a file") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"got {name}, which is no regular file", f"- < {name}")
    if (format := _format(name)) is None:  # noqa: A001
        raise InputError(f"got {name}, expected a file that ends in {SUFFIXES}", f"- < {name}, which reads it as text")
    kind, compression = format
    facts["separator"] = separator if kind == "text" else None
    source = Source(size=status.st_size, mtime_ns=status.st_mtime_ns, kind=kind, compression=compression, **facts)
    _require_its_kind(source)
    return source


def _require_its_kind(source: Source) -> None:
    """Refuse what is not of its kind by its first bytes."""
    with opened(source) as file, unpacked(file, source, Tally()) as stream:
        data = stream.read(SNIFFED)
    if source.kind == "parquet":
        require_arrow(source.name)
        if not data.startswith(b"PAR1"):
            raise InputError(f"{source.name} is no Parquet file", "writing the file again")
    else:
        require_text(data, source.name)


def read_stdin(source: Source, place: Path | None) -> tuple[Source, str]:
    """Standard input, read to its end, and its SHA-256; it is kept in the file `place`, if there is one."""
    digest, size = hashlib.sha256(), 0
    with nullcontext() if place is None else NewFile(place) as copy:
        for block in blocks(standard_input()):
            digest.update(block)
            size += len(block)
            if copy is not None:
                copy.write(block)
        source = dataclasses.replace(source, size=size, copy=None if place is None else str(place))
        if copy is not None:
            copy.settle()
            copy.publish()
            _require_its_kind(source)
    return source, digest.hexdigest()


@contextmanager
def opened(source: Source) -> Generator[IO[bytes]]:
    """The file of a source, to read from anywhere."""
    try:
        file = Path(source.file).open("rb")  # noqa: SIM115  # closed below; errors of its readers are not those of opening
    except OSError as error:
        raise InputError(f"cannot read {source.name}: {error.strerror or error}", "a file that you may read") from None
    with file:
        yield file


class _Tallied(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: Readable, tally: Tally) -> None:
        self._file, self._tally = file, tally

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._tally.add(data)
        return data

    def readable(self) -> bool:
        return True


@contextmanager
def unpacked(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    """What a file holds; `tally` counts what is read of the file itself."""
    tallied = _Tallied(file, tally)
    if source.compression is None:
        yield tallied
        return
    before = tally.bytes
    try:
        if source.compression == "gz":
            with gzip.GzipFile(fileobj=tallied, mode="rb") as unzipped:
                yield unzipped
        else:
            arrow = require_arrow(source.name)
            with arrow.CompressedInputStream(arrow.PythonFile(tallied, mode="r"), "zstd") as stream:
                yield stream
        if tally.bytes == before:
            raise EOFError("it is empty")
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what, tool = {"gz": ("gzip", "gzip"), "zst": ("Zstandard", "zstd")}[source.compression]
        raise InputError(f"{source.name} is no whole {what} file: {error}", f"{tool} -t on it") from None


def blocks(stream: Readable) -> Iterator[bytes]:
    """All that is left, block by block."""
    while data := stream.read(BLOCK):
        yield data


def range_blocks(file: IO[bytes], byte_range: ByteRange, tally: Tally, begin: int) -> Iterator[bytes]:
    """A byte range, block by block, from `begin` on, which may lie before it: that is not counted."""
    _, start, stop = byte_range
    file.seek(begin)
    for low in range(begin, stop, BLOCK):
        data = file.read(min(BLOCK, stop - low))
        if len(data) < min(BLOCK, stop - low):
            raise changed(byte_range)
        tally.add(memoryview(data)[max(start - low, 0) :])
        yield data


def changed(byte_range: ByteRange) -> InputError:
    """The error for a file that has become shorter, or longer where all of it was to be read."""
    source, _, stop = byte_range
    return InputError(f"{source.name} has changed: it had {stop} bytes or more", "the same again, on a quiet file")


def require_arrow(name: str) -> Any:  # an untyped package
    """`pyarrow`, which reads Parquet and Zstandard."""
    arrow = require("pyarrow", f"reading {name}")
    importlib.import_module("pyarrow.compute")
    return arrow
