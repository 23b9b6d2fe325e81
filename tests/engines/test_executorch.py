"""Modules with rotations and attention, exported and run by ExecuTorch with XNNPACK on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import Rotary
from locant.positions.scaling import YaRN
from tests.engines.exported import HEAD_DIM, LAYERS, STARTS, Layer, Rotation, far, tokens
from tests.engines.record import record
from tests.tolerances import EXPORTED, ROTATED_TOKEN

exir = pytest.importorskip("executorch.exir", reason="ExecuTorch is not installed: make engines ENGINES=executorch")
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402 - known now
from executorch.runtime import Runtime  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.unchecked,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

LIMIT = torch.export.Dim("length", min=2, max=1024)
"""ExecuTorch plans memory for the longest."""


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> Any:
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    loaded = Runtime.get().load_program(lowered.to_executorch().buffer)
    method = loaded.load_method("forward")
    return lambda *inputs: (loaded, method.execute(list(inputs))[0].clone())[1]  # the program has the memory


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_executorch(name: str, dynamic: bool) -> None:
    encoding, options = LAYERS[name]
    layer = Layer(encoding, **options)
    run = _compiled(layer, tokens(8), ({2: LIMIT},) * 3 if dynamic else None)
    for length in (8, 2, 37, 600) if dynamic else (8,):
        inputs = tokens(length)
        off = float((run(*inputs) - layer(*inputs)).abs().max())
        subject = "layers with rotations, ALiBi, T5, windows and soft-capping, of any length"
        record("ExecuTorch", subject, off, package="executorch", unit="absolute")
        assert off < EXPORTED


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, YaRN(factor=4.0, original_max_seq_len=64)], ids=["plain", "yarn"])
def test_rotations_in_executorch(scaling: YaRN | None, layout: Any, dynamic: bool) -> None:
    module = Rotation(Rotary(HEAD_DIM, layout=layout, scaling=scaling))
    run = _compiled(module, far(0), ({2: LIMIT}, {1: LIMIT}) if dynamic else None)
    for start in STARTS:
        inputs = far(start)
        off = float((run(*inputs) - module(*inputs)).abs().max())
        record("ExecuTorch", "rotations at positions up to 2³¹ − 1", off, package="executorch", unit="absolute")
        assert off < ROTATED_TOKEN
