"""Encodings with parameters in a block that FSDP shards: the same attention, the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from locant import ALiBi, Fire, Kerple, PositionEncoding, Positions, Shaw, T5Bias, attend
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")

HEADS, LENGTH, HEAD_DIM = 2, 7, 4

ENCODINGS = {
    "fire": lambda: Fire(HEADS, hidden=3),
    "t5": lambda: T5Bias(HEADS, num_buckets=8, max_distance=11),
    "kerple": lambda: Kerple(HEADS),
    "alibi": lambda: ALiBi(HEADS, learned=True),
    "shaw": lambda: Shaw(HEAD_DIM, 3),
}


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, encoding: PositionEncoding, backend: str) -> None:
        super().__init__()
        self.project = nn.Linear(HEAD_DIM, HEAD_DIM)
        self.encoding, self.backend = encoding, backend

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        return attend(q, x, x, encoding=self.encoding, positions=Positions.arange(LENGTH), backend=self.backend)


def gradients(block: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    block(x).backward(cotangent)
    found = [parameter.grad for parameter in block.parameters()]
    assert None not in found
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found if each is not None]


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.filterwarnings(r"ignore:FSDP2-wrapped module \(FSDPT5Bias\) returned a view")
@pytest.mark.parametrize(
    ("way", "backend"), [("FSDP2", "tiled"), ("FSDP2, on the encoding itself", "eager"), ("FSDP1", "auto")]
)
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_a_sharded_block_is_the_block(encoding_name: str, backend: str, way: str) -> None:
    block = Block(ENCODINGS[encoding_name](), backend)
    sharded = copy.deepcopy(block)
    x, cotangent = torch.randn(2, 1, HEADS, LENGTH, HEAD_DIM)
    expected, truth = block(x), gradients(block, x, cotangent)
    if way == "FSDP1":
        wrapped = FullyShardedDataParallel(sharded, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        if way != "FSDP2":
            fully_shard(sharded.encoding)
            register_fsdp_forward_method(sharded.encoding, "bias")
        wrapped = fully_shard(sharded)
    assert_close(wrapped(x), expected)
    for found, wanted in zip(gradients(wrapped, x, cotangent), truth, strict=True):
        assert_close(found, wanted)
