"""Every Triton kernel of the package, launched on devices that are not there: it compiles, and registers suffice.

What a launch computes is shown by the interpreter, in tests/kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import locant
from tests.gpu_without_gpu.cases import (
    CASES,
    There,
    launched,
    norm_and_rotate,
    require_fit,
    require_registers,
    rotate,
)
from tests.gpu_without_gpu.launcher import CAPABILITIES, fresh_process
from tests.gpu_without_gpu.outcomes import contracted

pytest.importorskip("triton", reason="there is no Triton for this platform")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    with fresh_process(tmp_path_factory.mktemp("triton")) as run:
        yield run


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(case, capability, marks=() if capability == 90 or (n + turn // 2) % 2 else pytest.mark.sweep)
        for n, case in enumerate(CASES)
        for turn, capability in enumerate(CAPABILITIES)
    ],
)
def test_every_kernel_keeps_to_its_registers(there: There, case: str, capability: int) -> None:
    """On an H100, and on an A100 or a B200 in turn. The sweep has all three."""
    require_fit(there, case, capability)


@pytest.mark.parametrize(
    ("head_dim", "capability"),
    [(2, 90), (40, 90), (72, 80), (80, 90), (96, 100), (128, 80), (192, 90), (256, 90), (512, 90)],
)
def test_the_rotation_of_every_head_keeps_to_its_registers_and_rounds_its_products(
    there: There, head_dim: int, capability: int
) -> None:
    """Each dtype whole in one of the layouts, and a part of a head."""
    for dtype, layout, rotary_dim in (
        (torch.bfloat16, "half", None), (torch.float32, "interleaved", None), (torch.float64, "half", None),
        (torch.bfloat16, "interleaved", max(2, head_dim // 4 * 2)),
    ):  # fmt: skip
        (launch,) = there(rotate, capability, head_dim, dtype, layout, rotary_dim)
        require_registers(launch, capability)
        assert contracted(launch.ptx) == 0


@pytest.mark.parametrize(("head_dim", "capability"), [(2, 90), (72, 80), (96, 90), (192, 80), (512, 100)])
def test_the_norm_of_every_head_keeps_to_its_registers_and_rounds_its_products(
    there: There, head_dim: int, capability: int
) -> None:
    """Forward and backward, for each dtype whole in one of the layouts, and for a part of a head."""
    for dtype, layout, rotary_dim in (
        (torch.bfloat16, "half", None), (torch.float32, "interleaved", None), (torch.float64, "half", None),
        (torch.float16, "half", max(2, head_dim // 4 * 2)),
    ):  # fmt: skip
        for launch in there(norm_and_rotate, capability, head_dim, dtype, layout, rotary_dim):
            require_registers(launch, capability)
            assert contracted(launch.ptx) == 0


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_tokens_move_16_bytes_at_a_time_and_products_are_rounded(there: There, layout: str) -> None:
    (launch,) = there(launched, layout, 90)
    assert contracted(launch.ptx) == 0
    for access in ("st", "ld"):  # of bfloat16: so many registers of 32 bits at once
        assert {*re.findall(rf"\b{access}\.global\S*?((?:\.v[248])?\.b(?:16|32))", launch.ptx)} == {".v4.b32"}


def test_the_cases_launch_every_kernel_there_is(there: There) -> None:
    texts = [path.read_text() for path in Path(locant.__file__).parent.rglob("*.py")]
    kernels = "".join(text for text in texts if "@triton.jit" in text)
    names = set(re.findall(r"\b(_\w+)\[(?!tl\.)", kernels)) - {"_LAUNCHES"}
    seen = set()
    for case in CASES:
        seen |= {launch.kernel for launch in there(launched, case, 90)}
    assert names == seen
    assert len(names) >= 5
