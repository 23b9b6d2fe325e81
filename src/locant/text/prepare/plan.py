"""What will be done, decided once and written down: the options, the sources, and the parts that they are cut into.

A plan is a folder, `.prepare` inside the store, that appears whole or not at all:

    plan.json        the options that decide the result, and where each line of parts.jsonl begins
    sources.json     every file as it was found: path, size, time of its last change
    parts.jsonl      a line per part: the pieces of files that it reads
    tokenizer.json   the tokenizer
    stdin            what came from standard input, if that is a source: it can be read again, and in parts
    lock             tells whether somebody is still writing the files above
    part-00000/...   what was made, see `locant.text.prepare.part`

Whoever makes a part reads its line alone, so that a worker needs little memory for a plan of any length. How parts are
cut depends on the sources and `shard_size` only, never on who makes them: so the store does not depend on it either.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from locant.errors import InputError
from locant.files import flush, write_whole
from locant.text.prepare.locks import is_dead, locked
from locant.text.prepare.pieces import Piece, Source, cut
from locant.text.reading import STDIN
from locant.text.store import MANIFEST
from locant.text.tokenizer import Tokenizer

__all__ = [
    "FOLDER",
    "SMALLEST_PART",
    "STDIN_FILE",
    "TAKEN",
    "Plan",
    "PlannedPiece",
    "discard_plan",
    "holds_work",
    "keep_plan",
    "keep_stdin",
    "new_plan",
    "part_bytes",
    "parts_of",
    "read_plan",
    "readable_sources",
    "remove_shards",
    "sweep_plans",
    "write_plan",
]

FOLDER = ".prepare"
STDIN_FILE = "stdin"
VERSION = 1
SMALLEST_PART = 16 * 2**20
PARTS = 64
"""A large input is cut into at least so many parts, of this many bytes or more, so that every worker has some."""

BYTES_PER_TOKEN = 4
"""What a token of usual text takes up: only to cut parts that give about one shard of the wanted size."""

SHARD = re.compile(r"shard-(\d{5,})\.(bin|idx)")
"""What `shard_name` gives, as a file."""

TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
"""How the system refuses to put one folder in the place of another that holds something."""


class PlannedPiece(NamedTuple):
    """A piece, with the size and time that its file had when the plan was made."""

    piece: Piece
    size: int | None
    mtime_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan that was written: what whoever makes a part has to know."""

    folder: Path
    options: Mapping[str, Any]
    """Everything asked for that decides the ids, but the sources."""
    vocab_size: int
    end_of_text: int | None
    """The id that is put after every document, or ``None`` for none."""
    total_bytes: int
    """Of all sources, as they lie on the disk."""
    offsets: Sequence[int]
    """Where the line of each part begins in parts.jsonl; one more for the end."""
    digest: str
    """Names this plan: what another plan has made is not taken for its own."""

    @property
    def store(self) -> Path:
        return self.folder.parent

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def pieces(self, number: int) -> list[PlannedPiece]:
        """What a part reads, in order."""
        start, stop = self.offsets[number : number + 2]
        with (self.folder / "parts.jsonl").open("rb") as file:
            file.seek(start)
            line = json.loads(file.read(stop - start))
        return [PlannedPiece(Piece(**piece), size, mtime_ns) for piece, size, mtime_ns in line]

    def readable(self, piece: Piece) -> Piece:
        """The same piece; standard input is read from the file that it was kept in."""
        return dataclasses.replace(piece, path=str(self.folder / STDIN_FILE)) if piece.path == STDIN else piece

    def sources(self) -> list[Source]:
        """The files, as they were found."""
        return [Source(**one) for one in json.loads((self.folder / "sources.json").read_text(encoding="utf-8"))]

    def readable_sources(self) -> list[Source]:
        """The files, with standard input where it was kept."""
        return readable_sources(self.sources(), self.folder)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was given, or trained on a sample."""
        path = self.folder / "tokenizer.json"
        return Tokenizer.from_json(path.read_text(encoding="utf-8"), str(path))


def readable_sources(sources: Iterable[Source], folder: Path) -> list[Source]:
    """The same sources; standard input is read from the file in `folder` that it was kept in."""
    kept = str(folder / STDIN_FILE)
    return [dataclasses.replace(source, path=kept) if source.path == STDIN else source for source in sources]


def part_bytes(total: int, shard_size: int) -> int:
    """How many bytes of input make a part: a 64th of it, but not few, and about one shard at most.

    >>> [part_bytes(total, shard_size=2**26) // 2**20 for total in (2**20, 2**31, 2**41)]
    [16, 32, 256]
    >>> part_bytes(2**31, shard_size=1000)
    4000
    """
    return min(max(total // PARTS, SMALLEST_PART), shard_size * BYTES_PER_TOKEN)


def parts_of(sources: Iterable[Source], target: int) -> Iterator[list[PlannedPiece]]:
    """The sources in order, cut and gathered into parts of about `target` bytes."""
    part: list[PlannedPiece] = []
    weight = 0
    for source in sources:
        for piece in cut(source, target):
            part.append(PlannedPiece(piece, source.size, source.mtime_ns))
            weight += (piece.stop or 0) - piece.start
            if weight >= target:
                yield part
                part, weight = [], 0
    if part:
        yield part


@contextmanager
def new_plan(store: Path) -> Generator[Path]:
    """A folder to write a plan into, which is gone afterwards unless it was kept by `keep_plan`."""
    sweep_plans(store)
    made = store / f"{FOLDER}.{secrets.token_hex(4)}"
    made.mkdir()
    try:
        with locked(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def keep_plan(made: Path) -> Plan:
    """Make what was written into a new folder the plan; one that another process has just kept is left as it is.

    All of it is on the disk by now: whoever wrote a file has flushed it, and the folder behind it.
    """
    store = made.parent
    try:
        made.replace(store / FOLDER)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
    flush(store)
    plan = read_plan(store)
    if plan is None:
        raise InputError(f"{store / FOLDER} vanished while it was made", "one run at a time, the same again")
    return plan


def sweep_plans(store: Path) -> None:
    """Empty the folders in which a plan was made, or discarded, by a process that died at it.

    They stay, empty, until the store is finished: see `holds_work`.
    """
    for folder in store.glob(f"{FOLDER}.*"):
        with suppress(OSError):
            if is_dead(folder):
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def keep_stdin(made: Path, plan: Plan) -> None:
    """Put the copy of standard input in a new folder in the place of the plan's, which was the same when it was made.

    Nobody knows what a power cut has left of that one, and its file tells nothing.
    """
    (made / STDIN_FILE).replace(plan.folder / STDIN_FILE)
    flush(plan.folder)


def discard_plan(store: Path) -> None:
    """Remove unfinished work; it is no plan any more from the first moment on.

    Its folder goes last: while it is there, the shards beside it are known to be of unfinished work.
    """
    aside = store / f"{FOLDER}.{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        (store / FOLDER).replace(aside)
        if not (store / MANIFEST).exists():  # else another process has just finished the store, and clears up
            remove_shards(store)
    shutil.rmtree(aside, ignore_errors=True)


def remove_shards(store: Path, first: int = 0) -> None:
    """Remove the shards in the folder of a store that have the number `first` or a higher one."""
    for path in store.glob("shard-*.*"):
        if (found := SHARD.fullmatch(path.name)) and int(found[1]) >= first:
            path.unlink(missing_ok=True)


def holds_work(store: Path) -> bool:
    """Whether a folder has unfinished work in it, or what is left of some."""
    return (store / FOLDER).exists() or any(store.glob(f"{FOLDER}.*"))


def write_plan(
    folder: Path, sources: Sequence[Source], options: Mapping[str, Any], tokenizer: Tokenizer, end_of_text: int | None
) -> None:
    """Write the files of a plan into a new folder."""
    total = sum(source.size or 0 for source in sources)
    parts = parts_of(sources, part_bytes(total, options["shard_size"]))
    lines = [_line(part) for part in parts]
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    facts = {
        "options": dict(options),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": end_of_text,
        "total_bytes": total,
        "offsets": offsets,
    }
    written = json.dumps([vars(source) for source in sources])
    definition = tokenizer.to_json()
    digest = hashlib.sha256(b"".join(lines))
    for text in (written, json.dumps(facts), definition):
        digest.update(text.encode())
    write_whole(folder / "parts.jsonl", b"".join(lines))
    write_whole(folder / "sources.json", written)
    write_whole(folder / "tokenizer.json", definition)
    write_whole(folder / "plan.json", json.dumps({"version": VERSION, **facts, "digest": digest.hexdigest()}))


def _line(part: Sequence[PlannedPiece]) -> bytes:
    return json.dumps([(vars(one.piece), one.size, one.mtime_ns) for one in part]).encode() + b"\n"


def read_plan(store: Path) -> Plan | None:
    """The plan of an unfinished store, or ``None`` where there is none.

    Raises:
        InputError: for one that this version cannot read.
    """
    folder = store / FOLDER
    try:
        facts = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists():  # a whole plan has that file: this is what somebody has left of one
            discard_plan(store)
        return None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.pop("version", None) != VERSION:
        raise InputError(
            f"{folder} is unfinished work of another version of locant", f"rm -r {folder}, which discards that work"
        )
    return Plan(folder=folder, **facts)
