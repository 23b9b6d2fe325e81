"""Products on grids against whole numbers of Python, by every kernel and by plain operations."""

from __future__ import annotations

import contextlib
import math
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch import Tensor

from locant.kernels import exact_dot, native

needs_library = pytest.mark.skipif(
    native.function(exact_dot.FUNCTIONS[0]) is None, reason=f"native kernels are {native.status()}"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def on_grid(vector: Tensor) -> list[Fraction]:
    """The nearest whole numbers of steps, ties to even. A sum of that many products of two of them has 53 bits."""
    numbers = [Fraction(x) for x in vector.double().tolist()]
    bits = (53 - math.ceil(math.log2(len(numbers)))) // 2
    step = Fraction(2) ** (math.frexp(max(abs(float(x)) for x in numbers))[1] - bits)
    return [round(x / step) * step for x in numbers]


def truth(a: Tensor, b: Tensor) -> list[list[float]]:
    rows, columns = ([on_grid(vector) for vector in x] for x in (a, b))
    return [[float(sum(x * y for x, y in zip(row, column, strict=True))) for column in columns] for row in rows]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, and vectors of zeros, of equal numbers and of powers of two."""
    x = torch.randn(*shape) * torch.randn(*shape).mul(4).exp()
    x[..., 0, :], x[..., 1, :], x[..., 2, 0] = 0.0, 0.7, 4096.0
    x = x.clamp(-60_000.0, 60_000.0)  # of float16
    return x.to(dtype)


def without_library() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(native, "has", return_value=False)


@torch.no_grad()
@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_library), "plain"])
@pytest.mark.parametrize("dim", [1, 2, 3, 16, 33, 64, 130])
def test_products_are_those_of_whole_numbers(dim: int, path: str) -> None:
    """Bit for bit: a few vectors with many, many with a few, and each with the row of an entry."""
    with contextlib.nullcontext() if path == "native" else without_library():
        for dtype in DTYPES:
            a, b = drawn(3, dim, dtype=dtype), drawn(40, dim, dtype=dtype)
            expected = torch.tensor(truth(a, b), dtype=torch.float64)
            assert torch.equal(exact_dot.exact_dot(a, b, torch.float32), expected)
            assert torch.equal(exact_dot.exact_dot(b, a, torch.float32), expected.mT)
            entries = torch.arange(40)[None, None] % 3
            found = exact_dot.exact_entries(b[None, None], a[None], entries)
            assert (found is None) == (path == "plain")
            if found is not None:
                assert torch.equal(found[0, 0, 0], expected.gather(0, entries[0])[0])


@needs_library
@torch.no_grad()
@pytest.mark.parametrize("variant", native.runnable())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_memory_and_any_instructions_give_the_bits_of_plain_operations(dtype: torch.dtype, variant: str) -> None:
    """Views, broadcast heads, a float64 query, grouped heads, several queries for each entry."""
    function = native.function
    with mock.patch.object(native, "function", lambda name: function(name, variant)):
        cache = drawn(2, 3, 90, 2 * 64, dtype=dtype).unflatten(-1, (2, 64))
        q, k = drawn(2, 6, 5, 64, dtype=dtype).double() * 1.1, cache[:, :, 7:77, 1]
        shared, entries = drawn(1, 6, 9, 64, dtype=dtype), torch.randint(0, 9, (2, 4, 70))
        calls = (
            lambda: exact_dot.exact_scores(q, k, torch.float32),
            lambda: exact_dot.exact_scores(q[:1, :, :1].float(), k, torch.float32),
            lambda: exact_dot.exact_dot(k, shared[0, :3], torch.float32),
            lambda: exact_dot.round_to_grid(k, 96),
        )
        for call in calls:
            with without_library():
                expected = call()
            assert torch.equal(call(), expected)
        found = exact_dot.exact_entries(k, shared[0, :3], entries)
        products = exact_dot.exact_dot(k, shared[0, :3], torch.float32)
        assert found is not None
        assert torch.equal(found, products.gather(3, entries.mT[:, None].expand(-1, 3, -1, -1)).mT)


@needs_library
@torch.no_grad()
def test_what_is_not_finite_stays_in_its_row() -> None:
    a, b = torch.randn(2, 64), torch.randn(50, 64)
    b[3, 5], b[4, 6] = torch.nan, torch.inf
    product = exact_dot.exact_dot(a, b, torch.float32)
    assert bool(product[:, 3:5].isnan().all())
    with without_library():
        assert torch.equal(product.nan_to_num(9.0), exact_dot.exact_dot(a, b, torch.float32).nan_to_num(9.0))
