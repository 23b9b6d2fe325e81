"""A disk that is full, fails, or takes less than it was given, at every single call to the system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from locant import InputError
from locant.files import NewFile, new_folder, write_whole
from locant.text.store import ShardRecord, TokenStore, write_manifest
from tests.text.store.made import BYTES, TOKENS, make, write_shard

CALLS = ("open", "write", "lseek", "read", "chmod", "fsync", "replace")
DOCUMENTS = [[5, 6, 7], [], [8], list(range(200)) * 3]


class Faults:
    """Counts calls to the system, and makes one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.failing: int | None = None
        self.code = 0
        self.share = 1
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self.failing is not None and len(self.calls) > self.failing:
                self.failing = None
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])  # part of it had room
                raise OSError(self.code, os.strerror(self.code))
            if name == "write" and self.share > 1:
                args = (args[0], args[1][: max(1, len(args[1]) // self.share)])
            return call(*args, **options)

        return counted

    def at_each(self, run: Callable[[], object]) -> Iterator[str]:
        """`run` with the first call failing, then with the second, and so on; the name of the call that did."""
        number = 0
        while True:
            self.calls.clear()
            self.failing, self.code = number, (errno.ENOSPC, errno.EIO)[number % 2]
            try:
                run()
            except InputError as error:
                if os.strerror(self.code) not in str(error) or not error.remedy:
                    raise
                yield self.calls[number]
            if self.failing is not None:  # no call was left to fail
                self.failing = None
                return
            number += 1


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_shard_is_written_or_refused(tmp_path: Path, faults: Faults) -> None:
    failed = []
    for call in faults.at_each(lambda: write_shard(tmp_path, 0, DOCUMENTS)):
        failed.append(call)
        assert names(tmp_path) <= {"shard-00000.bin", "shard-00000.idx"}
        if "replace" not in failed:
            assert names(tmp_path) == set()
        assert names(tmp_path) != {"shard-00000.idx"}, "an index without its tokens"
        for path in tmp_path.iterdir():
            path.unlink()
    assert set(failed) == set(CALLS)
    assert names(tmp_path) == {"shard-00000.bin", "shard-00000.idx"}


def test_a_manifest_is_written_or_there_is_no_store(tmp_path: Path, faults: Faults) -> None:
    records = [write_shard(tmp_path, 0, DOCUMENTS)]
    whole = names(tmp_path)
    failed = []
    for call in faults.at_each(lambda: _finish(tmp_path, records)):
        failed.append(call)
        assert names(tmp_path) <= {*whole, "tokenizer.json", "store.json"}
        if "store.json" in names(tmp_path):  # it stands, and only that this lasts was not said
            TokenStore(tmp_path).verify()
            (tmp_path / "store.json").unlink()
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    assert set(failed) == {"open", "write", "chmod", "fsync", "replace"}
    TokenStore(tmp_path).verify()


def _finish(folder: Path, records: list[ShardRecord]) -> None:
    write_manifest(folder, shards=records, tokenizer=BYTES, end_of_text=None, sources=[], options={})


def test_a_file_is_replaced_or_stays(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    for _ in faults.at_each(lambda: write_whole(path, "new" * 1000)):
        assert path.read_text() in ("old", "new" * 1000)
        assert names(tmp_path) == {"a.txt"}
        path.write_text("old")
    assert path.read_text() == "new" * 1000


@pytest.mark.parametrize("share", [2, 3, 10**9])
def test_writes_may_be_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    expected = make(tmp_path / "expected")
    faults = Faults(monkeypatch)
    faults.share = share
    store = make(tmp_path / "store")
    assert store == expected
    store.verify()
    assert store[:].tolist() == TOKENS.tolist()


def test_a_system_that_takes_nothing_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda handle, data: 0)
    with pytest.raises(InputError, match="nothing was written"):
        write_whole(tmp_path / "a.txt", "text")
    assert names(tmp_path) == set()


def test_small_writes_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch)
    with NewFile(tmp_path / "a") as file:
        for _ in range(1000):
            file.write(b"ab")
        file.write(b"c" * (1 << 20))
        file.overwrite(b"X", at=1)
        assert file.read(4, at=0) == b"aXab"
        file.write(b"end")
        file.fsync()
        file.publish()
    assert faults.calls.count("write") == 4
    assert (tmp_path / "a").read_bytes() == b"aX" + b"ab" * 999 + b"c" * (1 << 20) + b"end"
    assert file.size == 2000 + (1 << 20) + 3
    assert oct((tmp_path / "a").stat().st_mode & 0o777) == oct(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_other_users_may_read_a_new_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "inner").mkdir()
        save_file({"x": torch.zeros(1)}, folder / "inner" / "x.safetensors")
    assert oct((tmp_path / "a/inner/x.safetensors").stat().st_mode & 0o777) == oct(0o666 & ~_umask())
