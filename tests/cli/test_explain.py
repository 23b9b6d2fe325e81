"""`locant explain`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant.checkpoints import config_source
from locant.checkpoints.explanation import explain
from locant.figures.plot import draw_explanation
from locant.files import json_text
from locant.report.explain import explanation_facts, print_explanation
from tests.cli.conftest import Complains, Run, refused
from tests.positions.published import PRESETS
from tests.tolerances import FEW_ROUNDINGS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained_in_words_and_in_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explain(PRESETS[name])
    if "vocab_size" in PRESETS[name]:  # else it reads images
        assert explanation.tables[0].shape[0] == PRESETS[name]["vocab_size"]
        assert (explanation.longest is None) == all(layers.kind == "none" for layers in explanation.layers)
    print_explanation(explanation, name)
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith(f"model {name} ")
    facts = json.loads(json_text(explanation_facts(explanation)))
    for layers in facts["layers"]:
        assert all(warning in words for warning in layers["warnings"])
        assert all(f"{method}: " in words for method in layers["methods"])


def test_the_words_hold_the_numbers(run: Run) -> None:
    said = " ".join(run("explain llama-3.1-8b").stdout.split())
    for words in (
        "131,072 positions", "trained 8,192", "rotate: rotates queries and keys", "half: dimension i pairs with i + 64",
        "base 500,000", "Llama3: factor 8", "attention factor 1", "29 (0-28)", "6 (29-34)", "29 (35-63)", "vLLM yes",
        "tokens [128256, 4096] 525,336,576 2.0 GiB 1,002.0 MiB", "63 20,473,564",
    ):  # fmt: skip
        assert words in said


def test_a_file_and_a_folder_are_read(run: Run, folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(PRESETS["gpt2"]))
    for source in ("model", "model/config.json"):
        facts = json.loads(run("explain", source, "--json").stdout)
        assert (facts["model_type"], facts["longest"]) == ("gpt2", 1024)


def test_a_picture_is_drawn(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    result = run("explain gpt2 -o x.svg")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("x.svg\n")
    assert (folder / "x.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("name", ["gemma-3-4b", "bloom-7b1", "gpt2", "t5-base"])
def test_every_door_has_a_picture(name: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `lab`")
    figure = draw_explanation(explain(PRESETS[name]), PRESETS[name], name)
    assert any(axes.images or axes.lines for axes in figure.axes)
    rows = [axes.get_title(loc="left") for axes in figure.axes][::2]
    assert name != "gemma-3-4b" or rows == [f"{name}, full_attention", f"{name}, sliding_attention"]


def test_missing_values_are_the_defaults_of_the_architecture_and_are_named(run: Run, folder: Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(config))
    printed = " ".join(run("explain config.json").stdout.split())
    assert "defaults rope_theta 10,000: not in the configuration, so the default of qwen3 in transformers" in printed
    assert "head_dim 128: not in the configuration" in printed
    assert json.loads(run("explain config.json --json").stdout)["defaults"] == {"rope_theta": 10_000.0, "head_dim": 128}
    assert "defaults" not in run("explain qwen2.5-7b").stdout


def test_json_is_nothing_but_finite_json(run: Run) -> None:
    facts = json.loads(run("explain phi-3-mini-128k --json").stdout, parse_constant=pytest.fail)
    rotary = facts["layers"][0]["rotary"]
    assert len(rotary["pairs"]) == 48
    assert rotary["attention_factor"] == pytest.approx(1.1902380714238083, rel=FEW_ROUNDINGS, abs=0)
    assert rotary["precision"]["first_visible"] > 4096


test_what_cannot_be_explained_is_one_line = refused(
    "explain",
    ("lama-3.1-8b", "'llama-3.1-8b', did you mean that?"),
    ("/nowhere", "pass the path of a config.json"),
    ("./lama-3.1-8b", "pass the path of a config.json"),
    ("text.txt", "text.txt, which is not valid JSON"),
    (".", "which holds no config.json"),
    ("gpt2 -o x.gif", "ending in .png, .svg, .pdf; try: x.png"),
    ("gpt2 -o no/x.png", "there is no folder no"),
    ("", "missing argument 'CONFIG'; try: locant explain --help"),
)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "factor": 4.0,
    "original_max_position_embeddings": 1,
}  # fmt: skip
GEMMA_4 = {
    "model_type": "gemma4_text", "head_dim": 64, "rope_theta": None, "rope_scaling": None,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    "per_layer_config": {"0": {"head_dim": 128}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "kimi_k2", "qk_rope_head_dim": 64, "rope_theta": None}, "without rope_theta"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "got 1 for base"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": LONGROPE}, "original_max_seq_len"),
        (GEMMA_4, "layer_types"),
    ],
)
def test_a_configuration_that_is_not_understood_is_one_line(
    complains: Complains, folder: Path, change: dict[str, object], said: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**PRESETS["llama-3.1-8b"], **change}))
    assert said in complains("explain config.json")


def test_a_configuration_that_convert_wrote_is_explained(run: Run, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**PRESETS["llama-3.1-8b"], "rope_interleave": True}))
    said = " ".join(run("explain config.json").stdout.split())
    for words in (
        "interleaved: dimension 2i pairs with 2i + 1", "these weights were converted",
        "vLLM yes, but not as the configuration says; it pairs dimensions as half",
    ):  # fmt: skip
        assert words in said


def test_an_architecture_is_explained_and_said_to_be_a_default(run: Run) -> None:
    said = " ".join(run("explain llama4").stdout.split())
    assert "note the defaults of Llama4Config in transformers" in said
    assert "earlier tokens of the same chunk of 8,192" in said
    facts = json.loads(run("explain modernbert --json").stdout)
    assert "the defaults of ModernBertConfig" in facts["note"]
    assert facts["strip"][1] == {"kind": "sliding_attention", "window": 129, "place": "around"}


def test_missing_weights_are_named(run: Run, folder: Path) -> None:
    """The files of an incomplete download are named wherever a folder is explained."""
    weights = [f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)]
    (folder / "config.json").write_text(json.dumps(PRESETS["llama-3.1-8b"]))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"layer.{number}": name for number, name in enumerate(weights)}})
    )
    for number, name in enumerate(weights):
        note = json.loads(run("explain . --json").stdout)["note"]
        assert note.startswith("the folder lacks weights that its index names: ")
        assert [each in note for each in weights] == [number <= place < number + 3 for place in range(6)]
        assert ("more" in note) == (number < 3)
        assert name in " ".join(run("explain . --against llama-3.1-8b").stdout.split())
        (folder / name).touch()
    assert json.loads(run("explain . --json").stdout)["note"] is None
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json, which is not valid JSON" in json.loads(run("explain . --json").stdout)["note"]


def test_a_note_about_a_configuration_does_not_hide_missing_weights(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"weight_map": {"layer.0": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    source = config_source.Source(PRESETS["llama-3.1-8b"], "made for this test")
    monkeypatch.setattr(config_source, "find_source", lambda name: source)
    note = json.loads(run("explain . --json").stdout)["note"]
    compared = " ".join(run("explain . --against llama-3.1-8b").stdout.split())
    for words in ("made for this test", "model-00001-of-00001.safetensors"):
        assert words in note
        assert words in compared


def test_two_models_are_compared(run: Run, folder: Path) -> None:
    gemma = dict(PRESETS["gemma-3-4b"])
    (folder / "draft.json").write_text(json.dumps({**gemma, "rope_local_base_freq": 20_000.0}))
    result = run("explain draft.json --against gemma-3-4b")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert "here draft.json there gemma-3-4b" in said
    assert "layers full_attention differences none: both encode positions in the same way" in said
    assert "base is 20,000 here and 10,000 there" in said
    assert "cosines and sines differ from position 1 on" in said
    same = run("explain gpt2 --against gpt2 --json")
    assert (same.exit_code, json.loads(same.stdout)["agrees"]) == (0, True)


test_what_cannot_be_compared_is_one_line = refused(
    "explain",
    ("gpt2 --against x.gguf", "locant explain x.gguf --against gpt2"),
    ("gpt2 --against gpt2 -o x.svg", "there is no picture of two models"),
    ("gpt2 --n-ctx 4", "which is not a GGUF file"),
)


def test_errors_of_float32_angles_are_printed_if_they_are_visible(run: Run, tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    for length, is_visible in ((128, False), (2**17, True)):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": length}))
        assert ("float32 angles" in run(f"explain {tmp_path}").stdout) == is_visible
