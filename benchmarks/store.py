"""What do opening a token store, a random window of it, and writing a shard cost?

The peers: a plain `np.memmap` (nanoGPT's way), Megatron-LM's own reader of the same files, where it is installed, and
`ndarray.tofile`, which neither checks ids, nor hashes, nor waits for the disk.
"""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.timing import Row, measure
from locant import Tokenizer
from locant.text.store import FileRecord, ShardRecord, ShardWriter, TokenStore, shard_name, write_manifest
from locant.text.store.formats.shards import index_size

__all__ = ["rows"]

WINDOW, WINDOWS = 257, 2_000


def rows() -> list[Row]:
    """Opening, then reading, then writing."""
    with tempfile.TemporaryDirectory() as name:
        many, large = Path(name) / "many", Path(name) / "large"
        _sparse_store(many, shards=10_000, tokens=100_000)
        _sparse_store(large, shards=1, tokens=1_000_000_000)
        return [*_opening(many, "10 000 shards"), *_opening(large, "10^9 tokens"), *_reading(many, large), *_writing()]


def _sparse_store(folder: Path, *, shards: int, tokens: int, documents: int = 100) -> None:
    """A store of zeros, which takes no room on the disk; its hashes are made up, and only `verify` reads them."""
    folder.mkdir()
    sizes = {"bin": 2 * tokens, "idx": index_size(documents)}
    for number in range(shards):
        for suffix, size in sizes.items():
            with (folder / f"{shard_name(number)}.{suffix}").open("wb") as file:
                file.truncate(size)
    files = {suffix: FileRecord(size=size, sha256="0" * 64) for suffix, size in sizes.items()}
    records = [ShardRecord(tokens=tokens, documents=documents, **files)] * shards
    write_manifest(folder, shards=records, tokenizer=Tokenizer.bytes(), end_of_text=None, sources=[], options={})


def _opening(folder: Path, what: str) -> list[Row]:
    tracemalloc.start()
    TokenStore(folder)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    measured = measure(f"open a store of {what}", {"locant TokenStore": lambda: TokenStore(folder)})
    return [replace(row, megabytes=round(peak, 2)) for row in measured]


def _reading(many: Path, large: Path) -> list[Row]:
    stores = {"10 000 shards": TokenStore(many), "10^9 tokens": TokenStore(large)}
    read = TokenStore(many, mode="read")
    starts = random.Random(0).sample(range(len(stores["10^9 tokens"]) - WINDOW), WINDOWS)  # noqa: S311  # no secret
    plain = np.memmap(large / "shard-00000.bin", dtype="<u2", mode="r")
    contenders: dict[str, Callable[[int], object]] = {
        **{f"locant TokenStore, {name}": _window_of(store) for name, store in stores.items()},
        "locant TokenStore, 10 000 shards, mode='read'": _window_of(read),
        "np.memmap, 10^9 tokens": _window_of(plain),
    }
    return measure(
        f"{WINDOWS} random windows of {WINDOW} tokens",
        {name: lambda window=window: [window(start) for start in starts] for name, window in contenders.items()},
        rounds=7,
    )


def _window_of(tokens: TokenStore | np.ndarray) -> Callable[[int], object]:
    return lambda start: tokens[start : start + WINDOW].sum()


def _writing() -> list[Row]:
    ids = np.random.default_rng(0).integers(0, 50_257, 20_000_000).astype(np.int32)
    lengths = np.full(20_000, 1_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def shard() -> None:
            with ShardWriter(folder, 0, 50_257) as writer:
                for first in range(0, len(lengths), 1_000):
                    writer.append(ids[1_000 * first : 1_000 * (first + 1_000)], lengths[first : first + 1_000])
                writer.close()

        contenders = {
            "locant ShardWriter": shard,
            "astype and tofile": lambda: ids.astype("<u2").tofile(folder / "plain.bin"),
        }
        return measure("write 20 million tokens, 40 MB", contenders, rounds=7)
