"""The `flex` backend: what it hands to FlexAttention (in fast tests, uncompiled), and compiled (slow, or on a GPU)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Deberta, KVCache, Positions, Shaw, T5Bias, attend
from locant.attention.backends import flex
from tests.attention.arrangements import ARRANGEMENTS, ENCODINGS, HEADS, ONLY_A_MATRIX, Arrangement, Inputs, shaken
from tests.tolerances import TENSOR_CORES, assert_close

FAST = (("packed window both ways", "deberta"), ("chunk with a window", "t5"), ("left padding", "alibi"))
WITH_A_FUNCTION = [name for name in ENCODINGS if name not in ONLY_A_MATRIX] * 2
SLOW = ("packed window both ways", "chunk with a window", "holes", "behind caches of two lengths", "backwards")
COMPILERS_OWN_WARNING = "ignore:.*torch.jit:DeprecationWarning"  # torch's compiler, about itself


def agrees(arrangement: Arrangement, encoding_name: str, dtype: torch.dtype = torch.float32) -> None:
    encoding = shaken(encoding_name, dtype)
    inputs = Inputs.draw(arrangement, dtype)
    with torch.no_grad():
        y = inputs.through(arrangement, encoding, "flex")
    assert y.dtype == dtype
    expected, _ = inputs.expected(arrangement, encoding, torch.zeros_like(y))
    assert_close(y, expected)
    assert not y[arrangement.blind()].any()


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("arrangement_name", "encoding_name"),
    [
        *FAST,
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in zip(itertools.cycle(SLOW), WITH_A_FUNCTION, strict=False)
        ),
    ],
)
def test_the_functions_it_gets_say_what_numpy_says(
    arrangement_name: str, encoding_name: str, uncompiled: list[dict[str, Any]]
) -> None:
    agrees(ARRANGEMENTS[arrangement_name], encoding_name)
    assert len(uncompiled) == 1
    assert (uncompiled[0]["score_mod"] is None) == (encoding_name == "none")
    assert uncompiled[0]["block_mask"] is not None


def test_it_is_compiled_and_never_the_function_that_holds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_instead(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        made.append((function.__name__, options))
        return lambda q, k, v, **_: torch.zeros_like(q)

    monkeypatch.setattr(torch, "compile", compile_instead)
    flex._compile_for.cache_clear()
    try:
        x = torch.zeros(1, 2, 5, 16)
        attend(x, x, x, positions=Positions.arange(5), backend="flex")
    finally:
        flex._compile_for.cache_clear()
    assert made == [("flex_attention", {"fullgraph": True, "dynamic": False})]


@pytest.mark.parametrize("length", [0, 1, 128, 129])
def test_no_queries_or_no_keys(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, sizes are powers of two: lengths that grow by one are not compiled one by one."""
    sizes = []
    monkeypatch.setattr(
        flex, "_compile_for", lambda device: lambda q, k, v, **_: (sizes.append((q.shape[2], k.shape[2])), q)[1]
    )
    q, k = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, length, 16)
    y = attend(q, k, k, positions=Positions.arange(4), k_positions=Positions.arange(length), backend="flex")
    assert torch.equal(y, torch.zeros(2, 3, 4, 16))
    assert sizes == {0: [], 1: [(128, 128)], 128: [(128, 128)], 129: [(128, 256)]}[length]


@pytest.mark.slow
@pytest.mark.filterwarnings(COMPILERS_OWN_WARNING)
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("encoding_name", "arrangement_name"),
    [("none", "left padding"), pytest.param("alibi", "causal", marks=pytest.mark.sweep), ("deberta", "packed")],
)
def test_compiled_on_a_cpu(encoding_name: str, arrangement_name: str) -> None:
    """Each way for a score function to find its numbers: none, arithmetic, products of tokens; below, a table.

    Arithmetic is compiled with a cap, too, in `test_beside_softmax.py`, and without one in the sweep.
    """
    agrees(ARRANGEMENTS[arrangement_name], encoding_name)


@pytest.mark.slow
@pytest.mark.filterwarnings(COMPILERS_OWN_WARNING)
@pytest.mark.unchecked
def test_growing_lengths_and_other_modules_are_compiled_once() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    n = 20
    q, k, v = (torch.randn(1, HEADS, n, 16) for _ in range(3))
    for encoding in (T5Bias(HEADS), T5Bias(HEADS)):
        at_once = attend(q, k, v, encoding=encoding, positions=Positions.arange(n), backend="eager")
        with torch.no_grad():
            cache, steps = KVCache(), []
            for slot in range(n):
                part, where = slice(slot, slot + 1), cache.next_positions()
                keys, values, k_positions = cache.append(k[:, :, part], v[:, :, part], where)
                options = {"encoding": encoding, "positions": where, "k_positions": k_positions, "backend": "flex"}
                steps.append(attend(q[:, :, part], keys, values, **options))
        assert_close(torch.cat(steps, dim=2), at_once)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


OF_HEADS = {
    "shaw": partial(Shaw, 32, 20, key_term=True),
    "deberta": partial(Deberta, HEADS, 32, num_buckets=12, max_distance=90),
}
"""Encodings whose tables are as wide as the heads below."""


@pytest.mark.gpu
@pytest.mark.filterwarnings(COMPILERS_OWN_WARNING)
@pytest.mark.unchecked
@pytest.mark.parametrize(
    "encoding_name", ["none", "alibi", "alibi, learned", "t5", "kerple", "fire", "sandwich", *OF_HEADS]
)
@pytest.mark.parametrize("backend", ["flex", "tiled", "sdpa"])
def test_on_a_gpu_outputs_and_gradients_are_those_of_float64(backend: str, encoding_name: str) -> None:
    kinds, lengths, dtypes = ("causal", "window", "packed", "left padding"), (1, 127, 300), TENSOR_CORES
    for kind, length, dtype in itertools.product(kinds, lengths, dtypes):
        require_those_of_float64(backend, encoding_name, kind, length, dtype)


def require_those_of_float64(backend: str, encoding_name: str, kind: str, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = {
        "causal": Positions.arange(length),
        "window": Positions.arange(length),
        "packed": Positions.packed([[length // 3, length - length // 3], [length]]),
        "left padding": Positions.from_mask(torch.arange(length).expand(2, -1) >= torch.tensor([[length // 2], [0]])),
    }[kind].to("cuda")
    options = {"positions": positions, "window": 50 if kind == "window" else None}
    encoding = OF_HEADS[encoding_name]() if encoding_name in OF_HEADS else shaken(encoding_name, torch.float32)
    encoding = encoding if encoding is None else encoding.cuda()
    shapes = [(2, HEADS, length, 32), (2, 2, length, 32), (2, 2, length, 32)]
    leaves = [torch.randn(*shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    y = attend(*leaves, encoding=encoding, backend=backend, **options)
    cotangent = torch.randn_like(y)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = attend(*wide, encoding=encoding, backend="eager", **options)
    tolerance = TENSOR_CORES[dtype]
    assert float((y.double() - truth).abs().max()) <= tolerance * float(truth.abs().max())
    parameters = [] if encoding is None else list(encoding.parameters())
    ours = torch.autograd.grad(y, [*leaves, *parameters], cotangent, retain_graph=True)
    if backend == "flex" and encoding_name in OF_HEADS:
        again = torch.autograd.grad(y, [*leaves, *parameters], cotangent)
        assert all(map(torch.equal, ours, again)), "an order of its own in every run"
    theirs = torch.autograd.grad(truth, [*wide, *parameters], cotangent.double())
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings(COMPILERS_OWN_WARNING)
@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["flex", "auto"])
def test_on_a_gpu_training_needs_no_matrix(backend: str) -> None:
    length, heads = 8192, 8
    q, k, v = (torch.randn(1, heads, length, 64, device="cuda", requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    positions = Positions.arange(length, device="cuda")
    for encoding in (T5Bias(heads).cuda(), ALiBi(heads, learned=True).cuda()):
        attend(q, k, v, encoding=encoding, positions=positions, backend=backend).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length**2 * 4 / 8
