"""A forward pass asks the device for nothing, and fits into a captured graph; wrong ids are told of all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from locant import InputEmbedding, Learned, PositionEncoding, RangeError, SegmentEmbedding, TokenEmbedding
from locant.embedding.deferred_errors import DeferredErrorModule
from locant.parallel import VocabularyParallel
from tests.gpu_without_gpu.device import Device, pretended
from tests.ranks import needs_gloo
from tests.refusal import refuses

pytestmark = pytest.mark.unchecked  # an event of the device is none of torch's

VOCAB, WIDTH = 29, 14

MODELS: dict[str, Callable[[], DeferredErrorModule]] = {
    "no encoding": lambda: InputEmbedding(VOCAB, WIDTH),
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


@pytest.fixture
def split() -> Iterator[TokenEmbedding]:
    """A table split over the one rank there is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = parallelize_module(nn.Sequential(TokenEmbedding(VOCAB, WIDTH)), mesh, {"0": VocabularyParallel()})
    yield model[0]
    dist.destroy_process_group()


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


def require_named_later(embedding: DeferredErrorModule, shape: tuple[int, ...], place: str, gpu: Device) -> None:
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


@needs_gloo
def test_of_a_split_table_nothing_is_read_and_a_wrong_id_is_named_later(
    split: TokenEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts and sums are torch's, and so is a device that would take them; `is_cuda` is what we ask."""
    ids, reads = torch.tensor([[3, VOCAB, 4]]), []
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: isinstance(x, DTensor)))
    with mock.patch.object(torch, "aminmax", reads.append):
        good, rows = split(ids.clamp(max=5)), split(ids)  # a later call would raise
    monkeypatch.undo()
    assert reads == []
    assert rows.isnan().any(-1).tolist() == [[False, True, False]]
    assert not good.isnan().any()
    with refuses(RangeError, f"got id {VOCAB} at (0, 1) in an earlier call", f"={VOCAB}"):
        split.raise_deferred_errors()
