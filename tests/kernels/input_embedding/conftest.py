"""The kernels under test: that of the CPU, that of the GPU interpreted, and that of the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.input_embedding.embedded import Kernel
from tests.kernels.interpreted import Place

ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", "interpreted", *ON_A_GPU])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return Kernel("cpu", Place("cpu")) if request.param == "cpu" else _triton(request.param)


@pytest.fixture(params=["interpreted", *ON_A_GPU])
def gpu_kernel(request: pytest.FixtureRequest) -> Kernel:
    return _triton(request.param)


def _triton(where: str) -> Kernel:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return Kernel("triton", Place("cuda" if where == "cuda" else "cpu"))
