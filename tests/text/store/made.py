"""Small stores for tests, and the arrays that they have to hold."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from locant import InputError, Tokenizer
from locant.files import NewFile
from locant.text.store import FileRecord, ShardRecord, ShardWriter, TokenStore, write_manifest
from locant.text.store.formats.shards import IndexWriter, index_size

BYTES = Tokenizer.bytes()

SHARDS: list[list[list[int]]] = [[[5, 6, 7], [], [8]], [], [[256], [0, 1, 2, 3, 4]], [[]], [[9, 9], [255]]]
"""Documents by shard: empty ones first, in the middle and last, a shard of none, and one without a token."""

TOKENS = np.array([token for shard in SHARDS for document in shard for token in document])


def write_shard(folder: Path, number: int, documents: Sequence[Sequence[int]], vocab_size: int = 257) -> ShardRecord:
    with ShardWriter(folder, number, vocab_size) as writer:
        for document in documents:
            writer.append(np.array(document, dtype=np.int64), np.array([len(document)]))
        return writer.close()


def make(folder: Path, shards: Sequence[Sequence[Sequence[int]]] = SHARDS, **options: Any) -> TokenStore:
    """A finished store; `options` are those of `write_manifest`."""
    folder.mkdir(exist_ok=True)
    records = [write_shard(folder, number, documents) for number, documents in enumerate(shards)]
    defaults: dict[str, Any] = {"tokenizer": BYTES, "end_of_text": None, "sources": [], "options": {}}
    write_manifest(folder, shards=records, **{**defaults, **options})
    return TokenStore(folder)


def index_of(lengths: list[int], code: int = 8, documents: list[int] | None = None) -> bytes:
    """An index that does not contradict itself."""
    documents = list(range(len(lengths) + 1)) if documents is None else documents
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
    pointers = 2 * np.cumsum([0, *lengths])[:-1]
    return header + np.array(lengths, "<i4").tobytes() + pointers.tobytes() + np.array(documents, "<i8").tobytes()


LENGTHS = [2**31 - 1, 2**31 - 1, 5, 0, 2**31 - 1, 9]
TOTAL = sum(LENGTHS)
MARKS = {
    place: 1 + number for number, place in enumerate([0, 2**31 - 2, 2**31, 2**32 - 1, 2**32, 2**32 + 2, TOTAL - 1])
}
MADE_UP = "0" * 64  # hashes, which opening does not compare


def make_large(folder: Path) -> Path:
    """Two shards of 6 442 450 955 tokens each."""
    with (folder / "shard-00000.bin").open("wb") as file:
        file.truncate(2 * TOTAL)
        for place, mark in MARKS.items():
            file.seek(2 * place)
            file.write(bytes([mark, 0]))
    with NewFile(folder / "shard-00000.idx") as file:
        writer = IndexWriter(file, np.dtype("<u2"))
        writer.append(np.array(LENGTHS), continues=False)
        writer.finish()
        file.fsync()
        file.publish()
    for suffix in ("bin", "idx"):
        (folder / f"shard-00001.{suffix}").hardlink_to(folder / f"shard-00000.{suffix}")
    record = ShardRecord(
        tokens=TOTAL,
        documents=len(LENGTHS),
        bin=FileRecord(size=2 * TOTAL, sha256=MADE_UP),
        idx=FileRecord(size=index_size(len(LENGTHS)), sha256=MADE_UP),
    )
    write_manifest(folder, shards=[record, record], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    return folder


FILES = ["store.json", "tokenizer.json", "shard-00000.bin", "shard-00000.idx", "shard-00002.bin", "shard-00001.idx"]
"""Of the store that the fixture `folder` makes: one of each kind, then a shard in the middle and one of nothing."""


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """A file has this content for a while."""
    before = path.read_bytes()
    overwrite(path, content)
    try:
        yield
    finally:
        overwrite(path, before)


def overwrite(path: Path, content: bytes) -> None:
    """Other content for a file; to empty it first would cost a flush of the disk each time."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def is_found(folder: Path) -> bool:
    """Whether opening or verifying refuses, with an error of ours and a remedy; any other error is passed on."""
    try:
        TokenStore(folder).verify()
    except InputError as error:
        if not error.remedy:
            raise
        return True
    return False


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few changes, of the kinds that break parsers: bytes, numbers at their limits, pieces lost, doubled, moved."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        other = rng.randrange(len(data) + 1)
        low, high = min(place, other), max(place, other)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                size = rng.choice([4, 8])
                number = rng.choice([0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**61, 2**63 - 1, -(2**63), len(content)])
                data[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
            case 2:
                del data[low : min(high, low + 64)]
            case 3:
                data[place:place] = data[low : min(high, low + 64)]
            case 4:
                data[place : place + 1] = rng.choice([b"9" * 30, b"-", b"[" * 50, b"NaN", b"1e999", b'"', b"{}", b"\0"])
            case 5:
                data[low:high] = data[low:high][::-1]
        data = data or bytearray(b"\0")
    return bytes(data)
