"""Modules with rotations and attention, exported and run by ExecuTorch with XNNPACK on a CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import Rotary
from locant.positions.scaling import YaRN
from tests.engines.exported import HEAD_DIM, LAYERS, off_in_layer, off_in_rotation
from tests.engines.record import record
from tests.tolerances import EXPORTED, ROTATED_TOKEN

exir = pytest.importorskip("executorch.exir", reason="ExecuTorch is not installed: make engines ENGINES=executorch")
with warnings.catch_warnings(action="ignore"):  # of what it calls experimental
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.runtime import Runtime

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.unchecked,
    pytest.mark.filterwarnings("ignore"),
]

LIMIT = torch.export.Dim("length", min=2, max=1024)
"""ExecuTorch plans memory for the longest."""


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> Any:
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    loaded = Runtime.get().load_program(lowered.to_executorch().buffer)
    method = loaded.load_method("forward")
    return lambda *inputs: (loaded, method.execute(list(inputs))[0].clone())[1]  # the program has the memory


@pytest.mark.parametrize("length", [None, LIMIT], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_executorch(name: str, length: Any) -> None:
    off = off_in_layer(_compiled, name, length)
    subject = "layers with rotations, ALiBi, T5, windows and soft-capping, of any length"
    record("ExecuTorch", subject, off, package="executorch", unit="absolute")
    assert off < EXPORTED


@pytest.mark.parametrize("length", [None, LIMIT], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_in_executorch(layout: Any, length: Any) -> None:
    off = off_in_rotation(_compiled, Rotary(HEAD_DIM, layout=layout), length)
    record("ExecuTorch", "rotations at positions up to 2³¹ − 1", off, package="executorch", unit="absolute")
    assert off == 0


def test_rotations_with_an_attention_factor_in_executorch() -> None:
    off = off_in_rotation(_compiled, Rotary(HEAD_DIM, scaling=YaRN(factor=4.0, original_max_seq_len=64)), None)
    record("ExecuTorch", "rotations by YaRN", off, package="executorch", unit="absolute")
    assert off < ROTATED_TOKEN
