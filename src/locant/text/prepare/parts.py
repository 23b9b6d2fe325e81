"""Make a part of a store, and join all parts.

A part is a pure function of the plan and a number, so it may be made twice, or by two processes at once. It is made in
a folder `part-NAME.RANDOM`. When everything in this folder is on disk, the folder is renamed `part-NAME`, so a part
exists whole or not at all. If two processes make the same part, the second finds it done and removes its own copy,
which has the same bytes. A part holds shards of its encoded documents, with the end-of-text id after each of them.

When all parts are done, their shards are moved into the store, and the manifest is written last. The numbers of all
shards are written to a file before the first one moves, so the next call continues a run that was killed between two
moves. Until the manifest exists, no reader accepts the folder as a store.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from locant.errors import InputError, Remedy
from locant.files import flush, read_json, write_whole
from locant.text.prepare.byte_ranges import ByteRange, Source, Tally, open_source, range_blocks
from locant.text.prepare.plan import (
    FOLDER,
    LOCK,
    NUMBERING,
    Plan,
    cannot_write,
    is_abandoned,
    locked_folder,
    read_plan,
    remove_shards,
    store_folder,
    take_place,
)
from locant.text.prepare.readers import Batch, documents, without_text
from locant.text.prepare.sources import require_its_kind, require_readers
from locant.text.store import MANIFEST, FileRecord, ShardRecord, ShardWriter, TokenStore, shard_name, write_manifest
from locant.text.tokenizer import Tokenizer
from locant.text.tokenizer.engine import EncodedBatch, Engine

MARKER = "part.json"
RESTART_REMEDY = "resume=False (--restart), which starts again"
RECORDED_COUNTS = ("skipped", "not_utf8")
"""The counts of a tally that are recorded for each byte range, if they are not 0."""
MAX_LISTED = 10
"""The number of missing tasks that errors list. Further tasks are only counted."""

Advance = Callable[[int], None]
"""A function that is called with the number of bytes of the input that were read since its last call."""


@dataclass(frozen=True, kw_only=True)
class FinishedPart:
    """The record that marks a part as done. It is written last into the folder of the part."""

    name: str
    shards: list[ShardRecord]
    byte_ranges: list[dict[str, Any]]
    """Path, start, stop, SHA-256 and counts (`RECORDED_COUNTS`) of each byte range that was read."""

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> FinishedPart:
        for shard in facts["shards"]:
            shard |= {kind: FileRecord(**shard[kind]) for kind in ("bin", "idx")}
        shards = [ShardRecord(**shard) for shard in facts["shards"]]
        return cls(name=facts["name"], shards=shards, byte_ranges=facts["byte_ranges"])


def part_folder(plan: Plan, number: int) -> Path:
    """Return the folder of a finished part."""
    return plan.folder / f"part-{plan.names[number]}"


def finished_part(plan: Plan, number: int) -> FinishedPart | None:
    """Return the record of a part if it is marked as done and all its files have their recorded sizes, else ``None``.

    A part in which bad records were skipped is not done if the plan does not skip them.
    """
    folder = part_folder(plan, number)
    try:
        part = FinishedPart.from_json(read_json(folder / MARKER))
        sizes = [
            (folder / f"{shard_name(i)}.{kind}").stat().st_size == size
            for i, shard in enumerate(part.shards)
            for kind, size in (("bin", shard.bin.size), ("idx", shard.idx.size))
        ]
    except (OSError, KeyError, TypeError):
        return None
    skipped = any(one.get("skipped") for one in part.byte_ranges)
    return part if all(sizes) and part.name == plan.names[number] and (plan.skip_bad or not skipped) else None


def missing_parts(plan: Plan) -> list[int]:
    """Return the numbers of the parts that are not done."""
    if (plan.folder / NUMBERING).exists():
        return []
    return [number for number in range(plan.num_parts) if finished_part(plan, number) is None]


def sweep_parts(plan: Plan) -> None:
    """Remove the unfinished parts of dead processes."""
    for folder in plan.folder.glob("part-*.*"):
        with suppress(OSError):
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def make_part(plan: Plan, number: int, engine: Engine, advance: Advance) -> None:
    """Make a part, unless it is done."""
    if finished_part(plan, number) is not None:
        return
    place = part_folder(plan, number)
    try:
        with locked_folder(place) as folder:
            with _Shards(folder, plan.vocab_size, plan.options["shard_size"]) as shards:
                ranges = plan.byte_ranges(number)
                read = [_write_range(one, plan, shards, engine, advance) for one in ranges]
                shards.finish()
            part = FinishedPart(name=plan.names[number], shards=shards.records, byte_ranges=read)
            write_whole(folder / MARKER, json.dumps(asdict(part)))
            (folder / LOCK).unlink()
            if not take_place(folder, place) and finished_part(plan, number) is None:
                place.replace(folder.with_suffix(f"{folder.suffix}.broken"))  # not a finished part
                folder.replace(place)
            flush(plan.folder)
    except (OSError, InputError) as error:
        if not plan.folder.exists():
            cause = f"another run has finished {plan.store} meanwhile, or discarded it"
            raise InputError(cause, "run again: it finds the store") from error
        if isinstance(error, InputError):
            raise
        raise cannot_write(f"make part {number} of {plan.store}", error) from error


def _write_range(
    byte_range: ByteRange, plan: Plan, shards: _Shards, engine: Engine, advance: Advance
) -> dict[str, Any]:
    """Read, encode and write one byte range. Return its path, bounds, hash and counts."""
    (source, start, stop), tally, seen, continues = byte_range, Tally(), 0, False
    end_of_text = plan.end_of_text
    _require_unchanged(source)
    try:
        for ids, lengths, unfinished in _encode(engine, byte_range, tally, plan.skip_bad):
            if plan.begin_of_text is not None:  # not before the rest of a document
                begins = np.arange(len(lengths)) >= continues
                starts = (np.cumsum(lengths) - lengths)[begins]
                ids, lengths = np.insert(ids, starts, plan.begin_of_text), lengths + begins
            if end_of_text is not None:  # not after an unfinished document
                finished = np.arange(len(lengths)) < len(lengths) - unfinished
                ids, lengths = np.insert(ids, np.cumsum(lengths)[finished], end_of_text), lengths + finished
            shards.append(ids, lengths, continues=continues, unfinished=unfinished)
            continues = unfinished
            advance(tally.bytes - seen)
            seen = tally.bytes
    except (InputError, OSError):
        _require_unchanged(source)  # if the file has changed, the error must not state that it is damaged
        raise
    _require_unchanged(source)
    advance(tally.bytes - seen)
    counted = {name: count for name in RECORDED_COUNTS if (count := getattr(tally, name))}
    return {"path": source.path, "start": start, "stop": stop, "sha256": tally.sha256, **counted}


def _encode(engine: Engine, byte_range: ByteRange, tally: Tally, skip_bad: bool) -> Iterator[EncodedBatch]:
    name = byte_range.source.name
    try:
        if not skip_bad:
            yield from engine.stream(documents(byte_range, tally))
        else:
            yield from engine.stream(_good_documents(engine, byte_range, tally))
    except InputError as error:
        if name in error.cause:
            raise  # other errors come from the engine, which does not know the file
        raise InputError(f"{name}, after byte {byte_range.start}: {error.cause}", error.remedy) from None


def _good_documents(engine: Engine, byte_range: ByteRange, tally: Tally) -> Iterator[Batch]:
    """Yield the documents of a byte range, except unreadable and too long ones, which are counted.

    The range is first read once to find faults, because the fault of a file or document may be at its end. A broken
    file is left out as a whole.
    """
    source, start, _ = byte_range
    require_readers(source)
    try:
        with warnings.catch_warnings(action="ignore"):  # these warnings were given when the file was found
            require_its_kind(source, [])
        dropped = engine.find_too_long(documents(byte_range, Tally(), skip_bad=True))
    except InputError:
        _require_unchanged(source)
        tally.skipped += start == 0  # the other ranges of the file do not count it again
        with open_source(source) as file:
            for _ in range_blocks(file, byte_range, tally, start):
                pass
        return
    tally.skipped += len(dropped)
    number = 0
    for texts, unfinished in documents(byte_range, tally, skip_bad=True):
        good = [text for i, text in enumerate(texts) if number + i not in dropped]
        number += len(texts) - unfinished
        if good:
            yield Batch(good, unfinished and number not in dropped)


def _require_unchanged(source: Source) -> None:
    """Raise `InputError` if a file has changed, because the store would have the content of neither state."""
    try:
        state = os.stat(source.file)  # noqa: PTH116  # a `Path` for each of very many files takes longer
    except FileNotFoundError:
        cause = f"{source.name} has vanished since the work was planned"
        raise InputError(cause, f"put it back and run again, or pass {RESTART_REMEDY}") from None
    except OSError as error:
        remedy = "give access to it, and run again"
        raise InputError(f"cannot read {source.name}: {error.strerror}", remedy) from None
    if source.mtime_ns is not None and (state.st_size, state.st_mtime_ns) != (source.size, source.mtime_ns):
        cause = f"{source.name} has changed since the work was planned: it had {source.size} bytes, now {state.st_size}"
        remedy = "run again when nothing writes to the inputs any more: only its parts are made again"
        raise InputError(cause, remedy)


class _Shards:
    """Write documents into shards. A shard is closed after the document that brings it to `shard_size` tokens."""

    def __init__(self, folder: Path, vocab_size: int, shard_size: int) -> None:
        self.records: list[ShardRecord] = []
        self._folder, self._vocab_size, self._shard_size = folder, vocab_size, shard_size
        self._open: ShardWriter | None = None

    def append(self, ids: np.ndarray, lengths: np.ndarray, *, continues: bool, unfinished: bool) -> None:
        """Add documents. The first may continue the previous document, and the last may be unfinished."""
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while first < len(lengths):
            if self._open is None:
                self._open = ShardWriter(self._folder, len(self.records), self._vocab_size)
            writer = self._open
            full = int(np.searchsorted(ends[1:], ends[first] + self._shard_size - writer.tokens))
            stop = min(max(full, first), len(lengths) - 1) + 1
            writer.append(ids[ends[first] : ends[stop]], lengths[first:stop], continues=continues and first == 0)
            first = stop
            if writer.tokens >= self._shard_size and not (unfinished and first == len(lengths)):
                self.finish()

    def finish(self) -> None:
        """Complete the open shard, if there is one."""
        if self._open is not None:
            with self._open:
                self.records.append(self._open.close())
            self._open = None

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        """Discard the open shard, if there is one, after an error."""
        if self._open is not None:
            self._open.__exit__(*error)


def finalize(out: str | Path) -> TokenStore:
    """Join the results of all tasks in `out` into a store. A finished store is returned unchanged.

    Raises:
        InputError: there is no work to join, or tasks are missing (the error lists them).
    """
    out = store_folder(out)
    if (out / MANIFEST).exists():
        tidy(out)
        return TokenStore(out)
    plan = read_plan(out)
    if plan is None:
        raise InputError(f"{out} holds no tasks to join", Remedy("prepare with {} and {} first", task=0, num_tasks=...))
    if missing := missing_parts(plan):
        raise InputError(
            f"{out} is not finished: {_describe_missing(plan, missing)}", "run them, and then the same again"
        )
    return join(plan, plan.tokenizer())


def join(plan: Plan, tokenizer: Tokenizer) -> TokenStore:
    """Move the shards of all parts, which must be done, into the store, and write its manifest."""
    store = plan.store
    try:
        parts = _numbering(plan)
        records: list[ShardRecord] = []
        for number, part in enumerate(parts):
            for i, record in enumerate(part.shards):
                source, place = part_folder(plan, number) / shard_name(i), store / shard_name(len(records))
                for kind, file in ((".bin", record.bin), (".idx", record.idx)):
                    with suppress(FileNotFoundError):  # it has been moved already
                        source.with_suffix(kind).replace(place.with_suffix(kind))
                    if (size := place.with_suffix(kind).stat().st_size) != file.size:
                        raise InputError(
                            f"{place.with_suffix(kind)} has {size} bytes, expected {file.size}", RESTART_REMEDY
                        )
                records.append(record)
        remove_shards(store, len(records))  # discarded work may have left more shards
        flush(store)
        sources = plan.sources()
        read: dict[str, list[dict[str, Any]]] = {source.path: [] for source in sources}
        for one in chain.from_iterable(part.byte_ranges for part in parts):
            read[one["path"]].append({name: value for name, value in one.items() if name != "path"})
        write_manifest(
            store,
            shards=records,
            tokenizer=tokenizer,
            end_of_text=plan.end_of_text,
            sources=[{**source.to_json(), "pieces": read[source.path]} for source in sources],
            options=dict(plan.options),
        )
    except FileNotFoundError as error:
        if not (store / MANIFEST).exists():  # else another process has just joined the same parts
            raise InputError(f"{error.filename} has vanished while {store} was joined", RESTART_REMEDY) from None
    tidy(store)
    return TokenStore(store)


def _numbering(plan: Plan) -> list[FinishedPart]:
    """Return the records of all parts in order, as they were before the first shard was moved."""
    path = plan.folder / NUMBERING
    if not path.exists():
        parts = [part for number in range(plan.num_parts) if (part := finished_part(plan, number)) is not None]
        if len(parts) < plan.num_parts:
            missing = _describe_missing(plan, missing_parts(plan))
            raise InputError(f"{plan.store} is not finished: {missing}", "run the same command again")
        if not any(shard.documents for part in parts for shard in part.shards):
            raise without_text("got no text", plan.sources(), plan.skip_bad)
        write_whole(path, json.dumps([asdict(part) for part in parts]))
    return [FinishedPart.from_json(part) for part in json.loads(path.read_text(encoding="utf-8"))]


def tidy(store: Path) -> None:
    """Remove files that a finished store does not need, and files that killed runs left."""
    for folder in store.glob(f"{FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in chain(store.glob(".store.*.json"), store.glob(".tokenizer.*.json")):
        path.unlink(missing_ok=True)


def _describe_missing(plan: Plan, missing: Sequence[int]) -> str:
    """List the missing tasks, or the missing parts if there are no tasks or several divisions into tasks."""
    divisions = [int(path.name.removeprefix("tasks-")) for path in plan.folder.glob("tasks-*")]
    noun, numbers, total = "parts", [*missing], str(plan.num_parts)
    if len(divisions) == 1:
        noun, numbers = "tasks", sorted({number % divisions[0] for number in missing})
        total = str(divisions[0])
    more = f" and {len(numbers) - MAX_LISTED} more" if len(numbers) > MAX_LISTED else ""
    return f"{noun} {', '.join(map(str, numbers[:MAX_LISTED]))}{more} of {total} are missing"
