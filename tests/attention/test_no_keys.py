"""Queries without a single key: zeros, whatever their values, and gradients that are zeros too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from locant import ALiBi, Cope, Fire, PositionEncoding, Positions, T5Bias, attend

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(8),
    "t5": lambda: T5Bias(8),
    "fire": lambda: Fire(8),
}


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "flex", "eager"])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_zeros_whatever_the_queries_hold(encoding_name: str, backend: str) -> None:
    where = {"positions": Positions.arange(128), "k_positions": Positions.arange(0)}
    for dtype, value in ((torch.float16, 6e4), (torch.bfloat16, float("inf")), (torch.float32, float("nan"))):
        q = torch.full((1, 8, 128, 64), value, dtype=dtype)
        k, v = torch.zeros(1, 2, 0, 64, dtype=dtype), torch.zeros(1, 2, 0, 3, dtype=dtype)
        with torch.no_grad():
            y = attend(q, k, v, encoding=ENCODINGS[encoding_name](), backend=backend, **where)
        assert y.dtype == dtype
        assert torch.equal(y, torch.zeros(1, 8, 128, 3, dtype=dtype))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_everything_gets_a_gradient_of_zeros(encoding_name: str, backend: str) -> None:
    """Or a model trained on several devices would wait for it."""
    encoding = ENCODINGS[encoding_name]()
    q = torch.full((2, 8, 5, 4), 6e4, dtype=torch.float16, requires_grad=True)
    k, v = (torch.zeros(2, 8, 0, 4, dtype=torch.float16, requires_grad=True) for _ in range(2))
    where = {"positions": Positions.arange(5), "k_positions": Positions.arange(0)}
    y = attend(q, k, v, encoding=encoding, backend=backend, **where)
    leaves = [q, k, v, *([] if encoding is None else encoding.parameters())]
    for leaf, gradient in zip(leaves, torch.autograd.grad(y, leaves, torch.ones_like(y)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
def test_nor_does_padding_without_keys_reach_a_parameter(backend: str) -> None:
    encoding = Cope(4, 8)
    q, k = torch.full((1, 2, 3, 4), float("nan"), requires_grad=True), torch.ones(1, 2, 0, 4)
    where = {"positions": Positions.from_mask(torch.zeros(1, 3)), "k_positions": Positions.arange(0)}
    y = attend(q, k, k, encoding=encoding, backend=backend, **where)
    leaves = [q, *encoding.parameters()]
    for leaf, gradient in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "flex", "eager"])
def test_values_of_no_width_give_no_width(backend: str) -> None:
    q, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 0)
    assert attend(q, q, v, positions=Positions.arange(5), backend=backend).shape == (1, 2, 5, 0)
