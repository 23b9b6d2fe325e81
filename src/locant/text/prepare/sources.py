"""Find the source files of given paths, cut them into ranges of bytes, and read these ranges.

Sources are text (.txt, .md), JSON lines (.jsonl, .ndjson, .json) and Parquet (.parquet), each also compressed (.gz,
.zst, .bz2, .xz). Folders and patterns stand for all such files in them, sorted by path, and ``-`` is standard input. An
uncompressed .json file is read if it is named, but not as part of a folder, because such files are rarely text. The
other files of a folder are counted by the ends of their names. A file that is named twice, even by different paths, is
an error. Before the work begins, a file that begins like a binary file is an error, too. A NUL within the first
`SNIFFED` bytes means a binary file. A later NUL, which a few of a million web pages have, is text.

Text is UTF-8, or in the given `encoding`. A byte order mark at the beginning of a file decides the encoding of this
file (`MARKS`). A file in another encoding than UTF-8 is read from its beginning, and bytes that the encoding does not
define are read as U+FFFD. A file that is likely in another encoding gives a warning (`likely_other_encoding`). With a
given `encoding`, files that are likely UTF-8 (`is_misread_as`) give a warning, too, and are refused if it is UTF-16 or
UTF-32.

A document belongs to the range in which it begins, so the ranges of a file can be read independently and in any order,
and together they yield every document once.

Memory does not grow with the size of a compressed file. Only as much compressed input is read as a block of output
needs, so a file of some kilobytes that expands to terabytes costs time, not memory. Concatenated members and frames are
read to the end of the last one. A truncated stream is an error, even if only its checksum is incomplete. Any other
bytes after the last member are an error, too.
"""

from __future__ import annotations

import bz2
import codecs
import dataclasses
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import os
import re
import stat
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from locant.arguments import shown
from locant.errors import InputError, Remedy
from locant.extras import require
from locant.files import NewFile
from locant.text.reading import STDIN, Readable, require_text, standard_input

Paths = str | Path | Iterable[str | Path]
Kind = Literal["text", "jsonl", "parquet"]
Compression = Literal["gz", "zst", "bz2", "xz"]

KINDS: dict[str, Kind] = {
    ".txt": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"
}  # fmt: skip
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
TOOLS = {"gz": ("gzip", "gzip"), "zst": ("Zstandard", "zstd"), "bz2": ("bzip2", "bzip2"), "xz": ("xz", "xz")}
"""The name of each compression, and the program that tests and unpacks its files."""
SUFFIXES = f"{', '.join(KINDS)}, with or without {', '.join(COMPRESSIONS)}"

ONLY_IF_NAMED = ".json"
"""Files with this ending are read only if they are named. In folders most of them are settings."""

FIELD = "text"
"""The default key or column of the text."""

SNIFFED = 8192
"""Bytes at the beginning of a file that are checked for text."""

REPLACED_SHARE = 0.005
"""If a larger share of the characters of a text is not UTF-8, the text is likely in another encoding."""

FEWEST = 4
"""The least number of such characters for a warning. A few stray bytes prove nothing."""

CONTROL_SHARE = 0.1
"""The same limit for control characters other than white space, which UTF-16 of other scripts contains."""

NUL_SHARE = 0.3
"""If a larger share of the even or the odd bytes is NUL, the text is likely UTF-16."""

FOREIGN_SHARE = 0.5
"""If a larger share of the characters is not UTF-8, the text is hardly in a Western encoding."""

NAMED = 10
"""The number of files that a warning lists. Further ones are counted."""

MOST_DAMAGED = 2**26
"""The unpacked bytes in which damage is sought if a compressed file seems to be binary."""

MARKS: dict[bytes, tuple[str | None, str]] = {  # UTF-32 first: the mark of UTF-16 begins its mark
    codecs.BOM_UTF32_LE: ("utf-32", "utf-32-le"),
    codecs.BOM_UTF32_BE: ("utf-32", "utf-32-be"),
    codecs.BOM_UTF16_LE: ("utf-16", "utf-16-le"),
    codecs.BOM_UTF16_BE: ("utf-16", "utf-16-be"),
    codecs.BOM_UTF8: (None, "utf-8-sig"),
}
"""For each byte order mark the encoding of a file that begins with it, and its other name. ``None`` means UTF-8."""

WIDE = ("utf-16", "utf-32")
"""The beginnings of the names of encodings in which Latin letters have NUL bytes."""

_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")

BLOCK = 2**20
"""Bytes that are read, split and encoded at a time. Ctrl-C must wait until an engine has encoded them."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to read, in its state when it was found. ``-`` is standard input."""

    path: str
    size: int | None
    """The size in bytes, or ``None`` for standard input until it is read."""
    mtime_ns: int | None
    kind: Kind
    compression: Compression | None
    separator: str | None
    """The separator of the documents of a text. ``None`` means that the file is one document."""
    field: str
    """The key (JSON lines) or column (Parquet) that holds the text."""
    encoding: str | None = None
    """The encoding of a text or of JSON lines. ``None`` means UTF-8."""
    copy: str | None = dataclasses.field(default=None, compare=False)
    """The file with a copy of standard input."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def file(self) -> str:
        """The path of the file that holds its bytes."""
        return self.copy or self.path

    @property
    def is_one_document(self) -> bool:
        return self.kind == "text" and self.separator is None

    @property
    def can_be_cut(self) -> bool:
        """Whether documents can be found from the middle: in text with a separator, JSON lines and Parquet."""
        return self.compression is None and self.encoding is None and not self.is_one_document

    def to_json(self) -> dict[str, Any]:
        """Return the fields that plans and manifests record: all but `copy`, and `encoding` only if it is not UTF-8."""
        fields = {name: value for name, value in vars(self).items() if name != "copy"}
        return {name: value for name, value in fields.items() if name != "encoding" or value is not None}


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of a file on disk. A row group of Parquet belongs to the range with its first byte."""

    source: Source
    start: int
    stop: int


def cut(source: Source, size: int) -> list[ByteRange]:
    """Cut a source into ranges of `size` bytes (the last may be shorter), or one range if it cannot be cut.

    An empty file has no ranges.
    """
    end = source.size or 0
    step = size if source.can_be_cut else max(end, 1)
    return [ByteRange(source, start, min(start + step, end)) for start in range(0, end, step)]


class Tally:
    """Counts for a byte range, and a hash, which covers the whole range when all its documents have been read."""

    def __init__(self) -> None:
        self.bytes = 0  # on disk, without decompression
        self.documents = 0
        self.skipped = 0
        """Bad records that were left out: lines, documents that are too long, whole files."""
        self.not_utf8 = 0
        """Documents with bytes that their encoding does not define."""
        self._hash = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        """Count and hash the next bytes of the range."""
        self.bytes += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def find_sources(
    paths: Paths,
    *,
    separator: str | None = None,
    field: str | None = None,
    encoding: str | None = None,
    skip_bad: bool = False,
    left_out: Counter[str] | None = None,
) -> list[Source]:
    """Return the files that the paths stand for, in the order of the paths. Files of a folder or pattern are sorted.

    Without a `separator` each text file is one document. With a `field`, standard input is read as JSON lines. With
    `skip_bad`, a file that is not of its kind is not an error here, but is skipped when it is read. `left_out` counts
    the files of folders and patterns that have no known kind, by the ends of their names.

    Raises:
        InputError: a path is missing, of an unknown kind, unreadable, a folder without such files, or given twice.
    """
    entries: list[Any] = [*paths] if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    if odd := [path for path in entries if not isinstance(path, (str, Path))]:
        raise InputError(f"got {shown(odd[0])} as a path, expected str or Path", "pass the path of a file or folder")
    encoding = None if encoding is None else known_encoding(encoding)
    left_out = Counter() if left_out is None else left_out
    names = [name for path in entries for name in _expand(str(path), left_out)]
    if not names:
        raise InputError("got no path", "pass a file, a folder, or - for standard input")
    seen: dict[str, str] = {}
    for name in names:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            other = f" (as {seen[real]})" if seen[real] != name else ""
            raise InputError(f"got {'standard input' if name == STDIN else name} twice{other}", "pass it once")
        seen[real] = name
    misread: list[str] = []
    sources = [_source(name, separator, field, encoding, skip_bad, misread) for name in names]
    _warn_of_misread(misread, encoding)
    return sources


def known_encoding(name: str) -> str | None:
    """Return the usual name of an encoding of text, or ``None`` for UTF-8.

    >>> known_encoding("Latin1"), known_encoding("utf8")
    ('iso8859-1', None)
    """
    try:
        codec = codecs.lookup(name)
        "a".encode(codec.name)  # not one from bytes to bytes, such as hex
        # Not one of domain names (idna, punycode), which cannot replace bytes. UTF-16 and UTF-32 need the mark.
        codecs.getincrementaldecoder(codec.name)("replace").decode(codecs.BOM_UTF32_LE, True)
    except (LookupError, ValueError, TypeError):
        cause = f"got {shown(name)}, which Python does not know as an encoding of text files"
        raise InputError(cause, "use one such as cp1252, gbk or utf-16-le") from None
    return None if codec.name == "utf-8" else codec.name


def _expand(path: str, left_out: Counter[str]) -> list[str]:
    """Return the files that a path stands for."""
    if path == STDIN:
        return [path]
    if not path or "\0" in path:
        raise InputError(f"got {path!r}, which cannot be the name of a file", "pass the path of a text file")
    if (plain := str(Path(path))) != STDIN:
        path = plain  # "./a" and "a//" mean "a", and make the same request
    if os.path.isdir(path):  # noqa: PTH112  # a path is a str here, as it was spelled
        return _files_in(path, left_out)
    if not os.path.exists(path) and glob.has_magic(path):  # noqa: PTH110
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207
        others = set[str]()  # `**` finds a folder and the files in it
        names = [name for one in matches for name in (_walk(one) if os.path.isdir(one) else [one])]  # noqa: PTH112
        files = _select_known_kinds([*dict.fromkeys(names)], others, path)
        if not files:
            cause = f"no file to read matches {path}{_only(Counter(map(ending, others)))}"
            raise InputError(cause, f"use files that end in {SUFFIXES}")
        left_out.update(map(ending, others))
        return files
    return [path]


def _files_in(folder: str, left_out: Counter[str]) -> list[str]:
    """Return all files of a folder that can be read, by the ends of their names, and count the others."""
    others = set[str]()
    if not (files := _select_known_kinds(_walk(folder), others)):
        cause = f"there is no file to read in {folder}{_only(Counter(map(ending, others)))}"
        raise InputError(cause, f"use files that end in {SUFFIXES}")
    left_out.update(map(ending, others))
    return files


def _select_known_kinds(names: Sequence[str], others: set[str], pattern: str = "") -> list[str]:
    """Return the files that can be read, and add the rest to `others`."""
    excluded = () if pattern.lower().endswith(ONLY_IF_NAMED) else (ONLY_IF_NAMED,)
    files = [name for name in names if _format(name) and not name.lower().endswith(excluded)]
    others.update({*names} - {*files})
    return files


def ending(name: str) -> str:
    """Return the end of a file's name, including its compression, such as ``.csv.gz``."""
    stem, suffix = os.path.splitext(os.path.basename(name).lower())  # noqa: PTH119, PTH122
    return os.path.splitext(stem)[1] + suffix if suffix in COMPRESSIONS else suffix  # noqa: PTH122


def spelled_counts(left_out: Counter[str]) -> str:
    """Return the numbers of files that were left out, in words: ``2 .csv, 1 without an ending``."""
    return ", ".join(f"{count} {end or 'without an ending'}" for end, count in left_out.most_common())


def _only(left_out: Counter[str]) -> str:
    return f", only {spelled_counts(left_out)}" if left_out else ""


def _walk(folder: str) -> list[str]:
    """Return all files of a folder, sorted. Hidden files are left out, and links are followed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", "use a folder that you may read") from None

    files: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(place)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(place, name) for name in names if not name.startswith(".")]  # noqa: PTH118
    return sorted(files)


def _format(name: str) -> tuple[Kind, Compression | None] | None:
    """Return the kind and compression of a file by the end of its name, or ``None`` if they are unknown."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122
    compression = COMPRESSIONS.get(suffix)
    kind = KINDS.get(os.path.splitext(stem)[1] if compression else suffix)  # noqa: PTH122
    return None if kind is None else (kind, compression)


def _source(
    name: str, separator: str | None, field: str | None, encoding: str | None, skip_bad: bool, misread: list[str]
) -> Source:
    """Return the source of a path. The beginning of the file is checked, but standard input is not."""
    facts: dict[str, Any] = {"path": name, "separator": separator, "field": field or FIELD, "encoding": encoding}
    if name == STDIN:
        return Source(size=None, mtime_ns=None, kind="text" if field is None else "jsonl", compression=None, **facts)
    try:
        status = os.stat(name)  # noqa: PTH116
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot read {name}: {reason}", "pass the path of a file") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"got {name}, which is not a regular file", f"pass - < {name}")
    if (format := _format(name)) is None:  # noqa: A001
        compression = COMPRESSIONS.get(os.path.splitext(name.lower())[1])  # noqa: PTH122
        as_text = (
            f"pass - < {name}" if compression is None else f"{TOOLS[compression][1]} -dc {name} | locant prepare -"
        )
        raise InputError(f"got {name}, expected a file that ends in {SUFFIXES}", f"{as_text} to read it as text")
    kind, compression = format
    facts["separator"] = separator if kind == "text" else None
    facts["encoding"] = None if kind == "parquet" else encoding
    source = Source(size=status.st_size, mtime_ns=status.st_mtime_ns, kind=kind, compression=compression, **facts)
    require_readers(source)
    try:
        return require_its_kind(source, misread)
    except InputError:
        if not skip_bad:
            raise
    return source


def require_readers(source: Source) -> None:
    """Raise `InputError` if reading the source needs a package that is not installed."""
    if source.kind == "parquet" or source.compression == "zst":
        require_arrow(source.name)


def require_its_kind(source: Source, misread: list[str]) -> Source:
    """Return the source in the encoding of its byte order mark, if it has one.

    Raise `InputError` if the first bytes of the file contradict its kind. Warn if its encoding is likely another, and
    add its name to `misread` if it is likely UTF-8 (`is_misread_as`).
    """
    data = _beginning(source, SNIFFED)
    if source.kind == "parquet":
        if not data.startswith(b"PAR1"):
            raise InputError(f"{source.name} is not a Parquet file", "write the file again")
        return source
    source = _with_marked_encoding(source, data)
    try:
        _require_text(source, data)
    except InputError:
        if source.compression is not None:
            _require_undamaged(source)  # if it is damaged, this is the true error
        raise
    if source.encoding is not None:
        if is_misread_as(source.encoding, data):
            misread.append(source.name)
    elif (likely := likely_other_encoding(data)) is not None:
        why, try_this = likely
        # All of it is a `Remedy`, because the command line spells its arguments as options.
        text = f"{source.name} is likely not UTF-8: {why}; try: ".replace("{", "{{").replace("}", "}}")
        warnings.warn(Remedy(text + try_this.text, **try_this.arguments), stacklevel=2)
    return source


def _beginning(source: Source, size: int) -> bytes:
    """Return the first `size` bytes of the decompressed content of a file, or all if there are not more."""
    data = b""
    with opened(source) as file, _decompressed(file, source, Tally()) as stream:
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
    return data


def _require_undamaged(source: Source) -> None:
    """Raise `InputError` if a compressed file is damaged within the first `MOST_DAMAGED` bytes of its content."""
    size = 0
    with opened(source) as file, _decompressed(file, source, Tally()) as stream:
        while size < MOST_DAMAGED and (data := stream.read(BLOCK)):
            size += len(data)


def _with_marked_encoding(source: Source, data: bytes) -> Source:
    """Return the source in the encoding of the byte order mark of its data, if they begin with one."""
    names = _names(data)
    return source if not names or source.encoding in names else dataclasses.replace(source, encoding=names[0])


def _names(data: bytes) -> Sequence[str | None]:
    """Return the names of the encoding whose byte order mark begins the data, or no names."""
    return next((names for mark, names in MARKS.items() if data.startswith(mark)), ())


def _require_text(source: Source, data: bytes) -> None:
    """Raise `InputError` if the beginning of a file is not text in the source's encoding."""
    if source.encoding is not None:
        if source.encoding.startswith(WIDE) and is_misread_as(source.encoding, data):
            cause = f"{source.name} is not {source.encoding}: it has no NUL byte, and it is valid UTF-8"
            convert = f"convert the {source.encoding} files with iconv -f {source.encoding} -t UTF-8"
            raise InputError(cause, Remedy(f"prepare it without {{}}, or {convert}", encoding=...))
        if data and source.encoding in (needs := {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}) and not _names(data):
            cause = f"{source.name} has no byte order mark, which {source.encoding} needs"
            raise InputError(cause, Remedy(encoding=needs[source.encoding]))
        data = _decoded(data, source.encoding).encode(errors="replace")
    for encoding, likely in {"utf-16-le": data[1::2], "utf-16-be": data[::2]}.items():
        others = data.count(0) - likely.count(0)
        if len(likely) >= 8 and likely.count(0) > NUL_SHARE * len(likely) and others < NUL_SHARE * len(likely) / 2:
            cause = f"{source.name} is likely UTF-16 without a byte order mark: many of its bytes are NUL"
            raise InputError(cause, Remedy(encoding=encoding))
    require_text(data, source.name)


def is_misread_as(encoding: str, data: bytes) -> bool:
    """Return True if the beginning of a text is likely UTF-8, and is another text in this `encoding`.

    >>> is_misread_as("cp1252", "déjà vu".encode()), is_misread_as("cp1252", "déjà vu".encode("cp1252"))
    (True, False)
    >>> is_misread_as("utf-16-le", b"plain"), is_misread_as("cp1252", b"plain")
    (True, False)
    """
    if b"\0" in data or likely_other_encoding(data) is not None:
        return False
    if data.isascii() and b"a".decode(encoding, "replace") == "a":  # such as ISO-2022-JP, which has only ASCII bytes
        return False
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, len(data) < SNIFFED)
    except UnicodeDecodeError:
        return False
    if encoding.startswith(WIDE):
        return bool(data)
    return text.removeprefix("\ufeff") != _decoded(data, encoding)


def _decoded(data: bytes, encoding: str) -> str:
    """Decode the beginning of a file, which may end within a character unless it is the whole file."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(data, len(data) < SNIFFED)


def _warn_of_misread(names: Sequence[str], encoding: str | None) -> None:
    """Warn of files that are likely UTF-8, but are read in another encoding."""
    if not names:
        return
    if len(names) == 1:
        what, them, they_are = f"{names[0]} is valid UTF-8 but was read as {encoding}", "it", "it is"
    else:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        listed = ", ".join(names[:NAMED]) + more
        what, them, they_are = (
            f"{len(names)} files are valid UTF-8 but were read as {encoding}: {listed}",
            "them",
            "they are",
        )
    what = what.replace("{", "{{").replace("}", "}}")
    warnings.warn(Remedy(f"{what}; if {they_are} UTF-8, prepare {them} without {{}}", encoding=...), stacklevel=3)


def likely_other_encoding(data: bytes) -> tuple[str, Remedy] | None:
    """Return why the beginning of a text is likely not UTF-8, with a remedy, or ``None`` if it may be UTF-8.

    >>> likely_other_encoding("déjà vu, à l'été".encode("cp1252"))
    ('4 of its first 15 characters are not UTF-8', "pass encoding='cp1252', or its actual encoding")
    >>> likely_other_encoding("déjà vu, à l'été".encode()[:-1]) is None  # which ends within a letter
    True
    """
    text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
    replaced, control = text.count("\ufffd") - data.count("\ufffd".encode()), len(_CONTROL.findall(text))
    western = Remedy("pass {}, or its actual encoding", encoding="cp1252")
    if replaced > FOREIGN_SHARE * len(text):
        western = Remedy("pass {} with its actual encoding, for example gb18030, shift_jis or cp1251", encoding=...)
    wide = Remedy("pass {} with its actual encoding, for example utf-16-le", encoding=...)
    for count, share, what, remedy in (
        (replaced, REPLACED_SHARE, "are not UTF-8", western),
        (control, CONTROL_SHARE, "are control characters", wide),
    ):
        if count >= FEWEST and count > share * len(text):
            return f"{count} of its first {len(text)} characters {what}", remedy
    return None


def read_stdin(source: Source, place: Path | None) -> tuple[Source, str]:
    """Read standard input to its end, and return its source and SHA-256. With a `place`, it is copied to this file."""
    digest, size, misread, first = hashlib.sha256(), 0, list[str](), b""
    with nullcontext() if place is None else NewFile(place) as copy:
        for block in blocks(standard_input()):
            digest.update(block)
            size += len(block)
            first += block[: 4 - len(first)]
            if copy is not None:
                copy.write(block)
        source = dataclasses.replace(source, size=size, copy=None if place is None else str(place))
        source = _with_marked_encoding(source, first)
        if copy is not None:
            copy.settle()
            copy.publish()
            require_its_kind(source, misread)
            _warn_of_misread(misread, source.encoding)
    return source, digest.hexdigest()


@contextmanager
def opened(source: Source) -> Generator[IO[bytes]]:
    """Open the file of a source for reading from any place."""
    try:
        file = Path(source.file).open("rb")  # noqa: SIM115  # closed below; errors of its readers are not those of opening
    except OSError as error:
        raise InputError(
            f"cannot read {source.name}: {error.strerror or error}", "use a file that you may read"
        ) from None
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


class _Unpacked:
    """The content of all members of a compressed file, by the decompressors of Python's library.

    The library's own readers ignore any bytes after the last member.
    """

    def __init__(self, file: Readable, start: Callable[[], Any], pad: bytes) -> None:
        self._file, self._start, self._pad = file, start, pad
        self._member, self._rest = start(), b""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, and no bytes at the end of the last member."""
        while True:
            if self._member.eof:
                self._rest = (self._member.unused_data or self._file.read(BLOCK)).lstrip(self._pad)
                while not self._rest:
                    if not (more := self._file.read(BLOCK)):
                        return b""
                    self._rest = more.lstrip(self._pad)
                self._member = self._start()
            elif self._member.needs_input and not self._rest:
                self._rest = self._file.read(BLOCK)
                if not self._rest:
                    raise EOFError("it is truncated")
            data, self._rest = self._member.decompress(self._rest, size), b""
            if data:
                return data


class _Recoded:
    """A stream in another encoding, converted to UTF-8. Bytes that the encoding does not define become U+FFFD."""

    def __init__(self, stream: Readable, encoding: str) -> None:
        self._stream, self._decoder, self._rest = stream, codecs.getincrementaldecoder(encoding)("replace"), b""

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, and no bytes at the end."""
        while not self._rest:
            data = self._stream.read(size)
            self._rest = self._decoder.decode(data, final=not data).encode(errors="replace")
            if not data:
                break
        size = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


@contextmanager
def unpacked(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    """Open the decompressed content of a file, as UTF-8 if it is text. `tally` counts the bytes of the file itself."""
    with _decompressed(file, source, tally) as stream:
        yield stream if source.encoding is None else _Recoded(stream, source.encoding)


@contextmanager
def _decompressed(file: Readable, source: Source, tally: Tally) -> Generator[Readable]:
    tallied = _Tallied(file, tally)
    if source.compression is None:
        yield tallied
        return
    before = tally.bytes
    try:
        if source.compression == "gz":
            with gzip.GzipFile(fileobj=tallied, mode="rb") as unzipped:
                yield unzipped
        elif source.compression == "bz2":
            yield _Unpacked(tallied, bz2.BZ2Decompressor, b"")
        elif source.compression == "xz":
            yield _Unpacked(tallied, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), b"\0")
        else:
            arrow = require_arrow(source.name)
            with arrow.CompressedInputStream(arrow.PythonFile(tallied, mode="r"), "zstd") as stream:
                yield stream
        if tally.bytes == before:
            raise EOFError("it is empty")
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what, tool = TOOLS[source.compression]
        raise InputError(f"{source.name} is not a complete {what} file: {error}", f"test it with {tool} -t") from None


def blocks(stream: Readable) -> Iterator[bytes]:
    """Yield the rest of a stream, block by block."""
    while data := stream.read(BLOCK):
        yield data


def range_blocks(file: IO[bytes], byte_range: ByteRange, tally: Tally, begin: int) -> Iterator[bytes]:
    """Yield the bytes from `begin` to the end of a range, block by block. Bytes before the range are not counted."""
    _, start, stop = byte_range
    file.seek(begin)
    for low in range(begin, stop, BLOCK):
        data = file.read(min(BLOCK, stop - low))
        if len(data) < min(BLOCK, stop - low):
            raise changed(byte_range)
        tally.add(memoryview(data)[max(start - low, 0) :])
        yield data


def changed(byte_range: ByteRange) -> InputError:
    """Return the error for a file that has become shorter, or longer if all of it was to be read."""
    source, _, stop = byte_range
    return InputError(
        f"{source.name} has changed: it had {stop} bytes or more", "run the same again when nothing writes to the file"
    )


def require_arrow(name: str) -> Any:  # an untyped package
    """Return `pyarrow`, which reads Parquet and Zstandard."""
    arrow = require("pyarrow", f"reading {name}")
    importlib.import_module("pyarrow.compute")
    return arrow
