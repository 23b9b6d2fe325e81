"""What do windows cost, beside a Python list with a tensor per window (the way most tutorials do it)?

Both are read through a `DataLoader`, shuffled: the list by its defaults, as in the tutorials, windows by
`Windows.loader`, and by a `DataLoader` that is told a batch size and their `collate`, or nothing but the batch size.
Each is measured for a part of an epoch at a time, in turns. Memory is what a process of its own holds after building
and one epoch, less what it held before.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import Row, measure
from locant import Tokenizer, Windows
from locant.text.store import ShardWriter, TokenStore, write_manifest

__all__ = ["rows"]

TOKENS, LENGTH, STRIDE = 10_000_000, 256, 128
VOCAB = 256
SHARDS = 100
BATCHES = {32: (300, 0.33), 256: (60, 0.2)}
"""Of each size, so many are read in one turn; and the time that was wanted, of that of the list."""

WITH_WORKERS = (8, 1_024)
"""Windows of a batch, and tokens of a window, read with and without worker processes."""


class ListOfWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The dataset of the tutorials: all ids in a list, a slice and a tensor per window, everything in memory."""

    def __init__(self, ids: list[int], length: int, stride: int) -> None:
        self.inputs, self.targets = [], []
        for start in range(0, len(ids) - length, stride):
            self.inputs.append(torch.tensor(ids[start : start + length]))
            self.targets.append(torch.tensor(ids[start + 1 : start + length + 1]))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def rows() -> list[Row]:
    """Building them, reading them in batches, a single window, and memory."""
    with tempfile.TemporaryDirectory() as folder:
        one = TokenStore(_write_store(Path(folder) / "one", 1))
        several = TokenStore(_write_store(Path(folder) / "several", SHARDS))
        return [*_times(one, several), *_workers(one), *_packing(), *_first_use(), *_memory(one.path)]


def _times(one: TokenStore, several: TokenStore) -> list[Row]:
    ids = one[:]
    question = f"windows of {LENGTH}, stride {STRIDE}, over {TOKENS} tokens"
    built: dict[str, Windows] = {}
    lists: list[ListOfWindows] = []
    building: dict[str, Callable[[], object]] = {
        "locant Windows": lambda: built.update(ids=Windows(ids, LENGTH, STRIDE)),
        "locant Windows of a store": lambda: built.update(store=Windows(one, LENGTH, STRIDE)),
        f"the same in {SHARDS} shards": lambda: built.update(shards=Windows(several, LENGTH, STRIDE)),
        "list of tensors": lambda: lists.append(ListOfWindows(ids.tolist(), LENGTH, STRIDE)),
    }
    found = measure(f"build {question}", building, rounds=1, warmup=0)
    windows, stored, sharded, listed = *built.values(), lists[0]
    for size, (count, wanted) in BATCHES.items():
        loaders = {
            "list of tensors, plain DataLoader": lambda size=size: DataLoader(listed, size, shuffle=True),
            "locant Windows.loader": lambda size=size: windows.loader(size),
            "the same of a store": lambda size=size: stored.loader(size),
            f"the same in {SHARDS} shards": lambda size=size: sharded.loader(size),
            "locant Windows, DataLoader and collate": lambda size=size: _collated(windows, size),
            "the same of a store, DataLoader and collate": lambda size=size: _collated(stored, size),
            f"the same in {SHARDS} shards, DataLoader and collate": lambda size=size: _collated(sharded, size),
            "locant Windows, plain DataLoader": lambda size=size: DataLoader(windows, size, shuffle=True),
        }
        turns = {name: _Turns(make, count) for name, make in loaders.items()}
        found += measure(f"read {count} batches of {size}, {question}, shuffled (wanted: {wanted})", turns, rounds=15)
    return found + _single(dict(zip(building, (windows, stored, sharded, listed), strict=True)))


def _collated(windows: Windows, size: int) -> DataLoader:
    return DataLoader(windows, size, shuffle=True, collate_fn=windows.collate)


class _Turns:
    """Reads so many batches at a time; a new epoch begins outside of what is measured of others."""

    def __init__(self, make: Callable[[], object], count: int) -> None:
        self.make, self.count = make, count
        self.batches: Iterator[object] = iter(())

    def __call__(self) -> None:
        read = sum(1 for _ in islice(self.batches, self.count))
        if read < self.count:
            self.batches = iter(self.make())  # type: ignore[call-overload]
            assert sum(1 for _ in islice(self.batches, self.count - read)) == self.count - read


def _workers(store: TokenStore, batches: int = 40, rounds: int = 15) -> list[Row]:
    """With and without worker processes, which send every batch to the main process."""
    size, length = WITH_WORKERS
    windows = Windows(store, length)
    turns = {
        f"{count} worker processes": _Turns(lambda count=count: windows.loader(size, num_workers=count), batches)
        for count in (0, 2)
    }
    return measure(f"read {batches} batches of {size}, windows of {length}", turns, rounds=rounds)


def _single(sources: dict[str, Dataset]) -> list[Row]:
    order = np.random.default_rng(1).permutation(TOKENS // STRIDE - 2)[:1000].tolist()

    def read(source: Dataset) -> None:
        for index in order:
            source[index]

    contenders = {name: partial(read, source) for name, source in sources.items()}
    return measure("read 1000 single windows (so 1 ms says 1 microsecond for each)", contenders, rounds=7)


def _packing() -> list[Row]:
    lengths = np.random.default_rng(0).lognormal(5.8, 1.2, 10**6).astype(np.int64)
    ids, documents = np.zeros(int(lengths.sum()), dtype=np.uint8), np.cumsum([0, *lengths])
    modes = {
        "flat": lambda: Windows(ids, 2048),
        "document": lambda: Windows(ids, 2048, mode="document", documents=documents),
        "packed": lambda: Windows(ids, 2048, mode="packed", documents=documents),
    }
    fills = {name: make().fill for name, make in modes.items()}
    assert fills["packed"] > 0.99, fills
    named = {f"{name}, {fills[name]:.1%} of the slots filled": make for name, make in modes.items()}
    return measure("build windows of 2048 over a million documents", named, rounds=5)


FIRST_USE = """
import time, torch
began = time.perf_counter()
from locant import Windows
print(time.perf_counter() - began)
"""


def _first_use() -> list[Row]:
    """In processes of their own, where torch is imported already."""
    command = [sys.executable, "-c", FIRST_USE]
    took = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    milliseconds = round(1000 * statistics.median(took), 1)
    question = "the first locant.Windows of a process that has torch (wanted: 200 ms)"
    return [Row(question=question, contender="from locant import Windows", milliseconds=milliseconds, ratio=1.0)]


def _memory(path: Path) -> list[Row]:
    """What is held beyond what was held before."""
    contenders = {"locant Windows": "windows", "list of tensors": "listed"}
    megabytes = {}
    for name, kind in contenders.items():
        command = [sys.executable, "-m", "benchmarks.windows", kind, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        megabytes[name] = float(done.stdout)
    first = next(iter(megabytes.values()))
    question = f"memory: windows over {TOKENS} tokens, and an epoch of them"
    return [
        Row(question=question, contender=name, milliseconds=None, ratio=round(value / first, 3), megabytes=value)
        for name, value in megabytes.items()
    ]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def _held(kind: str, path: str) -> float:
    """What this process holds more than before, in MiB."""
    list(islice(Windows(range(5000), LENGTH, STRIDE).loader(32), 2))  # everything is imported and has been used once
    store = TokenStore(path)
    store.fingerprint  # noqa: B018
    before = _resident()
    if kind == "windows":
        built = Windows(store, LENGTH, STRIDE)
        loader: object = built.loader(32)
    else:
        built = ListOfWindows(store[:].tolist(), LENGTH, STRIDE)
        loader = DataLoader(built, 32, shuffle=True)
    for _ in loader:  # type: ignore[attr-defined]
        pass
    return round(_resident() - before, 1)


def _write_store(folder: Path, shards: int) -> Path:
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS).astype(np.uint16)
    records = []
    for number, part in enumerate(np.split(ids, shards)):
        with ShardWriter(folder, number, VOCAB) as writer:
            writer.append(part, np.array([len(part)]))
            records.append(writer.close())
    write_manifest(
        folder, shards=records, tokenizer=Tokenizer.bytes(), end_of_text=None, sources=[], options={"made": "up"}
    )
    return folder


if __name__ == "__main__":
    print(_held(*sys.argv[1:]))
