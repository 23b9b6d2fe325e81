"""The kernel under test, where there is one."""

from __future__ import annotations

import pytest

from locant.kernels import native
from locant.kernels.input_embedding.native import FORWARD
from tests.kernels.input_embedding.embedded import Kernel


@pytest.fixture
def kernel() -> Kernel:
    if native.function(FORWARD) is None:
        pytest.skip(f"native kernels are {native.status()}")
    return Kernel()
