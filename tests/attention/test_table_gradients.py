"""Gradients of what a bias is made of, where queries, keys and values are narrow: as near as if they were not.

A gradient of a slope or a bucket gathers millions of products that nearly cancel. What is rounded to bfloat16 on the
way there shows, and grows with the mean of the values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Kerple, PositionEncoding, Positions, T5Bias, attend
from locant.kernels import distance_attention as kernel
from locant.kernels.distance_attention import distance_attention
from tests.tolerances import GATHERED, assert_close

HEADS, HEAD_DIM, LENGTH = 2, 8, 300

ENCODINGS: dict[str, Callable[[], PositionEncoding]] = {
    "alibi": lambda: ALiBi(HEADS, learned=True),
    "t5": lambda: T5Bias(HEADS),
    "kerple": lambda: Kerple(HEADS),
}


def dense(q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding) -> Tensor:
    """Causal attention from its definition."""
    n = q.shape[2]
    steps = torch.arange(n)[:, None] - torch.arange(n)
    scores = q @ k.mT * HEAD_DIM**-0.5
    if isinstance(encoding, ALiBi):
        scores = scores - encoding.slopes.double()[:, None, None] * steps.abs()
    elif isinstance(encoding, Kerple):
        scores = scores - encoding.r1.double()[:, None, None] * torch.log1p(
            encoding.r2.double()[:, None, None] * steps.abs()
        )
    elif isinstance(encoding, T5Bias):
        scores = scores + encoding.weight.double()[encoding.buckets(steps)].permute(2, 0, 1)
    return scores.masked_fill(steps < 0, float("-inf")).softmax(-1) @ v


def off_by(found: Tensor, truth: Tensor) -> float:
    """Over the norm of what it should be."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("mean", [0.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize("backend", ["tiled", "sdpa", "eager"])
def test_gradients_are_those_of_float64_whatever_the_mean_of_the_values(
    backend: str, encoding_name: str, dtype: torch.dtype, mean: float
) -> None:
    encoding = ENCODINGS[encoding_name]()
    q, k, v, cotangent = torch.randn(4, 1, HEADS, LENGTH, HEAD_DIM).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, (v + mean).detach())]
    parameters = list(encoding.parameters())
    y = attend(*leaves, encoding=encoding, positions=Positions.arange(LENGTH), backend=backend)
    found = torch.autograd.grad(y, [*leaves, *parameters], cotangent)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(dense(*wide, encoding), [*wide, *parameters], cotangent.double())
    for gradient, wanted in zip(found, truth, strict=True):
        assert off_by(gradient, wanted) < GATHERED[gradient.dtype]


@pytest.mark.parametrize("learned", [True, False])
def test_keys_and_values_gather_many_tiles_without_rounding_between_them(
    learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slope that is fixed torch's kernel does the rounding: once for each tile, no more than in one piece."""
    monkeypatch.setattr(kernel, "NARROW_TILE", 4)
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, HEADS, LENGTH, HEAD_DIM).bfloat16()]
    cotangent, slopes = torch.randn_like(leaves[0]), ALiBi(HEADS, learned=True)

    def errors(encoding: PositionEncoding, backend: str) -> list[float]:
        y = attend(*leaves, encoding=encoding, positions=Positions.arange(LENGTH), backend=backend)
        found = torch.autograd.grad(y, leaves, cotangent)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        truth = torch.autograd.grad(dense(*wide, slopes), wide, cotangent.double())
        return [off_by(gradient, wanted) for gradient, wanted in zip(found, truth, strict=True)]

    in_one_piece = [GATHERED[torch.bfloat16]] * 3 if learned else errors(ALiBi(HEADS), "sdpa")
    for ours, theirs in zip(errors(slopes if learned else ALiBi(HEADS), "tiled"), in_one_piece, strict=True):
        assert ours < 1.2 * theirs


def test_a_table_gathers_rows_that_cancel_without_losing_the_others() -> None:
    """Of three equal rows the first and the last, with cotangents a million times larger, cancel exactly."""
    q, k, v = (torch.randn(1, 2, 20, 4) for _ in range(3))
    table = torch.randn(1, 39, requires_grad=True)
    large, small = 1e6 * torch.randn_like(v), torch.randn_like(v)

    def gradient(*cotangents: Tensor) -> Tensor:
        rows = len(cotangents)
        y, _ = distance_attention(*(x.expand(rows, -1, -1, -1) for x in (q, k, v)), table, 0, 38, 0.5)
        return torch.autograd.grad(y, table, torch.cat(cotangents))[0]

    assert_close(gradient(large, small, -large), gradient(small))
