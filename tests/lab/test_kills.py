"""A comparison that is killed at random moments, in threads and on Ray, goes on to what it measures undisturbed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from locant.lab.comparison import Watcher, compare_files

OPTIONS = {
    "tasks": ("copy",), "encodings": ("alibi", "rotary", "rotary+ntk", "rotary@randomized"), "seeds": (0, 1),
    "task_length": 3, "num_steps": 10, "d_model": 16, "num_layers": 1, "num_heads": 2, "batch_size": 4,
}  # fmt: skip


def compare(folder: Path, ray: str | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(2)
    text = {"tokenizer": None, "vocab_size": None, "download": False}
    compare_files((), OPTIONS, folder=folder, force=False, watcher=Watcher(), ray=ray, **text)


def started(folder: Path, ray: str | None) -> Any:
    """In a process that is forked from one with torch in it: a start costs no import.

    That one may be older than the cluster, and then it does not know that the cluster asks for a token.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["locant.lab.comparison"])
    environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    process = processes.Process(target=compare, args=(folder, ray, environment))
    process.start()
    return process


def records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "results.json"
    return json.loads(file.read_text())["records"] if file.exists() else []


def finished(folder: Path) -> dict[str, Any]:
    """The results but for times."""
    results = json.loads((folder / "results.json").read_text())
    return {**results, "records": [{**record, "seconds": 0} for record in results["records"]]}


@pytest.fixture(params=["threads", "Ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The address of a Ray cluster with two workers; ``None`` for threads."""
    if request.param == "threads":
        yield None
        return
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'locant[ray]'")
    context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


def workers() -> list[int]:
    """Processes below this one that train for Ray."""
    parents, training = dict[int, int](), list[int]()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if (place / "cmdline").read_bytes().startswith(b"ray::_in_a_worker"):
                training.append(int(place.name))
        except OSError:  # it has ended
            continue

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return [pid for pid in training if is_ours(pid)]


def kill(process: Any, victim: Callable[[list[int]], int]) -> bool:
    """The driver, or one of the workers, which Ray replaces; false where it has just ended by itself."""
    pid = victim([process.pid, *workers()])
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    if pid == process.pid:
        process.join()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.sweep)])
def test_killed_at_random_moments_it_goes_on_to_the_same_results(
    tmp_path: Path, cluster: str | None, count: int
) -> None:
    """Moments are drawn from the whole of a run, with the start of it; what ends before its kill begins anew."""
    seed = int(time.time())
    draw, kills, folders = random.Random(seed), 0, 0
    began = time.monotonic()
    started(tmp_path / "whole", None).join()
    taken, whole = time.monotonic() - began, finished(tmp_path / "whole")
    assert len(whole["records"]) == 8
    while kills < count:
        folder, is_whole = tmp_path / str(folders), False
        folders += 1
        while not is_whole:
            before, process, kills_before = records(folder), started(folder, cluster), kills
            while kills < count and process.is_alive():
                process.join(draw.uniform(0, taken))
                if process.is_alive():
                    kills += kill(process, draw.choice)
            process.join()
            assert all(record in records(folder) for record in before), "a training that was finished was run again"
            is_whole = process.exitcode == 0
            assert is_whole or kills > kills_before, "a run that nobody killed did not end well"
        assert finished(folder) == whole, f"after kills as random.Random({seed}) draws them"
