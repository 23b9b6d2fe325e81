"""The native kernel: the bits of torch's operators, whatever it is given, and no byte beside its memory."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from locant.kernels import native as kernels
from locant.kernels.input_embedding import Operands, native
from tests.kernels.input_embedding import by_torch
from tests.kernels.input_embedding.embedded import EVERY, LEARNED, operands, poisoned

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PARTS = [
    (),
    ("eps", "gamma", "beta"),
    ("gamma", "beta"),
    ("gamma",),
    ("beta",),
    ("position", "position_index"),
    ("segments",),
    ("segment", "segments", "padding_idx"),
    ("eps", "gamma", "beta", "position", "position_index", "segment", "segments"),
]

pytestmark = pytest.mark.skipif(
    kernels.function(native.FORWARD) is None, reason=f"native kernels are {kernels.status()}"
)


def random_operands(draw: random.Random) -> Operands:
    """Sizes of nothing, of less than a vector and of several chunks; ids that are hot, and that are all different."""
    batch, seq_len = draw.choice([(0, 3), (1, 1), (1, 530), (2, 3), (3, 259), (31, 17), (600, 2)])
    width = draw.choice([1, 2, 3, 15, 31, 32, 33, 64, 131])
    dtype, heights = draw.choice(DTYPES), {"token": draw.choice([1, 23, 1_000]), "segment": draw.choice([1, 4, 5, 40])}
    heights["position"] = seq_len + draw.choice([0, 8])
    index = draw.choice([
        torch.arange(seq_len)[None] + draw.choice([0, heights["position"] - seq_len]),
        torch.randint(heights["position"], (1, seq_len)),
        torch.randint(heights["position"], (batch, seq_len)),
    ])  # fmt: skip
    tables = {name: torch.randn(height, width).to(dtype) for name, height in heights.items()}
    if draw.random() < 0.3:
        tables["position"] = tables["position"].float()
    shape = batch, seq_len
    read = {"ids": torch.randint(heights["token"], shape), "segments": torch.randint(heights["segment"], shape)}
    return operands(
        shape, width, dtype=dtype, **tables, **read, position_index=index, seed=torch.tensor([draw.getrandbits(60)]),
        p=draw.choice([0.0, 0.3]), padding_idx=draw.choice([None, 0]), without=draw.choice(PARTS),
    )  # fmt: skip


def random_cotangent(draw: random.Random, o: Operands) -> Tensor:
    """Mostly as it comes from a layer, sometimes with other strides or of another dtype."""
    shape = *o.ids.shape, o.width
    return draw.choice([
        lambda: torch.randn(shape).to(o.token.dtype),
        lambda: torch.randn(shape).to(o.token.dtype),
        lambda: torch.randn(shape),
        lambda: torch.randn(shape[1], shape[0], shape[2]).to(o.token.dtype).transpose(0, 1),
        lambda: torch.randn(*shape[:2], 2 * shape[2])[..., ::2],
        lambda: torch.tensor(0.75).expand(shape),
    ])()  # fmt: skip


def require_same_bits(o: Operands, cotangent: Tensor, needs: list[bool] = EVERY) -> None:
    with poisoned():
        expected = by_torch.forward(o)
        expected_gradients = by_torch.backward(cotangent, *expected[1:], o, needs)
        ours = native.forward(o)
        gradients = native.backward(cotangent, *ours[1:], o, needs)
    for name, one, other in zip(("y", "mean", "rstd"), ours, expected, strict=True):
        assert torch.equal(one, other), name
    for name, one, other in zip(LEARNED, gradients, expected_gradients, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(one, other), name


def fuzz(seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        draw = random.Random(seed)
        o = random_operands(draw)
        needs = EVERY if draw.random() < 0.7 else [draw.random() < 0.5 for _ in LEARNED]
        require_same_bits(o, random_cotangent(draw, o), needs)


@pytest.fixture(params=kernels.runnable())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    of_library = kernels.function
    with mock.patch.object(kernels, "function", lambda name: of_library(name, request.param)):
        yield request.param


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_the_bits_of_torchs_operators_with_every_instruction_set(variant: str, threads: int) -> None:
    fuzz(range(30 * threads, 30 * threads + 30))


@pytest.mark.slow
@pytest.mark.parametrize("threads", range(1, 9), indirect=True)
def test_the_bits_of_torchs_operators_whatever_the_number_of_threads(variant: str, threads: int) -> None:
    fuzz(range(100 * threads, 100 * threads + 30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", range(1, 4))
def test_sizes_of_none_to_three(width: int, dtype: torch.dtype, variant: str) -> None:
    for batch in range(4):
        for seq_len in range(4):
            o = operands((batch, seq_len), width, dtype=dtype, seed=torch.tensor([1]), p=0.3)
            require_same_bits(o, torch.randn(batch, seq_len, width).to(dtype))


def test_numbers_that_are_none(variant: str) -> None:
    """Infinities and NaN in a table, dropped or not, come out as torch's arithmetic has them."""
    o = operands((3, 5), 33, seed=torch.tensor([1]), p=0.5, without=("eps", "gamma", "beta"))
    for dtype in DTYPES:
        table = o.token.to(dtype)
        table[o.ids[0, 0], :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
        tables = {name: getattr(o, name).to(dtype) for name in ("position", "segment")}
        strange = dataclasses.replace(o, token=table, **tables)
        ours, expected = native.forward(strange)[0], by_torch.forward(strange)[0]
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
        assert ours.isnan().any()


def test_rows_that_do_not_lie_side_by_side_are_copied_first() -> None:
    o = operands((2, 5), 8)
    for changed in ({"token": torch.randn(8, 23).T}, {"segment": torch._neg_view(torch.randn(3, 8))}):
        require_same_bits(dataclasses.replace(o, **changed), torch.randn(2, 5, 8))
    for grad in (torch._neg_view(torch.randn(2, 5, 8)), torch.randn(2, 5, 8, dtype=torch.float64).float()):
        require_same_bits(o, grad)


# ---------------------------------------------------------------------- among other code


def test_many_python_threads_at_once() -> None:
    o = operands((5, 600), 64, seed=torch.tensor([1]), p=0.1, dtype=torch.bfloat16)
    cotangents = [torch.randn(5, 600, 64).bfloat16() for _ in range(12)]
    _, mean, rstd = native.forward(o)

    def one(cotangent: Tensor) -> Any:
        return native.backward(cotangent, mean, rstd, o, EVERY)

    expected = [one(cotangent) for cotangent in cotangents]
    with ThreadPoolExecutor(4) as pool:
        for ours, other in zip(pool.map(one, cotangents), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


FORK = """
import os, torch
from locant import InputEmbedding, Learned
embedding = InputEmbedding(50, 64, encoding=Learned(600, 64), norm="layer_norm", backend="fused")
ids = torch.randint(50, (4, 600))
def run():
    return [embedding(ids), *torch.autograd.grad(embedding(ids).square().sum(), list(embedding.parameters()))]
torch.set_num_threads(3)
expected = run()
child = os.fork()
if not child:
    ours = embedding(ids)
    torch.set_num_threads(1)  # without it, torch's own operators wait for threads that are not there
    os._exit(not torch.equal(ours, expected[0]))
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_embeds() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == "0", done.stderr
