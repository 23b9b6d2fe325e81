"""Modules with rotations and attention, exported and run by ONNX Runtime; and its own rotary operator, with our tables.

ExecuTorch and OpenVINO read the same exported program: it holds operators of torch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locant import ALiBi, Fire, LocantError, PositionEncoding, Positions, Rotary, T5Bias, attend
from locant.positions.scaling import YaRN
from tests.engines.exported import HEAD_DIM, HEADS, LAYERS, LENGTH, STARTS, Layer, Rotation, far, tokens
from tests.engines.record import record
from tests.refusal import refuses
from tests.tolerances import ROTATED_TOKEN, assert_close

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*The axis name:UserWarning"),
]


def _record(subject: str, found: Tensor, expected: Tensor) -> None:
    difference = float((found - expected).abs().max())
    record("ONNX Runtime", subject, difference, package="onnxruntime", unit="absolute")


def _run(program: Any, path: Path, inputs: tuple[Tensor, ...]) -> Tensor:
    program.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return torch.from_numpy(session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})[0])


def _exported(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> Any:
    options: Any = {"dynamo": True, "dynamic_shapes": shapes, "opset_version": 23, "verbose": False}
    return torch.onnx.export(module.eval(), inputs, **options)


@pytest.mark.slow
@pytest.mark.unchecked  # the exporter traces what checks signatures, too
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_onnx_runtime(name: str, dynamic: bool, tmp_path: Path) -> None:
    encoding, options = LAYERS[name]
    layer = Layer(encoding, **options)
    program = _exported(layer, tokens(8), ({2: LENGTH},) * 3 if dynamic else None)
    for length in (8, 2, 37, 600) if dynamic else (8,):
        inputs = tokens(length)
        found, expected = _run(program, tmp_path / "a.onnx", inputs), layer(*inputs).detach()
        _record("layers with rotations, ALiBi, T5, windows and soft-capping, of any length", found, expected)
        assert_close(found, expected)


@pytest.mark.unchecked
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_in_onnx_runtime_have_the_same_bits(layout: Any, tmp_path: Path) -> None:
    module = Rotation(Rotary(HEAD_DIM, layout=layout))
    x, _, _ = tokens(8)
    program = _exported(module, (x, torch.arange(8)[None]), ({2: LENGTH}, {1: LENGTH}))
    for start in STARTS:
        inputs = far(start)
        found, expected = _run(program, tmp_path / "a.onnx", inputs), module(*inputs)
        _record("rotations at positions up to 2³¹ − 1", found, expected)
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.unchecked
def test_rotations_with_an_attention_factor_are_equal_up_to_its_rounding(tmp_path: Path) -> None:
    module = Rotation(Rotary(HEAD_DIM, scaling=YaRN(factor=4.0, original_max_seq_len=64)))
    program = _exported(module, far(0), None)
    for start in STARTS:
        inputs = far(start)
        found, expected = _run(program, tmp_path / "a.onnx", inputs), module(*inputs)
        _record("rotations by YaRN", found, expected)
        assert (found - expected).abs().max() < ROTATED_TOKEN


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "encoding", [Rotary(HEAD_DIM), ALiBi(HEADS), T5Bias(HEADS), Fire(HEADS)], ids=lambda e: e.info.name
)
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_an_exported_program_is_for_every_length_and_holds_operators_of_torch_alone(
    encoding: PositionEncoding, backend: str
) -> None:
    layer = Layer(encoding, backend=backend).eval()
    program = torch.export.export(layer, tokens(8), dynamic_shapes=({2: LENGTH},) * 3, strict=False)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in operators if "locant" in name]
    for length in (2, 300, 700):
        inputs = tokens(length)
        assert_close(program.module()(*inputs), layer(*inputs))


@pytest.mark.unchecked
@pytest.mark.parametrize("length", [9, 20])
def test_a_decoding_step_is_exported_for_every_length(length: int) -> None:
    class Step(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
            positions = Positions(index)
            q = Rotary(HEAD_DIM).rotate_one(q, positions)
            return attend(q, k, v, positions=positions, k_positions=Positions.arange(k.shape[2]))

    def step(length: int) -> tuple[Tensor, ...]:
        return tokens(1)[0], *tokens(length)[1:], torch.tensor([[length - 1]])

    program = torch.export.export(Step(), step(length), dynamic_shapes=({}, {2: LENGTH}, {2: LENGTH}, {}), strict=False)
    for other in (2, 15, 16, 300):
        inputs = step(other)
        assert_close(program.module()(*inputs), Step()(*inputs))


@pytest.mark.unchecked
def test_in_place_and_tiles_while_exporting() -> None:
    class InPlace(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return Rotary(HEAD_DIM).rotate(q.clone(), k.clone(), Positions.arange(q.shape[2]), inplace=True)

    q, k, v = tokens(8)
    program = torch.export.export(InPlace(), (q, k), strict=False)
    assert not [node for node in program.graph.nodes if "locant" in str(node.target)]
    expected = Rotary(HEAD_DIM).rotate(q, k, Positions.arange(8))
    assert all(torch.equal(a, b) for a, b in zip(program.module()(q, k), expected, strict=True))
    with refuses(LocantError, "tiled", "exported program"):
        torch.export.export(Layer(ALiBi(HEADS), backend="tiled"), (q, k, v), strict=False)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_standard_operator_with_our_tables(
    domain: Any, rotary_dim: int | None, layout: Any, tmp_path: Path
) -> None:
    from locant.engines.onnx import rotary_model

    rotary = Rotary(HEAD_DIM, layout=layout, rotary_dim=rotary_dim)
    x, _, _ = tokens(6)
    content = rotary_model(rotary, num_heads=HEADS, max_seq_len=4096, domain=domain)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for start in (0, 100, 4090):
        index = torch.arange(start, start + 6)[None]
        found = torch.from_numpy(session.run(None, {"x": x.numpy(), "positions": index.numpy()})[0])
        expected = rotary.rotate_one(x, Positions(index))
        _record("the operator `RotaryEmbedding` with our tables", found, expected)
        assert_close(found, expected)
