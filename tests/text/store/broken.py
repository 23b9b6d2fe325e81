"""Breaking a store, and asking whether that is noticed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from locant import InputError
from locant.text.store import TokenStore

__all__ = ["FILES", "holding", "is_found", "mutated", "overwrite"]

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
