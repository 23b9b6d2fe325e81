"""From paths to documents: what is read, what a document is, and how a file is read in pieces.

**Files.** Text (.txt, .md), JSON lines (.jsonl) and Parquet (.parquet), each also compressed (.gz, .zst), folders and
patterns with all such files in them, sorted by path, and ``-`` for standard input. A file that is named twice, by
whatever way, is refused: nobody knows whether it should count twice. What cannot be read, and what begins like a binary
file or like UTF-16, is refused when it is found, before the work begins.

**Documents.** A text is one document, or what stands between separators, found from left to right as `bytes.split`
does. A line of JSON and a row of Parquet are one each. Documents without a byte are left out, everywhere: what follows
the last separator, a blank line, null. White space is a document. A byte order mark at the beginning of a file is
dropped, and everything else is kept as it stands, carriage returns included. A NUL within the first `SNIFFED` bytes
means a binary file; one further on, in some of a million web pages, is text. So are bytes that are not UTF-8:
`Tokenizer.encode` says what becomes of them.

**Parts.** `documents` gives batches of some megabytes. A document may be longer than that, or than memory: then it
comes in parts, the last text of a batch that is `unfinished` and the first of the next one. Parts end anywhere, also
within a letter. `Engine.stream` takes such batches and gives their ids, in the same manner: it alone knows where a
text may be cut. So all of it together is::

    for ids, lengths, unfinished in engine.stream(documents(piece, tally)):
        ...
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from locant.errors import InputError
from locant.text.prepare.documents import SNIFFED, require_text
from locant.text.prepare.documents import documents as documents
from locant.text.prepare.pieces import Batch as Batch
from locant.text.prepare.pieces import Compression, Kind
from locant.text.prepare.pieces import Piece as Piece
from locant.text.prepare.pieces import Source as Source
from locant.text.prepare.pieces import Tally as Tally
from locant.text.prepare.pieces import cut as cut
from locant.text.prepare.streams import call, opened, require_arrow, unpacked
from locant.text.reading import STDIN

__all__ = ["Batch", "Piece", "Source", "Tally", "cut", "documents", "find_sources"]

KINDS: dict[str, Kind] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}


# ------------------------------------------------------------------ finding


def find_sources(
    paths: str | Path | Iterable[str | Path], *, separator: str | None = None, field: str | None = None
) -> list[Source]:
    r"""The files that the paths name, in the order of the paths; those of a folder or pattern sorted.

    Args:
        paths: files, folders, patterns such as ``data/**/*.jsonl``, and ``-``.
        separator: what stands between the documents of a text file; ``None`` makes each file one document.
        field: the key or column that holds the text, ``"text"`` if it is not given. With one, standard input is read
            as JSON lines, and without as text.

    Raises:
        InputError: for a path that is missing, of another kind, unreadable, empty of files, or there twice.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("b.txt", "a.md", "c.png"):
    ...     _ = (folder / name).write_text("one\n\ntwo")
    >>> sources = find_sources(folder, separator="\n\n")
    >>> [Path(source.path).name for source in sources]
    ['a.md', 'b.txt']
    >>> [text for piece in cut(sources[0], 1000) for batch in documents(piece) for text in batch.texts]
    [b'one', b'two']
    """
    if separator == "":
        raise InputError("got an empty separator", r"'\n\n', or None to make each file one document")
    given = [paths] if isinstance(paths, (str, Path)) else [*paths]
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
            raise InputError(f"no file to read matches {path}", f"one that ends in {_suffixes()}")
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
        raise InputError(f"there is no file to read in {folder}", f"files that end in {_suffixes()}")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot read {error.filename}: {error.strerror}", "a folder that you may read") from None


def _require_once(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            other = f" (as {seen[real]})" if seen[real] != name else ""
            raise InputError(f"got {call(name)} twice{other}", "naming it once")
        seen[real] = name


def _format(name: str) -> tuple[Kind, Compression | None] | None:
    """What a file is by the end of its name."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122
    compression = COMPRESSIONS.get(suffix)
    kind = KINDS.get(os.path.splitext(stem)[1] if compression else suffix)  # noqa: PTH122
    return None if kind is None else (kind, compression)


def _suffixes() -> str:
    return f"{', '.join(KINDS)}, with or without {' or '.join(COMPRESSIONS)}"


def _source(name: str, separator: str | None, field: str | None) -> Source:
    made = _stdin if name == STDIN else _file
    return made(name, separator, field)


def _stdin(name: str, separator: str | None, field: str | None) -> Source:
    return Source(
        path=name,
        size=None,
        mtime_ns=None,
        kind="text" if field is None else "jsonl",
        compression=None,
        separator=separator,
        field=field or "text",
    )


def _file(name: str, separator: str | None, field: str | None) -> Source:
    found = _format(name)
    try:
        status = os.stat(name)  # noqa: PTH116
    except OSError as error:
        raise InputError(
            f"cannot read {name}: {(error.strerror or str(error)).lower()}", "the path of a file"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"got {name}, which is no regular file", f"- < {name}")
    if found is None:
        raise InputError(
            f"got {name}, expected a file that ends in {_suffixes()}", f"- < {name}, which reads it as text"
        )
    kind, compression = found
    _sniff(name, kind, compression)
    return Source(
        path=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        kind=kind,
        compression=compression,
        separator=separator if kind == "text" else None,
        field=field or "text",
    )


def _sniff(name: str, kind: Kind, compression: Compression | None) -> None:
    """Refuse what is not of its kind by its first bytes."""
    with opened(name) as file, unpacked(file, compression, name, Tally()) as stream:
        data = stream.read(SNIFFED)
    if kind != "parquet":
        require_text(data, name)
    else:
        require_arrow(name)
        if not data.startswith(b"PAR1"):
            raise InputError(f"{name} is no Parquet file", "writing the file again")
