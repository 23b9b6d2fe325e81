"""Making one part: a pure function of the plan and a number, which may be done twice, or by two at once.

A part is made in a folder of its own, `part-00012.RANDOM`, which becomes `part-00012` when everything in it is on the
disk: so a part is there whole or not at all. Of two that make the same part the second finds it done and removes its
own, which had the same bytes. What it holds: its documents, encoded, with the end of text after each, in shards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from locant.errors import InputError
from locant.files import flush, write_whole
from locant.text.prepare.byte_ranges import ByteRange, Source, Tally
from locant.text.prepare.folders import LOCK, cannot_write, is_abandoned, locked_folder, take_place
from locant.text.prepare.plan import Plan
from locant.text.prepare.readers import documents
from locant.text.store import FileRecord, ShardRecord, ShardWriter, shard_name
from locant.text.tokenizer.engine import Encoded, Engine

__all__ = ["Advance", "FinishedPart", "finished_part", "make_part", "part_folder", "sweep_parts"]

MARKER = "part.json"

Advance = Callable[[int], None]
"""Is called with how many more bytes of the input were read."""


@dataclass(frozen=True, kw_only=True)
class FinishedPart:
    """What is written, last, into the folder of a part: the marker that it is done."""

    plan: str
    shards: list[ShardRecord]
    byte_ranges: list[dict[str, Any]]
    """Path, start, stop and SHA-256 of what was read, for each byte range."""

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> FinishedPart:
        """From what `asdict` gave."""
        for shard in facts["shards"]:
            shard |= {kind: FileRecord(**shard[kind]) for kind in ("bin", "idx")}
        shards = [ShardRecord(**shard) for shard in facts["shards"]]
        return cls(plan=facts["plan"], shards=shards, byte_ranges=facts["byte_ranges"])


def part_folder(plan: Plan, number: int) -> Path:
    """Where a part is, once it is done."""
    return plan.folder / f"part-{number:05d}"


def finished_part(plan: Plan, number: int) -> FinishedPart | None:
    """What a part has, if it is done: marked as done, of this plan, and all its files of the size that was written."""
    folder = part_folder(plan, number)
    try:
        part = FinishedPart.from_json(json.loads((folder / MARKER).read_text(encoding="utf-8")))
        sizes = [
            (folder / f"{shard_name(i)}.{kind}").stat().st_size == size
            for i, shard in enumerate(part.shards)
            for kind, size in (("bin", shard.bin.size), ("idx", shard.idx.size))
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return part if all(sizes) and part.plan == plan.digest else None


def make_part(plan: Plan, number: int, engine: Engine, advance: Advance) -> None:
    """Make a part, unless it is done."""
    if finished_part(plan, number) is not None:
        return
    place = part_folder(plan, number)
    try:
        with locked_folder(place) as folder:
            shards, byte_ranges = write_shards(plan, number, folder, engine, advance)
            part = FinishedPart(plan=plan.digest, shards=shards, byte_ranges=byte_ranges)
            write_whole(folder / MARKER, json.dumps(asdict(part)))
            (folder / LOCK).unlink()
            if not take_place(folder, place) and finished_part(plan, number) is None:
                place.replace(folder.with_suffix(f"{folder.suffix}.broken"))  # what stands there is no finished part
                folder.replace(place)
            flush(plan.folder)
    except (OSError, InputError) as error:
        if not plan.folder.exists():
            cause = f"another run has finished {plan.store} meanwhile, or discarded it"
            raise InputError(cause, "the same again: a store is found") from error
        if isinstance(error, InputError):
            raise
        raise cannot_write(f"make part {number} of {plan.store}", error) from error


def sweep_parts(plan: Plan) -> None:
    """Remove what is left of parts whose makers died."""
    for folder in plan.folder.glob("part-*.*"):
        with suppress(OSError):
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def write_shards(
    plan: Plan, part: int, folder: Path, engine: Engine, advance: Advance
) -> tuple[list[ShardRecord], list[dict[str, Any]]]:
    """Write the shards of a part; what they hold, and of each byte range its path, start, stop and SHA-256."""
    with closing(_Shards(folder, plan.vocab_size, plan.options["shard_size"])) as shards:
        read = [_write_range(one, plan.end_of_text, shards, engine, advance) for one in plan.byte_ranges(part)]
        shards.finish()
    return shards.records, read


def _write_range(
    byte_range: ByteRange, end_of_text: int | None, shards: _Shards, engine: Engine, advance: Advance
) -> dict[str, Any]:
    """Read, encode and write one byte range; what was read, and its hash."""
    (source, start, stop), tally, seen, continues = byte_range, Tally(), 0, False
    _require_unchanged(source)
    try:
        for ids, lengths, unfinished in _encoded(engine, byte_range, tally):
            if end_of_text is not None:  # not after a document that goes on
                finished = np.arange(len(lengths)) < len(lengths) - unfinished
                ids, lengths = np.insert(ids, np.cumsum(lengths)[finished], end_of_text), lengths + finished
            shards.append(ids, lengths, continues=continues, unfinished=unfinished)
            continues = unfinished
            advance(tally.bytes - seen)
            seen = tally.bytes
    except (InputError, OSError):
        _require_unchanged(source)  # else its reader complains of damage, which is not what happened
        raise
    _require_unchanged(source)
    advance(tally.bytes - seen)
    return {"path": source.path, "start": start, "stop": stop, "sha256": tally.sha256}


def _encoded(engine: Engine, byte_range: ByteRange, tally: Tally) -> Iterator[Encoded]:
    """The ids of a byte range; an engine that refuses does not know whose text it reads."""
    name = byte_range.source.name
    try:
        yield from engine.stream(documents(byte_range, tally))
    except InputError as error:
        if name in error.cause:
            raise
        raise InputError(f"{name}, after byte {byte_range.start}: {error.cause}", error.remedy) from None


def _require_unchanged(source: Source) -> None:
    """A file that changes while it is read would give a store of neither state."""
    try:
        state = os.stat(source.file)  # noqa: PTH116  # a `Path` for each of very many files takes longer
    except FileNotFoundError:
        remedy = "putting it back as it was, or resume=False (--restart), which begins anew"
        raise InputError(f"{source.name} has vanished since the work was planned", remedy) from None
    except OSError as error:
        remedy = "giving access to it, then the same again"
        raise InputError(f"cannot read {source.name}: {error.strerror}", remedy) from None
    if source.mtime_ns is not None and (state.st_size, state.st_mtime_ns) != (source.size, source.mtime_ns):
        cause = f"{source.name} has changed since the work was planned: it had {source.size} bytes, now {state.st_size}"
        raise InputError(
            cause, "resume=False (--restart), which begins anew, once nothing writes to the inputs any more"
        )


class _Shards:
    """Documents into shards: one is closed with the document that brings it to `shard_size` tokens."""

    def __init__(self, folder: Path, vocab_size: int, shard_size: int) -> None:
        self.records: list[ShardRecord] = []
        self._folder, self._vocab_size, self._shard_size = folder, vocab_size, shard_size
        self._open: ShardWriter | None = None

    def append(self, ids: np.ndarray, lengths: np.ndarray, *, continues: bool, unfinished: bool) -> None:
        """Add documents; the first may continue the last one, and the last may be unfinished."""
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while first < len(lengths):
            if self._open is None:
                self._open = ShardWriter(self._folder, len(self.records), self._vocab_size)
            writer = self._open
            full = int(np.searchsorted(ends[1:], ends[first] + self._shard_size - writer.tokens))
            last = min(max(full, first), len(lengths) - 1)
            writer.append(
                ids[ends[first] : ends[last + 1]], lengths[first : last + 1], continues=continues and first == 0
            )
            first = last + 1
            if writer.tokens >= self._shard_size and not (unfinished and first == len(lengths)):
                self.finish()

    def finish(self) -> None:
        """Complete the shard that is open, if one is."""
        if self._open is not None:
            with self._open:
                self.records.append(self._open.close())
            self._open = None

    def close(self) -> None:
        """Discard the shard that is open, if one is: an error came before its end."""
        if self._open is not None:
            with self._open:
                pass
