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
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from locant import ALiBi, Kerple, PositionEncoding, Positions, attend
from locant.attention.backends import flex, sdpa
from locant.positions import ModelShape, constant
from locant.positions.registry import encodings
from tests.gpu_without_gpu import inductor

HEADS, KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 512, 64
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=LENGTH)
BIASES: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    **{name: partial(kind.for_model, SHAPE) for name, kind in encodings().items() if "bias" in kind.doors()},
    "learned alibi": partial(ALiBi, HEADS, learned=True),
    "kerple, power": partial(Kerple, HEADS, "power"),
}
TILED = ("cope", "transformer_xl")
"""They have no score function, and so no kernel of FlexAttention."""
TOO_SLOW = ("fire",)
"""Its kernel takes minutes to compile."""
ATOMIC = ("shaw", "deberta")
"""Gradients of their products with tokens are added up by torch."""
ARRANGEMENTS = ("prefill", "packed window", "decode")
"""Documents and a window are in one mask, and so in one kernel; by themselves they are compiled below."""
DTYPES = ("bfloat16", "float16", "float32")
FAST = [
    ("alibi", "decode", "bfloat16", False), ("kerple", "packed window", "float16", False),
]  # fmt: skip

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: python -m pytest -m gpu tests/attention"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="torch without CUDA needs a compiler of C++ to pretend it"),
    pytest.mark.unchecked,
    pytest.mark.xdist_group("an H100"),  # one process has it, which takes some seconds to begin
]


def every_case() -> list[Any]:
    """All, of which a few are fast: an encoding in every arrangement, dtypes in turn, and backward but for decoding.

    DeBERTa's kernels, of half a minute each, are left out where only the mask differs, which is no part of an encoding.
    """
    cases = [
        (name, arrangement, DTYPES[(n + m) % 3], arrangement != "decode")
        for n, name in enumerate(name for name in BIASES if name not in (*TILED, *TOO_SLOW))
        for m, arrangement in enumerate(ARRANGEMENTS)
        if name != "deberta" or arrangement != "packed window"
    ]
    return [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in FAST)]


# ---------------------------------------------------------------------- in the other process


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


def tensors(
    arrangement: str, dtype: str, learning: bool, length: int = LENGTH
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    def empty(heads: int, tokens: int) -> Tensor:
        size, kind = (2, heads, tokens, HEAD_DIM), getattr(torch, dtype)
        return torch.empty(size, dtype=kind, device="cuda", requires_grad=learning)

    where: dict[str, Any] = {"positions": Positions.arange(length, device="cuda")}
    if "window" in arrangement:
        where["window"] = 100
    if "packed" in arrangement:
        lengths = torch.zeros(2, length, dtype=torch.int64, device="cuda")
        where["positions"] = Positions(lengths, lengths, None, 0, length - 1)
    if arrangement == "decode":
        where = {"positions": Positions.after(length - 1, 1, device="cuda"), "k_positions": where["positions"]}
    return empty(HEADS, where["positions"].seq_len), empty(KV_HEADS, length), where


def through_flex(name: str, arrangement: str, dtype: str, learning: bool) -> list[inductor.Kernel]:
    """The kernels of one call, and of its backward."""

    encoding = BIASES[name]()

    def call() -> None:
        inductor.to_device(encoding, learning=learning)
        q, k, where = tensors(arrangement, dtype, learning)
        with torch.set_grad_enabled(learning):
            y = attend(q, k, k, encoding=encoding, backend="flex", **where)
            if learning:
                y.sum().backward()
        assert (y.dtype, y.shape) == (q.dtype, q.shape)

    return inductor.compiled(call)


def beside_the_softmax(name: str, arrangement: str, dtype: str, learning: bool) -> list[inductor.Kernel]:
    """The same with sinks, a soft cap and the log-sum-exp, and the gradients of all of them."""
    encoding = BIASES[name]()

    def call() -> None:
        inductor.to_device(encoding, learning=learning)
        q, k, where = tensors(arrangement, dtype, learning)
        options: dict[str, Any] = {"sinks": torch.empty(HEADS, device="cuda", requires_grad=learning), "softcap": 30.0}
        with torch.set_grad_enabled(learning):
            y, lse = attend(q, k, k, encoding=encoding, backend="flex", return_lse=True, **options, **where)
            if learning:
                (y.sum() + lse.sum()).backward()
        assert (y.dtype, y.shape) == (q.dtype, q.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3])

    return inductor.compiled(call)


def a_whole_graph(name: str, arrangement: str, lengths: tuple[int, ...], learning: bool) -> list[inductor.Kernel]:
    """Attention as a part of a model that is compiled whole, with queries and keys of one length after another."""
    encoding = BIASES[name]()

    def layer(q: Tensor, k: Tensor, where: dict[str, Any]) -> Tensor:
        return attend(q, k, k, encoding=encoding, backend="flex", **where)

    def call() -> None:
        inductor.to_device(encoding, learning=learning)
        constant.copy_all(torch.device("cuda", 0))
        compiled = torch.compile(layer, fullgraph=True)
        for length in lengths:
            q, k, where = tensors(arrangement, "bfloat16", learning, length)
            y = compiled(q, k, where)
            if learning:
                y.sum().backward()

    with mock.patch.object(constant.Constant, "_copy", copied_and_kept):
        return inductor.compiled(call)


def copied_and_kept(self: constant.Constant, device: torch.device) -> None:
    """As it is on a device; fake tensors would not be kept."""
    if device not in self._copies:
        self._copies[device] = torch.empty(self._value.shape, dtype=self._value.dtype).to(device)


def keeps_still(name: str, backend: str) -> None:
    """Every call but the first: that one has put what is constant where it belongs."""
    encoding = BIASES[name]()

    def call() -> None:
        inductor.to_device(encoding)
        for mode in (nullcontext(), NoTraffic()):
            for arrangement in ARRANGEMENTS:
                q, k, where = tensors(arrangement, "bfloat16", learning=False)
                with torch.no_grad(), mode:
                    attend(q, k, k, encoding=encoding, backend=backend, **where)

    def nothing(q: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(q)

    with ExitStack() as stack:
        for module, attribute, stands_in in (
            (flex, "_run", nothing),
            (sdpa.F, "scaled_dot_product_attention", nothing),
            (constant, "is_watched", lambda: False),
            (constant.Constant, "_copy", copied_and_kept),
        ):
            stack.enter_context(mock.patch.object(module, attribute, stands_in))
        inductor.compiled(call)


# ---------------------------------------------------------------------- in this one


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process that believes in its H100."""
    spawn, cache = multiprocessing.get_context("spawn"), tmp_path_factory.mktemp("compiled")
    with ProcessPoolExecutor(1, spawn, inductor.start, (cache,)) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


@pytest.mark.parametrize(("name", "arrangement", "dtype", "learning"), every_case())
def test_machine_code_comes_out_that_fits_the_device(
    name: str, arrangement: str, dtype: str, learning: bool, there: Callable[..., Any]
) -> None:
    kernels = there(through_flex, name, arrangement, dtype, learning)
    assert any("flex" in kernel.name for kernel in kernels)
    assert name in ATOMIC or not any(kernel.atomics for kernel in kernels), "an order of its own in every run"
    assert all(kernel.cubin for kernel in kernels)
    fitting = {kernel.name for kernel in kernels if kernel.shared <= inductor.SHARED_MEMORY}
    assert fitting == {kernel.name for kernel in kernels}, "Inductor goes on to smaller blocks, up to some that fit"


@pytest.mark.parametrize(
    "case",
    [
        ("none", "window", "bfloat16", True),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in [
                ("none", "decode", "bfloat16", False), ("t5", "prefill", "bfloat16", True),
                ("alibi", "packed", "float16", True), ("learned alibi", "prefill", "float32", True),
            ]
        ),
    ],
    ids=str,
)  # fmt: skip
def test_so_it_does_with_what_stands_beside_the_softmax(
    case: tuple[str, str, str, bool], there: Callable[..., Any]
) -> None:
    kernels = there(beside_the_softmax, *case)
    assert any("flex" in kernel.name for kernel in kernels)
    assert any("flex" in kernel.name and "backward" in kernel.name for kernel in kernels) == case[-1]
    assert max(kernel.shared for kernel in kernels) <= inductor.SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("none", "prefill", (512, 640, 100), False), ("kerple", "packed", (512, 640), True)], ids=str
)
def test_a_whole_graph_is_compiled_for_other_lengths(
    case: tuple[str, str, tuple[int, ...], bool], there: Callable[..., Any]
) -> None:
    """torch takes the second length for any; a hundred queries, two to a key head, need another kernel of it."""
    names = [kernel.name for kernel in there(a_whole_graph, *case)]
    assert len({name for name in names if "flex_attention" in name and "backward" not in name}) >= 2


@pytest.mark.parametrize("name", BIASES)
def test_no_value_is_read_and_nothing_copied_to_the_device_after_the_first_call(
    name: str, there: Callable[..., Any]
) -> None:
    for backend in ("flex", "tiled") if name not in TILED else ("tiled",):
        there(keeps_still, name, backend)


def test_what_would_be_traffic_is_seen(there: Callable[..., Any]) -> None:
    for read in (reads, copies):
        with pytest.raises(AssertionError):
            there(read)


def reads() -> None:
    with FakeTensorMode(), NoTraffic():
        bool(torch.ones(1, device="cuda").all())


def copies() -> None:
    with FakeTensorMode(), NoTraffic():
        torch.ones(1).to("cuda")
