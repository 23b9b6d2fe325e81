"""What the Model screen says is what `explain` and `extend` say, and its layers are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locant.checkpoints.explanation import layer_strip
from locant.checkpoints.extension import extend
from locant.checkpoints.swap import swap
from locant.errors import InputError
from locant.explore.screens import answer
from locant.explore.session import Session
from locant.models.registry import presets
from locant.positions import ALiBi
from locant.positions.registry import encoding
from tests.refusal import refuses

transformers = pytest.importorskip("transformers", reason="the independent code beside ours")

COUNT = 13


def settings_of(model_type: str) -> dict:
    return transformers.CONFIG_MAPPING[model_type](num_hidden_layers=COUNT).to_dict()


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "olmo3"])
def test_windows_are_where_transformers_has_them(model_type: str, listed: bool) -> None:
    config = settings_of(model_type)
    types = config["layer_types"] if listed else config.pop("layer_types")
    expected = [config["sliding_window"] if each == "sliding_attention" else None for each in types]
    assert [layer.window for layer in layer_strip(config)] == expected


@pytest.mark.parametrize("model_type", ["llama4_text", "smollm3"])
def test_layers_without_positions_are_where_transformers_has_them(model_type: str) -> None:
    config = settings_of(model_type)
    expected = ["with" if each else "without" for each in config["no_rope_layers"]]
    assert [layer.kind for layer in layer_strip(config)] == expected


def test_an_encoder_stands_before_its_decoder() -> None:
    config = {**presets()["t5-base"], "num_layers": 2, "num_decoder_layers": 3}
    assert [layer.kind for layer in layer_strip(config)] == ["encoder"] * 2 + ["decoder"] * 3


def test_an_order_that_is_not_told_is_not_made_up() -> None:
    config = {**settings_of("gemma3_text"), "layer_types": ["sliding_attention", "full_attention"]}
    assert layer_strip(config) == ()


def test_a_model_that_was_swapped_shows_which_layer_has_what(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=5, **sizes))
    nope, alibi = encoding("nope"), ALiBi(2)
    with swap(model, layers=lambda layer, _: {0: alibi, 3: nope, 4: alibi}.get(layer)):
        model.save_pretrained(tmp_path)
    session = Session.of([str(tmp_path)], [])
    shown = answer("model", {"model": tmp_path.name}, session)["numbers"]
    kinds = [kind["kind"] for kind in shown["kinds"]]
    assert [kinds[layer["kind"]] for layer in shown["layers"]] == [
        "alibi(num_heads=2)", "Rotary", "Rotary", "nope()", "alibi(num_heads=2)",
    ]  # fmt: skip
    assert dict(shown["facts"])["swapped"] == ["alibi(num_heads=2): layers 0, 4", "nope(): layers 3"]
    assert dict(shown["facts"])["vLLM"][0].startswith("no")


@pytest.mark.parametrize(
    "plan", [7, {}, {"encodings": [{"name": "<b>", "options": {}}], "layers": [0]}, {"encodings": [], "layers": [0]}]
)
def test_a_plan_that_is_damaged_is_refused(plan: object) -> None:
    content = json.dumps({**settings_of("llama"), "locant": plan}).encode()
    session = Session()
    with refuses(InputError, "locant"):
        answer("model", {"model": session.drop("config.json", content)}, session)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_shown(name: str) -> None:
    numbers = answer("model", {"model": name}, Session())["numbers"]
    assert numbers["facts"][0] == ["model", [numbers["facts"][0][1][0]]]
    assert name in numbers["facts"][0][1][0]
    assert {layer["kind"] for layer in numbers["layers"]} <= set(range(len(numbers["kinds"])))
    assert (numbers["extension"] is None) == bool(numbers["refused"])


def test_the_configuration_to_copy_is_that_of_extend() -> None:
    numbers = answer("model", {"model": "phi-2", "to": "8192", "method": "ntk"}, Session())["numbers"]
    extension = extend(presets()["phi-2"], to=8192, method="ntk")
    assert json.loads(numbers["extension"]["config"]) == extension.config
    assert numbers["extension"]["after"] == [pair.wavelength for pair in extension.after.pairs]


def test_a_configuration_of_the_command_line_comes_first() -> None:
    session = Session(configs={"mine": {**presets()["phi-2"], "num_hidden_layers": 5}})
    assert len(answer("model", {}, session)["numbers"]["layers"]) == 5


def test_what_cannot_be_read_is_refused() -> None:
    session = Session()
    with refuses(InputError, "dropped on another page"):
        answer("model", {"model": "dropped-0123"}, session)
    for content, words in ((b"[]", "not a JSON object"), (b'{"a": NaN}', "NaN"), (b"{}", "model_type")):
        with refuses(InputError, words):
            answer("model", {"model": session.drop("x.json", content)}, session)
