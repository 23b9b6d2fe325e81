"""How native kernels are built, found and chosen, and how they behave among threads and processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from locant import ALiBi, InputEmbedding, Learned, Positions, Rotary, attend
from locant.errors import InputError
from locant.kernels import native
from locant.kernels.native import build
from locant.kernels.rotary import choose_kernel, reference, rotate
from locant.kernels.rotary.cpu import FUNCTION
from tests.kernels.rotary.rotating import tables
from tests.refusal import refuses

needs_library = pytest.mark.skipif(native.function(FUNCTION) is None, reason=f"native kernels are {native.status()}")
needs_gcc = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="there is no gcc")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sources and no library."""
    for source in build.HERE.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(build, "HERE", tmp_path)
    return tmp_path


def run(code: str, **environment: str) -> str:
    """What it prints, in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_gcc
@pytest.mark.slow
def test_a_library_is_built_once_and_an_earlier_one_is_removed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-O3"))  # which takes long
    (copied / "locant-0123456789abcdef.so").touch()
    assert build.build() == build.library_path()
    assert list(copied.glob("*.so")) == [build.library_path()]
    assert {path.suffix for path in copied.iterdir()} == {".c", ".h", ".so"}


def test_a_library_is_not_found_for_other_sources(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build.library_path().name}
    for name in ("rotary.c", "numbers.h"):
        with (copied / name).open("a", encoding="utf-8") as source:
            source.write("\n")
        names.add(build.library_path().name)
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    assert len({*names, build.library_path().name}) == 4


@pytest.mark.parametrize(
    ("compiler", "said"), [("false", "false ended with code 1"), ("no-such-compiler -m64", "no C compiler 'no-such")]
)
def test_what_keeps_it_from_being_built_is_said(
    compiler: str, said: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(build.BuildError, match=said):
        build.build()
    assert {path.suffix for path in copied.iterdir()} == {".c", ".h"}
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(build.BuildError, match="on Linux and macOS, this is win32"):
        build.build()


@needs_gcc
@needs_library
@pytest.mark.slow
def test_fused_products_would_be_seen(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: compiled as gcc does by default, where an instruction set has fused products."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "FLAGS", tuple("-ffp-contract=fast" if "fp-c" in flag else flag for flag in build.FLAGS))
    for source in copied.glob("*.c"):
        if source.name != "rotary.c":
            source.unlink()
    fused = ctypes.CDLL(str(build.build()))
    q, index, of = torch.randn(1, 3, 67, 64), torch.arange(67)[None], tables(64)
    expected, _ = reference.rotate(q, None, index, of, "half")
    assert torch.equal(rotate(q, None, index, of, "half")[0], expected)
    best = native.runnable()[0]
    with mock.patch.object(native, "function", lambda name: getattr(fused, f"{name}_{best}")):
        ours, _ = rotate(q, None, index, of, "half")
    assert torch.equal(ours, expected) == (best == "baseline")


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.slow
@needs_library
def test_every_compiler_gives_the_bits_of_torch(compiler: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform not in build.COMPILERS or not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CC", compiler)
    for source in copied.glob("*.c"):
        if source.name != "rotary.c":
            source.unlink()
    made = ctypes.CDLL(str(build.build()))
    q, index, of = torch.randn(1, 3, 6007, 64), torch.arange(6007)[None], tables(64)  # for more than one thread
    expected, _ = reference.rotate(q, None, index, of, "half")
    for variant in native.runnable():
        with mock.patch.object(native, "function", lambda name, variant=variant: getattr(made, f"{name}_{variant}")):
            assert torch.equal(rotate(q, None, index, of, "half")[0], expected)


def test_without_a_library_torch_rotates_and_it_is_said_what_to_do(copied: Path) -> None:
    q = torch.randn(1, 2, 3, 8)
    index, of = torch.arange(3)[None], tables(8)
    with mock.patch.object(native, "function", return_value=None):
        assert choose_kernel(q, index, of).kernel == "cpu"
        assert torch.equal(rotate(q, None, index, of, "half")[0], reference.rotate(q, None, index, of, "half")[0])
    found = native._load_library.__wrapped__()
    assert found.library is None
    assert found.status == "not built; with a C compiler: python -m locant.kernels.native build"


def test_a_file_that_is_no_library_is_not_used(copied: Path) -> None:
    build.library_path().write_bytes(b"nothing")
    found = native._load_library.__wrapped__()
    assert found.library is None
    assert found.status.startswith("cannot be loaded (")


def test_it_can_be_switched_off_and_held_to_an_older_instruction_set() -> None:
    with mock.patch.dict(os.environ, LOCANT_NATIVE="off"):
        assert native._load_library.__wrapped__() == (None, "", "not used, because of LOCANT_NATIVE=off")
    if native.function(FUNCTION) is not None:
        with mock.patch.dict(os.environ, LOCANT_NATIVE="baseline"):
            assert native._load_library.__wrapped__()[1:] == ("baseline", "used, for baseline")
    with mock.patch.dict(os.environ, LOCANT_NATIVE="sse9"), refuses(InputError, "LOCANT_NATIVE=sse9", "unset"):
        native._load_library.__wrapped__()


@needs_library
def test_what_the_kernel_cannot_read_goes_another_way_with_the_same_bits() -> None:
    index, of = torch.arange(3)[None], tables(8)
    sparse, negated = torch.randn(1, 2, 3, 16)[..., ::2], torch._neg_view(torch.randn(1, 2, 3, 8))
    windows = torch.randn(100).as_strided((1, 1, 3, 8), (1, 1, 1, 1))  # its copy has another order in memory
    zeros = torch._efficientzerotensor((1, 2, 3, 8))
    assert choose_kernel(torch.randn(1, 2, 3, 8), index, of).kernel == "native"
    for q in (sparse, negated, zeros):
        assert choose_kernel(q, index, of).kernel == "cpu"
    for q in (sparse, negated, windows):
        assert torch.equal(rotate(q, None, index, of, "half")[0], reference.rotate(q, None, index, of, "half")[0])


@needs_library
def test_autograd_sees_what_is_overwritten() -> None:
    index, of, q = torch.arange(3)[None], tables(8), torch.randn(1, 2, 3, 8)
    weight = torch.randn(1, 2, 3, 8, requires_grad=True)
    loss = (weight * q).sum()
    rotate(q, None, index, of, "half", inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_library
def test_many_python_threads_may_rotate_at_once() -> None:
    index, of = torch.arange(600)[None], tables(64)
    inputs = [torch.randn(1, 4, 600, 64) for _ in range(16)]

    def one(q: torch.Tensor) -> Any:
        return rotate(q, None, index, of, "half")[0]

    with ThreadPoolExecutor(4) as pool:
        for q, ours in zip(inputs, pool.map(one, inputs), strict=True):
            assert torch.equal(ours, reference.rotate(q, None, index, of, "half")[0])


THREADS = """
import os, torch
from locant import Positions, Rotary
torch.set_num_threads(1)
rotary, q = Rotary(64), torch.randn(1, 8, 600, 64)
short, long = Positions.arange(1), Positions.arange(600)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
for work in (lambda: rotary.rotate_one(q[:, :, :1], short), lambda: rotary.rotate_one(q, long), lambda: q.exp()):
    work()
    print(len(os.listdir("/proc/self/task")) - before)
"""


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_one_token_starts_no_thread_and_many_those_that_torch_goes_on_with() -> None:
    assert run(THREADS).split() == ["0", "2", "2"]


FORK = """
import os, signal, torch
from locant import Positions, Rotary
from locant.kernels import native
torch.set_num_threads(2)
rotary, q, positions = Rotary(64), torch.randn(1, 8, 600, 64), Positions.arange(600)
rotary.rotate_one(q, positions)  # starts the second thread
child = os.fork()
if not child:
    signal.alarm(60)
    ours, threads = rotary.rotate_one(q, positions), native.threads()
    torch.set_num_threads(1)  # for torch, which waits without end
    print(threads, torch.equal(ours, rotary.rotate_one(q, positions)), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], native.threads())
"""


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    """The OpenMP library would: in the child it knows of its parent's threads, which are not there."""
    assert run(FORK).splitlines() == ["1 True", "0 2"]


class Rotated(Dataset[torch.Tensor]):
    """Items that are computed by native kernels: rotated and attended to over a cache."""

    def __init__(self) -> None:
        self.rotary, self.encoding, self.keys = Rotary(64), ALiBi(8), Positions.arange(600)
        self.embedding = InputEmbedding(50, 512, encoding=Learned(600, 512), norm="layer_norm")
        self.ids = torch.randint(50, (1, 600))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> torch.Tensor:
        with torch.no_grad():
            where = Positions.after(item, 600)
            x = self.embedding(self.ids).unflatten(-1, (8, 64)).transpose(1, 2)
            q, k = self.rotary.rotate(x, x, where)
            q, k = self.rotary.rotate(q, k, where)
            last = Positions.after(599, 1)
            return attend(q[:, :, -1:], k, x, encoding=self.encoding, positions=last, k_positions=self.keys)


@needs_library
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_of_a_data_loader_computes_the_same(start: str) -> None:
    items = Rotated()
    expected = torch.stack([items[item] for item in range(4)])  # with threads of this process, before it is forked
    loader = DataLoader(items, batch_size=4, num_workers=1, multiprocessing_context=start, timeout=120)
    (batch,) = loader
    assert torch.equal(batch, expected)
