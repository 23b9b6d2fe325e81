"""A forward pass asks the device for nothing, and fits into a captured graph; wrong ids are told of all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from locant import InputEmbedding, Learned, PositionEncoding, RangeError, Rotary, SegmentEmbedding, TokenEmbedding
from locant.embedding.deferred_errors import RaisesLater
from tests.gpu_without_gpu.device import Device, HostReadError, pretended
from tests.refusal import refuses

pytest.importorskip("triton", reason="there is no Triton for this platform")
pytestmark = pytest.mark.unchecked  # an event of the device is none of torch's

VOCAB, WIDTH = 29, 14

MODELS: dict[str, Callable[[], RaisesLater]] = {
    "rotary": lambda: InputEmbedding(VOCAB, WIDTH, encoding=Rotary(WIDTH)),
    "NoPE": lambda: InputEmbedding(VOCAB, WIDTH, encoding=PositionEncoding(), scale="sqrt_d_model"),
    "an own norm": lambda: InputEmbedding(VOCAB, WIDTH, num_segments=2, norm=nn.RMSNorm(WIDTH)),
    "learned": lambda: InputEmbedding(VOCAB, WIDTH, encoding=Learned(9, WIDTH), norm="layer_norm", dropout=0.1),
    "tokens alone": lambda: TokenEmbedding(VOCAB, WIDTH),
    "tokens alone, bfloat16": lambda: TokenEmbedding(VOCAB, WIDTH, padding_idx=0).bfloat16(),
    "segments alone": lambda: SegmentEmbedding(VOCAB, WIDTH),
}


@pytest.fixture
def gpu() -> Iterator[Device]:
    with pretended() as device:
        yield device


def test_a_read_would_be_seen(gpu: Device) -> None:
    x = torch.arange(3)
    for read in (lambda: int(x.max()), lambda: x.tolist(), lambda: x.cpu(), lambda: bool(x.any()), x.nonzero):
        with pytest.raises(HostReadError):
            read()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_read(model: str, trained: bool, gpu: Device) -> None:
    ids, embedding = torch.tensor([[3, 4, 28], [1, 0, 2]]), MODELS[model]()
    for _ in range(2):
        with torch.set_grad_enabled(trained):
            y = embedding(ids)
        if trained:
            y.sum().backward()
    gpu.finished = True
    assert y.isfinite().all()


@pytest.mark.parametrize("model", MODELS)
def test_a_graph_can_be_captured_after_other_calls(model: str, gpu: Device) -> None:
    ids, embedding = torch.tensor([[3, 4, 28]]), MODELS[model]()
    embedding(ids)
    gpu.capturing = True
    embedding(ids)


@pytest.mark.parametrize("model", MODELS)
def test_an_id_without_a_row_is_named_later(model: str, gpu: Device) -> None:
    require_named_later(MODELS[model](), (1, 3), "(0, 1)", gpu)


@pytest.mark.parametrize(("shape", "place"), [((3,), "(1,)"), ((1, 1, 3), "(0, 0, 1)")])
def test_ids_of_any_shape_are_found_again(shape: tuple[int, ...], place: str, gpu: Device) -> None:
    require_named_later(TokenEmbedding(VOCAB, WIDTH), shape, place, gpu)


def require_named_later(embedding: RaisesLater, shape: tuple[int, ...], place: str, gpu: Device) -> None:
    ids = torch.tensor([3, VOCAB, 4]).view(shape)
    wrong, good = embedding(ids), embedding(torch.zeros_like(ids))
    gpu.finished = True
    assert wrong.view(3, -1).isnan().all(1).tolist() == [False, True, False]
    assert not good.isnan().any()
    with refuses(RangeError, f"got id {VOCAB} at {place} in an earlier call", f"={VOCAB}"):
        embedding.raise_deferred_errors()
    embedding(ids)
    with refuses(RangeError, f"got id {VOCAB} at {place} in an earlier call"):
        embedding(torch.zeros_like(ids))
