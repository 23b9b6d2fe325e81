"""Fixtures of the whole suite: no network, fixed seeds, one thread per worker.

This file must not import locant: `make test` puts runtime shape checks into the package while it is imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch and transformers are imported, here and in the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # by default a thread that waits keeps its core busy
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The workers of one run share what compilers make. Later runs start anew: a killed process leaves half a file behind.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="locant-compiled-")

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent

# Two workers with a thread pool each on the same few cores wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which first formats a stack for each kind of device that is not there: a millisecond."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


class TorchRandom:
    """Lets hypothesis seed torch before every example, so that a failing example fails again when it is replayed."""

    def seed(self, seed: int) -> None:
        seed_torch(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis holds it weakly
hypothesis.register_random(TORCH_RANDOM)

# Nothing that depends on how quick the machine is: no deadline, no complaint that examples are slow in coming. The same
# examples every time in the first two, so that a red run is the change's own; "fresh" draws new ones, to find more.
NO_CLOCK = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
SAME = {"derandomize": True, "database": None}
hypothesis.settings.register_profile("quick", max_examples=25, **NO_CLOCK, **SAME)
hypothesis.settings.register_profile("thorough", max_examples=500, **NO_CLOCK, **SAME)
hypothesis.settings.register_profile("fresh", max_examples=500, **NO_CLOCK, print_blob=True)
hypothesis.settings.load_profile("quick")  # --hypothesis-profile=... overrides it


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--jaxtyping-packages"):
        from tests import shape_checks

        shape_checks.install()
    if config.getoption("--hypothesis-profile") != "fresh":
        _draw_no_numbers_of_other_files()


def _draw_no_numbers_of_other_files() -> None:
    """Hypothesis parses every module of ours that is loaded and draws the numbers that are written in it.

    That takes each worker seconds, and examples are others whenever some file is changed.
    """
    providers = importlib.import_module("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays to the end: the search for garbage passes over it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries count what is left at the end; before, pytest collects five times


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker sends six messages for each of ten thousand tests; only what came of it is shown, unless one asks."""
    option = item.config.option
    asked = option.durations is not None or option.verbose > 0 or item.config.getoption("xmlpath", None)
    if asked or "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


# What a test calls that cannot run while shapes are checked: compilers cannot follow the checks.
UNCHECKED = {"compile", "compiles_at_most_twice", "score_mod_is_bias"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only unchecked tests are asked for, no file is imported that speaks of none."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("unchecked"):
        text = collection_path.read_text(encoding="utf-8")
        return None if any(word in text for word in ("unchecked", *UNCHECKED)) else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_unchecked(item):
            item.add_marker("unchecked")
    if config.getoption("--jaxtyping-packages"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("unchecked")])
        items[:] = [item for item in items if not item.get_closest_marker("unchecked")]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


def _is_unchecked(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return not UNCHECKED.isdisjoint(names) or "uncompiled" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed_torch(0)


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Only this machine may be spoken to (process groups do). Not an OSError: code that falls back would hide it."""
    here = {None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()}
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: tuple[str, int] | str) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in here:
            pytest.fail(f"a test reached for the network: {address}")
        connect(self, address)

    def look_up_here(host: str | None, *args: object, **options: object) -> list[tuple[object, ...]]:
        if host not in here:
            pytest.fail(f"a test reached for the network: {host}")
        return look_up(host, *args, **options)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(socket.socket, "connect", connect_here)
        patches.setattr(socket, "getaddrinfo", look_up_here)
        yield


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder with `the-verdict.txt` and `shakespeare.txt`, which is not part of the repository."""
    folder = Path(os.environ.get("LOCANT_CORPORA", ROOT.parent / "shared" / "corpora"))
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}; set LOCANT_CORPORA to a folder that holds them")
    return folder
