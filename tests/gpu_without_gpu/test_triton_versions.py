"""Every Triton kernel of the package, compiled for an H100 by the Triton that each supported torch brings along.

CI takes the oldest, beside the one that is installed. `make sweep` takes those between them.
Each is installed by pip into pytest's cache, 0.7 GB a version, and stays there until ``make clean``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_without_gpu.cases import CASES, require_fit
from tests.gpu_without_gpu.launcher import fresh_process

triton = pytest.importorskip("triton", reason="there is no Triton for this platform")

PINNED = {"2.9": "3.5.1", "2.10 and 2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.1"}
"""By torch, from the requirements of its wheels for CUDA."""

STACK = {"3.5.1": {"_rows": 728, "_backward_kernel": 8}, "3.6.0": {"_rows": 720}}
"""The most bytes of stack of kernels that need more with an older version than with the others."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "torch", [pytest.param(torch, marks=pytest.mark.sweep if n else ()) for n, torch in enumerate(PINNED)]
)
def test_every_kernel_is_compiled_by_the_triton_of(torch: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    version = PINNED[torch]
    if version == triton.__version__:
        pytest.skip("it is installed, and so what all tests compile with")
    folder = installed(version, request.config.cache.mkdir("triton"))
    with fresh_process(tmp_path, folder) as there:
        assert there(compiler) == (version, folder)
        for case in CASES:
            require_fit(there, case, 90, STACK.get(version, {}))


def installed(version: str, cache: Path) -> Path:
    """The folder that this version can be imported from."""
    folder, unfinished = cache / version, cache / f"{version}.unfinished"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-cache-dir", "--no-compile", "--retries=1"]
        done = subprocess.run(
            [*pip, "--only-binary=:all:", "--target", unfinished, f"triton=={version}"], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"pip cannot fetch it: {done.stderr.strip().splitlines()[-1]}")
        unfinished.rename(folder)
    return folder


def compiler() -> tuple[str, Path]:
    import triton

    return triton.__version__, Path(triton.__file__).parents[1]
