"""`locant probe`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import locant
from locant.probing.report import RotationReport
from tests.cli.conftest import Complains, Run

SMALL = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "rope_theta": 1e6}


def test_a_folder_is_measured_in_words_in_json_and_in_a_picture(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    (folder / "config.json").write_text(json.dumps(SMALL))
    report = locant.probe(SMALL)
    assert isinstance(report, RotationReport)
    drawn = run("probe . -o x.svg")
    assert (drawn.exit_code, drawn.stdout, drawn.stderr) == (0, f"{report}\nx.svg\n", "")
    assert (folder / "x.svg").read_bytes().startswith(b"<?xml")
    facts = json.loads(run("probe config.json --json").stdout)
    assert facts["encoding"] == repr(locant.Rotary(32, base=1e6, angles="float32"))
    assert facts["warnings"] == [*report.warnings]
    assert [block["dims"] for block in facts["queries"]["blocks"]] == [[pair, pair + 16] for pair in range(16)]
    assert facts["differences"] == []


def test_a_class_of_transformers_is_its_default_configuration(run: Run) -> None:
    found = json.loads(run("probe OlmoForCausalLM --json").stdout)
    assert (found["subject"], found["head_dim"]) == ("OlmoRotaryEmbedding", 128)
    assert "the defaults of OlmoConfig" in found["note"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_layer_decides_which_type_is_probed(run: Run, folder: Path, order: int) -> None:
    bases = {"sliding_attention": 1e4, "full_attention": 1e6}
    ropes = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in [*bases.items()][::order]}
    config = SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": ropes}
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    found = json.loads(run("probe . --json").stdout)
    assert found["encoding"] == repr(locant.Rotary(32, base=1e4, angles="float32"))
    assert found["note"] == "This holds for layers of type sliding_attention. Other types: full_attention."
    found = json.loads(run("probe . --layer-type full_attention --json").stdout)
    assert found["encoding"] == repr(locant.Rotary(32, base=1e6, angles="float32"))
    assert found["note"] is None


def test_a_configuration_that_transformers_refuses_is_refused(complains: Complains, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": "two"}))
    assert "num_hidden_layers' expected int, got str" in complains("probe .")
    (folder / "config.json").write_text(json.dumps(SMALL | {"dtype": [1]}))
    assert "refuses: list index out of range" in complains("probe .")


def test_a_model_without_rotary_positions_is_refused(complains: Complains) -> None:
    assert "no rotary module" in complains("probe bert-base")
    assert "one of the presets" in complains("probe no-such-model")
