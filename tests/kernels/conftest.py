"""Kernels are tested wherever they can run: interpreted everywhere, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreted import Place

# Not a skipped twin of every test where there is no GPU: some hundred lines that say the same.
ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *ON_A_GPU])
def place(request: pytest.FixtureRequest) -> Place:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return Place(request.param)
