"""`locant convert`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from locant.checkpoints import convert_layout
from tests.cli.conftest import Complains, Run, refused

LLAMA = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
NAME = "model.layers.0.self_attn"


@pytest.fixture
def model(folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    weights = {
        f"{NAME}.{part}_proj.weight": torch.randn(rows, 24) for part, rows in zip("qkv", (24, 12, 12), strict=True)
    }
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


def test_a_folder_is_converted_and_back(run: Run, succeeds: Run, model: Path) -> None:
    result = run("convert model --to interleaved -o out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "out: half -> interleaved, 2 of 3 tensors converted, 4,608 bytes in 1 file\n"
    expected = convert_layout(load_file("model/model.safetensors"), LLAMA, to="interleaved")
    got = load_file("out/model.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    succeeds("convert out --to half -o back")
    assert Path("back/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_json_is_all_there_is_on_stdout(run: Run, model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"old")
    result = run("convert model --to interleaved -o out --json")
    assert json.loads(result.stdout) == {
        "folder": "model", "output": "out", "architecture": "llama", "source": "half", "to": "interleaved",
        "files": ["model.safetensors"], "copied": [], "left_out": ["pytorch_model.bin"], "tensors": 3, "converted": 2,
        "bytes": 4608,
    }  # fmt: skip
    assert result.stderr == "left out: pytorch_model.bin\n"


def test_the_layout_that_they_have_can_be_said(run: Run, complains: Complains, model: Path) -> None:
    assert "'half' already" in complains("convert model --to half -o out")
    result = run("convert model --to half --from interleaved -o out")
    assert "interleaved -> half" in result.stdout


def test_an_adapter_needs_a_configuration(succeeds: Run, complains: Complains, model: Path) -> None:
    (model / "config.json").rename("base.json")
    assert "got no file model/config.json" in complains("convert model --to interleaved -o out")
    succeeds("convert model --to interleaved -o out --config base.json")


test_mistakes_cost_one_line = refused(
    "convert",
    ("model -o out", "half, interleaved"),
    ("model --to interleaved", "-o"),
    ("model --to neox -o out", "neox"),
    ("gone --to interleaved -o out", "got gone, which is no folder"),
    ("text.txt --to interleaved -o out", "got text.txt, which is no folder"),
    ("model --to interleaved -o model", "as input and output"),
    ("model --to interleaved -o .", "which is not empty"),
    ("model --to interleaved -o text.txt", "which is a file"),
    fixtures=["model"],
)
