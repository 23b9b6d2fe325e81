"""Going on after an interruption, and refusing to mix what does not belong together."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from locant import InputError
from locant.text.prepare import finalize, prepare
from locant.text.prepare.parts import finished_part, part_folder, sweep_parts
from locant.text.prepare.plan import GRACE_SECONDS, read_plan, sweep_plans
from locant.text.prepare.sources import find_sources, read_stdin
from locant.text.store import TokenStore, export_store
from tests.refusal import refuses
from tests.text.prepare.corpus import SEPARATOR, TEXTS, contents, edited, options, planned, require_ids


def test_joining_names_the_tasks_that_are_missing(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    for task in (0, 2):
        prepare(corpus, out, **options(task=task, num_tasks=4))
    with refuses(InputError, "tasks 1, 3 of 4 are missing"):
        finalize(out)
    with refuses(InputError, "holds no finished store"):
        TokenStore(out)
    prepare(corpus, out, **options(task=0, num_tasks=3))
    plan = planned(out)
    with refuses(InputError, "parts ", f" of {plan.num_parts} are missing"):
        finalize(out)
    require_ids(prepare(corpus, out, **options()), TEXTS)
    require_ids(finalize(out), TEXTS)


def test_nothing_to_join_is_refused(tmp_path: Path) -> None:
    with refuses(InputError, "no tasks to join"):
        finalize(tmp_path)


def interrupted(corpus: Path, out: Path, *, finished: bool = False) -> None:
    """Unfinished work, one task of three; or a finished store."""
    prepare(corpus, out, **(options() if finished else options(task=0, num_tasks=3)))


CHANGES = {
    "shard_size was 20 and is 21": {"shard_size": 21},
    "separator was '\\n\\n' and is None": {"separator": None},
    "append_end_of_text was True and is False": {"append_end_of_text": False},
    "field was None and is 'body'": {"field": "body"},
    "tokenizer was '": {"tokenizer": None},
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("said", CHANGES)
def test_changed_options_are_refused_and_nothing_is_touched(
    corpus: Path, tmp_path: Path, said: str, finished: bool
) -> None:
    out = tmp_path / "store"
    interrupted(corpus, out, finished=finished)
    before = contents(out)
    with refuses(InputError, said):
        prepare(corpus, out, **options(**CHANGES[said]))
    assert contents(out) == before


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def added(path: Path) -> None:
    path.with_name("9.txt").write_text("x")


@pytest.mark.parametrize(
    ("change", "said", "finished"),
    [
        (edited, "1.txt changed from", True),
        (touched, "1.txt changed from", True),
        *((Path.unlink, "1.txt is no longer an input", finished) for finished in (False, True)),
        *((added, "9.txt is a new input", finished) for finished in (False, True)),
    ],
)
def test_changed_inputs_are_refused(corpus: Path, tmp_path: Path, change: Any, said: str, finished: bool) -> None:
    out = tmp_path / "store"
    interrupted(corpus, out, finished=finished)
    change(corpus / "1.txt")
    with refuses(InputError, said):
        prepare(corpus, out, **options())


def test_the_order_of_inputs_matters(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus / "0.txt", corpus / "1.txt"], tmp_path / "store", **options())
    with refuses(InputError, "another order"):
        prepare([corpus / "1.txt", corpus / "0.txt"], tmp_path / "store", **options())


def test_another_order_is_named_beside_a_mended_file(corpus: Path, tmp_path: Path) -> None:
    """A mended file alone would be read again."""
    interrupted(corpus, out := tmp_path / "store")
    edited(corpus / "1.txt")
    paths = sorted(corpus.iterdir(), reverse=True)
    with refuses(InputError, "another request: the inputs come in another order; "):
        prepare(paths, out, **options())


def test_unfinished_work_can_be_discarded_but_a_store_cannot(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    interrupted(corpus, out)
    store = prepare(corpus, out, **options(shard_size=70, resume=False))
    require_ids(store, TEXTS)
    before = contents(out)
    with refuses(InputError, "holds a finished store", "rm -r"):
        prepare(corpus, out, **options(shard_size=70, resume=False))
    assert contents(out) == before


def test_a_store_that_prepare_did_not_make_is_refused(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "store", **options())
    export_store(TokenStore(tmp_path / "store"), tmp_path / "copy", to="locant")
    before = contents(tmp_path / "copy")
    with refuses(InputError, "copy holds a finished store that prepare did not make", "another folder"):
        prepare(corpus, tmp_path / "copy", **options())
    assert contents(tmp_path / "copy") == before


def test_a_touch_within_a_second_is_told(corpus: Path, tmp_path: Path) -> None:
    second = 10**9 * 1_700_000_000
    os.utime(corpus / "1.txt", ns=(second, second + 123_456_789))
    interrupted(corpus, tmp_path / "store", finished=True)
    os.utime(corpus / "1.txt", ns=(second, second + 123_456_790))
    with refuses(InputError, ":20.123456789 (text", ":20.123456790 (text"):
        prepare(corpus, tmp_path / "store", **options())


def test_the_same_call_returns_the_finished_store_untouched(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    first = prepare(corpus, out, **options())
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(corpus, out, **options(workers=2, engine="tokenizers")) == first
    assert prepare(corpus, out, **options(task=0, num_tasks=2)) is None
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


def test_what_is_done_is_not_done_again(corpus: Path, tmp_path: Path) -> None:
    interrupted(corpus, tmp_path / "store")
    plan = planned(tmp_path / "store")
    done = [part_folder(plan, n) for n in range(plan.num_parts) if finished_part(plan, n)]
    assert done
    times = {folder: folder.stat().st_mtime_ns for folder in done}
    prepare(corpus, tmp_path / "store", **options(task=1, num_tasks=2))
    assert {folder: folder.stat().st_mtime_ns for folder in done} == times


def damages() -> dict[str, Any]:
    return {
        "a shard that is shorter": lambda folder: os.truncate(folder / "shard-00000.bin", 2),
        "a shard that is gone": lambda folder: (folder / "shard-00000.idx").unlink(),
        "no marker": lambda folder: (folder / "part.json").unlink(),
        "an empty marker": lambda folder: (folder / "part.json").write_text(""),
        "a marker of another part": lambda folder: (folder / "part.json").write_text(
            (folder / "part.json").read_text().replace('{"name": "', '{"name": "x')
        ),
        "a marker that is none": lambda folder: (folder / "part.json").write_text("[1]"),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_part_that_is_not_as_it_was_marked_is_made_again(corpus: Path, tmp_path: Path, damage: str) -> None:
    prepare(corpus, tmp_path / "alone", **options())
    interrupted(corpus, tmp_path / "store")
    plan = planned(tmp_path / "store")
    damages()[damage](part_folder(plan, 0))
    assert finished_part(plan, 0) is None
    prepare(corpus, tmp_path / "store", **options())
    assert contents(tmp_path / "store") == contents(tmp_path / "alone")


def test_folders_of_other_things_are_left_alone(corpus: Path, tmp_path: Path) -> None:
    before = contents(corpus)
    with refuses(InputError, "holds other things"):
        prepare(corpus, corpus, **options())
    with refuses(InputError, "which is a file"):
        prepare(corpus, corpus / "0.txt", **options())
    assert contents(corpus) == before
    with refuses(InputError, "gone"):
        prepare(corpus / "gone.txt", tmp_path / "made" / "store", **options())
    assert not (tmp_path / "made").exists()


def test_what_somebody_left_of_a_plan_is_no_obstacle(corpus: Path, tmp_path: Path) -> None:
    interrupted(corpus, tmp_path / "store")
    (tmp_path / "store" / ".prepare" / "plan.json").unlink()
    require_ids(prepare(corpus, tmp_path / "store", **options()), TEXTS)
    (tmp_path / "other" / ".prepare").mkdir(parents=True)
    (tmp_path / "other" / ".prepare" / "plan.json").write_text('{"version": 99}')
    with refuses(InputError, "another version"):
        prepare(corpus, tmp_path / "other", **options())


def test_a_store_that_was_finished_meanwhile_keeps_its_shards(corpus: Path, tmp_path: Path) -> None:
    """Half of a plan is there also while another process clears up behind a store that it finished."""
    out = tmp_path / "store"
    prepare(corpus, out, **options())
    before = contents(out)
    (out / ".prepare").mkdir()
    assert read_plan(out) is None
    assert contents(out) == before


def test_the_dead_are_swept_and_the_living_are_not(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(corpus, tmp_path / "store")
    plan = planned(tmp_path / "store")
    living, dead, new = (plan.folder / f"part-00009.{name}" for name in ("living", "dead", "new"))
    for folder in (living, dead, new):
        folder.mkdir()
    (dead / "lock").touch()
    born = new.stat().st_mtime
    clock = iter([born + GRACE_SECONDS - 1, born + GRACE_SECONDS + 1])  # asked for the new one alone, which has no lock
    monkeypatch.setattr("locant.text.prepare.plan.time", SimpleNamespace(time=lambda: next(clock)))
    code = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, 2); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(living / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        sweep_parts(plan)
        assert (living.exists(), dead.exists(), new.exists()) == (True, False, True)
        holder.communicate(b"\n")
    sweep_parts(plan)
    assert not living.exists()
    assert not new.exists()


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


def test_standard_input_is_kept_and_recognised(unfinished: Path, pipe: Pipe) -> None:
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
def test_what_a_power_cut_left_of_standard_input_is_not_read(unfinished: Path, pipe: Pipe, left: bytes | None) -> None:
    kept = unfinished / ".prepare" / "stdin"
    assert kept.read_bytes() == TEXT
    if left is None:
        kept.unlink()
    else:
        kept.write_bytes(left)
    pipe(TEXTS[0])
    require_ids(prepare("-", unfinished, **options()), TEXTS[:1])


def test_standard_input_is_on_the_disk_before_anything_relies_on_it(
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
def test_what_killed_runs_have_kept_of_standard_input_goes_before_it_is_kept_again(
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
