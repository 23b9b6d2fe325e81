"""The costs of bugs from a tiny random model to the page, the picture and the warnings. No weights are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import locant
from benchmarks.real_models import bugs, bugs_again, cost_of_bugs, picture, weights
from benchmarks.real_models.bugs import BUGS
from benchmarks.real_models.cost_of_bugs import BLOCK, Losses, Recall
from benchmarks.real_models.record import RESULTS, read
from docs.generator import readme
from docs.generator.real_models import position_bugs
from locant.errors import InputError
from locant.position_costs import costs
from tests.tolerances import PRINTED

LENGTHS = (256, 512)
SOME = {
    key: BUGS[key]
    for key in (
        "exact-angles", "positions-bfloat16", "base-10000", "half-as-interleaved", "not-rotated", "restarts", "gap",
        "packed-documents-visible", "padding-visible", "scaling-missing",
    )
}  # fmt: skip


class Bytes:
    """A tokenizer of `transformers`, as far as it is called."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))


def tiny(folder: Path) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=12, num_hidden_layers=1, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.config._name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a record that `run` made of a tiny model with some bugs. A second run reads no weights."""
    made = tmp_path_factory.mktemp("record")
    locant.Tokenizer.bytes().save(made / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_of_bugs, "BUGS", SOME)
        patch.setattr(
            cost_of_bugs, "PLAN", (*(Losses("smollm2", each, 2) for each in LENGTHS), Recall("smollm2", 1, 700))
        )
        patch.setattr(weights, "load", lambda name: (tiny(made), Bytes()))
        cost_of_bugs.run(folder=made)
        patch.setattr(weights, "load", None)
        cost_of_bugs.run(folder=made)
    return made


def test_the_summary_is_that_of_the_losses(folder: Path) -> None:
    record = read("bugs", folder)
    rows, measured = record["summary"]["rows"], record["measured"]
    assert rows.keys() == SOME.keys()
    for key in ("positions-bfloat16", "packed-documents-visible", "padding-visible"):
        for length in LENGTHS:
            right, wrong = (
                np.concatenate([each["blocks"] for each in measured[f"smollm2/{length}/{name}"]["value"]["windows"]])
                for name in (f"correct {BUGS[key].scenario}", key)
            )
            found = rows[key]["costs"]["smollm2"][str(length)]
            if BUGS[key].scenario == "text":
                assert found["cost"] == pytest.approx((wrong - right).mean(), abs=2 * PRINTED[4])
                first = (wrong - right).reshape(2, -1)[:, 0].mean()
                assert found["by_position"][0] == [0, BLOCK, pytest.approx(first, abs=2 * PRINTED[4])]
            if found["interval"] is not None:
                low, high = found["interval"]
                assert (wrong - right).min() - PRINTED[4] <= low <= high <= (wrong - right).max() + PRINTED[4]
    assert rows["exact-angles"]["costs"]["smollm2"]["512"]["cost"] == pytest.approx(0, abs=2 * PRINTED[4])
    assert rows["half-as-interleaved"]["recall"]["smollm2"]["one key"]["asked"] == 1
    assert "gemma3" not in rows["exact-angles"]["costs"]
    assert rows["scaling-missing"]["costs"] == {}


def test_the_tools_see_what_they_can_see(folder: Path) -> None:
    rows = read("bugs", folder)["summary"]["rows"]
    said = {key: row["warnings"].get("smollm2", {}) for key, row in rows.items()}
    assert any("positions counted in bfloat16" in each for each in said["positions-bfloat16"]["probe"])
    assert any("base is 10,000 here and 100,000 there" in each for each in said["base-10000"]["explain --against"])
    assert any("hide other documents" in each for each in said["packed-documents-visible"]["check-batch"])
    assert said["exact-angles"]["probe"] == []


def test_the_page_is_made_of_the_record(folder: Path) -> None:
    record = read("bugs", folder)
    page = position_bugs(record)
    rows = record["summary"]["rows"]
    shown = [key for key, row in rows.items() if row["costs"]]
    assert len(re.findall(r"^\| \*\*`", page, flags=re.MULTILINE)) == len(shown)
    for key, row in rows.items():
        assert f"`{key}`" in page
        if row["source"]:
            assert f"https://github.com/{row['source'].replace('#', '/issues/')}" in page
    worst = max(rows["not-rotated"]["costs"]["smollm2"]["512"]["cost"], 0)
    assert f"{worst:.2f}" in page or f"{worst:.3f}" in page
    assert "the most costly are" in page


def test_the_picture_has_the_correct_model_and_the_bugs_that_it_names(folder: Path) -> None:
    figure = picture.draw(read("bugs", folder))
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels[-1] == "correct"
    assert [each.partition(":")[0] for each in labels[:-1]] == picture.chosen(read("bugs", folder), max(LENGTHS))
    assert len(labels) == 7


def test_sentences_of_the_readme_are_those_of_the_record() -> None:
    """`make real` writes them. A sentence with another number is replaced, and other text is kept."""
    (mistake, cost), *_ = ((cost.mistake, cost) for cost in costs().values())
    old = f"A warning. This matters: if {mistake}, the loss rises by 7.00 nats.\nMore."
    assert readme.with_costs(old) == f"A warning. {cost}\nMore."


def test_the_second_calculation_is_another_and_finds_a_wrong_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about the tiny model, whose heads have four pairs, and about a record with a wrong cost."""
    monkeypatch.setattr(bugs_again, "LENGTH", 512)
    angles = {key: each for key, each in bugs_again.ANGLES.items() if key in SOME}
    assert len(angles) == 4
    monkeypatch.setattr(bugs_again, "ANGLES", angles)
    monkeypatch.setattr(bugs_again, "_frequencies", lambda base=100_000.0: base ** (-torch.arange(0, 8, 2) / 8))
    monkeypatch.setattr(weights, "load", lambda name: (tiny(folder), Tensors()))
    bugs_again.run(folder=folder)
    assert read("bugs-again", folder)["summary"]["largest difference"] <= bugs_again.ROUNDED
    record = read("bugs", folder)
    record["summary"]["rows"]["gap"]["costs"]["smollm2"]["512"]["cost"] += 0.01
    (folder / "bugs.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="'gap'"):
        bugs_again.run(folder=folder)


class Tensors(Bytes):
    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([list(text.encode())]))


def test_the_published_record_is_of_these_weights_and_confirmed() -> None:
    """Every row was measured with the published checksums, and no second calculation contradicts it."""
    record = read("bugs", RESULTS)
    assert {name: facts["sha256"] for name, facts in record["weights"].items()} == {
        name: weights.MODELS[name].sha256 for name in ("smollm2", "gemma3")
    }
    again = read("bugs-again", RESULTS)
    assert again["summary"]["largest difference"] <= bugs_again.ROUNDED
    assert again["summary"]["differences"].keys() == bugs_again.ANGLES.keys()


def test_bugs_have_ids_that_warnings_can_have() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", key) for key in bugs.BUGS)
