"""Joining the finished parts: their shards get their places in the store, and the manifest is written last.

The numbers that shards get are written down before the first one moves, so a run that was killed between two moves is
taken up where it was. Until the manifest stands, no reader takes the folder for a store.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.files import flush, write_whole
from locant.text.prepare.byte_ranges import Source
from locant.text.prepare.parts import FinishedPart, finished_part, part_folder
from locant.text.prepare.plan import FOLDER, Plan, read_plan, remove_shards
from locant.text.prepare.request import store_folder
from locant.text.store import MANIFEST, ShardRecord, TokenStore, read_manifest, shard_name, write_manifest
from locant.text.tokenizer import Tokenizer

__all__ = ["finalize", "join", "missing_parts", "note_tasks", "recorded_request", "tidy"]

NUMBERING = "numbering.json"
ANEW = "resume=False (--restart), which begins anew"
RECORDED = {"pieces", *(field.name for field in dataclasses.fields(Source) if field.name != "copy")}
"""What the manifest records of each source."""
NAMED = 10
"""How many missing tasks are named; the others are counted."""


def finalize(out: str | Path) -> TokenStore:
    """Join what tasks have made in `out` into its store; a finished store is left as it is.

    Raises:
        InputError: there is nothing to join, or some task has not done its part; they are named.
    """
    out = store_folder(out)
    if (out / MANIFEST).exists():
        tidy(out)
        return TokenStore(out)
    plan = read_plan(out)
    if plan is None:
        raise InputError(f"{out} holds no tasks to join", "locant prepare PATH -o OUT --task 0 --num-tasks N, first")
    if missing := missing_parts(plan):
        raise InputError(f"{out} is not finished: {_named(plan, missing)}", "running them, and then --finalize again")
    return join(plan, plan.tokenizer())


def missing_parts(plan: Plan) -> list[int]:
    """The numbers of the parts that are not done."""
    if (plan.folder / NUMBERING).exists():
        return []
    return [number for number in range(plan.num_parts) if finished_part(plan, number) is None]


def join(plan: Plan, tokenizer: Tokenizer) -> TokenStore:
    """Move the shards of all parts, which are done, into the store, and write its manifest."""
    store = plan.store
    try:
        parts = _numbering(plan)
        records: list[ShardRecord] = []
        for number, part in enumerate(parts):
            for i, record in enumerate(part.shards):
                source, place = part_folder(plan, number) / shard_name(i), store / shard_name(len(records))
                for kind, file in ((".bin", record.bin), (".idx", record.idx)):
                    _move(source.with_suffix(kind), place.with_suffix(kind), file.size)
                records.append(record)
        remove_shards(store, len(records))  # of work that was discarded, which had more of them
        flush(store)
        write_manifest(
            store,
            shards=records,
            tokenizer=tokenizer,
            end_of_text=plan.end_of_text,
            sources=_recorded_sources(plan.sources(), parts),
            options=dict(plan.options),
        )
    except FileNotFoundError as error:
        if not (store / MANIFEST).exists():  # else another process has just joined the same parts
            raise InputError(f"{error.filename} has vanished while {store} was joined", ANEW) from None
    tidy(store)
    return TokenStore(store)


def _numbering(plan: Plan) -> list[FinishedPart]:
    """The parts in order, as they were when the first shard was about to move."""
    path = plan.folder / NUMBERING
    if not path.exists():
        parts = [part for number in range(plan.num_parts) if (part := finished_part(plan, number)) is not None]
        if len(parts) < plan.num_parts:
            missing = _named(plan, missing_parts(plan))
            raise InputError(f"{plan.store} is not finished: {missing}", "the same command again")
        if not any(shard.documents for part in parts for shard in part.shards):
            raise InputError("got no text: no input has a document in it", "other paths, a --separator or a --field")
        write_whole(path, json.dumps([dataclasses.asdict(part) for part in parts]))
    return [FinishedPart.from_json(part) for part in json.loads(path.read_text(encoding="utf-8"))]


def _move(source: Path, place: Path, size: int) -> None:
    """Rename a file, unless that was done before."""
    with suppress(FileNotFoundError):
        source.replace(place)
    if place.stat().st_size != size:
        raise InputError(f"{place} has {place.stat().st_size} bytes, expected {size}", ANEW)


def tidy(store: Path) -> None:
    """Remove what a finished store needs no more, and what was left where a run was killed."""
    for folder in store.glob(f"{FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in chain(store.glob(".store.*.json"), store.glob(".tokenizer.*.json")):
        path.unlink(missing_ok=True)


def _recorded_sources(sources: Sequence[Source], parts: Sequence[FinishedPart]) -> list[dict[str, Any]]:
    """The sources with the hashes of their byte ranges, as the manifest keeps them."""
    read: dict[str, list[dict[str, Any]]] = {source.path: [] for source in sources}
    for one in chain.from_iterable(part.byte_ranges for part in parts):
        read[one["path"]].append({name: one[name] for name in ("start", "stop", "sha256")})
    return [{**source.to_json(), "pieces": read[source.path]} for source in sources]


def recorded_request(store: Path) -> tuple[dict[str, Any], list[Source]]:
    """The options and sources that a finished store was made from."""
    manifest = read_manifest(store)
    if any(source.keys() != RECORDED for source in manifest.sources):
        raise InputError(f"{store} holds a finished store that prepare did not make", "another folder")
    sources = [Source(**{name: one for name, one in source.items() if name != "pieces"}) for source in manifest.sources]
    return dict(manifest.options), sources


def note_tasks(plan: Plan, num_tasks: int) -> None:
    """Remember into how many tasks the work was divided, to name those that are missing."""
    (plan.folder / f"tasks-{num_tasks}").touch()


def _named(plan: Plan, missing: Sequence[int]) -> str:
    """Tasks, as they are typed; parts, where the work was divided into tasks in no way or in several."""
    divisions = [int(path.name.removeprefix("tasks-")) for path in plan.folder.glob("tasks-*")]
    what, numbers, of_all = "parts", [*missing], str(plan.num_parts)
    if len(divisions) == 1:
        what, numbers = "tasks", sorted({number % divisions[0] for number in missing})
        of_all = f"--num-tasks {divisions[0]}"
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"{what} {', '.join(map(str, numbers[:NAMED]))}{more} of {of_all} are missing"
