"""Ctrl-C at each stage of `prepare`: what is left, and that the same call goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from locant import Tokenizer
from locant.text.prepare import prepare, workers
from locant.text.prepare.workers import Workers
from tests.text.prepare.corpus import TEXTS, options, planned, require_ids


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def at_bytes(number: int) -> Callable[[int, int], None]:
    """Ctrl-C when so many bytes are done."""
    return lambda done, _: interrupt() if done >= number else None


def notes_of(corpus: Path, out: Path, **others: Any) -> list[str]:
    """What is noted on the exception that ends a call."""
    with pytest.raises(KeyboardInterrupt) as caught:
        prepare(corpus, out, **options(**others))
    return getattr(caught.value, "__notes__", [])


def test_while_planning_nothing_is_left(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "train", interrupt)
    assert notes_of(corpus, tmp_path / "made" / "store", tokenizer=None) == []
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_while_parts_are_made_the_finished_ones_stay(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    out, started = tmp_path / "store", list[subprocess.Popen[bytes]]()
    start = workers._started

    def remembered() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(workers, "_started", remembered)
    (note,) = notes_of(corpus, out, workers=num_workers, progress=at_bytes(600))
    assert str(out) in note
    assert [*out.glob(".prepare/part-?????")]
    assert [process.poll() for process in started] == ([-signal.SIGKILL] * 2 if num_workers == 2 else [])
    if num_workers == 1:
        assert not [*out.glob(".prepare/part-*.*")], "the folder of the part that was being made is gone"
    require_ids(prepare(corpus, out, **options()), TEXTS)


def test_workers_do_not_receive_it(corpus: Path, tmp_path: Path) -> None:
    """A terminal sends it to them too; what becomes of them is decided by the process that started them."""
    prepare(corpus, tmp_path / "store", **options(task=49, num_tasks=50))
    plan = planned(tmp_path / "store")
    with closing(Workers(1)) as processes:
        os.kill(processes._workers[0].pid, signal.SIGINT)
        processes.load(plan.store)
        processes.make("tokenizers", range(plan.num_parts), lambda _: None)
    require_ids(prepare(corpus, tmp_path / "store", **options()), TEXTS)


def test_while_parts_are_joined_the_next_call_joins_the_rest(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["locant.text.prepare.parts"], "remove_shards", interrupt)
        assert len(notes_of(corpus, out)) == 1
    assert not (out / "store.json").exists()
    require_ids(prepare(corpus, out, **options()), TEXTS)
