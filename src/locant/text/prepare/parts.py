"""Making one part: a pure function of the plan and a number, which may be done twice, or by two at once.

A part is made in a folder of its own, `part-00012.RANDOM`, which becomes `part-00012` when everything in it is on the
disk: so a part is there whole or not at all. Of two that make the same part the second finds it done and removes its
own, which had the same bytes.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.files import flush, write_whole
from locant.text.prepare.encode import Advance, write_shards
from locant.text.prepare.folders import LOCK, cannot_write, is_abandoned, new_folder, take_place
from locant.text.prepare.plan import Plan
from locant.text.store import ShardRecord, shard_name
from locant.text.tokenizer.engine import Engine

__all__ = ["FinishedPart", "finished_part", "make_part", "part_folder", "sweep_parts"]

MARKER = "part.json"


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
        shards = [ShardRecord.from_json(shard) for shard in facts["shards"]]
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
        with new_folder(place) as folder:
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
            raise InputError(
                f"another run has finished {plan.store} meanwhile, or discarded it", "the same again: a store is found"
            ) from error
        if isinstance(error, InputError):
            raise
        raise cannot_write(f"make part {number} of {plan.store}", error) from error


def sweep_parts(plan: Plan) -> None:
    """Remove what is left of parts whose makers died."""
    for folder in plan.folder.glob("part-*.*"):
        with suppress(OSError):
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
