"""Standard input, which is read once and kept: it is recognised, trusted only as it came, and never kept twice."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from locant import InputError
from locant.text.prepare import prepare
from locant.text.prepare.plan import sweep_plans
from locant.text.prepare.sources import find_sources, read_stdin
from tests.refusal import refuses
from tests.text.prepare.corpus import SEPARATOR, TEXTS, options, require_ids

TEXT = SEPARATOR.join(TEXTS[0]).encode()

Pipe = Callable[[list[str]], None]


class Piped:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """Texts to be read from standard input."""
    return lambda texts: monkeypatch.setattr(sys, "stdin", Piped(SEPARATOR.join(texts).encode()))


@pytest.fixture
def unfinished(pipe: Pipe, tmp_path: Path) -> Path:
    """A store whose standard input is kept, and of which no part is made."""
    pipe(TEXTS[0])
    prepare("-", tmp_path / "store", **options(task=49, num_tasks=50))
    return tmp_path / "store"


def test_it_is_kept_and_recognised(unfinished: Path, pipe: Pipe) -> None:
    pipe(TEXTS[1])
    with refuses(InputError, "standard_input was"):
        prepare("-", unfinished, **options())
    for _ in range(2):
        pipe(TEXTS[0])
        require_ids(prepare("-", unfinished, **options()), TEXTS[:1])
    pipe(TEXTS[1])
    with refuses(InputError, "standard_input was"):
        prepare("-", unfinished, **options())


@pytest.mark.parametrize("left", [b" " * len(TEXT), TEXT[:50], b"", None], ids=["blank", "cut", "empty", "gone"])
def test_what_a_power_cut_left_of_it_is_not_read(unfinished: Path, pipe: Pipe, left: bytes | None) -> None:
    kept = unfinished / ".prepare" / "stdin"
    assert kept.read_bytes() == TEXT
    if left is None:
        kept.unlink()
    else:
        kept.write_bytes(left)
    pipe(TEXTS[0])
    require_ids(prepare("-", unfinished, **options()), TEXTS[:1])


def test_it_is_on_the_disk_before_anything_relies_on_it(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    pipe(TEXTS[0])
    read_stdin(find_sources("-")[0], tmp_path / "stdin")
    assert flushed[0] == (tmp_path / "stdin").stat().st_ino


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Watched(Piped):
    """Standard input that looks, when it is first read, at what a folder has."""

    def __init__(self, data: bytes, out: Path) -> None:
        super().__init__(data)
        self.out, self.seen = out, list[list[str]]()
        self.buffer, self._data = self, self.buffer

    def read(self, size: int = -1) -> bytes:
        if not self.seen:
            self.seen.append(files_of(self.out))
            sweep_plans(self.out)  # as another process may at any time
            self.seen.append(files_of(self.out))
        return self._data.read(size)


@pytest.mark.parametrize("planned", [False, True])
def test_what_killed_runs_have_kept_of_it_goes_before_it_is_kept_again(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    out = tmp_path / "store"
    if planned:
        pipe(TEXTS[0])
        prepare("-", out, **options(task=49, num_tasks=50))
    for name in ("dead", "living"):
        (out / f".prepare.{name}" / "part-00000").mkdir(parents=True)
        for file in ("lock", "stdin", "part-00000/shard-00000.bin"):
            (out / f".prepare.{name}" / file).write_text("x")
    with (out / ".prepare.living" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watched = Watched(TEXT, out)
        monkeypatch.setattr(sys, "stdin", watched)
        prepare("-", out, **options(task=49, num_tasks=50))
    before, after = watched.seen
    assert before == after
    assert len([name for name in before if name.startswith(".prepare.living/")]) == 3
    assert not [name for name in before if name.startswith(".prepare.dead/")]
    ours = [name for name in before if not name.startswith((".prepare/", ".prepare.living/"))]
    assert [Path(name).name[:6] for name in ours] == [".stdin", "lock"]
    pipe(TEXTS[0])
    require_ids(prepare("-", out, **options()), TEXTS[:1])
    assert not [*out.glob(".prepare*")]
