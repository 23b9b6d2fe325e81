"""Killed at any moment and at every step, with a full or failing disk: what is there afterwards, and after going on.

The oracle is a run that nothing has disturbed: after going on, every file of the store has to have the same hash, and
no other file may be there. Until then nothing may open as a store, unless it is that store, whole.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.text.prepare.corpus import contents, is_valid
from tests.text.prepare.fault_injection import FaultInjector, fault_injector

QUICK = 8
SHARDS = 6
MOMENTS = 60


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultInjector]:
    with fault_injector(tmp_path_factory.mktemp("faults")) as subject:
        yield subject


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


def chosen(steps: list[str], count: int) -> list[int]:
    """Steps of the beginning, the end, and between."""
    return sorted({round(i * (len(steps) - 1) / (count - 1)) for i in range(count)})


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
    for at in places:
        shutil.rmtree(injector.out, ignore_errors=True)
        answer = injector.run(fault=fault, at=at)
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
    return [i for i, name in enumerate(steps) if name.startswith("write")]


def some(places: list[int], count: int) -> list[int]:
    return [places[i] for i in chosen([""] * len(places), count)]


def test_killed_at_some_moments(injector: FaultInjector, undisturbed: Any) -> None:
    assert kill_at_moments(injector, undisturbed[0], QUICK)


def test_killed_at_some_steps(injector: FaultInjector, undisturbed: Any) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, "kill", chosen(steps, QUICK))
    fail_at(injector, whole, steps, "torn", some(writes(steps), 4))


@pytest.mark.slow
def test_killed_at_many_moments(injector: FaultInjector, undisturbed: Any) -> None:
    assert len(kill_at_moments(injector, undisturbed[0], MOMENTS)) >= 10  # from its first steps to its last


@pytest.mark.slow
def test_killed_at_every_step(injector: FaultInjector, undisturbed: Any) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, "kill", every(steps))


@pytest.mark.slow
def test_killed_in_every_write(injector: FaultInjector, undisturbed: Any) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, "torn", writes(steps))


# ------------------------------------------------------------------ beginning anew


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


def restart_after_a_kill(restart: Restart, places: list[int]) -> None:
    for at in places:
        shutil.rmtree(restart.injector.out, ignore_errors=True)
        assert restart.injector.run(fault="kill", at=at)["code"] == -signal.SIGKILL
        if not (restart.injector.out / "store.json").exists():
            assert restart.run()["said"] is None
            assert contents(restart.injector.out) == restart.whole


def kill_a_restart(restart: Restart, steps: list[str], places: list[int]) -> None:
    for at in places:
        restart.half_joined(steps)
        assert restart.run(fault="kill", at=at)["code"] == -signal.SIGKILL
        require_no_half(restart.injector.out, restart.whole)
        restart.resume()


def first(steps: list[str], what: str) -> int:
    return next(i for i, name in enumerate(steps) if name.startswith(what))


def steps_of_a_restart(restart: Restart, steps: list[str]) -> list[str]:
    restart.half_joined(steps)
    taken = restart.run()["steps"]
    assert contents(restart.injector.out) == restart.whole
    return taken


def test_beginning_anew_after_a_kill_at_some_steps(restart: Restart, undisturbed: Any) -> None:
    _, steps = undisturbed
    restart_after_a_kill(restart, chosen(steps, QUICK))


def test_a_restart_that_is_killed_at_some_steps(restart: Restart, undisturbed: Any) -> None:
    _, steps = undisturbed
    taken = steps_of_a_restart(restart, steps)
    discarding, planning = (first(taken, what) for what in ("remove /shard", "mkdir /.prepare."))
    assert discarding < planning
    kill_a_restart(restart, steps, [*chosen(taken, QUICK), discarding, discarding + 1, planning])


@pytest.mark.slow
def test_beginning_anew_after_a_kill_at_every_kind_of_step(restart: Restart, undisturbed: Any) -> None:
    _, steps = undisturbed
    restart_after_a_kill(restart, of_each_kind(steps, every(steps)))


@pytest.mark.slow
def test_a_restart_that_is_killed_at_every_kind_of_step(restart: Restart, undisturbed: Any) -> None:
    _, steps = undisturbed
    taken = steps_of_a_restart(restart, steps)
    kill_a_restart(restart, steps, of_each_kind(taken, every(taken)))


# ------------------------------------------------------------------ disks


@pytest.mark.parametrize("fault", ["full", "broken"])
def test_a_disk_that_is_full_or_fails(injector: FaultInjector, undisturbed: Any, fault: str) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, fault, chosen(steps, QUICK))


@pytest.mark.slow
def test_a_disk_that_is_full_at_every_kind_of_step(injector: FaultInjector, undisturbed: Any) -> None:
    whole, steps = undisturbed
    removing = ("remove", "rmdir")  # which a full disk lets through
    places = [at for at, name in enumerate(steps) if not name.startswith(removing)]
    fail_at(injector, whole, steps, "full", of_each_kind(steps, places))


def test_writes_of_half_the_bytes(injector: FaultInjector, undisturbed: Any) -> None:
    whole, steps = undisturbed
    fail_at(injector, whole, steps, "short", some(writes(steps), 4))


def test_a_full_disk_leaves_an_old_store_as_it_was(injector: FaultInjector, undisturbed: Any) -> None:
    resume(injector, undisturbed[0])
    for at in range(3):
        injector.run(fault="full", at=at)
        assert contents(injector.out) == undisturbed[0]


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
