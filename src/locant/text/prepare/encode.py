"""What a part holds: its documents, encoded, with the end of text after each, in shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Integer

from locant.errors import InputError
from locant.text.prepare.pieces import Batch, Piece, Tally
from locant.text.prepare.plan import Plan, PlannedPiece
from locant.text.prepare.sources import documents
from locant.text.store import ShardRecord, ShardWriter
from locant.text.tokenizer.engine import Encoded, Engine

__all__ = ["Advance", "Shards", "with_ends", "write_shards"]

Advance = Callable[[int], None]
"""Is told how many more bytes of the input were read."""

MORSEL = 2**20
"""Bytes that are encoded at a time."""


def write_shards(
    plan: Plan, number: int, folder: Path, engine: Engine, advance: Advance
) -> tuple[list[ShardRecord], list[dict[str, Any]]]:
    """Read, encode and write what belongs to a part.

    Returns:
        What the shards in `folder` hold; and of each piece of the input its path, range and SHA-256.
    """
    with Shards(folder, plan.vocab_size, plan.options["shard_size"]) as shards:
        pieces = [_write_piece(planned, plan, shards, engine, advance) for planned in plan.pieces(number)]
        shards.finish()
    return shards.records, pieces


def _write_piece(planned: PlannedPiece, plan: Plan, shards: Shards, engine: Engine, advance: Advance) -> dict[str, Any]:
    """Read, encode and write one piece; what of its file was read, and its hash."""
    piece, tally, seen, continues = plan.readable(planned.piece), Tally(), 0, False
    _require_unchanged(piece.path, planned)
    try:
        for ids, lengths, unfinished in _encoded(engine, piece, tally):
            if plan.end_of_text is not None:
                ids, lengths = with_ends(ids, lengths, plan.end_of_text, unfinished=unfinished)
            shards.append(ids, lengths, continues=continues, unfinished=unfinished)
            continues = unfinished
            advance(tally.bytes - seen)
            seen = tally.bytes
    except (InputError, OSError):
        _require_unchanged(piece.path, planned)  # else its reader complains of damage, which is not what happened
        raise
    _require_unchanged(piece.path, planned)
    advance(tally.bytes - seen)
    return {"path": planned.piece.path, "start": piece.start, "stop": piece.stop, "sha256": tally.sha256}


def _encoded(engine: Engine, piece: Piece, tally: Tally) -> Iterator[Encoded]:
    """The ids of a piece; an engine that refuses does not know whose text it reads."""
    try:
        yield from engine.stream(_in_morsels(documents(piece, tally)))
    except InputError as error:
        if piece.path in error.cause:
            raise
        raise InputError(f"{piece.path}, after byte {piece.start}: {error.cause}", error.remedy) from None


def _in_morsels(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same documents, fewer at a time: Ctrl-C has to wait for an engine, and the slow one takes a while."""
    for texts, unfinished in batches:
        morsel: list[bytes] = []
        size = 0
        for text in texts[:-1]:
            morsel.append(text)
            size += len(text)
            if size >= MORSEL:
                yield Batch(morsel, unfinished=False)
                morsel, size = [], 0
        yield Batch([*morsel, *texts[-1:]], unfinished)


def _require_unchanged(path: str, planned: PlannedPiece) -> None:
    """A file that changes while it is read would give a store of neither state."""
    try:
        state = os.stat(path)  # noqa: PTH116  # a `Path` for each of very many files takes longer
    except FileNotFoundError:
        raise InputError(
            f"{path} has vanished since the work was planned",
            "putting it back as it was, or resume=False (--restart), which begins anew",
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "giving access to it, then the same again") from None
    if planned.mtime_ns is not None and (state.st_size, state.st_mtime_ns) != (planned.size, planned.mtime_ns):
        raise InputError(
            f"{path} has changed since the work was planned: it had {planned.size} bytes, now {state.st_size}",
            "resume=False (--restart), which begins anew, once nothing writes to the inputs any more",
        )


def with_ends(
    ids: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " documents"], end: int, *, unfinished: bool
) -> tuple[Integer[np.ndarray, " more_tokens"], Integer[np.ndarray, " documents"]]:
    """The end of text after every document, but not after one that goes on."""
    finished = len(lengths) - unfinished
    places = np.cumsum(lengths)[:finished]
    lengths = lengths.copy()
    lengths[:finished] += 1
    return np.insert(ids, places, end), lengths


class Shards:
    """Documents into shards: one is closed with the document that brings it to `shard_size` tokens."""

    def __init__(self, folder: Path, vocab_size: int, shard_size: int) -> None:
        self.records: list[ShardRecord] = []
        self._folder, self._vocab_size, self._shard_size = folder, vocab_size, shard_size
        self._open: ShardWriter | None = None

    def append(
        self,
        ids: Integer[np.ndarray, " tokens"],
        lengths: Integer[np.ndarray, " documents"],
        *,
        continues: bool,
        unfinished: bool,
    ) -> None:
        """Add documents; the first may continue the last one, and the last may be unfinished."""
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while first < len(lengths):
            writer = self._writer()
            full = int(np.searchsorted(ends[1:], ends[first] + self._shard_size - writer.tokens))
            last = min(max(full, first), len(lengths) - 1)
            writer.append(
                ids[ends[first] : ends[last + 1]], lengths[first : last + 1], continues=continues and first == 0
            )
            first = last + 1
            if writer.tokens >= self._shard_size and not (unfinished and first == len(lengths)):
                self.finish()

    def _writer(self) -> ShardWriter:
        if self._open is None:
            self._open = ShardWriter(self._folder, len(self.records), self._vocab_size)
        return self._open

    def finish(self) -> None:
        """Close the shard that is open, if one is."""
        if self._open is not None:
            with self._open:
                self.records.append(self._open.close())
            self._open = None

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)
