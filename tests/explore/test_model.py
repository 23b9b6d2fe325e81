"""What the Model and the Swap screen say is what `explain`, `extend` and `swap` say of the layers of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import locant
from locant.checkpoints.extension import extend
from locant.checkpoints.layer_strip import layer_strip
from locant.errors import InputError
from locant.explore.session import Session
from locant.lab.language_model import without_weights
from locant.lab.position_overrides import PositionOverride
from locant.models.registry import presets
from locant.positions import ALiBi
from locant.positions.registry import encoding
from locant.swapping import swap
from tests.explore.screens import executed, numbers_of
from tests.refusal import refuses
from tests.tolerances import SHORT_SUM

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
    numbers = numbers_of("model", session, model=tmp_path.name)
    kinds = [kind["kind"] for kind in numbers["kinds"]]
    assert [kinds[layer["kind"]] for layer in numbers["layers"]] == [
        "alibi(num_heads=2)", "Rotary", "Rotary", "nope()", "alibi(num_heads=2)",
    ]  # fmt: skip
    assert dict(numbers["facts"])["swapped"] == ["alibi(num_heads=2): layers 0, 4", "nope(): layers 3"]
    assert dict(numbers["facts"])["vLLM"][0].startswith("no")


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_shown(name: str) -> None:
    numbers = numbers_of("model", model=name)
    assert numbers["facts"][0] == ["model", [numbers["facts"][0][1][0]]]
    assert name in numbers["facts"][0][1][0]
    assert {layer["kind"] for layer in numbers["layers"]} <= set(range(len(numbers["kinds"])))
    assert (numbers["extension"] is None) == bool(numbers["refused"])


def test_the_configuration_to_copy_is_that_of_extend() -> None:
    numbers = numbers_of("model", model="phi-2", to="8192", method="ntk")
    extension = extend(presets()["phi-2"], to=8192, method="ntk")
    assert json.loads(numbers["extension"]["config"]) == extension.config
    assert numbers["extension"]["after"] == [pair.wavelength for pair in extension.after.pairs]


def test_a_configuration_of_the_command_line_comes_first() -> None:
    session = Session(configs={"mine": {**presets()["phi-2"], "num_hidden_layers": 5}})
    assert len(numbers_of("model", session)["layers"]) == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "not a JSON object"),
        ('{"a": NaN}', "NaN"),
        ("{}", "model_type"),
        *(
            (json.dumps({**settings_of("llama"), "locant": plan}), "locant")
            for plan in (
                7, {}, {"encodings": [{"name": "<b>", "options": {}}], "layers": [0]}, {"encodings": [], "layers": [0]},
            )
        ),
    ],
)  # fmt: skip
def test_a_dropped_file_that_is_no_configuration_or_a_damaged_plan_is_refused(content: str, words: str) -> None:
    session = Session()
    with refuses(InputError, words):
        numbers_of("model", session, model=session.drop("x.json", content.encode()))


def test_a_file_that_was_dropped_elsewhere_is_asked_for_again() -> None:
    with refuses(InputError, "dropped on another page"):
        numbers_of("model", model="dropped-0123")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(num_hidden_layers=6, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made


def swapped(folder: Path, **given: str) -> dict[str, Any]:
    return numbers_of("swap", Session.of([str(folder)], []), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"with": "exact"},
        {"with": "nope", "layers": "every", "every": "3"},
        {"with": "kerple"},
        {"with": "yarn", "factor": "8"},
        {"with": "longrope", "layers": "every", "every": "2"},
        {"with": "self-extend", "factor": "4"},
        {"with": "fire"},
    ],
)
def test_its_python_gives_the_sentences_that_are_shown(
    folder: Path, given: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = swapped(folder, **given)
    executed(numbers, "layers")
    said = [f"layer {at}: {layer['sentence']}" for at, layer in enumerate(numbers["layers"])]
    assert capsys.readouterr().out == "\n".join(said) + "\n"
    changed = [at for at, layer in enumerate(numbers["layers"]) if layer["changed"]]
    assert changed == [at for at in range(6) if (at + 1) % int(given.get("every", 1)) == 0]


def test_frequencies_are_those_of_transformers(folder: Path) -> None:
    pairs = swapped(folder, factor="8", **{"with": "yarn"})["pairs"]
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=8 * 2048, rope_parameters={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "rope_theta": 10_000.0,
    })  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    np.testing.assert_allclose(pairs["after"], theirs, **SHORT_SUM)
    np.testing.assert_allclose(pairs["before"], 10_000.0 ** -(np.arange(0, 16, 2) / 16), **SHORT_SUM)
    np.testing.assert_allclose(pairs["factors"], [1.0, factor], **SHORT_SUM)


@pytest.mark.parametrize("given", [{"with": "yarn", "factor": "8"}, {"with": "dynamic", "factor": "2"}])
def test_the_python_of_the_frequencies_gives_them(folder: Path, given: dict[str, str]) -> None:
    numbers = swapped(folder, **given)
    made = executed(numbers, "pairs")
    for side in ("before", "after"):
        np.testing.assert_array_equal(made[side], numbers["pairs"][side])


def test_the_python_of_a_models_pictures_gives_its_layers_and_wavelengths() -> None:
    numbers = numbers_of("model", model="mistral-7b", to="65536", method="ntk")
    made = executed(numbers, "layers")
    assert [window for _, window in made["layers"]] == [layer["window"] for layer in numbers["layers"]]
    made = executed(numbers, "pairs")
    assert (made["before"], made["after"]) == (numbers["extension"]["before"], numbers["extension"]["after"])
    refused = numbers_of("model", model="llama-3.1-8b")
    assert executed(refused, "pairs")["wavelengths"] == [each["now"] for each in refused["wavelengths"]]


def test_layers_of_one_type_are_scaled_by_their_own_frequencies(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, layer_types=kinds, head_dim=16, num_key_value_heads=2, **SIZES
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    assert "2 rotary encodings" in swapped(tmp_path, **{"with": "ntk"})["refused"][0]
    numbers = swapped(tmp_path, layers="full_attention", **{"with": "ntk"})
    assert [layer["changed"] for layer in numbers["layers"]] == [kind == "full_attention" for kind in kinds]
    assert "base=1000000" in numbers["layers"][2]["sentence"]
    assert all("by layer" in refused for _, refused in numbers["ways"])
    executed(numbers, "layers")


@pytest.mark.parametrize("given", [{"with": "exact"}, {"with": "xpos", "layers": "decoder"}], ids=["exact", "decoder"])
def test_layers_of_an_encoder_and_a_decoder_are_counted_through(
    given: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 99}
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=1, num_decoder_layers=2, **sizes)
    ).save_pretrained(tmp_path)
    numbers = swapped(tmp_path, **given)
    assert [layer["type"] for layer in numbers["layers"]] == ["encoder", "decoder", "decoder"]
    assert [layer["changed"] for layer in numbers["layers"]] == [given["with"] == "exact", True, True]
    assert numbers["pairs"] is None
    assert all(refused for _, refused in numbers["ways"])
    executed(numbers, "layers")
    sentences = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert sentences == [layer["sentence"] for layer in numbers["layers"]]


def test_a_model_without_rotary_positions_has_no_frequencies_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=99)
    ).save_pretrained(tmp_path)
    assert "0 rotary encodings" in swapped(tmp_path, **{"with": "yarn"})["refused"][0]
    monkeypatch.setattr(PositionOverride, "encoding", lambda *args: locant.Rotary(16))
    numbers = swapped(tmp_path, **{"with": "xpos"})
    assert "Rotary(head_dim=16" in numbers["layers"][0]["sentence"]
    assert (numbers["pairs"], numbers["refused"]) == (None, None)


def test_what_is_refused_is_said_with_its_remedy(folder: Path) -> None:
    refused = numbers_of("swap", model="bloom-7b1", **{"with": "kerple"})["refused"]
    assert "ALiBi in its own code" in refused[0]
    ways = swapped(folder, **{"with": "rerope"})["ways"]
    assert [refused is None for _, refused in ways] == [True, False]
    [(measure, _), (train, _)] = swapped(folder, **{"with": "yarn"})["ways"]
    assert measure.endswith("my.txt --lengths 2048,8192 --with own,yarn:4")
    assert train.split()[:2] == ["locant", "tune"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"auto_map": {"AutoModel": "theirs.Model"}}, "code of its own"),
        ({"attn_implementation": "theirs/kernel"}, "code of its own"),
        ({"locant": {"encodings": [], "layers": []}}, "swapped already"),
        ({"num_hidden_layers": 10**6}, "1,000,000 for the layers"),
        ({"hidden_size": 2**30}, "for the width"),
        ({"model_type": "clip"}, "clip"),
        ({"hidden_act": "<b>"}, "cannot load"),
    ],
)
def test_a_hostile_configuration_builds_nothing(changed: dict[str, Any], words: str) -> None:
    with refuses(InputError, words):
        without_weights({**presets()["mistral-7b"], **changed})


def test_a_model_without_weights_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_weights(presets()["llama-3.1-8b"])
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.model.rotary_emb.inv_freq.device.type == "cpu"
    with locant.swap(model) as swapped:
        assert len(swapped.sentences) == 32
    devices = set()
    reset = locant.Learned.reset_parameters

    def told(learned: locant.Learned) -> None:
        devices.add(learned.weight.device.type)
        reset(learned)

    monkeypatch.setattr(locant.Learned, "reset_parameters", told)
    assert numbers_of("swap", model="mistral-7b", **{"with": "learned"})["refused"] is None
    assert devices == {"meta"}


def test_a_model_without_attention_is_refused() -> None:
    session = Session()
    key = session.drop("config.json", b'{"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64}')
    assert "no attention heads" in numbers_of("swap", session, model=key, **{"with": "learned"})["refused"][0]
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(num_hidden_layers=1, hidden_size=16, state_size=4, vocab_size=9)
    )
    with refuses(InputError, "MambaModel", "no num_attention_heads"):
        locant.swap(model, locant.ALiBi(4))
