"""Requests, which are checked arguments of `prepare`, and plans, which divide the work into parts and are written once.

A request holds everything that decides the content of the store, but not how it is made. A plan is a folder,
`.prepare` inside the store, that appears whole or not at all:

    plan.json        the options that decide the result, and where each line of parts-DIGEST.jsonl begins
    sources-DIGEST.json  every file in its state when it was found: path, size, time of its last change
    parts-DIGEST.jsonl   a line per part: the byte ranges that it reads
    tokenizer.json   the tokenizer
    stdin            a copy of standard input, if it is a source, so that it can be read again, and in parts
    lock             locked while a process is writing the files above
    part-NAME/...    finished parts, see `locant.text.prepare.parts`

A process that makes a part reads only the line of this part. The cuts between parts depend only on the sources and
`shard_size`, not on the processes that make parts, so the store does not depend on the processes either. The name of a
part is a hash of its input (files as they were found) and of everything that decides its tokens. So if a file has
changed, the same call replaces the plan (`plan.json` is replaced atomically). Parts that read no changed file keep
their names in the new plan, so they are done already. The new plan keeps the tokenizer and the size of parts.

Folders here appear whole or not at all. A folder is written under another name next to its place, `NAME.RANDOM`, and
renamed when everything in it is on disk. Meanwhile the process that writes it holds a lock on a file in it, which the
system releases however the process ends. On a file system without locks, no folder counts as abandoned.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

from locant.arguments import flag, short_repr, whole
from locant.errors import InputError, RangeError, Remedy
from locant.files import flush, lock, write_whole
from locant.shell import shell_path
from locant.text.prepare.byte_ranges import ByteRange, Source, cut
from locant.text.prepare.readers import without_text
from locant.text.prepare.sample import TRAINING_BYTES, Sample, take_sample
from locant.text.prepare.sources import Paths, find_sources, read_stdin
from locant.text.prepare.text_encodings import known_encoding
from locant.text.reading import STDIN, well_formed
from locant.text.store import MANIFEST
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.tokenizer import LARGEST_VOCABULARY

SHARD_SIZE = 2**26
VOCAB_SIZE = 32_768
TRAINED = "a BPE trained on the input"
MAX_LISTED = 3
"""The number of differences that errors list. Further differences are only counted."""

FOLDER = ".prepare"
STDIN_FILE = "stdin"
NUMBERING = "numbering.json"
"""This file exists when all parts are done and are being joined."""
VERSION = 3
SMALLEST_PART = 16 * 2**20
PARTS = 64
"""A large input is cut into at least this many parts of `SMALLEST_PART` bytes or more, for all workers."""

BYTES_PER_TOKEN = 4
"""The bytes of text of a usual token. This number is used only to cut parts that make about one shard."""

SHARD = re.compile(r"shard-(\d{5,})\.(bin|idx)")
"""The names of the files of shards, see `shard_name`."""

NAME = 16
"""The number of digits of the hashes that name parts and plans."""

LOCK = "lock"
GRACE_SECONDS = 60.0
"""Seconds that a new folder may exist without its lock."""


class ContentOptions(TypedDict, total=False):
    """The options of `prepare` that decide the content of a store."""

    tokenizer: Tokenizer | str | Path | None
    shard_size: int
    vocab_size: int | None
    separator: str | None
    field: str | None
    append_end_of_text: bool | None
    encoding: str | None
    skip_bad: bool
    end_of_text: str | None
    begin_of_text: str | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides the content of the store, but not how it is made (workers, engines, tasks)."""

    sources: Sequence[Source]
    options: Mapping[str, Any]
    tokenizer: Tokenizer | None
    """``None`` if a tokenizer is to be trained."""
    skip_bad: bool = False
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The number of files of folders and patterns that are not read, by the ends of their names."""

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
        encoding: str | None = None,
        skip_bad: bool = False,
        end_of_text: str | None = None,
        begin_of_text: str | None = None,
    ) -> Request:
        """Return the request for a call of `prepare` with the same arguments. The errors are the same, too."""
        shard_size = whole("shard_size", shard_size, 1, 2**62, remedy=Remedy(shard_size=SHARD_SIZE))
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, 257, LARGEST_VOCABULARY, remedy=Remedy(vocab_size=VOCAB_SIZE))
        flag("skip_bad", skip_bad)
        for name, value in {"separator": separator, "field": field, "encoding": encoding}.items():
            if value is not None and not (isinstance(value, str) and value and value == well_formed(value)):
                raise RangeError(
                    f"got {short_repr(value)} for {name}, expected a text", f"pass {name}=None for the default"
                )
        if append_end_of_text is not None:
            append_end_of_text = flag("append_end_of_text", append_end_of_text)
        if tokenizer is not None and vocab_size is not None:
            cause = "got both a tokenizer and a vocabulary size, which is only for a tokenizer that is trained here"
            raise RangeError(cause, Remedy(vocab_size=None))
        if isinstance(tokenizer, (str, Path)):
            tokenizer = Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)
        if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
            cause = f"got {short_repr(tokenizer)} for tokenizer, expected a Tokenizer, a path or a name"
            raise RangeError(cause, Remedy(tokenizer="bytes"))
        token_ids = {
            name: _token_id(tokenizer, name, token)
            for name, token in {"end_of_text": end_of_text, "begin_of_text": begin_of_text}.items()
            if token is not None
        }
        if append_end_of_text is False and "end_of_text" in token_ids:
            raise RangeError("got end_of_text and append_end_of_text=False", Remedy(append_end_of_text=True))
        has_end = tokenizer is None or tokenizer.end_of_text is not None or "end_of_text" in token_ids
        if append_end_of_text and not has_end:
            raise RangeError("got a tokenizer without an end-of-text token to append", Remedy(append_end_of_text=False))
        trained = {"tokenizer": TRAINED, "vocab_size": VOCAB_SIZE if vocab_size is None else vocab_size}
        options = {
            **(trained if tokenizer is None else {"tokenizer": tokenizer.fingerprint}),
            "separator": separator,
            "field": field,
            "append_end_of_text": has_end if append_end_of_text is None else append_end_of_text,
            "shard_size": shard_size,
            **token_ids,
        }
        if encoding is not None and (encoding := known_encoding(encoding)) is not None:
            options["encoding"] = encoding
        left_out = Counter[str]()
        sources = find_sources(
            paths, separator=separator, field=field, encoding=encoding, skip_bad=skip_bad, left_out=left_out
        )
        return cls(sources=sources, options=options, tokenizer=tokenizer, skip_bad=skip_bad, left_out=dict(left_out))

    @property
    def total_bytes(self) -> int:
        return sum(source.size or 0 for source in self.sources)

    @property
    def needs_stdin(self) -> bool:
        """Return whether standard input is a source that has not been read yet."""
        return any(source.size is None for source in self.sources)

    def with_stdin(self, place: Path | None) -> Request:
        """Read standard input, and return the request with its source. With a `place`, it is copied to this file."""
        number = next(i for i, source in enumerate(self.sources) if source.path == STDIN)
        stdin, sha256 = read_stdin(self.sources[number], place)
        sources = [*self.sources[:number], stdin, *self.sources[number + 1 :]]
        return dataclasses.replace(self, sources=sources, options={**self.options, "standard_input": sha256})

    def chosen_tokenizer(self, sample: Sample | None = None) -> Tokenizer:
        """Return the given tokenizer, or train one on the sample (default: take a new sample)."""
        if self.tokenizer is not None:
            return self.tokenizer
        sample = take_sample(self.sources, TRAINING_BYTES, skip_bad=self.skip_bad) if sample is None else sample
        texts = [text.decode(errors="replace") for text in sample.texts]
        if not any(texts):
            raise without_text("found no text to train a tokenizer on", self.sources, self.skip_bad)
        return Tokenizer.train(texts, self.options["vocab_size"])

    def end_of_text(self, tokenizer: Tokenizer) -> int | None:
        """Return the id to put after every document, or ``None`` for no id."""
        usual = self.options.get("end_of_text", tokenizer.end_of_text)
        return usual if self.options["append_end_of_text"] else None

    def can_mend(self, plan: Plan) -> bool:
        """Return True if this request equals the plan's request, except for changes of files or of `skip_bad`."""
        before, after = ({source.path: source for source in each} for each in (plan.sources(), self.sources))
        if dict(plan.options) != dict(self.options) or [*before] != [*after]:
            return False
        return before != after or plan.skip_bad != self.skip_bad

    def changes_from(self, options: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
        """Describe the differences from an earlier request. The list is empty if both make the same store."""
        pairs = {name: (options.get(name), self.options.get(name)) for name in {**options, **self.options}}
        changes = [f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new]
        before, after = ({source.path: source for source in each} for each in (sources, self.sources))
        changed = [path for path in before if path in after and before[path] != after[path]]
        files = [f"{path} is no longer an input" for path in before if path not in after]
        files += [f"{path} is a new input" for path in after if path not in before]
        files += [f"{path} changed from {_state(before[path])} to {_state(after[path])}" for path in changed]
        if {*before} == {*after} and [*before] != [*after]:  # first, because it alone stops unfinished work
            files.insert(0, "the inputs come in another order")
        changes += files
        return [*changes[:MAX_LISTED], f"{len(changes) - MAX_LISTED} more"] if len(changes) > MAX_LISTED else changes


def _token_id(tokenizer: Tokenizer | None, option: str, token: object) -> int:
    """Return the id of the token that an option names."""
    if tokenizer is None:
        raise RangeError(f"got {option}={token!r}, but no tokenizer that has this token", Remedy(tokenizer=...))
    number = tokenizer.id_of(token) if isinstance(token, str) else None
    if number is None:
        names = ", ".join(map(repr, [*tokenizer.special_tokens][:12])) or "none"
        cause = (
            f"got {short_repr(token)} for {option}, which the tokenizer does not have; its special tokens are {names}"
        )
        raise RangeError(cause, "use one of its tokens")
    return number


def _state(source: Source) -> str:
    if source.mtime_ns is None:
        return f"{source.size} bytes"
    # In the reader's time zone, to the last digit, for comparison with `ls --full-time`.
    seconds, rest = divmod(source.mtime_ns, 10**9)
    when = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}.{rest:09d}"
    how = f"{source.kind}, separator {source.separator!r}, field {source.field!r}"
    return f"{source.size} bytes of {when} ({how})"


def store_folder(out: object) -> Path:
    """Return the path of the store. Raise `InputError` if it cannot name a folder (empty means the current folder)."""
    if not isinstance(out, (str, Path)) or not str(out) or "\0" in str(out):
        raise InputError(f"got {short_repr(out)} as the folder of a store, expected a path", "out='store'")
    return Path(out)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A written plan: everything that a process needs to make a part."""

    folder: Path
    options: Mapping[str, Any]
    vocab_size: int
    end_of_text: int | None
    """The id after every document, or ``None`` for no id."""
    begin_of_text: int | None
    """The id before every document, or ``None`` for no id."""
    total_bytes: int
    part_bytes: int
    """The least number of bytes of input that make a part."""
    skip_bad: bool
    offsets: Sequence[int]
    """The places in parts-DIGEST.jsonl where the line of each part begins, and the end of the file."""
    names: Sequence[str]
    """For each part, a hash of its input and of everything that decides its tokens."""
    digest: str
    """A hash that identifies this plan."""

    @property
    def store(self) -> Path:
        return self.folder.parent

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def byte_ranges(self, part: int) -> list[ByteRange]:
        """Return the byte ranges that a part reads, in order."""
        start, stop = self.offsets[part : part + 2]
        with (self.folder / f"parts-{self.digest[:NAME]}.jsonl").open("rb") as file:
            file.seek(start)
            line = json.loads(file.read(stop - start))
        return [ByteRange(self._source(source), *ends) for source, *ends in line]

    def sources(self) -> list[Source]:
        path = self.folder / f"sources-{self.digest[:NAME]}.json"
        return [self._source(one) for one in json.loads(path.read_text(encoding="utf-8"))]

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        return Tokenizer.from_json(path.read_text(encoding="utf-8"), str(path))

    def _source(self, facts: dict[str, Any]) -> Source:
        return Source(**facts, copy=str(self.folder / STDIN_FILE) if facts["path"] == STDIN else None)


def plan_for(store: Path, request: Request, *, resume: bool) -> tuple[Plan, Tokenizer]:
    """Return the plan of a request, and its tokenizer. Write a plan if it does not exist."""
    plan, tokenizer = read_plan(store), request.tokenizer
    if plan is not None and not resume:
        discard_plan(store)
        plan = None
    sweep_plans(store)
    with locked_folder(store / FOLDER) as folder:
        if request.needs_stdin:
            request = request.with_stdin(folder / STDIN_FILE)
        if plan is None:
            tokenizer = request.chosen_tokenizer()
            _write_plan(folder, request, tokenizer, part_bytes(request.total_bytes, request.options["shard_size"]))
            take_place(folder, store / FOLDER)  # a plan that another process has just made stays
            flush(store)
            plan = read_plan(store)
        if plan is None:
            raise InputError(f"{store / FOLDER} vanished while it was made", "run again, one run at a time")
        if request.can_mend(plan) and not (plan.folder / NUMBERING).exists():
            plan = _mend_plan(plan, request)
        if changes := request.changes_from(plan.options, plan.sources()):
            raise InputError(
                f"{store} holds unfinished work of another request: {'; '.join(changes)}",
                "use the same options and inputs, another folder, or resume=False (--restart) to discard that work",
            )
        if (folder / STDIN_FILE).exists():  # equal to the plan's copy, which a power cut may have damaged
            (folder / STDIN_FILE).replace(plan.folder / STDIN_FILE)
            flush(plan.folder)
    return plan, tokenizer or plan.tokenizer()


def _mend_plan(plan: Plan, request: Request) -> Plan:
    """Replace a plan whose files have changed by a new plan with the same tokenizer."""
    _write_plan(plan.folder, request, plan.tokenizer(), plan.part_bytes)
    flush(plan.folder)
    mended = read_plan(plan.store)
    if mended is None:
        raise InputError(f"{plan.folder} vanished while it was updated", "run again, one run at a time")
    for name in {*plan.names} - {*mended.names}:  # parts that were read from files that have changed
        shutil.rmtree(plan.folder / f"part-{name}", ignore_errors=True)
    return mended


def _write_plan(folder: Path, request: Request, tokenizer: Tokenizer, size: int) -> None:
    lines = [
        json.dumps([(source.to_json(), start, stop) for source, start, stop in part]).encode() + b"\n"
        for part in _parts(request.sources, size)
    ]
    decisive = {
        "options": dict(request.options),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": request.end_of_text(tokenizer),
        "begin_of_text": request.options.get("begin_of_text"),
    }
    parts, definition = b"".join(lines), tokenizer.to_json()
    decides = hashlib.sha256((json.dumps(decisive) + definition).encode())
    names = list[str]()
    for line in lines:
        hashed = decides.copy()
        hashed.update(line)
        names.append(hashed.hexdigest()[:NAME])
    facts = {
        **decisive,
        "total_bytes": request.total_bytes,
        "part_bytes": size,
        "skip_bad": request.skip_bad,
        "offsets": [0, *accumulate(map(len, lines))],
        "names": names,
    }
    sources = json.dumps([source.to_json() for source in request.sources])
    digest = hashlib.sha256((sources + json.dumps(facts)).encode()).hexdigest()
    write_whole(folder / f"parts-{digest[:NAME]}.jsonl", parts)
    write_whole(folder / f"sources-{digest[:NAME]}.json", sources)
    if not (folder / "tokenizer.json").exists():
        write_whole(folder / "tokenizer.json", definition)
    write_whole(folder / "plan.json", json.dumps({"version": VERSION, **facts, "digest": digest}))


def part_bytes(total: int, shard_size: int) -> int:
    """Return the size of parts: a 64th of the input, but at least `SMALLEST_PART` and at most about one shard."""
    return min(max(total // PARTS, SMALLEST_PART), shard_size * BYTES_PER_TOKEN)


def _parts(sources: Iterable[Source], target: int) -> Iterator[list[ByteRange]]:
    """Cut the sources, in order, and collect the ranges into parts of about `target` bytes."""
    part: list[ByteRange] = []
    size = 0
    for source in sources:
        for byte_range in cut(source, target):
            part.append(byte_range)
            size += byte_range.stop - byte_range.start
            if size >= target:
                yield part
                part, size = [], 0
    if part:
        yield part


def read_plan(store: Path) -> Plan | None:
    """Return the plan of an unfinished store, or ``None`` if there is none."""
    folder = store / FOLDER
    try:
        facts = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists():  # a whole plan has this file, so this folder is the rest of a plan
            discard_plan(store)
        return None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.pop("version", None) != VERSION:
        cause = f"{folder} is unfinished work of another version of locant"
        raise InputError(cause, f"rm -r {shell_path(folder)} to discard that work")
    return Plan(folder=folder, **facts)


def discard_plan(store: Path) -> None:
    """Remove unfinished work. Its folder is removed last, because it marks the shards next to it as unfinished."""
    aside = _unused_name(store / FOLDER)
    with suppress(FileNotFoundError):
        (store / FOLDER).replace(aside)
        if not (store / MANIFEST).exists():  # else another process has just finished the store, and clears up
            remove_shards(store)
    shutil.rmtree(aside, ignore_errors=True)


def sweep_plans(store: Path) -> None:
    """Empty the folders in which a dead process made or discarded a plan. The empty folders mark the store as ours."""
    for folder in store.glob(f"{FOLDER}.*"):
        with suppress(OSError):
            if is_abandoned(folder):
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_shards(store: Path, first: int = 0) -> None:
    """Remove the shards with the numbers `first` and above from the folder of a store."""
    for path in store.glob("shard-*.*"):
        if (shard := SHARD.fullmatch(path.name)) and int(shard[1]) >= first:
            path.unlink(missing_ok=True)


@contextmanager
def locked_folder(place: Path) -> Generator[Path]:
    """Make a folder next to `place`, with a locked file `LOCK`. Remove it at the end unless it was moved."""
    folder = _unused_name(place)
    folder.mkdir()
    try:
        with (folder / LOCK).open("wb") as file:
            lock(file)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unused_name(place: Path) -> Path:
    """Return an unused name next to `place`."""
    return place.with_name(f"{place.name}.{secrets.token_hex(4)}")


def take_place(folder: Path, place: Path) -> bool:
    """Rename a folder, whose files are flushed, to its final name. Return ``False`` if that name is in use."""
    try:
        folder.replace(place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.EACCES) or not place.exists():
            raise
        return False
    return True


def is_abandoned(folder: Path) -> bool:
    """Return True if the process that worked in a folder has ended."""
    try:
        with (folder / LOCK).open("rb") as file:
            return lock(file) is True
    except FileNotFoundError:  # the lock does not exist yet, or no longer, for a moment or for ever
        return time.time() - folder.stat().st_mtime > GRACE_SECONDS


def cannot_write(what: str, error: OSError) -> InputError:
    """Return the error for a failed write."""
    where = f": {error.filename}" if error.filename else ""
    remedy = "make room or give access, and run again: finished work is kept"
    return InputError(f"cannot {what}: {error.strerror or error}{where}", remedy)
