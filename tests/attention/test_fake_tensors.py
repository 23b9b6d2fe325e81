"""Attention of tensors that have no values: shapes come out as with values, and no value is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from locant import ALiBi, Cope, KVCache, PositionEncoding, Positions, T5Bias, attend

HEADS, LENGTH, HEAD_DIM = 4, 600, 8

WHERE: dict[str, Callable[[], Positions]] = {
    "plain": lambda: Positions.arange(LENGTH),
    "packed": lambda: Positions.packed([[250, 350], [600]]),
    "padded": lambda: Positions.from_mask(torch.arange(LENGTH).expand(2, -1) >= 10),
    "a mask of ones": lambda: Positions.from_mask(torch.ones(2, LENGTH)),
    "anything": lambda: Positions.of(torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)),
    "grid": lambda: Positions.grid(20, 30),
}
ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(HEADS),
    "t5": lambda: T5Bias(HEADS),
    "cope": lambda: Cope(HEAD_DIM, 5),
}


def combinations() -> Iterator[tuple[str, str, str, bool]]:
    """Any two of a kind, an encoding and a backend meet, with or without a gradient by turns."""
    for i, kind in enumerate(WHERE):
        for n, backend in enumerate(["auto", "tiled", "sdpa", "eager"]):
            encoding_name = "none" if kind == "grid" else [*ENCODINGS][(i + n) % 4]  # a distance has one axis
            yield kind, encoding_name, backend, (i // 2 + n) % 2 == 0


@pytest.mark.parametrize(("kind", "encoding_name", "backend", "gradient"), list(combinations()))
def test_shapes_come_out(kind: str, encoding_name: str, backend: str, gradient: bool) -> None:
    with FakeTensorMode():
        encoding, where = ENCODINGS[encoding_name](), WHERE[kind]()
        q = torch.randn(2, HEADS, LENGTH, HEAD_DIM, requires_grad=gradient)
        k = torch.randn(2, 2, LENGTH, HEAD_DIM)
        y = attend(q, k, k, encoding=encoding, positions=where, backend=backend)
        assert isinstance(y, FakeTensor)
        assert (y.shape, y.dtype) == (q.shape, q.dtype)
        if gradient:
            y.sum().backward()
            assert q.grad is not None
            assert q.grad.shape == q.shape


@pytest.mark.parametrize("kind", WHERE)
def test_a_cache_fills(kind: str) -> None:
    with FakeTensorMode():
        cache, k = KVCache(), torch.randn(2, 2, LENGTH, HEAD_DIM)
        cache.append(k, k, WHERE[kind]())
        if kind != "grid":
            where = cache.next_positions(3)
            keys, _, k_positions = cache.append(k[:, :, :3], k[:, :, :3], where)
            assert keys.shape[2] == k_positions.seq_len == LENGTH + 3
