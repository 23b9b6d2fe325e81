"""Attention with every encoding goes through dynamo, Inductor, Triton and the assembler, for an H100 that is not there.

Nothing runs on it: these tests say that code comes out, what it needs, and that nothing on the way reads a value of the
device or copies from the host.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant import attend
from locant.attention.backends import dense, flex
from locant.positions import constant
from tests.gpu_without_gpu import inductor
from tests.gpu_without_gpu.compiled_cases import (
    BIASES,
    ON_GRIDS,
    TILED,
    Case,
    copied_and_kept,
    machine_code,
    of_a_graph,
    tensors,
)
from tests.gpu_without_gpu.outcomes import atomics, target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: python -m pytest -m gpu tests/attention"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="torch without CUDA needs a compiler of C++ to pretend it"),
    pytest.mark.unchecked,
]


IN_THE_SWEEP = {"sandwich", "cope", "transformer_xl", "continuous_grid_bias", "kerple, power"}
"""Biases whose code another one has: tables of distances (t5), graphs of networks (fire), and numbers on a grid."""


def slow_or_sweep(case: Case, is_for_sweep: bool) -> Any:
    """The case as a parameter, which CI leaves out if `make sweep` alone compiles it."""
    return pytest.param(case, id=str(case), marks=pytest.mark.sweep if is_for_sweep else ())


def in_turns() -> list[Case]:
    """Of each encoding one kind of rows with its backward pass, and of every third decoding; kinds and dtypes in turn.

    Graphs, and DeBERTa's kernels, take a quarter or half a minute each: of those no decoding, nor of what belongs to
    grids. `benchmarks/compile_all.py` does the rest.
    """
    dtypes, cases = ("bfloat16", "float16", "float32"), list[Case]()
    for n, name in enumerate(BIASES):
        few = name in (*TILED, *ON_GRIDS, "deberta")
        kind = "prefill" if few else ("prefill", "window", "packed")[n % 3]
        kind = "grid" if name in ON_GRIDS else kind
        cases.append(Case(name, kind, dtypes[n // 3 % 3], learning=True))
        if not few and n % 3 == 0:
            cases.append(Case(name, "decode", dtypes[(n + 1) % 3], learning=False))
    return cases


class NoTraffic(TorchDispatchMode):
    """Refuses what waits for the device, and what copies to it from the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"), name
        out = function(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            devices = {x.device.type for x in (*args, out) if isinstance(x, Tensor)}
            assert len(devices) == 1, f"{name} between {devices}"
        return out


def keeps_still(name: str, backend: str) -> None:
    """Every call but the first: that one has put what is constant where it belongs."""
    encoding = BIASES[name]()

    def call() -> None:
        inductor.to_device(encoding)
        for mode in (nullcontext(), NoTraffic()):
            for arrangement in ("prefill", "packed window", "decode"):
                q, k, where = tensors(arrangement, "bfloat16", learning=False)
                with torch.no_grad(), mode:
                    attend(q, k, k, encoding=encoding, backend=backend, **where)

    def nothing(q: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(q)

    with ExitStack() as stack:
        for module, attribute, stands_in in (
            (flex, "_run", nothing),
            (dense.F, "scaled_dot_product_attention", nothing),
            (constant, "is_dispatch_mode_active", lambda: False),
            (constant.Constant, "_copy", copied_and_kept),
        ):
            stack.enter_context(mock.patch.object(module, attribute, stands_in))
        inductor.compiled(call)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process that believes in its H100."""
    spawn, cache = multiprocessing.get_context("spawn"), tmp_path_factory.mktemp("compiled")
    with ProcessPoolExecutor(1, spawn, inductor.start, (cache,)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


@pytest.mark.parametrize("case", [slow_or_sweep(case, case.name in IN_THE_SWEEP) for case in in_turns()])
def test_machine_code_comes_out_that_fits_the_device(case: Case, there: Callable[..., Any]) -> None:
    kernels = there(machine_code, case)
    assert any("flex" in kernel.name for kernel in kernels) or case.name in TILED
    in_no_order = case.name in (*ON_GRIDS, *TILED)  # torch adds up their tables' gradients, and what graphs look up
    assert in_no_order or not any(atomics(kernel.ptx) for kernel in kernels), "an order of its own in every run"
    assert all(target(kernel.ptx) == "sm_90a" for kernel in kernels)
    fitting = {kernel.name for kernel in kernels if kernel.shared <= inductor.SHARED_MEMORY}
    assert fitting == {kernel.name for kernel in kernels}, "Inductor goes on to smaller blocks, up to some that fit"


@pytest.mark.parametrize(
    "case",
    [
        slow_or_sweep(Case("none", "window", "bfloat16", True), False),
        slow_or_sweep(Case("none", "decode", "bfloat16", False), False),
        slow_or_sweep(Case("t5", "prefill", "bfloat16", True), True),  # as the last, in its code
        slow_or_sweep(Case("alibi", "packed", "float16", True), True),
        slow_or_sweep(Case("learned alibi", "prefill", "float32", True), False),
    ],
)
def test_so_it_does_with_what_stands_beside_the_softmax(case: Case, there: Callable[..., Any]) -> None:
    kernels = there(machine_code, case, True)
    assert any("flex" in kernel.name for kernel in kernels)
    assert any("flex" in kernel.name and "backward" in kernel.name for kernel in kernels) == case[-1]
    assert max(kernel.shared for kernel in kernels) <= inductor.SHARED_MEMORY


@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        (Case("none", "prefill", "bfloat16", learning=False), (512, 640, 100)),
        (Case("kerple", "packed", "bfloat16", learning=True), (512, 640)),
    ],
    ids=str,
)
def test_a_whole_graph_is_compiled_for_other_lengths(
    case: Case, lengths: tuple[int, ...], there: Callable[..., Any]
) -> None:
    """torch takes the second length for any; a hundred queries, two to a key head, need another kernel of it."""
    names = [kernel.name for kernel in there(of_a_graph, case, lengths, "flex")]
    assert len({name for name in names if "flex_attention" in name and "backward" not in name}) >= 2


@pytest.mark.parametrize("name", BIASES)
def test_no_value_is_read_and_nothing_copied_to_the_device_after_the_first_call(
    name: str, there: Callable[..., Any]
) -> None:
    for backend in ("flex", "tiled") if name not in TILED else ("tiled",):
        there(keeps_still, name, backend)
