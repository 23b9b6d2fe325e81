"""Entries about training on several processes: two of them, over gloo, with the wrappers of torch itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from locant import PositionEncoding, Positions
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import EVERY, WIDTH, Build, differences, queries, use
from tests.known_bugs.twins import BufferRotary, GrowingRotary
from tests.ranks import found_on, needs_gloo

pytestmark = [pytest.mark.slow, needs_gloo]

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


OURS = [name for name in KINDS if not name.startswith("twin")]


class Layer(nn.Module):
    """One layer that looks at the far positions of its encoding, in float32, while it is wrapped and running."""

    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.encoding = encoding
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        encoding = self.encoding
        self.seen = {
            method: value.detach() for method, value in use(encoding, queries(encoding, FAR.seq_len), FAR).items()
        }
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
    """Forward and backward, then: by how much each method moved, the buffers, and the gradient."""
    torch.manual_seed(0)
    encoding = build()
    alone = Layer(encoding)
    with torch.no_grad():
        expected = use(encoding, queries(encoding, FAR.seq_len), FAR)
        expected = {method: value.clone() for method, value in expected.items()}
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


def find_out() -> dict[str, dict[str, Any]]:
    """The work of one process: what it found, by wrapper, then by encoding."""
    found: dict[str, dict[str, Any]] = {way: {} for way in ("FSDP1", "FSDP2", "DDP")}
    for name, build in KINDS.items():
        for way, results in found.items():
            results[name] = _one_step(way, build, seq_len=8 * (dist.get_rank() + 1) if way == "DDP" else 8)
    return found


Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found() -> Found:
    return found_on(WORLD, find_out)


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2"])
def test_29_sharding_in_half_precision_leaves_constants_alone(found: Found, way: str) -> None:
    """FSDP casts the tables of rotary.

    facebookresearch/fairseq2#480: FSDP cast buffers, and could not broadcast a complex one. Its mixed precision has a
    dtype for buffers, which is meant for running means and also reaches tables of cosines.

    Check: Print the buffers' dtypes behind `FullyShardedDataParallel(model, mixed_precision=...)`.

    Test: FSDP1 and FSDP2 with mixed precision on two processes.
    """

    def check(name: str) -> None:
        for rank in found:
            result = rank[way][name]
            assert not result["complex"], f"{name}: complex buffers {result['complex']}"
            assert not result["moved"], f"{name}: in {way} the table moved by {result['moved']}"
            assert result["gradients"], f"{name}: nothing was trained"

    exhibit(check, *OURS, twin="twin: complex", because=r"complex buffers \['encoding.rotations'\]")
    if way == "FSDP1":  # its successor leaves buffers alone
        exhibit(check, *OURS, twin="twin: buffer", because="in FSDP1 the table moved by")


def test_30_ranks_may_see_sequences_of_different_lengths(found: Found) -> None:
    """Ranks with different lengths broadcast buffers of different shapes.

    lucidrains/CoCa-pytorch#17, modelscope/ms-swift#10187: Data-parallel training crashed. Each rank grew a buffer to
    the length that it had seen, and the next step broadcast buffers of different shapes.

    Check: Give two ranks sequences of 8 and 16 tokens, and take two steps.

    Test: DDP on two processes with 8 and 16 tokens.
    """

    def check(name: str) -> None:
        one, other = (rank["DDP"][name] for rank in found)
        assert one["shapes"] == other["shapes"], f"{name}: buffers are {one['shapes']} here, {other['shapes']} there"
        assert one["gradients"] == other["gradients"] != [], f"{name}: the ranks do not agree on a gradient"
        assert not one["moved"] | other["moved"], f"{name}: the table moved"

    exhibit(check, *OURS, twin="twin: growing", because=r"\[2, 1, 8, 8\]} here, .*\[2, 1, 16, 8\]} there")
