"""Modules with rotations and attention, exported and run by OpenVINO on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import Rotary
from locant.positions.scaling import YaRN
from tests.engines.exported import HEAD_DIM, LAYERS, LENGTH, STARTS, Layer, Rotation, far, tokens
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
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
    compiled = openvino.Core().compile_model(openvino.convert_model(program), "CPU", FLOAT32)
    return lambda *inputs: torch.from_numpy(compiled([x.numpy() for x in inputs])[0].copy())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_openvino(name: str, dynamic: bool) -> None:
    encoding, options = LAYERS[name]
    layer = Layer(encoding, **options)
    run = _compiled(layer, tokens(8), ({2: LENGTH},) * 3 if dynamic else None)
    for length in (8, 2, 37, 600) if dynamic else (8,):
        inputs = tokens(length)
        off = float((run(*inputs) - layer(*inputs)).abs().max())
        subject = "layers with rotations, ALiBi, T5, windows and soft-capping, of any length"
        record("OpenVINO", subject, off, package="openvino", unit="absolute")
        assert off < EXPORTED


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, YaRN(factor=4.0, original_max_seq_len=64)], ids=["plain", "yarn"])
def test_rotations_in_openvino(scaling: YaRN | None, layout: Any, dynamic: bool) -> None:
    module = Rotation(Rotary(HEAD_DIM, layout=layout, scaling=scaling))
    run = _compiled(module, far(0), ({2: LENGTH}, {1: LENGTH}) if dynamic else None)
    for start in STARTS:
        inputs = far(start)
        off = float((run(*inputs) - module(*inputs)).abs().max())
        record("OpenVINO", "rotations at positions up to 2³¹ − 1", off, package="openvino", unit="absolute")
        assert off < ROTATED_TOKEN
