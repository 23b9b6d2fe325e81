"""From paths to sources: files, folders and patterns, and standard input.

Text (.txt, .md), JSON lines (.jsonl) and Parquet (.parquet), each also compressed (.gz, .zst); folders and patterns
stand for all such files in them, sorted by path; ``-`` is standard input. A file that is named twice, in whatever way,
is refused, and so is, before the work begins, what begins like a binary file or like UTF-16. A NUL within the first
`SNIFFED` bytes means a binary file; one further on, in some of a million web pages, is text.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import stat
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.files import NewFile
from locant.text.prepare.byte_ranges import Compression, Kind, Source, Tally
from locant.text.prepare.readers.streams import blocks, opened, require_arrow, unpacked
from locant.text.reading import STDIN, require_text, standard_input

__all__ = ["FIELD", "find_sources", "read_stdin"]

KINDS: dict[str, Kind] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}

FIELD = "text"
"""The key or column that holds the text, where none is named."""

SUFFIXES = f"{', '.join(KINDS)}, with or without {' or '.join(COMPRESSIONS)}"

SNIFFED = 8192
"""How much of a file is looked at to tell text from other things."""


def find_sources(
    paths: str | Path | Iterable[str | Path], *, separator: str | None = None, field: str | None = None
) -> list[Source]:
    """The files that the paths name, in the order of the paths; those of a folder or pattern sorted.

    Without a `separator` each text file is one document. With a `field`, standard input is read as JSON lines.

    Raises:
        InputError: for a path that is missing, of another kind, unreadable, empty of files, or there twice.
    """
    given: list[Any] = [*paths] if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    if odd := [path for path in given if not isinstance(path, (str, Path))]:
        raise InputError(f"got {shown(odd[0])} as a path, expected str or Path", "the path of a file or folder")
    named = [name for path in given for name in _named(str(path))]
    if not named:
        raise InputError("got no path", "a file, a folder, or - for standard input")
    _require_once(named)
    return [_source(name, separator, field) for name in named]


def _named(path: str) -> list[str]:
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
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207
        files = [name for one in found for name in (_within(one) if os.path.isdir(one) else [one])]  # noqa: PTH112
        files = [*dict.fromkeys(name for name in files if _format(name))]  # `**` finds a folder and what is in it
        if not files:
            raise InputError(f"no file to read matches {path}", f"one that ends in {SUFFIXES}")
        return files
    return [path]


def _within(folder: str) -> list[str]:
    """All files of a folder that can be read, by their names; hidden ones are left alone, links are followed."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        status = os.stat(place)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(place, name) for name in names if not name.startswith(".") and _format(name)]  # noqa: PTH118
    if not found:
        raise InputError(f"there is no file to read in {folder}", f"files that end in {SUFFIXES}")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot read {error.filename}: {error.strerror}", "a folder that you may read") from None


def _require_once(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            other = f" (as {seen[real]})" if seen[real] != name else ""
            raise InputError(f"got {'standard input' if name == STDIN else name} twice{other}", "naming it once")
        seen[real] = name


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
    if (found := _format(name)) is None:
        raise InputError(f"got {name}, expected a file that ends in {SUFFIXES}", f"- < {name}, which reads it as text")
    kind, compression = found
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
