"""`locant convert` and `neighbours`, as they are typed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from locant.checkpoints import convert_layout
from locant.figures import canvas
from tests.cli.conftest import Complains, Run, refused
from tests.minilm import MINILM

LLAMA = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
NAME = "model.layers.0.self_attn"


@pytest.fixture
def llama(folder: Path) -> Path:
    path = folder / "model"
    path.mkdir()
    weights = {
        f"{NAME}.{part}_proj.weight": torch.randn(rows, 24) for part, rows in zip("qkv", (24, 12, 12), strict=True)
    }
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


def test_a_folder_is_converted_and_back(run: Run, succeeds: Run, llama: Path) -> None:
    result = run("convert model --to interleaved -o out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "out: half → interleaved, 2 of 3 tensors converted, 4,608 bytes in 1 file\n"
    expected = convert_layout(load_file("model/model.safetensors"), LLAMA, to="interleaved")
    got = load_file("out/model.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    succeeds("convert out --to half -o back")
    assert Path("back/model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_json_is_all_that_convert_prints(run: Run, llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"old")
    result = run("convert model --to interleaved -o out --json")
    assert json.loads(result.stdout) == {
        "folder": "model", "output": "out", "architecture": "llama", "source": "half", "to": "interleaved",
        "files": ["model.safetensors"], "copied": [], "left_out": ["pytorch_model.bin"], "tensors": 3, "converted": 2,
        "bytes": 4608,
    }  # fmt: skip
    assert result.stderr == "left out: pytorch_model.bin\n"


def test_the_layout_that_they_have_can_be_said(run: Run, complains: Complains, llama: Path) -> None:
    assert "already have the layout 'half'" in complains("convert model --to half -o out")
    result = run("convert model --to half --from interleaved -o out")
    assert "interleaved → half" in result.stdout


def test_an_adapter_needs_a_configuration(succeeds: Run, complains: Complains, llama: Path) -> None:
    (llama / "config.json").rename("base.json")
    assert "got no file model/config.json" in complains("convert model --to interleaved -o out")
    succeeds("convert model --to interleaved -o out --config base.json")


test_what_cannot_be_converted_is_one_line = refused(
    "convert",
    ("model -o out", "half, interleaved"),
    ("model --to interleaved", "-o"),
    ("model --to neox -o out", "neox"),
    ("gone --to interleaved -o out", "got gone, which is not a folder"),
    ("text.txt --to interleaved -o out", "got text.txt, which is not a folder"),
    ("model --to interleaved -o model", "as input and output"),
    ("model --to interleaved -o .", "which is not empty"),
    ("model --to interleaved -o text.txt", "which is a file"),
    fixtures=["llama"],
)


def test_a_word_and_a_sum(run: Run) -> None:
    facts = json.loads(run("neighbours", MINILM, "king", "-k", 3, "--json").stdout)
    assert [one["token"] for one in facts["nearest"]] == ["kings", "queen", "monarch"]
    lines = run("neighbours", MINILM, "king", "-", "man", "+", "woman", "-k", 1).stdout.splitlines()
    assert lines[-1].split()[0] == "queen"


def test_a_list_with_its_pictures(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    monkeypatch.setattr(canvas, "DOTS_PER_INCH", 30)
    pictures = ("--figure", "h.png", "--map", "m.svg", "--positions", "p.png")
    result = run("neighbours", MINILM, "cat", "dog", "tokenizer", *pictures)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["cat"][-1] == "dog"
    assert "tokenizer is 2 tokens, token ##izer. Its vector is the mean of their rows" in result.stdout
    assert (folder / "h.png").read_bytes().startswith(b"\x89PNG")
    assert b"tokenizer" in (folder / "m.svg").read_bytes()
    assert (folder / "p.png").exists()


def test_more_words_than_a_line_has_room_for_are_told_their_nearest(run: Run) -> None:
    words = ["king", "queen", "man", "woman", "paris", "london", "berlin", "cat", "dog", "mouse", "car", "truck", "bus"]
    lines = run("neighbours", MINILM, *words).stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["king"] == ["king", "+0.627", "queen"]
    assert not any("…" in line for line in lines)


def test_what_cannot_be_shown_costs_a_line(complains: Complains) -> None:
    assert "not a folder" in complains("neighbours bert-base-uncased king")
    assert "got no word" in complains("neighbours", MINILM)
    assert "got no word" in complains("neighbours", MINILM, "", " ")
    assert "no list" in complains("neighbours", MINILM, "king", "--figure", "x.png")
    assert "expected words with + or -" in complains("neighbours", MINILM, "king", "-", "+", "man")
    assert "ending in .png" in complains("neighbours", MINILM, "a", "b", "--figure", "x.jpg")


@pytest.mark.skipif(importlib.util.find_spec("umap") is not None, reason="umap-learn is installed")
def test_umap_is_asked_for_where_it_is_missing(complains: Complains) -> None:
    assert "pip install umap-learn" in complains(
        "neighbours", MINILM, "a", "b", "c", "--map", "m.png", "--layout", "umap"
    )
