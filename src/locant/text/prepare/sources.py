"""Find the source files of given paths, and check that each is of its kind.

Sources are text (.txt, .md), JSON lines (.jsonl, .jsonlines, .ndjson, .json) and Parquet (.parquet), each also
compressed (.gz, .zst, .bz2, .xz). A folder or a pattern means all such files in it, sorted by path. ``-`` is standard
input. An uncompressed .json file is read if it is named, but not as part of a folder, because such files are rarely
text. The other files of a folder are counted by the ends of their names. A file that is named twice, even by different
paths, is an error. Before the work begins, a file that begins like a binary file is an error, too.

`byte_ranges` cuts these files. `compression` and `text_encodings` read their bytes. `readers` reads their texts.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, Remedy
from locant.files import NewFile
from locant.shell import shell_path
from locant.text.prepare.byte_ranges import Compression, Kind, Source, Tally, blocks, open_source
from locant.text.prepare.compression import COMPRESSIONS, TOOLS, open_decompressed, require_arrow, require_undamaged
from locant.text.prepare.text_encodings import (
    CHECKED_BYTES,
    is_misread_as,
    known_encoding,
    likely_other_encoding,
    require_encoded_text,
    warn_of_misread,
    with_marked_encoding,
)
from locant.text.reading import STDIN, standard_input

Paths = str | Path | Iterable[str | Path]

KINDS: dict[str, Kind] = {
    ".txt": "text", ".md": "text", ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip

SUFFIXES = f"{', '.join(KINDS)}, with or without {', '.join(COMPRESSIONS)}"

ARCHIVES = {
    **dict.fromkeys((".tar", *(f".tar{each}" for each in COMPRESSIONS), ".tgz", ".tbz2", ".txz"), "tar -xf"),
    ".zip": "unzip", ".7z": "7z x",
}  # fmt: skip
"""The ends of the names of archives, and the commands that unpack them."""

ONLY_IF_NAMED = ".json"
"""Files with this ending are read only if they are named. In folders most of them are settings."""

FIELD = "text"
"""The default key or column of the text."""


def find_sources(
    paths: Paths,
    *,
    separator: str | None = None,
    field: str | None = None,
    encoding: str | None = None,
    skip_bad: bool = False,
    left_out: Counter[str] | None = None,
) -> list[Source]:
    """Return the files that the paths name, in the order of the paths. Files of a folder or pattern are sorted.

    Without a `separator` each text file is one document. With a `field`, standard input is read as JSON lines. With
    `skip_bad`, a file that is not of its kind is not an error here, but is skipped when it is read. `left_out` counts
    the files of folders and patterns that have no known kind, by the ends of their names.

    Raises:
        InputError: a path is missing, of an unknown kind, unreadable, a folder without such files, or given twice.
    """
    entries: list[Any] = [*paths] if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    if odd := [path for path in entries if not isinstance(path, (str, Path))]:
        raise InputError(
            f"got {short_repr(odd[0])} as a path, expected str or Path", "pass the path of a file or folder"
        )
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
    warn_of_misread(misread, encoding)
    return sources


def _expand(path: str, left_out: Counter[str]) -> list[str]:
    """Return the files that a path names."""
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
            raise _nothing_to_read(f"no file to read matches {path}", others)
        left_out.update(map(ending, others))
        return files
    return [path]


def _files_in(folder: str, left_out: Counter[str]) -> list[str]:
    """Return all files of a folder that can be read, by the ends of their names, and count the others."""
    others = set[str]()
    if not (files := _select_known_kinds(_walk(folder), others)):
        raise _nothing_to_read(f"there is no file to read in {folder}", others)
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
    """Return how many files were left out, in words: ``2 .csv, 1 without an ending``."""
    return ", ".join(f"{count} {end or 'without an ending'}" for end, count in left_out.most_common())


def unpack_remedy(name: str) -> str | None:
    """Return the remedy for an archive, or ``None`` if the name does not end like an archive's."""
    command = next((command for end, command in ARCHIVES.items() if name.lower().endswith(end)), None)
    return None if command is None else f"unpack it first ({command} {shell_path(name)}), and pass the unpacked files"


def _nothing_to_read(cause: str, others: Iterable[str]) -> InputError:
    """Return the error for a folder or a pattern with only these files."""
    counts = Counter(map(ending, others))
    archive = next(filter(None, map(unpack_remedy, sorted(others))), None)
    only = f", only {spelled_counts(counts)}" if counts else ""
    return InputError(f"{cause}{only}", archive or f"use files that end in {SUFFIXES}")


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
        raise InputError(f"got {name}, which is not a regular file", f"pass - < {shell_path(name)}")
    if (format := _format(name)) is None:  # noqa: A001
        compression = COMPRESSIONS.get(os.path.splitext(name.lower())[1])  # noqa: PTH122
        as_text = (
            f"pass - < {shell_path(name)}"
            if compression is None
            else f"{TOOLS[compression][1]} -dc {shell_path(name)} | locant prepare -"
        )
        remedy = unpack_remedy(name) or f"{as_text} to read it as text"
        raise InputError(f"got {name}, expected a file that ends in {SUFFIXES}", remedy)
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

    Raise `InputError` if the first bytes of the file contradict its kind. Warn if it is likely not UTF-8, but no
    encoding was named. If it is likely UTF-8 although another encoding was named, add its name to `misread`.
    """
    data = _beginning(source, CHECKED_BYTES)
    if source.kind == "parquet":
        if not data.startswith(b"PAR1"):
            raise InputError(f"{source.name} is not a Parquet file", "write the file again")
        return source
    source = with_marked_encoding(source, data)
    try:
        require_encoded_text(source, data)
    except InputError:
        if source.compression is not None:
            require_undamaged(source)  # if it is damaged, this is the true error
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
    """Return the first `size` bytes of the decompressed content of a file, or all if it is shorter."""
    data = b""
    with open_source(source) as file, open_decompressed(file, source, Tally()) as stream:
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
    return data


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
        source = with_marked_encoding(source, first)
        if copy is not None:
            copy.fsync()
            copy.publish()
            require_its_kind(source, misread)
            warn_of_misread(misread, source.encoding)
    return source, digest.hexdigest()
