"""What was asked for, checked: the sources, as they were found, and the options that decide what the store holds.

Sources are text (.txt, .md), JSON lines (.jsonl) and Parquet (.parquet), each also compressed (.gz, .zst); folders and
patterns stand for all such files in them, sorted by path; ``-`` is standard input. A file that is named twice, in
whatever way, is refused, and so is, before the work begins, what begins like a binary file or like UTF-16. A NUL within
the first `SNIFFED` bytes means a binary file; one further on, in some of a million web pages, is text.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from locant.arguments import flag, shown, whole
from locant.errors import InputError, RangeError
from locant.files import NewFile
from locant.text.prepare.readers import Sample
from locant.text.prepare.readers.streams import (
    Compression,
    Kind,
    Source,
    Tally,
    blocks,
    opened,
    require_arrow,
    unpacked,
)
from locant.text.reading import STDIN, require_text, standard_input, well_formed
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.tokenizer import LARGEST_VOCABULARY

__all__ = [
    "FIELD", "SHARD_SIZE", "VOCAB_SIZE", "ContentOptions", "Paths", "Request", "find_sources", "read_stdin",
    "store_folder",
]  # fmt: skip

KINDS: dict[str, Kind] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}

FIELD = "text"
"""The key or column that holds the text, where none is named."""

SUFFIXES = f"{', '.join(KINDS)}, with or without {' or '.join(COMPRESSIONS)}"

SNIFFED = 8192
"""How much of a file is looked at to tell text from other things."""

SHARD_SIZE = 2**26
VOCAB_SIZE = 32_768
TRAINED = "a BPE trained on the input"
NAMED = 3
"""How many differences are told; the others are counted."""

Paths = str | Path | Iterable[str | Path]


class ContentOptions(TypedDict, total=False):
    """The options of `prepare` that decide what is in a store."""

    tokenizer: Tokenizer | str | Path | None
    shard_size: int
    vocab_size: int | None
    separator: str | None
    field: str | None
    append_end_of_text: bool | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides the store, and nothing of how it is made: no workers, engines or tasks."""

    sources: Sequence[Source]
    options: Mapping[str, Any]
    tokenizer: Tokenizer | None
    """``None`` for one that is trained."""

    @classmethod
    def of(
        cls,
        paths: Paths,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        shard_size: int = SHARD_SIZE,
        vocab_size: int | None = None,
        separator: str | None = None,
        field: str | None = None,
        append_end_of_text: bool | None = None,
    ) -> Request:
        """The request of a call of `prepare`; its arguments, and errors, are those."""
        shard_size = whole("shard_size", shard_size, 1, 2**62, remedy=f"shard_size={SHARD_SIZE}")
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, 257, LARGEST_VOCABULARY, remedy=f"vocab_size={VOCAB_SIZE}")
        for name, value in {"separator": separator, "field": field}.items():
            if value is not None and not (isinstance(value, str) and value and value == well_formed(value)):
                raise RangeError(f"got {shown(value)} for {name}, expected a text", f"{name}=None for the default")
        if append_end_of_text is not None:
            append_end_of_text = flag("append_end_of_text", append_end_of_text)
        if tokenizer is not None and vocab_size is not None:
            cause = "got both a tokenizer and a vocabulary size, which is for one that is trained here"
            raise RangeError(cause, "vocab_size=None")
        if isinstance(tokenizer, (str, Path)):
            tokenizer = Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)
        if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
            cause = f"got {shown(tokenizer)} for tokenizer, expected a Tokenizer, a path or a name"
            raise RangeError(cause, 'tokenizer="bytes"')
        ends = tokenizer is None or tokenizer.end_of_text is not None
        if append_end_of_text and not ends:
            raise RangeError("got a tokenizer without an end-of-text token to append", "append_end_of_text=False")
        trained = {"tokenizer": TRAINED, "vocab_size": VOCAB_SIZE if vocab_size is None else vocab_size}
        options = {
            **(trained if tokenizer is None else {"tokenizer": tokenizer.fingerprint}),
            "separator": separator,
            "field": field,
            "append_end_of_text": ends if append_end_of_text is None else append_end_of_text,
            "shard_size": shard_size,
        }
        sources = find_sources(paths, separator=separator, field=field)
        return cls(sources=sources, options=options, tokenizer=tokenizer)

    @property
    def total_bytes(self) -> int:
        """Of all sources whose size is known."""
        return sum(source.size or 0 for source in self.sources)

    @property
    def needs_stdin(self) -> bool:
        """Whether standard input is a source that was not read yet."""
        return any(source.size is None for source in self.sources)

    def with_stdin(self, place: Path | None) -> Request:
        """The same, with standard input read; it is kept in the file `place`, if there is one."""
        number = next(i for i, source in enumerate(self.sources) if source.path == STDIN)
        stdin, sha256 = read_stdin(self.sources[number], place)
        sources = [*self.sources[:number], stdin, *self.sources[number + 1 :]]
        return dataclasses.replace(self, sources=sources, options={**self.options, "standard_input": sha256})

    def chosen_tokenizer(self, sample: Callable[[], Sample]) -> Tokenizer:
        """The tokenizer that was given, or one that is trained on a sample."""
        if self.tokenizer is not None:
            return self.tokenizer
        texts = [text.decode(errors="replace") for text in sample().texts]
        if not any(texts):
            raise InputError("found no text to train a tokenizer on", "other paths, a --separator or a --field")
        return Tokenizer.train(texts, self.options["vocab_size"])

    def end_of_text(self, tokenizer: Tokenizer) -> int | None:
        """The id to put after every document, if there shall be one."""
        return tokenizer.end_of_text if self.options["append_end_of_text"] else None

    def changes_from(self, options: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
        """What is different from an earlier request, in words; nothing if both give the same store."""
        pairs = {name: (options.get(name), self.options.get(name)) for name in {**options, **self.options}}
        changes = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
        before, after = ({source.path: source for source in each} for each in (sources, self.sources))
        changed = [path for path in before if path in after and before[path] != after[path]]
        files = [f"{path} is no longer an input" for path in before if path not in after]
        files += [f"{path} is a new input" for path in after if path not in before]
        files += [f"{path} changed from {_state(before[path])} to {_state(after[path])}" for path in changed]
        if not files and [*before] != [*after]:
            files.append("the inputs come in another order")
        changes += files
        return [*changes[:NAMED], f"{len(changes) - NAMED} more"] if len(changes) > NAMED else changes


def store_folder(out: object) -> Path:
    """Where the store shall be, if that can be the name of a folder; an empty one would be the current folder."""
    if not isinstance(out, (str, Path)) or not str(out) or "\0" in str(out):
        raise InputError(f"got {shown(out)} as the folder of a store, expected a path", "out='store'")
    return Path(out)


def _state(source: Source) -> str:
    if source.mtime_ns is None:
        return f"{source.size} bytes"
    # The zone of the reader, who compares it with what `ls --full-time` says, to the last digit.
    seconds, rest = divmod(source.mtime_ns, 10**9)
    when = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}.{rest:09d}"
    how = f"{source.kind}, separator {source.separator!r}, field {source.field!r}"
    return f"{source.size} bytes of {when} ({how})"


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
    seen: dict[str, str] = {}
    for name in named:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            other = f" (as {seen[real]})" if seen[real] != name else ""
            raise InputError(f"got {'standard input' if name == STDIN else name} twice{other}", "naming it once")
        seen[real] = name
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
