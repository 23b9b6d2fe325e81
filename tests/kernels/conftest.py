"""Kernels are tested wherever they can run: interpreted everywhere, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from locant.kernels import native
from tests.kernels.interpreted import Place

# Not a skipped twin of every test where there is no GPU: some hundred lines that say the same.
ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *ON_A_GPU])
def place(request: pytest.FixtureRequest) -> Place:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return Place(request.param)


@pytest.fixture(scope="module", params=native.runnable())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine has, for native kernels."""
    if native.function("locant_rotate") is None:
        pytest.skip(f"native kernels are {native.status()}")
    with mock.patch.object(native, "function", lambda name, of=native.function: of(name, request.param)):
        yield request.param
