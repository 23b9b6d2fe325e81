"""Making one part: a pure function of the plan and a number, which may be done twice, or by two at once.

A part is made in a folder of its own, `part-00012.RANDOM`, which becomes `part-00012` when everything in it is on the
disk: so a part is there whole or not at all. Of two that make the same part the second finds it done and removes its
own, which had the same bytes. `locant.text.prepare.locks` tells a folder whose maker has died from one at work.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.errors import InputError
from locant.files import flush, write_whole
from locant.text.prepare.encode import Advance, write_shards
from locant.text.prepare.locks import LOCK, is_dead, locked
from locant.text.prepare.plan import TAKEN, Plan
from locant.text.store import ShardRecord
from locant.text.tokenizer.engine import Engine

__all__ = ["Part", "finished_part", "make_part", "part_folder", "sweep"]

MARKER = "part.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is written, last, into the folder of a part: the marker that it is done."""

    plan: str
    shards: list[ShardRecord]
    pieces: list[dict[str, Any]]
    """Path, range, bytes and SHA-256 of what was read, for each piece."""

    def to_json(self) -> str:
        return json.dumps(
            {"plan": self.plan, "shards": [shard.to_json() for shard in self.shards], "pieces": self.pieces}
        )

    @classmethod
    def from_json(cls, text: str) -> Part:
        facts = json.loads(text)
        return cls(
            plan=facts["plan"],
            shards=[ShardRecord.from_json(shard) for shard in facts["shards"]],
            pieces=facts["pieces"],
        )


def part_folder(plan: Plan, number: int) -> Path:
    """Where a part is, once it is done."""
    return plan.folder / f"part-{number:05d}"


def finished_part(plan: Plan, number: int) -> Part | None:
    """What a part has, if it is done: marked as done, of this plan, and all its files of the size that was written."""
    folder = part_folder(plan, number)
    try:
        part = Part.from_json((folder / MARKER).read_text(encoding="utf-8"))
        sizes = [
            (folder / f"shard-{i:05d}.{kind}").stat().st_size == size
            for i, shard in enumerate(part.shards)
            for kind, size in (("bin", shard.bin.size), ("idx", shard.idx.size))
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return part if all(sizes) and part.plan == plan.digest else None


def make_part(plan: Plan, number: int, engine: Engine, advance: Advance) -> None:
    """Make a part, unless it is done.

    Raises:
        InputError: for an input that changed or cannot be read, and where nothing can be written.
    """
    if finished_part(plan, number) is not None:
        return
    try:
        with _attempt(plan, number) as folder:
            shards, pieces = write_shards(plan, number, folder, engine, advance)
            part = Part(plan=plan.digest, shards=shards, pieces=pieces)
            write_whole(folder / MARKER, part.to_json())
    except (OSError, InputError) as error:
        if not plan.folder.exists():
            raise InputError(
                f"another run has finished {plan.store} meanwhile, or discarded it", "the same again: a store is found"
            ) from error
        if isinstance(error, InputError):
            raise
        where = f": {error.filename}" if error.filename else ""
        raise InputError(
            f"cannot make part {number} of {plan.store}: {error.strerror or error}{where}",
            "making room or giving access, then the same again: what is done is kept",
        ) from error


@contextmanager
def _attempt(plan: Plan, number: int) -> Generator[Path]:
    """A folder that becomes the part's if the block succeeds, and vanishes if it fails.

    Whoever writes a file in it has flushed both by the end of the block.
    """
    place = part_folder(plan, number)
    folder = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        with locked(folder):
            yield folder
            (folder / LOCK).unlink()
            _put(folder, place, plan, number)
            flush(plan.folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(folder: Path, place: Path, plan: Plan, number: int) -> None:
    """Rename; where the place is taken by what is not the finished part, that goes first."""
    try:
        folder.replace(place)
        return
    except OSError as error:
        if error.errno not in TAKEN:
            raise
    if finished_part(plan, number) is None:
        place.replace(folder.with_suffix(f"{folder.suffix}.broken"))
        folder.replace(place)


def sweep(plan: Plan) -> None:
    """Remove what died in the middle of a part."""
    for folder in plan.folder.glob("part-*.*"):
        with suppress(OSError):
            if is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
