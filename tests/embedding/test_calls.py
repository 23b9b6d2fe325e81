"""What embeddings are called with: shapes without data, and what is no tensor, or one of another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from locant import (
    InputEmbedding,
    Learned,
    Positions,
    RangeError,
    SegmentEmbedding,
    ShapeError,
    Sinusoidal,
    TokenEmbedding,
)
from locant.spelling import dtype_name
from tests.refusal import refuses

ENCODINGS: dict[str, Any] = {
    "none": lambda: None,
    "learned": lambda: Learned(9, 4),
    "sinusoidal": lambda: Sinusoidal(4),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("weights_are_real", [False, True])
def test_shapes_without_data(encoding: str, weights_are_real: bool) -> None:
    """Planners of memory and of parallelism run a model on fake tensors; there are no ids to look at."""

    def build() -> InputEmbedding:
        return InputEmbedding(7, 4, encoding=ENCODINGS[encoding](), num_segments=2, norm="layer_norm")

    real = build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        embedding = real if weights_are_real else build()
        ids = torch.randint(99, (2, 3))
        for positions in (None, Positions.of(ids), Positions.packed([2, 1]), Positions.from_mask(ids)):
            y = embedding(ids, positions, ids)
            assert isinstance(y, FakeTensor)
            assert y.shape == (2, 3, 4)
        if not weights_are_real:
            y.sum().backward()
            assert embedding.token.weight.grad.shape == (7, 4)
        assert TokenEmbedding(7, 4)(ids[0]).shape == (3, 4)
        assert SegmentEmbedding(7, 4)(ids[0]).shape == (3, 4)
    assert real(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 4)  # and nothing of it stays behind


def test_what_is_no_tensor_is_refused() -> None:
    embedding = InputEmbedding(7, 4, num_segments=2)
    with refuses(ShapeError, "list", "expected a tensor", "tensor("):
        embedding.combine([[[1.0, 2.0, 3.0, 4.0]]])  # type: ignore[arg-type]
    with refuses(ShapeError, "list", "expected a tensor"):
        embedding.token.logits([1.0])  # type: ignore[arg-type]
    for encoding in (Learned(7, 4), Sinusoidal(4)):
        with refuses(ShapeError, "list", "tensor(x)"):
            encoding.embed([1.0], Positions.arange(1))  # type: ignore[arg-type]


def test_vectors_of_another_width_are_refused_beside_segments() -> None:
    with refuses(ShapeError, "x of shape", "4"):
        InputEmbedding(7, 4, num_segments=2).combine(torch.zeros(1, 2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_logits_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    embedding = TokenEmbedding(7, 4)
    with refuses(ShapeError, f"dtype {dtype_name(dtype)}, the table is float32", "autocast"):
        embedding.logits(torch.ones(2, 4, dtype=dtype))


def test_logits_under_autocast_are_as_autocast_has_them() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert TokenEmbedding(7, 4).logits(torch.ones(2, 4, dtype=dtype)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32], ids=str)
def test_dtypes_without_arithmetic_are_refused(dtype: torch.dtype) -> None:
    for encoding in (Learned(7, 4), Sinusoidal(4)):
        with refuses(ShapeError, f"dtype {dtype_name(dtype)}, ", "16 bits", "x.float()"):
            encoding.embed(torch.ones(1, 2, 4).to(dtype), Positions.arange(2))


@pytest.mark.parametrize("size", [8.5, "9", None])
def test_odd_sizes_to_grow_to_are_refused(size: Any) -> None:
    for table in (TokenEmbedding(7, 4), Learned(7, 4)):
        before = table.weight
        with refuses(RangeError, "expected an integer", "resize(7)"):
            table.resize(size)
        assert table.weight is before
