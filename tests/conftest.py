"""Fixtures of the whole suite: no network, fixed seeds, one thread per worker.

This file must not import locant: `make test` puts runtime shape checks into the package while it is imported.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

# Before torch and transformers are imported, here and in the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # by default a thread that waits keeps its core busy
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The workers of one run share what compilers make, and later runs find it again by the graph that was compiled. By the
# graph before, it is not looked up: there a backward pass of ours is only a name, which stays when its code changes.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="locant-compiled-")
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import hypothesis
import pytest
import torch

from tests import shape_checks
from tests.browser import browser  # noqa: F401  # a fixture
from tests.older_releases import how_it_differs

# With `--jaxtyping-packages`, jaxtyping's import hook is in place by now, and the conftest of a folder comes next.
if any(type(finder).__module__.startswith("jaxtyping") for finder in sys.meta_path):
    assert "locant" not in sys.modules, "locant was imported before the hook that checks its shapes"
    shape_checks.install()

ROOT = Path(__file__).resolve().parent.parent
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Two workers with a thread pool each on the same few cores wait for one another.
if IS_WORKER:
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


# What is collected stays to the end: a search for garbage meanwhile takes each worker 9 seconds of 30, and finds none.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries count what is left at the end; before, pytest collects five times


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "packages are of other versions: what they deprecate is a warning, and a test of what they lack is skipped"
    parser.addoption("--other-versions", action="store_true", help=what)


DEPRECATIONS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
OTHER_VERSIONS = [f"{action}:{kind}" for action in ("default:", "error:locant") for kind in DEPRECATIONS]
"""Filters of warnings: the messages of our own begin with our name, and stay errors."""


def pytest_configure(config: pytest.Config) -> None:
    if not IS_WORKER and (kept := compiled_before(config)):
        shutil.copytree(kept, os.environ["TORCHINDUCTOR_CACHE_DIR"], dirs_exist_ok=True)
    if config.getoption("--other-versions"):
        for line in OTHER_VERSIONS:
            config.addinivalue_line("filterwarnings", line)


def compiled_before(config: pytest.Config) -> Path | None:
    """Return the folder of pytest's cache with what compilers made in earlier runs, or None without that cache."""
    cache = getattr(config, "cache", None)
    return cache and cache.mkdir("compiled")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep what compilers made in a run that passed: a process that is killed leaves half a file behind."""
    kept, made = compiled_before(session.config), Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    if IS_WORKER or kept is None or exitstatus != pytest.ExitCode.OK:
        return
    for file in made.rglob("*"):
        place = kept / file.relative_to(made)
        if file.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            whole = shutil.copy(file, kept.with_name(f"compiled-{os.getpid()}"))
            Path(whole).replace(place)  # at once: another run may read it meanwhile


def pytest_unconfigure() -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--jaxtyping-packages"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("unchecked")])
        items[:] = [item for item in items if not item.get_closest_marker("unchecked")]
    if config.getoption("--other-versions"):
        import transformers

        for item in items:
            if differs := how_it_differs(item.nodeid, transformers.__version__):
                item.add_marker(pytest.mark.skip(reason=f"transformers {transformers.__version__}: {differs}"))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Among other versions, skip a test that asks transformers for a model that it does not have."""
    try:
        return (yield)
    except (ImportError, LookupError, AttributeError, ValueError) as error:
        if item.config.getoption("--other-versions") and is_missing_in_transformers(error):
            import transformers

            what = str(error).partition(". ")[0]  # the rest is a list of all that it has
            pytest.skip(f"not in transformers {transformers.__version__}: {what}")
        raise


def is_missing_in_transformers(error: BaseException) -> bool:
    """Return whether a test itself looked a module, a class, an attribute or a type of model up there, in vain.

    What locant or a model looks up is a failure.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if any((ROOT / "src") in file.parents for file in files):
        return False
    inside = [file for file in files if "transformers" in file.parts]
    looked_up = {file.name for file in inside} <= {"auto_factory.py", "configuration_auto.py", "import_utils.py"}
    if isinstance(error, ImportError):
        return (error.name or "").startswith("transformers.")
    if isinstance(error, AttributeError):
        owner = error.obj if isinstance(error.obj, (ModuleType, type)) else type(error.obj)
        home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        return home.startswith("transformers") and looked_up
    return looked_up and bool(inside) and inside[-1] == files[-1]


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
