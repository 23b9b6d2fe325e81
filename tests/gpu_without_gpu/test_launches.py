"""Every Triton kernel of the package, launched on devices that are not there: it compiles, and registers suffice.

What a launch computes is shown by the interpreter, in tests/kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import locant
from tests.gpu_without_gpu.cases import CASES, There, launched, require_fit
from tests.gpu_without_gpu.launcher import CAPABILITIES, fresh_process

pytest.importorskip("triton", reason="there is no Triton for this platform")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    with fresh_process(tmp_path_factory.mktemp("triton")) as run:
        yield run


@pytest.mark.parametrize("case", ["half", "learned bias"])
def test_what_most_models_launch_is_compiled_and_launched_once(there: There, case: str) -> None:
    require_fit(there, case, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_keeps_to_its_registers(there: There, case: str, capability: int) -> None:
    require_fit(there, case, capability)


@pytest.mark.slow
def test_the_cases_launch_every_kernel_there_is(there: There) -> None:
    texts = [path.read_text() for path in Path(locant.__file__).parent.rglob("*.py")]
    kernels = "".join(text for text in texts if "@triton.jit" in text)
    names = set(re.findall(r"\b(_\w+)\[(?!tl\.)", kernels)) - {"_LAUNCHES"}
    seen = set()
    for case in CASES:
        seen |= {launch.kernel for launch in there(launched, case, 90)}
    assert names == seen
    assert len(names) >= 5
