"""The Swap screen says what `locant.swap` says of a model with weights, and its Python does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import locant
from locant.errors import InputError
from locant.explore.screens import answer
from locant.explore.session import Session
from locant.lab.language_model import without_weights
from locant.lab.ways import Way
from locant.models.registry import presets
from tests.refusal import refuses
from tests.tolerances import SHORT_SUM

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **SIZES)).save_pretrained(made)
    return made


def shown(folder: Path, **given: str) -> dict[str, Any]:
    return answer("swap", given, Session.of([str(folder)], []))["numbers"]


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
    numbers = shown(folder, **given)
    exec(numbers["python"], {})  # noqa: S102  # what the page offers to copy
    said = [f"layer {at}: {layer['sentence']}" for at, layer in enumerate(numbers["layers"])]
    assert capsys.readouterr().out == "\n".join(said) + "\n"
    changed = [at for at, layer in enumerate(numbers["layers"]) if layer["changed"]]
    assert changed == [at for at in range(6) if (at + 1) % int(given.get("every", 1)) == 0]


def test_frequencies_are_those_of_transformers(folder: Path) -> None:
    pairs = shown(folder, factor="8", **{"with": "yarn"})["pairs"]
    config = LlamaConfig(**SIZES, max_position_embeddings=8 * 2048, rope_parameters={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "rope_theta": 10_000.0,
    })  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    np.testing.assert_allclose(pairs["after"], theirs, **SHORT_SUM)
    np.testing.assert_allclose(pairs["before"], 10_000.0 ** -(np.arange(0, 16, 2) / 16), **SHORT_SUM)
    np.testing.assert_allclose(pairs["factors"], [1.0, factor], **SHORT_SUM)


def test_layers_of_one_type_are_scaled_by_their_own_frequencies(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, head_dim=16, num_key_value_heads=2, **SIZES)
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    assert "2 rotary encodings" in shown(tmp_path, **{"with": "ntk"})["refused"][0]
    numbers = shown(tmp_path, layers="full_attention", **{"with": "ntk"})
    assert [layer["changed"] for layer in numbers["layers"]] == [kind == "full_attention" for kind in kinds]
    assert "base=1e+06" in numbers["layers"][2]["sentence"]
    assert all("by layer" in refused for _, refused in numbers["ways"])
    exec(numbers["python"], {})  # noqa: S102


@pytest.mark.parametrize("given", [{"with": "exact"}, {"with": "xpos", "layers": "decoder"}], ids=["exact", "decoder"])
def test_layers_of_an_encoder_and_a_decoder_are_counted_through(
    given: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 99}
    T5ForConditionalGeneration(T5Config(num_layers=1, num_decoder_layers=2, **sizes)).save_pretrained(tmp_path)
    numbers = shown(tmp_path, **given)
    assert [layer["type"] for layer in numbers["layers"]] == ["encoder", "decoder", "decoder"]
    assert [layer["changed"] for layer in numbers["layers"]] == [given["with"] == "exact", True, True]
    assert numbers["pairs"] is None
    assert all(refused for _, refused in numbers["ways"])
    exec(numbers["python"], {})  # noqa: S102
    sentences = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert sentences == [layer["sentence"] for layer in numbers["layers"]]


def test_a_model_without_rotary_positions_has_no_frequencies_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=99)).save_pretrained(tmp_path)
    assert "0 rotary encodings" in shown(tmp_path, **{"with": "yarn"})["refused"][0]
    monkeypatch.setattr(Way, "encoding", lambda *args: locant.Rotary(16))
    numbers = shown(tmp_path, **{"with": "xpos"})
    assert "Rotary(head_dim=16" in numbers["layers"][0]["sentence"]
    assert (numbers["pairs"], numbers["refused"]) == (None, None)


def test_what_is_refused_is_said_with_its_remedy(folder: Path) -> None:
    refused = answer("swap", {"model": "bloom-7b1", "with": "kerple"}, Session())["numbers"]["refused"]
    assert "ALiBi of its own code" in refused[0]
    ways = shown(folder, **{"with": "rerope"})["ways"]
    assert [refused is None for _, refused in ways] == [True, False]
    [(measure, _), (train, _)] = shown(folder, **{"with": "yarn"})["ways"]
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
    assert answer("swap", {"model": "mistral-7b", "with": "learned"}, Session())["numbers"]["refused"] is None
    assert devices == {"meta"}


def test_a_model_without_attention_is_refused() -> None:
    session = Session()
    key = session.drop("config.json", b'{"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64}')
    assert "no attention heads" in answer("swap", {"model": key, "with": "learned"}, session)["numbers"]["refused"][0]
    model = MambaForCausalLM(MambaConfig(num_hidden_layers=1, hidden_size=16, state_size=4, vocab_size=9))
    with refuses(InputError, "MambaModel", "no attention heads"):
        locant.swap(model, locant.ALiBi(4))
