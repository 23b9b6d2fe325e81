"""The kernels under test: those of the CPU, that of the GPU interpreted, and that of the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from locant.kernels import native
from locant.kernels.input_embedding.native import FORWARD
from tests.kernels.input_embedding.embedded import Kernel
from tests.kernels.interpreted import Place

ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", "native", "interpreted", *ON_A_GPU])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return _of_cpu(request.param) if request.param in ("cpu", "native") else _triton(request.param)


@pytest.fixture(params=["cpu", "native"])
def cpu_kernel(request: pytest.FixtureRequest) -> Kernel:
    return _of_cpu(request.param)


@pytest.fixture(params=["interpreted", *ON_A_GPU])
def gpu_kernel(request: pytest.FixtureRequest) -> Kernel:
    return _triton(request.param)


def _of_cpu(name: str) -> Kernel:
    if name == "native" and native.function(FORWARD) is None:
        pytest.skip(f"native kernels are {native.status()}")
    return Kernel(name, Place("cpu"))


def _triton(where: str) -> Kernel:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return Kernel("triton", Place("cuda" if where == "cuda" else "cpu"))
