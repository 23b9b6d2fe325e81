"""Modules with rotations and attention, exported and run by OpenVINO on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import Rotary
from locant.positions.scaling import YaRN
from tests.engines.exported import HEAD_DIM, LAYERS, LENGTH, off_in_layer, off_in_rotation
from tests.engines.record import record
from tests.tolerances import EXPORTED, ROTATED_TOKEN

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it reports every conversion
openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed: make engines ENGINES=openvino")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.unchecked,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> Any:
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    compiled = openvino.Core().compile_model(openvino.convert_model(program), "CPU", FLOAT32)
    return lambda *inputs: torch.from_numpy(compiled([x.numpy() for x in inputs])[0].copy())


@pytest.mark.parametrize("length", [None, LENGTH], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_openvino(name: str, length: Any) -> None:
    off = off_in_layer(_compiled, name, length)
    subject = "layers with rotations, ALiBi, T5, windows and soft-capping, of any length"
    record("OpenVINO", subject, off, package="openvino", unit="absolute")
    assert off < EXPORTED


@pytest.mark.parametrize("length", [None, LENGTH], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_in_openvino(layout: Any, length: Any) -> None:
    off = off_in_rotation(_compiled, Rotary(HEAD_DIM, layout=layout), length)
    record("OpenVINO", "rotations at positions up to 2³¹ − 1", off, package="openvino", unit="absolute")
    assert off < ROTATED_TOKEN


def test_rotations_with_an_attention_factor_in_openvino() -> None:
    off = off_in_rotation(_compiled, Rotary(HEAD_DIM, scaling=YaRN(factor=4.0, original_max_seq_len=64)), None)
    record("OpenVINO", "rotations by YaRN", off, package="openvino", unit="absolute")
    assert off < ROTATED_TOKEN
