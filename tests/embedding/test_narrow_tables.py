"""16-bit tables: their gradients are summed in float32 and rounded once, whichever way the rows were read.

Whole numbers below 2**24 are summed in float32 without an error, so the truth is known to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from locant import InputEmbedding, Learned, PositionEncoding, Positions, SegmentEmbedding, TokenEmbedding

VOCAB, WIDTH, LENGTH = 4, 8, 4_096
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "learned": lambda: Learned(LENGTH, WIDTH),
}


def counted(ids: Tensor, cotangent: Tensor, num_rows: int = VOCAB) -> Tensor:
    """What arrives for each row, summed in float64 and rounded once."""
    total = torch.zeros(num_rows, cotangent.shape[-1], dtype=torch.float64)
    return total.index_add_(0, ids.reshape(-1), cotangent.double().flatten(0, -2)).to(cotangent.dtype)


def asked(dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Ids, and cotangents that mostly add up."""
    return torch.randint(VOCAB, (batch, LENGTH)), torch.randint(-1, 8, (batch, LENGTH, WIDTH)).to(dtype)


def gradient(module: torch.nn.Module, weight: Tensor, ids: Tensor, cotangent: Tensor, *rest: Any) -> Tensor:
    return torch.autograd.grad(module(ids, *rest), weight, cotangent)[0]


@DTYPES
@pytest.mark.parametrize("num_segments", [2, 0])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_input(encoding: str, num_segments: int, dtype: torch.dtype) -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=ENCODINGS[encoding](), num_segments=num_segments).to(dtype)
    ids, cotangent = asked(dtype)
    assert torch.equal(gradient(embedding, embedding.token.weight, ids, cotangent), counted(ids, cotangent))
    if embedding.segment is not None:
        segments = ids % 2
        found = gradient(embedding, embedding.segment.weight, ids, cotangent, None, segments)
        assert torch.equal(found, counted(segments, cotangent, 2))


@DTYPES
def test_tables_alone(dtype: torch.dtype) -> None:
    ids, cotangent = asked(dtype)
    token, segment = TokenEmbedding(VOCAB, WIDTH, padding_idx=1).to(dtype), SegmentEmbedding(VOCAB, WIDTH).to(dtype)
    assert torch.equal(gradient(segment, segment.weight, ids[0], cotangent[0]), counted(ids, cotangent))
    expected = counted(ids, cotangent)
    expected[1] = 0
    assert torch.equal(gradient(token, token.weight, ids, cotangent), expected)
    assert torch.equal(token(ids), token.weight[ids])
    assert token(ids[:, :0]).shape == (1, 0, WIDTH)
    assert torch.equal(token(ids[0, 0]), token.weight[ids[0, 0]])


@DTYPES
def test_learned_positions_alone(dtype: torch.dtype) -> None:
    learned, (ids, cotangent) = Learned(VOCAB, WIDTH).to(dtype), asked(dtype)
    y = learned.embed(torch.zeros_like(cotangent), Positions.of(ids))
    assert torch.equal(torch.autograd.grad(y, learned.weight, cotangent)[0], counted(ids, cotangent))


def test_gradients_that_will_be_differentiated() -> None:
    """They come from other operators, in which the sums must not be narrower either."""
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(VOCAB, WIDTH), num_segments=2).bfloat16()
    ids, cotangent = asked(torch.bfloat16)
    places, segments = ids.flip(1), ids % 2
    y = embedding(ids, Positions.of(places), segments)
    found = torch.autograd.grad(y, list(embedding.parameters()), cotangent.requires_grad_(), create_graph=True)
    read = zip((ids, places, segments), (VOCAB, VOCAB, 2), strict=True)
    for gradient_of_one, (which, num_rows) in zip(found, read, strict=True):
        assert gradient_of_one.requires_grad
        assert torch.equal(gradient_of_one, counted(which, cotangent.detach(), num_rows))


def test_under_transforms_of_functions_and_when_recomputed() -> None:
    token, (ids, cotangent) = TokenEmbedding(VOCAB, WIDTH).bfloat16(), asked(torch.bfloat16, batch=2)

    def loss(weight: Tensor, ids: Tensor, cotangent: Tensor) -> Tensor:
        return (functional_call(token, {"weight": weight}, (ids,)) * cotangent).float().sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0))(token.weight, ids, cotangent)
    for sample in range(2):
        assert torch.equal(each[sample], counted(ids[sample], cotangent[sample]))
        assert torch.equal(grad(loss)(token.weight, ids[sample], cotangent[sample]), each[sample])
    again = checkpoint(token, ids, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, token.weight, cotangent)[0], counted(ids, cotangent))
    several = torch.autograd.grad(token(ids[0]), token.weight, cotangent, is_grads_batched=True)[0]
    assert torch.equal(several[1], counted(ids[0], cotangent[1]))


@pytest.mark.unchecked
def test_compiled() -> None:
    torch._dynamo.reset()
    embedding, (ids, cotangent) = InputEmbedding(VOCAB, WIDTH).bfloat16(), asked(torch.bfloat16)
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    assert torch.equal(gradient(compiled, embedding.token.weight, ids, cotangent), counted(ids, cotangent))
    torch._dynamo.reset()


def test_what_nobody_trains_is_read_by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token takes microseconds, and an exported graph has one look-up."""

    def called(*_: object, **__: object) -> None:
        raise AssertionError("sorted")

    monkeypatch.setattr("locant.kernels.look_up.torch.unique", called)
    ids = torch.tensor([[1, 2]])
    TokenEmbedding(VOCAB, WIDTH)(ids)
    narrow = TokenEmbedding(VOCAB, WIDTH).bfloat16()
    with torch.no_grad():
        narrow(ids)
    narrow.requires_grad_(False)(ids)
    program = torch.export.export(narrow.requires_grad_(True), (ids,))
    assert sum("embedding" in str(node.target) for node in program.graph.nodes if node.op == "call_function") == 1
    with pytest.raises(AssertionError, match="sorted"):
        narrow(ids)
