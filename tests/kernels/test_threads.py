"""Native kernels among threads and processes: watched by gcc's thread sanitizer, and in a worker of a `DataLoader`.

The sanitizer knows nothing of OpenMP's own waiting, and would report it. So kernels are linked with a team of plain
threads (`threads/team.c`) in the place of OpenMP's, which shares out the same parallel regions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from locant import ALiBi, Positions, Rotary, attend
from locant.kernels import native
from locant.kernels.native import build
from locant.kernels.rotary.native import FUNCTION

CALLS = Path(__file__).parent / "threads"
ATOMIC = "__atomic_sub_fetch(&plan->left[number], 1, __ATOMIC_ACQ_REL)"
needs_sanitizer = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("gcc") and shutil.which("setarch")),
    reason="there is no gcc or setarch",
)


def races(kernel: str, folder: Path, sources: Path = build.HERE) -> int:
    """How many the sanitizer reports of one call of `kernel` by four threads."""
    flags = [flag for flag in build.FLAGS if flag != "-O3"]
    sanitized = [
        "gcc",
        *flags,
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-DVARIANT=watched",
        f"-I{sources}",
        f"-I{build.HERE}",
    ]
    made = []
    for source in (f"call_{kernel}.c", "team.c"):
        made.append(str(folder / f"{source}.o"))
        subprocess.run([*sanitized, "-c", str(CALLS / source), "-o", made[-1]], check=True)
    program = str(folder / kernel)
    subprocess.run(["gcc", "-fsanitize=thread", *made, "-lm", "-lpthread", "-o", program], check=True)
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, check=False)
    found = done.stderr.count("WARNING: ThreadSanitizer: data race")
    assert done.returncode == (66 if found else 0), done.stderr  # 66 is the sanitizer's own
    return found


@needs_sanitizer
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["rotary", "decode"])
def test_the_thread_sanitizer_sees_no_race(kernel: str, tmp_path: Path) -> None:
    assert races(kernel, tmp_path) == 0


@needs_sanitizer
@pytest.mark.slow
def test_a_race_would_be_seen(tmp_path: Path) -> None:
    """The twin: chunks that are done are counted without care for other threads."""
    code = (build.HERE / "decode.c").read_text(encoding="utf-8")
    assert ATOMIC in code
    (tmp_path / "decode.c").write_text(code.replace(ATOMIC, "--plan->left[number]"), encoding="utf-8")
    assert races("decode", tmp_path, sources=tmp_path) > 0


class Rotated(Dataset[torch.Tensor]):
    """Items that are computed by native kernels, rotated and attended to over a cache."""

    def __init__(self) -> None:
        self.rotary, self.encoding, self.keys = Rotary(64), ALiBi(8), Positions.arange(600)
        self.x = torch.randn(1, 8, 600, 64)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> torch.Tensor:
        with torch.no_grad():
            where = Positions.after(item, 600)
            q, k = self.rotary.rotate(self.x, self.x, where)
            q, k = self.rotary.rotate(q, k, where)
            last = Positions.after(599, 1)
            return attend(q[:, :, -1:], k, self.x, encoding=self.encoding, positions=last, k_positions=self.keys)


@pytest.mark.skipif(native.function(FUNCTION) is None, reason=f"native kernels are {native.status()}")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_of_a_data_loader_computes_the_same(start: str) -> None:
    items = Rotated()
    expected = torch.stack([items[item] for item in range(4)])  # with threads of this process, before it is forked
    loader = DataLoader(items, batch_size=4, num_workers=1, multiprocessing_context=start, timeout=120)
    (batch,) = loader
    assert torch.equal(batch, expected)
