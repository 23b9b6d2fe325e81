"""Other processes that do the work: what becomes of it when they fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from locant import InputError, Tokenizer, cluster
from locant.text.prepare import estimate, prepare, workers
from locant.text.prepare.workers import Workers
from locant.text.store import TokenStore
from tests.refusal import refuses
from tests.text.prepare.corpus import SEPARATOR, TEXTS, contents, options, planned, require_ids


def test_a_worker_that_is_killed_is_reported_and_the_work_goes_on(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "store", **options(task=0, num_tasks=50))
    plan = planned(tmp_path / "store")
    with refuses(InputError, "killed (SIGKILL)", "memory is full"), closing(Workers(2)) as workers:
        workers._workers[0].kill()
        workers.load(plan.store)
        workers.make("tokenizers", range(plan.num_parts), lambda _: None)
    with refuses(InputError, "no finished store"):
        TokenStore(tmp_path / "store")
    require_ids(prepare(corpus, tmp_path / "store", **options()), TEXTS)


@pytest.mark.slow
def test_a_ray_cluster_of_two_workers_makes_the_same_store(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'locant[ray]'")
    prepare(corpus, tmp_path / "alone", **options())
    code = (
        "import sys; from locant.text.prepare import prepare; options = "
        "{'tokenizer': 'bytes', 'separator': '\\n\\n', 'shard_size': 20}; "
        "prepare(sys.argv[1], sys.argv[2], **options, workers=2, ray='local')"
    )  # in a process of its own, which Ray may fill with threads and open sockets
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path / "ray")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:123456789"])
def test_a_cluster_that_is_not_there_is_said_so_before_ray_waits_for_it(address: str) -> None:
    ray = SimpleNamespace(init=lambda **_: pytest.fail("Ray was asked"))
    with socket.socket() as taken:  # a port that nothing listens at
        taken.bind(("127.0.0.1", 0))
        with refuses(InputError, "cannot reach a Ray cluster"):
            cluster._connect(ray, address.format(taken.getsockname()[1]), 1)


def test_a_cluster_that_lets_nobody_in_may_ask_for_a_token() -> None:
    def refused(**_: Any) -> None:
        raise ConnectionError("Failed to connect")

    with socket.create_server(("127.0.0.1", 0)) as server, refuses(InputError, "RAY_AUTH_MODE=token"):
        cluster._connect(SimpleNamespace(init=refused), f"127.0.0.1:{server.getsockname()[1]}", 1)


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


def test_ctrl_c_while_planning_leaves_nothing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "train", interrupt)
    assert notes_of(corpus, tmp_path / "made" / "store", tokenizer=None) == []
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ctrl_c_while_parts_are_made_leaves_the_finished_ones(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    out, started = tmp_path / "store", list[subprocess.Popen[bytes]]()
    start = workers._start

    def remembered() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(workers, "_start", remembered)
    (note,) = notes_of(corpus, out, workers=num_workers, progress=at_bytes(600))
    assert str(out) in note
    assert [*out.glob(".prepare/part-????????????????")]
    assert [process.poll() for process in started] == ([-signal.SIGKILL] * 2 if num_workers == 2 else [])
    if num_workers == 1:
        assert not [*out.glob(".prepare/part-*.*")], "the folder of the part that was being made is gone"
    require_ids(prepare(corpus, out, **options()), TEXTS)


def test_workers_receive_no_ctrl_c_and_what_goes_wrong_in_one_is_said_here(corpus: Path, tmp_path: Path) -> None:
    """A terminal sends it to them too; what becomes of them is decided by the process that started them."""
    prepare(corpus, tmp_path / "store", **options(task=49, num_tasks=50))
    plan = planned(tmp_path / "store")
    with closing(Workers(1)) as processes:
        os.kill(processes._workers[0].pid, signal.SIGINT)
        processes.load(plan.store)
        processes.make("tokenizers", range(plan.num_parts), lambda _: None)
        with pytest.raises(RuntimeError, match="TypeError"):
            processes.make("tokenizers", [plan.num_parts + 5], lambda _: None)
    require_ids(prepare(corpus, tmp_path / "store", **options()), TEXTS)


def test_after_ctrl_c_while_parts_are_joined_the_next_call_joins_the_rest(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["locant.text.prepare.parts"], "remove_shards", interrupt)
        assert len(notes_of(corpus, out)) == 1
    assert not (out / "store.json").exists()
    require_ids(prepare(corpus, out, **options()), TEXTS)


def test_by_default_a_small_input_is_done_in_this_process(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker for so many bytes, up to one for each core; a dry run says how many."""
    module, started = sys.modules["locant.text.prepare.prepare"], list[int]()
    request: dict[str, Any] = {"tokenizer": "bytes", "separator": SEPARATOR, "shard_size": 20}
    monkeypatch.setattr(module, "num_cores", lambda: 4)
    monkeypatch.setattr(module, "Workers", lambda size: (started.append(size), Workers(size))[1])
    total = estimate(corpus, **request).bytes
    for number, (bytes_per_worker, wanted) in enumerate([(total, 1), (total // 2, 2), (1, 4)]):
        monkeypatch.setattr(module, "BYTES_PER_WORKER", bytes_per_worker)
        estimated = estimate(corpus, **request)
        assert estimated.workers == wanted
        assert str(estimated).endswith(f"{wanted} worker{'s' * (wanted > 1)} by default")
        prepare(corpus, tmp_path / str(number), **request)
    assert started == [2, 4]
