"""The kernels under test: torch's operators and the native one."""

from __future__ import annotations

import pytest

from locant.kernels import native
from locant.kernels.input_embedding.native import FORWARD
from tests.kernels.input_embedding.embedded import Kernel


@pytest.fixture(params=["cpu", "native"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "native" and native.function(FORWARD) is None:
        pytest.skip(f"native kernels are {native.status()}")
    return Kernel(request.param)
