"""What was asked for, checked, and what will be done, decided once and written down.

A request is everything that decides the store, and nothing of how it is made. A plan is a folder, `.prepare` inside the
store, that appears whole or not at all:

    plan.json        the options that decide the result, and where each line of parts-DIGEST.jsonl begins
    sources-DIGEST.json  every file as it was found: path, size, time of its last change
    parts-DIGEST.jsonl   a line per part: the byte ranges that it reads
    tokenizer.json   the tokenizer
    stdin            what came from standard input, if that is a source: it can be read again, and in parts
    lock             tells whether a process is still writing the files above
    part-NAME/...    what was made, see `locant.text.prepare.parts`

A process that makes a part reads its line alone. How parts are cut depends on the sources and `shard_size` only, never
on who makes them: so the store does not either. A part is named after what it reads, as it was found, and what decides
its tokens. So if a file was mended, the same call writes a new plan in the place of the old one (`plan.json` is
replaced at once), in which all parts that read no changed file have their old names: they are done. The new plan keeps
the tokenizer and the size of parts.

Folders here appear whole or not at all: one is written under another name beside its place, `NAME.RANDOM`, and renamed
when everything in it is on the disk. Meanwhile its maker holds a lock on a file in it, which the system releases when a
process ends in any way. On a file system without locks, no folder counts as left behind.
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

from locant.arguments import flag, shown, whole
from locant.errors import InputError, RangeError, Remedy
from locant.files import flush, lock, write_whole
from locant.text.prepare.readers import TRAINING_BYTES, Sample, take_sample
from locant.text.prepare.sources import ByteRange, Paths, Source, cut, find_sources, known_encoding, read_stdin
from locant.text.reading import STDIN, well_formed
from locant.text.store import MANIFEST
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.tokenizer import LARGEST_VOCABULARY

SHARD_SIZE = 2**26
VOCAB_SIZE = 32_768
TRAINED = "a BPE trained on the input"
NAMED = 3
"""How many differences are told; the others are counted."""

FOLDER = ".prepare"
STDIN_FILE = "stdin"
NUMBERING = "numbering.json"
"""Is there when all parts are done, and being joined."""
VERSION = 3
SMALLEST_PART = 16 * 2**20
PARTS = 64
"""A large input is cut into at least so many parts, of this many bytes or more, so that every worker has some."""

BYTES_PER_TOKEN = 4
"""What a token of usual text takes up: only to cut parts that give about one shard of the wanted size."""

SHARD = re.compile(r"shard-(\d{5,})\.(bin|idx)")
"""What `shard_name` gives, as a file."""

NAME = 16
"""Digits of the hashes that name parts and plans."""

LOCK = "lock"
YOUNG = 60.0
"""Seconds in which a new folder may come to have its lock."""


class ContentOptions(TypedDict, total=False):
    """The options of `prepare` that decide what is in a store."""

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
    """Everything that decides the store, and nothing of how it is made: no workers, engines or tasks."""

    sources: Sequence[Source]
    options: Mapping[str, Any]
    tokenizer: Tokenizer | None
    """``None`` for one that is trained."""
    skip_bad: bool = False
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many files of folders and patterns are of no kind that is read, by the ends of their names."""

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
        """The request of a call of `prepare`; its arguments, and errors, are those."""
        shard_size = whole("shard_size", shard_size, 1, 2**62, remedy=Remedy(shard_size=SHARD_SIZE))
        if vocab_size is not None:
            vocab_size = whole("vocab_size", vocab_size, 257, LARGEST_VOCABULARY, remedy=Remedy(vocab_size=VOCAB_SIZE))
        flag("skip_bad", skip_bad)
        for name, value in {"separator": separator, "field": field, "encoding": encoding}.items():
            if value is not None and not (isinstance(value, str) and value and value == well_formed(value)):
                raise RangeError(f"got {shown(value)} for {name}, expected a text", f"{name}=None for the default")
        if append_end_of_text is not None:
            append_end_of_text = flag("append_end_of_text", append_end_of_text)
        if tokenizer is not None and vocab_size is not None:
            cause = "got both a tokenizer and a vocabulary size, which is for one that is trained here"
            raise RangeError(cause, Remedy(vocab_size=None))
        if isinstance(tokenizer, (str, Path)):
            tokenizer = Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)
        if not (tokenizer is None or isinstance(tokenizer, Tokenizer)):
            cause = f"got {shown(tokenizer)} for tokenizer, expected a Tokenizer, a path or a name"
            raise RangeError(cause, Remedy(tokenizer="bytes"))
        named = {
            name: _id_of(tokenizer, name, token)
            for name, token in {"end_of_text": end_of_text, "begin_of_text": begin_of_text}.items()
            if token is not None
        }
        if append_end_of_text is False and "end_of_text" in named:
            raise RangeError("got end_of_text, and that none is to be appended", Remedy(append_end_of_text=True))
        ends = tokenizer is None or tokenizer.end_of_text is not None or "end_of_text" in named
        if append_end_of_text and not ends:
            raise RangeError("got a tokenizer without an end-of-text token to append", Remedy(append_end_of_text=False))
        trained = {"tokenizer": TRAINED, "vocab_size": VOCAB_SIZE if vocab_size is None else vocab_size}
        options = {
            **(trained if tokenizer is None else {"tokenizer": tokenizer.fingerprint}),
            "separator": separator,
            "field": field,
            "append_end_of_text": ends if append_end_of_text is None else append_end_of_text,
            "shard_size": shard_size,
            **named,
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
        """Whether standard input is a source that was not read yet."""
        return any(source.size is None for source in self.sources)

    def with_stdin(self, place: Path | None) -> Request:
        """The same, with standard input read; it is kept in the file `place`, if there is one."""
        number = next(i for i, source in enumerate(self.sources) if source.path == STDIN)
        stdin, sha256 = read_stdin(self.sources[number], place)
        sources = [*self.sources[:number], stdin, *self.sources[number + 1 :]]
        return dataclasses.replace(self, sources=sources, options={**self.options, "standard_input": sha256})

    def chosen_tokenizer(self, sample: Sample | None = None) -> Tokenizer:
        """The tokenizer that was given, or one that is trained on a sample, by default a new one."""
        if self.tokenizer is not None:
            return self.tokenizer
        sample = take_sample(self.sources, TRAINING_BYTES, skip_bad=self.skip_bad) if sample is None else sample
        texts = [text.decode(errors="replace") for text in sample.texts]
        if not any(texts):
            raise InputError(
                "found no text to train a tokenizer on", Remedy("other paths, {} or {}", separator=..., field=...)
            )
        return Tokenizer.train(texts, self.options["vocab_size"])

    def end_of_text(self, tokenizer: Tokenizer) -> int | None:
        """The id to put after every document, if there shall be one."""
        usual = self.options.get("end_of_text", tokenizer.end_of_text)
        return usual if self.options["append_end_of_text"] else None

    def mends(self, plan: Plan) -> bool:
        """Whether this is the request of a plan, but that files have changed, or bad records shall be skipped now."""
        before, after = ({source.path: source for source in each} for each in (plan.sources(), self.sources))
        if dict(plan.options) != dict(self.options) or [*before] != [*after]:
            return False
        return before != after or plan.skip_bad != self.skip_bad

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


def _id_of(tokenizer: Tokenizer | None, option: str, token: object) -> int:
    """The id of the token that an option names."""
    if tokenizer is None:
        raise RangeError(f"got {option}={token!r} without a tokenizer that has it", Remedy(tokenizer=...))
    number = tokenizer.id_of(token) if isinstance(token, str) else None
    if number is None:
        known = ", ".join(map(repr, [*tokenizer.special_tokens][:12])) or "none"
        cause = f"got {shown(token)} for {option}, which the tokenizer does not have; its special tokens are {known}"
        raise RangeError(cause, "name one of its tokens")
    return number


def _state(source: Source) -> str:
    if source.mtime_ns is None:
        return f"{source.size} bytes"
    # The zone of the reader, who compares it with what `ls --full-time` says, to the last digit.
    seconds, rest = divmod(source.mtime_ns, 10**9)
    when = f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}.{rest:09d}"
    how = f"{source.kind}, separator {source.separator!r}, field {source.field!r}"
    return f"{source.size} bytes of {when} ({how})"


def store_folder(out: object) -> Path:
    """Where the store shall be, if that can be the name of a folder; an empty one would be the current folder."""
    if not isinstance(out, (str, Path)) or not str(out) or "\0" in str(out):
        raise InputError(f"got {shown(out)} as the folder of a store, expected a path", "out='store'")
    return Path(out)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan that was written: what a process that makes a part has to know."""

    folder: Path
    options: Mapping[str, Any]
    vocab_size: int
    end_of_text: int | None
    """The id that is put after every document, or ``None`` for none."""
    begin_of_text: int | None
    """The same before every document."""
    total_bytes: int
    part_bytes: int
    """How many bytes of input make a part, or more."""
    skip_bad: bool
    offsets: Sequence[int]
    """Where the line of each part begins in parts-DIGEST.jsonl; one more for the end."""
    names: Sequence[str]
    """Of each part: a hash of what it reads, and of what decides its tokens."""
    digest: str
    """Names this plan."""

    @property
    def store(self) -> Path:
        return self.folder.parent

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def byte_ranges(self, part: int) -> list[ByteRange]:
        """What a part reads, in order."""
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
    """The plan of a request, and its tokenizer: the plan that is there, or a new one."""
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
            take_place(folder, store / FOLDER)  # one that another process has just made is left as it is
            flush(store)
            plan = read_plan(store)
        if plan is None:
            raise InputError(f"{store / FOLDER} vanished while it was made", "run the same again, one run at a time")
        if request.mends(plan) and not (plan.folder / NUMBERING).exists():
            plan = _mend_plan(plan, request)
        if changes := request.changes_from(plan.options, plan.sources()):
            raise InputError(
                f"{store} holds unfinished work of another request: {'; '.join(changes)}",
                "use the same options and inputs, another folder, or resume=False (--restart) to discard that work",
            )
        if (folder / STDIN_FILE).exists():  # the same as the plan's; of that one a power cut may have left anything
            (folder / STDIN_FILE).replace(plan.folder / STDIN_FILE)
            flush(plan.folder)
    return plan, tokenizer or plan.tokenizer()


def _mend_plan(plan: Plan, request: Request) -> Plan:
    """A new plan in the place of one whose files have changed, with the same tokenizer."""
    _write_plan(plan.folder, request, plan.tokenizer(), plan.part_bytes)
    flush(plan.folder)
    mended = read_plan(plan.store)
    if mended is None:
        raise InputError(f"{plan.folder} vanished while it was mended", "run the same again, one run at a time")
    for name in {*plan.names} - {*mended.names}:  # what was read of a file as it is no more
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
    """How many bytes of input make a part: a 64th of it, but not few, and about one shard at most."""
    return min(max(total // PARTS, SMALLEST_PART), shard_size * BYTES_PER_TOKEN)


def _parts(sources: Iterable[Source], target: int) -> Iterator[list[ByteRange]]:
    """The sources in order, cut and gathered into parts of about `target` bytes."""
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
    """The plan of an unfinished store, or ``None`` where there is none."""
    folder = store / FOLDER
    try:
        facts = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists():  # a whole plan has that file: this is what is left of one
            discard_plan(store)
        return None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.pop("version", None) != VERSION:
        cause = f"{folder} is unfinished work of another version of locant"
        raise InputError(cause, f"rm -r {folder}, which discards that work")
    return Plan(folder=folder, **facts)


def discard_plan(store: Path) -> None:
    """Remove unfinished work. Its folder goes last: while it is there, the shards beside it are known to be of it."""
    aside = _aside(store / FOLDER)
    with suppress(FileNotFoundError):
        (store / FOLDER).replace(aside)
        if not (store / MANIFEST).exists():  # else another process has just finished the store, and clears up
            remove_shards(store)
    shutil.rmtree(aside, ignore_errors=True)


def sweep_plans(store: Path) -> None:
    """Empty the folders in which a process that died made or discarded a plan; they stay: the folder is ours."""
    for folder in store.glob(f"{FOLDER}.*"):
        with suppress(OSError):
            if is_abandoned(folder):
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_shards(store: Path, first: int = 0) -> None:
    """Remove the shards in the folder of a store that have the number `first` or a higher one."""
    for path in store.glob("shard-*.*"):
        if (shard := SHARD.fullmatch(path.name)) and int(shard[1]) >= first:
            path.unlink(missing_ok=True)


@contextmanager
def locked_folder(place: Path) -> Generator[Path]:
    """A folder beside `place` to write in, where it has a file `LOCK`; gone afterwards unless it took its place."""
    folder = _aside(place)
    folder.mkdir()
    try:
        with (folder / LOCK).open("wb") as file:
            lock(file)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _aside(place: Path) -> Path:
    """A name beside `place` that nothing has."""
    return place.with_name(f"{place.name}.{secrets.token_hex(4)}")


def take_place(folder: Path, place: Path) -> bool:
    """Give a folder its name; ``False`` if something stands there already. Who wrote in it has flushed it."""
    try:
        folder.replace(place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.EACCES) or not place.exists():
            raise
        return False
    return True


def is_abandoned(folder: Path) -> bool:
    """Whether the process that worked in a folder has ended."""
    try:
        with (folder / LOCK).open("rb") as file:
            return lock(file) is True
    except FileNotFoundError:  # its lock is not there yet, or not any more: for a moment, or for ever
        return time.time() - folder.stat().st_mtime > YOUNG


def cannot_write(what: str, error: OSError) -> InputError:
    """The error where the system refuses to write."""
    where = f": {error.filename}" if error.filename else ""
    remedy = "make room or give access, and run the same again: finished work is kept"
    return InputError(f"cannot {what}: {error.strerror or error}{where}", remedy)
