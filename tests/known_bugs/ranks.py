"""What two processes find out about encodings inside the wrappers for data-parallel and sharded training.

The processes are started by the tests, talk over gloo, and leave what they found as JSON, one file for each rank.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from locant import PositionEncoding, Positions
from tests.known_bugs.subjects import EVERY, WIDTH, Build, differences, queries, use
from tests.known_bugs.twins import BufferRotary, GrowingRotary

__all__ = ["KINDS", "WORLD", "find_out"]

WORLD = 2
FAR = Positions.of([0, 1, 2, 100, 1857, 4095])


class ComplexRotary(BufferRotary):
    """Cosines and sines as one complex buffer, which no real dtype can hold."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(4096)[:, None] * self.inv_freq
        self.register_buffer("rotations", torch.polar(torch.ones_like(angle), angle), persistent=False)


KINDS: dict[str, Build] = {
    **{name: EVERY[name] for name in ("rotary", "t5 bidirectional", "learned")},
    "twin: buffer": BufferRotary,
    "twin: complex": ComplexRotary,
    "twin: growing": GrowingRotary,
}


class Layer(nn.Module):
    """One layer that looks at the far positions of its encoding, in float32, while it is wrapped and running."""

    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.encoding = encoding
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        encoding = self.encoding
        self.seen = {door: value.detach() for door, value in use(encoding, queries(encoding, FAR.seq_len), FAR).items()}
        return sum(value.float().sum() for value in use(encoding, self.project(x), positions).values())  # type: ignore[return-value]


def _wrapped(way: str, layer: Layer) -> nn.Module:
    if way == "FSDP1":
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        return FullyShardedDataParallel(layer, mixed_precision=half, device_id=torch.device("cpu"))
    if way == "FSDP2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
        return fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # type: ignore[return-value]
    return DistributedDataParallel(layer)


def _one_step(way: str, build: Build, seq_len: int) -> dict[str, object]:
    """Forward and backward, then: by how much each door moved, the buffers, and the gradient."""
    torch.manual_seed(0)
    encoding = build()
    alone = Layer(encoding)
    with torch.no_grad():
        expected = use(encoding, queries(encoding, FAR.seq_len), FAR)
        expected = {door: value.clone() for door, value in expected.items()}
    model = _wrapped(way, alone)
    model(queries(encoding, seq_len), Positions.arange(seq_len)).backward()
    # What a parameter comes to is rounded by mixed precision, as asked for; it holds small whole numbers here.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {
        "moved": differences(expected, alone.seen),
        "shapes": {name: list(buffer.shape) for name, buffer in alone.named_buffers()},
        "complex": [name for name, buffer in alone.named_buffers() if buffer.is_complex()],
        "gradients": [float(gradient.double().sum()) for gradient in gradients] if way == "DDP" else len(gradients),
    }


def find_out(rank: int, folder: str) -> None:
    """The work of one process."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(minutes=10))
    found: dict[str, dict[str, object]] = {way: {} for way in ("FSDP1", "FSDP2", "DDP")}
    for name, build in KINDS.items():
        for way, results in found.items():
            results[name] = _one_step(way, build, seq_len=8 * (rank + 1) if way == "DDP" else 8)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
