"""``locant check-batch``: what it says of a file, with and without a model, and as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from tests.cli.conftest import Complains, Run

LEFT = {"input_ids": [[5, 6, 7], [0, 8, 9]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}
IMAGE = {
    "input_ids": [[5, 6, 7, 7, 7, 7, 8]], "mm_token_type_ids": [[0, 0, 1, 1, 1, 1, 0]], "image_grid_thw": [[1, 4, 4]],
    "position_ids": [[[0, 1, 2, 2, 2, 2, 4]], [[0, 1, 2, 2, 3, 3, 4]], [[0, 1, 2, 3, 2, 3, 4]]],
}  # fmt: skip


def _saved(tmp_path: Path, batch: dict[str, Any]) -> str:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(batch))
    return str(path)


def test_what_depends_on_the_model_is_said_and_asked_for(run: Run, tmp_path: Path) -> None:
    file = _saved(tmp_path, LEFT)
    config = tmp_path / "config.json"
    config.write_text(GPT2Config().to_json_string())
    assert run("check-batch", file).stdout.splitlines() == [
        "positions and documents agree",
        "not checked: padding before tokens, which models with absolute positions count (GPT-2): give the model",
    ]
    for model in ("gpt2", str(config), "GPT2LMHeadModel"):
        result = run("check-batch", file, "--model", model, "--json")
        assert result.exit_code == 1
        facts = json.loads(result.stdout)
        assert [(each["check"], each["row"], each["token"]) for each in facts["findings"]] == [("padding", 1, 1)]
        assert facts["findings"][0]["remedy"] == "give Positions.from_mask(attention_mask).index for position_ids"
        assert facts["unchecked"] == []
    for model in ("llama-3.1-8b", "qwen3"):
        assert run("check-batch", file, "--model", model).stdout == "positions and documents agree\n"


@pytest.mark.parametrize("options", [("--model", "qwen2_vl"), ("--axes", "3")])
def test_ids_of_images_are_compared(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    time, rows, columns = IMAGE["position_ids"]
    batch = {**IMAGE, "input_ids": [[5, 6, *[151655] * 4, 8]]}
    assert run("check-batch", _saved(tmp_path, batch), *options).stdout == "positions and documents agree\n"
    exchanged = _saved(tmp_path, {**batch, "position_ids": [time, columns, rows]})
    result = run("check-batch", exchanged, *options)
    assert result.exit_code == 1
    said = result.stdout
    assert "at token 3 of row 0 (image) are (time, row, column) (2, 3, 2)" in said
    assert "(2, 2, 3): rows and columns are exchanged" in said


def test_models_and_axes_that_there_are_not_are_refused(complains: Complains, tmp_path: Path) -> None:
    file = _saved(tmp_path, LEFT)
    assert "nothing-like-it" in complains("check-batch", file, "--model", "nothing-like-it")
    assert "5 is not in the range" in complains("check-batch", file, "--axes", "5")
    assert "expected frames, rows and columns" in complains(
        "check-batch", _saved(tmp_path, {**LEFT, "image_grid_thw": [[1, 2]]})
    )
