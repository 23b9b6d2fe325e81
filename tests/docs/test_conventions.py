"""The table of conventions: every row that is said to be run names a test, and the programs below are run here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from locant import Positions, Rotary
from tests.tolerances import assert_close

Layout = Literal["half", "interleaved"]
Rotates = Callable[[Tensor, int], Tensor]
"""Of [tokens, head_dim], from a position on."""

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "conventions.md").read_text(encoding="utf-8")
HEAD_DIM, START = 8, 3
ROWS = {cells[0]: cells for line in PAGE.splitlines() if len(cells := line.strip("| ").split(" | ")) == 5}


def _frequencies() -> Tensor:
    return 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def _angles(x: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + len(x))[:, None] * _frequencies()


def _locant(layout: Layout) -> Rotates:
    return lambda x, start: Rotary(HEAD_DIM, layout=layout).rotate_one(x[None, None], Positions.after(start, len(x)))[
        0, 0
    ]


def _transformers(layout: Layout) -> Rotates:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as of_neighbours
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_halves

    def rotate(x: Tensor, start: int) -> Tensor:
        angles = _angles(x, start)[None]
        if layout == "interleaved":
            return of_neighbours(x[None, :, None], angles.sin(), angles.cos())[0, :, 0]
        twice = torch.cat([angles, angles], dim=-1)
        return of_halves(x[None, None], x[None, None], twice.cos(), twice.sin())[0][0, 0]

    return rotate


def _onnx(layout: Layout) -> Rotates:
    runtime = pytest.importorskip("onnxruntime")
    from locant.engines.onnx import rotary_model

    def rotate(x: Tensor, start: int) -> Tensor:
        model = rotary_model(Rotary(HEAD_DIM, layout=layout), num_heads=1, max_seq_len=64)
        session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
        where = torch.arange(start, start + len(x))[None]
        return torch.from_numpy(session.run(None, {"x": x[None, None].numpy(), "positions": where.numpy()})[0])[0, 0]

    return rotate


def _mlx(layout: Layout) -> Rotates:
    mx: Any = pytest.importorskip("mlx.core")

    def rotate(x: Tensor, start: int) -> Tensor:
        options = {"traditional": layout == "interleaved", "base": 10_000.0, "scale": 1.0, "offset": start}
        return torch.tensor(mx.fast.rope(mx.array(x.numpy())[None], HEAD_DIM, **options)[0].tolist())

    return rotate


def _rotary_embedding_torch(layout: Layout) -> Rotates:
    package = pytest.importorskip("rotary_embedding_torch")
    return lambda x, start: package.RotaryEmbedding(HEAD_DIM).rotate_queries_or_keys(x[None, None], offset=start)[0, 0]


VLLM = """
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
rotate = lambda x, angles, neox: ApplyRotaryEmb.forward_static(x[:, None], angles.cos(), angles.sin(), neox)[:, 0]
"""
SGLANG = """
from unittest.mock import MagicMock
from transformers import LlamaConfig
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "vllm", "vllm._custom_ops"):
    sys.modules[name] = MagicMock()  # for pictures, and for kernels of GPUs
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
def rotate(x, angles, neox):
    module = RotaryEmbedding(x.shape[-1], x.shape[-1], 64, 10_000, neox, torch.float32)
    return module.forward_native(angles[:, 0].round().long(), x.clone(), x.clone())[0]  # the first pair has frequency 1
"""


def _in_a_process(package: str, code: str) -> Callable[[Layout], Rotates]:
    """Of an engine whose import changes what is imported after it."""

    def made(layout: Layout) -> Rotates:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")

        def rotate(x: Tensor, start: int) -> Tensor:
            given = f"torch.tensor({x.tolist()}), torch.tensor({_angles(x, start).tolist()}), {layout == 'half'}"
            program = f"import sys, torch\n{code}\nprint('found', rotate({given}).tolist())"
            said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
            (numbers,) = re.findall(r"^found (.*)$", said, flags=re.MULTILINE)
            return torch.tensor([[float(number) for number in row.split(",")] for row in numbers[2:-2].split("], [")])

        return rotate

    return made


PROGRAMS: dict[str, Callable[[Layout], Rotates]] = {
    "locant": _locant,
    "transformers": _transformers,
    "vLLM": _in_a_process("vllm", VLLM),
    "SGLang": _in_a_process("sglang", SGLANG),
    "ONNX `RotaryEmbedding`": _onnx,
    "MLX `fast.rope`, `nn.RoPE`": _mlx,
    "rotary-embedding-torch": _rotary_embedding_torch,
}
ENGINES = {"vLLM", "SGLang"}
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
CASES = [
    pytest.param(program, layout, marks=[pytest.mark.engine, pytest.mark.slow] if program in ENGINES else [])
    for program in PROGRAMS
    for layout, cell in zip(LAYOUTS, ROWS[program][1:3], strict=True)
    if cell != "–"
]


@pytest.mark.parametrize(("program", "layout"), CASES)
def test_a_program_pairs_and_turns_as_its_row_says(program: str, layout: Layout) -> None:
    x = torch.randn(5, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    expected, other = (_locant(each)(x, START) for each in (layout, *(each for each in LAYOUTS if each != layout)))
    found = PROGRAMS[program](layout)(x, START)
    assert_close(found, expected)
    assert (found - other).abs().max() > 0.1


def test_a_row_that_is_run_names_a_test_that_is_there_and_a_row_that_is_read_its_source() -> None:
    known = [line.strip("| ").rpartition(" | ")[2] for line in PAGE.splitlines() if re.search(r"\| (run|read): ", line)]
    assert len(known) > 25
    for cell in known:
        kind, _, source = cell.partition(": ")
        if source.startswith("`"):
            assert (ROOT / source.strip("`")).is_file(), source
        else:
            assert ("https://" in source) == (kind == "read"), source


def test_every_program_that_this_file_is_named_for_is_run_here() -> None:
    named = {program for program, cells in ROWS.items() if "tests/docs/test_conventions.py" in cells[-1]}
    assert named == set(PROGRAMS)
