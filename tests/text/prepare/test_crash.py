"""Killed at any moment and at every step, with a full or failing disk: what is there afterwards, and after going on.

The oracle is a run that nothing has disturbed: after going on, every file of the store has to have the same hash, and
no other file may be there. Until then nothing may open as a store, unless it is that store, whole.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.text.prepare.corpus import contents, is_valid

QUICK = 6
SHARDS = 6


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultInjector]:
    """Three files of a few documents each, shards of 80 tokens: two parts, of four shards and of two."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "corpus").mkdir()
    for number in range(3):
        texts = [f"document {number}.{i} " * (1 + i % 3) for i in range(6)]
        (folder / "corpus" / f"{number}.txt").write_text("\n\n".join(texts))
    script = Path(__file__).with_name("fault_process.py")
    with subprocess.Popen(
        [sys.executable, "-P", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    ) as process:
        yield FaultInjector(process, folder, {"separator": "\n\n", "shard_size": 80})
        process.stdin.close()


@pytest.fixture(scope="module")
def undisturbed(injector: FaultInjector) -> tuple[dict[str, str], list[str]]:
    """The hashes of a run that nothing disturbs, and the steps that it took."""
    shutil.rmtree(injector.out, ignore_errors=True)
    answer = injector.run()
    assert answer["said"] is None
    hashes = contents(injector.out)
    assert len([name for name in hashes if name.endswith(".bin")]) == SHARDS
    return hashes, answer["steps"]


@pytest.fixture(autouse=True)
def _nothing_there(injector: FaultInjector) -> None:
    shutil.rmtree(injector.out, ignore_errors=True)


def require_no_half(folder: Path, whole: dict[str, str]) -> None:
    """What is there is no store, or all of one."""
    if folder.exists() and is_valid(folder):
        found = contents(folder)
        assert {name: found.get(name) for name in whole} == whole


def resume(injector: FaultInjector, whole: dict[str, str]) -> None:
    assert injector.run()["said"] is None
    assert contents(injector.out) == whole


def spread(places: Sequence[int], count: int) -> list[int]:
    """Of the beginning, the end, and between."""
    return sorted({places[round(i * (len(places) - 1) / (count - 1))] for i in range(count)})


def kill_at_moments(injector: FaultInjector, whole: dict[str, str], count: int) -> set[int]:
    """Kill at `count` random moments, going on to the end after every few deaths; the numbers of files left behind.

    How long a run takes depends on the machine and on what else it does. A run that ends before its moment is not
    counted and brings the next moments forward, one that is killed puts them off, so that five of six are killed and
    the moments lie in all of a run's course.
    """
    rng = random.Random(0)
    latest, died, left = 0.04, 0, set()
    while died < count:
        shutil.rmtree(injector.out, ignore_errors=True)
        for _ in range(rng.choice([1, 1, 2, 4])):  # also while it goes on after an earlier death
            killed = injector.run(after=rng.uniform(0, latest))["code"] == -signal.SIGKILL
            died += killed
            latest *= 1.02 if killed else 0.9
            require_no_half(injector.out, whole)
            left.add(len([*injector.out.rglob("*")]))
        resume(injector, whole)
    return left


def fail_at(injector: FaultInjector, whole: dict[str, str], steps: list[str], fault: str, places: list[int]) -> None:
    for number, at in enumerate(places):
        shutil.rmtree(injector.out, ignore_errors=True)
        answer = injector.run(fault=("broken", "full")[number % 2] if fault == "disk" else fault, at=at)
        if fault in ("kill", "torn"):
            assert answer["code"] == -signal.SIGKILL, steps[at]
        elif answer["said"] is not None:  # what cannot be removed at the end is no error
            require_clear(answer["said"])
        require_no_half(injector.out, whole)
        resume(injector, whole)


def require_clear(said: str) -> None:
    assert "; try: " in said
    assert "No space left on device" in said or "Input/output error" in said, said
    assert "Traceback" not in said


def every(steps: list[str]) -> list[int]:
    """Every step to be killed at, but for those after a flush: what is there is what was there before it."""
    return [at for at in range(len(steps)) if not (at and steps[at - 1].startswith("fsync"))]


def of_each_kind(steps: list[str], places: list[int]) -> list[int]:
    """The first and the last step of every name without its numbers and random letters."""
    kinds = [re.sub(r"\.[a-z0-9_]{8}(?=[./]|$)|\d+", "", name) for name in steps]
    ends: dict[str, list[int]] = {}
    for at in places:
        ends[kinds[at]] = [*ends.get(kinds[at], [])[:1], at]
    return sorted(at for both in ends.values() for at in both)


def writes(steps: list[str]) -> list[int]:
    return [at for at, name in enumerate(steps) if name.startswith("write")]


PLACES: dict[str, Callable[[list[str]], list[int]]] = {
    "some steps": lambda steps: spread(range(len(steps)), QUICK),
    "some writes": lambda steps: spread(writes(steps), 4),
    "every step": every,
    "every write": writes,
    "each kind of step": lambda steps: of_each_kind(steps, every(steps)),
    "each kind that a disk refuses": lambda steps: of_each_kind(
        steps, [at for at, name in enumerate(steps) if not name.startswith(("remove", "rmdir"))]
    ),
}


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        ("kill", "some steps"), ("torn", "some writes"), ("disk", "some steps"),
        pytest.param("kill", "every step", marks=pytest.mark.slow),
        pytest.param("torn", "every write", marks=pytest.mark.slow),
        pytest.param("disk", "each kind that a disk refuses", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_fault_leaves_no_half_of_a_store(injector: FaultInjector, undisturbed: Any, fault: str, places: str) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, fault, PLACES[places](steps))


@pytest.mark.parametrize(("count", "left"), [(QUICK, 1), pytest.param(60, 10, marks=pytest.mark.slow)])
def test_killed_at_any_moment(injector: FaultInjector, undisturbed: Any, count: int, left: int) -> None:
    """From its first steps to its last."""
    assert len(kill_at_moments(injector, undisturbed[0], count)) >= left


def test_a_full_disk_leaves_an_old_store_as_it_was(injector: FaultInjector, undisturbed: Any) -> None:
    resume(injector, undisturbed[0])
    for at in range(3):
        injector.run(fault="full", at=at)
        assert contents(injector.out) == undisturbed[0]


@pytest.fixture(scope="module")
def restart(injector: FaultInjector) -> Restart:
    """Another request, whose store has fewer shards, that discards what is there."""
    return Restart(injector)


class Restart:
    def __init__(self, injector: FaultInjector) -> None:
        self.injector, self.options = injector, {**injector.options, "shard_size": 100}
        shutil.rmtree(injector.out, ignore_errors=True)
        assert injector.run(options=self.options)["said"] is None
        self.whole = contents(injector.out)
        self.kept = injector.out.with_name("half joined")

    def half_joined(self, steps: list[str]) -> None:
        """Unfinished work of the old request, all of whose shards but the last are in the folder of the store."""
        shutil.rmtree(self.injector.out, ignore_errors=True)
        if not self.kept.exists():
            last = max(i for i, name in enumerate(steps) if name.startswith("rename /shard"))
            assert self.injector.run(fault="kill", at=last)["code"] == -signal.SIGKILL
            assert len([*self.injector.out.glob("shard-*")]) == 2 * SHARDS - 1
            self.injector.out.rename(self.kept)
        shutil.copytree(self.kept, self.injector.out)

    def run(self, **order: Any) -> dict[str, Any]:
        return self.injector.run(options={**self.options, "resume": False}, **order)

    def resume(self) -> None:
        """The same call goes on, unless it was killed before it had discarded anything."""
        said = self.injector.run(options=self.options)["said"]
        if said is not None:
            assert "unfinished work of another request" in said
            assert self.run()["said"] is None
        assert contents(self.injector.out) == self.whole


ANEW = pytest.mark.parametrize("places", ["some steps", pytest.param("each kind of step", marks=pytest.mark.slow)])


@ANEW
def test_beginning_anew_after_a_kill(restart: Restart, undisturbed: Any, places: str) -> None:
    for at in PLACES[places](undisturbed[1]):
        shutil.rmtree(restart.injector.out, ignore_errors=True)
        assert restart.injector.run(fault="kill", at=at)["code"] == -signal.SIGKILL
        if not (restart.injector.out / "store.json").exists():
            assert restart.run()["said"] is None
            assert contents(restart.injector.out) == restart.whole


@ANEW
def test_a_restart_that_is_killed(restart: Restart, undisturbed: Any, places: str) -> None:
    _, steps = undisturbed
    restart.half_joined(steps)
    taken = restart.run()["steps"]
    assert contents(restart.injector.out) == restart.whole
    discarding, planning = (
        next(i for i, name in enumerate(taken) if name.startswith(what))
        for what in ("remove /shard", "mkdir /.prepare.")
    )
    assert discarding < planning
    for at in [*PLACES[places](taken), discarding, discarding + 1, planning]:
        restart.half_joined(steps)
        assert restart.run(fault="kill", at=at)["code"] == -signal.SIGKILL
        require_no_half(restart.injector.out, restart.whole)
        restart.resume()


def is_before(place: Path, path: str) -> bool:
    """Whether a path is that which a file or folder had before it got its place, or within it."""
    return path.startswith((f"{place}.", str(place.with_name(f".{place.stem}."))))


def faults_of_order(steps: list[str]) -> list[str]:
    """Where a power cut could leave less than a name promises: everything is flushed before it gets its name.

    The temporary name of a file that becomes `shard-00000.bin` begins with `.shard-00000.`, and that of a folder that
    becomes `part-00000` with `part-00000.`. What a folder lists is on the disk once the folder was flushed.
    """
    faults = []
    dirty: set[str] = set()
    for name in steps:
        what, _, path = name.partition(" ")
        if what == "write":
            dirty.add(path)
        elif what == "fsync":
            dirty.discard(path)
        elif what == "rename":
            place = Path(path)
            faults += [f"{path} gets its name while {one} is unflushed" for one in dirty if is_before(place, one)]
            dirty.add(str(place.parent))
    last = [i for i, name in enumerate(steps) if name.startswith("rename")]
    if not steps[last[-1]].endswith("rename /store.json"):
        faults.append("the manifest is not the last")
    shards = max(i for i, name in enumerate(steps) if name.startswith("rename /shard"))
    if "fsync " not in steps[shards : last[-1]]:
        faults.append("the names of the shards are not flushed before the manifest")
    if "fsync " not in steps[last[-1] :]:
        faults.append("the name of the manifest is not flushed")
    return faults


def test_everything_is_on_the_disk_before_it_has_its_name(undisturbed: Any) -> None:
    assert faults_of_order(undisturbed[1]) == []


ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class FaultInjector:
    """Prepares a small corpus in a process that can be killed, or fails, at a chosen moment."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, options: dict[str, Any]) -> None:
        self.process, self.options = process, options
        self.corpus, self.out = folder / "corpus", folder / "store"

    def run(self, **order: Any) -> dict[str, Any]:
        order = {"paths": [str(self.corpus)], "out": str(self.out), "options": self.options, **order}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert not answer.get("crashed"), answer
        return answer
