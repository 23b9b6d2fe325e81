"""A registered architecture works wherever a built-in one does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, AutoConfig

import locant
from locant import ALiBi, InputError, RangeError, Rotary
from locant.checkpoints import convert_layout
from locant.checkpoints.config_source import read_source
from locant.checkpoints.explanation import explain
from locant.checkpoints.extension import extend
from locant.cli import main
from locant.models import Architecture, LayerKind, RotaryKeys, layer_types, one_after_another, required, with_defaults
from locant.models.registry import ARCHITECTURES
from tests.models.configurations import ROTARY_KEYS
from tests.refusal import refuses
from tests.registries import restore

CONFIG: dict[str, Any] = {
    "model_type": "strange", "width": 48, "n_attn": 6, "rotary_base": 5e5, "seq_len": 2048, "vocab_size": 7,
}  # fmt: skip
STRANGE = Architecture(
    rotary=RotaryKeys(layout="interleaved", base_key="rotary_base"),
    attribute_map={"hidden_size": "width", "num_attention_heads": "n_attn", "max_position_embeddings": "seq_len"},
    projections={"c_attn": one_after_another},
    defaults={"rotary_base": 10_000.0},
    warnings=(lambda config, encoding: f"{required(config, 'num_attention_heads')} heads are strange",),
    presets={"strange-1b": CONFIG},
)


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> None:
    restore(ARCHITECTURES, monkeypatch)
    locant.register_architecture("strange", STRANGE, aliases=("strange_text",))


@pytest.mark.usefixtures("strange")
def test_its_encoding_is_read() -> None:
    for config in (CONFIG, {**CONFIG, "model_type": "strange_text"}, {"text_config": CONFIG}):
        assert repr(Rotary.from_config(config)) == repr(Rotary(8, base=5e5, layout="interleaved"))
        assert repr(locant.encoding_from_config(config)) == repr(Rotary(8, base=5e5, layout="interleaved"))
    assert layer_types(CONFIG) == ()


@pytest.mark.usefixtures("strange")
def test_it_is_explained_by_its_name_and_its_warnings(tmp_path: Path) -> None:
    explained = explain({key: value for key, value in CONFIG.items() if key != "rotary_base"})
    assert (explained.longest, explained.defaults) == (2048, {"rotary_base": 10_000.0})
    assert explained.layers[0].warnings == ("6 heads are strange",)
    assert explained.tables[0].shape == (7, 48)
    assert read_source("strange-1b") == CONFIG
    printed = CliRunner().invoke(main, ["explain", "strange-1b", "--json"])
    assert json.loads(printed.stdout)["layers"][0]["rotary"]["layout"] == "interleaved"


@pytest.mark.usefixtures("strange")
def test_it_is_extended_under_its_own_keys() -> None:
    extension = extend(CONFIG, to=8192, method="ntk")
    assert set(extension.changed) == {"rotary_base", "seq_len"}
    assert {**CONFIG, **{key: new for key, (_, new) in extension.changed.items()}} == extension.config
    assert Rotary.from_config(extension.config).base > 5e5
    assert extend(CONFIG, to=8192).config["rope_scaling"]["factor"] == 4.0


@pytest.mark.usefixtures("strange")
def test_its_weights_are_converted() -> None:
    weights = {"h.0.attn.c_attn.weight": torch.arange(3 * 48)[:, None], "h.0.attn.c_proj.weight": torch.zeros(2)}
    with refuses(InputError, "c_proj"):
        convert_layout(weights, CONFIG, to="half")
    del weights["h.0.attn.c_proj.weight"]
    moved = convert_layout(weights, CONFIG, to="half")["h.0.attn.c_attn.weight"][:, 0]
    assert moved[:8].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert moved[96:].tolist() == list(range(96, 144))


@pytest.mark.usefixtures("strange")
def test_an_encoding_that_is_not_rotary_is_made_by_a_function() -> None:
    row = Architecture(encoding=lambda config, layer_type: ALiBi(required(config, "heads")))
    locant.register_architecture("sloping", row)
    config = {"model_type": "sloping", "heads": 4}
    assert isinstance(locant.encoding_from_config(config), ALiBi)
    assert explain(config).layers[0].methods == ("bias",)
    with refuses(InputError, "sloping", "rotary positions"):
        extend(config, to=100)
    with refuses(InputError, "heads"):
        locant.encoding_from_config({"model_type": "sloping"})


@pytest.mark.usefixtures("strange")
def test_invalid_registrations_raise() -> None:
    with refuses(RangeError, "llama"):
        locant.register_architecture("llama", STRANGE)
    with refuses(RangeError, "Architecture"):
        locant.register_architecture("other", RotaryKeys())  # type: ignore[arg-type]
    with refuses(RangeError, "layout"):
        locant.register_architecture("other", Architecture(rotary=RotaryKeys(layout=None)))
    with refuses(RangeError, "rotary"):
        Architecture()


def test_an_installed_package_registers_an_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("strange", "tests.models.test_registry:STRANGE", "locant.architectures")
    broken = importlib.metadata.EntryPoint("broken", "tests.models.no_such_module:ROW", "locant.architectures")
    restore(ARCHITECTURES, monkeypatch)
    monkeypatch.setattr(ARCHITECTURES, "_offers", {"strange": entry, "broken": broken})
    monkeypatch.setattr("locant.registry.LOADED", [])
    monkeypatch.setattr(ARCHITECTURES, "broken", {})
    assert Rotary.from_config(CONFIG).layout == "interleaved"
    with refuses(InputError, "broken"):
        locant.encoding_from_config({"model_type": "broken"})
    assert read_source("gpt2")["model_type"] == "gpt2"
    assert set(ARCHITECTURES.broken) == {"broken"}


# ------------------------------------------------------------------ defaults

SIZES = {"hidden_size": 2400, "num_attention_heads": 20}
SPEECH = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio")
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **{key: {"hidden_size": 240, "num_attention_heads": 2} for key in SPEECH},  # a convolution is large
    **{key: {"num_heads": [3, 6, 12, 24]} for key in ("swin", "donut-swin", "maskformer-swin", "swinv2")},
    **{key: {**SIZES, "use_relative_position_bias": True} for key in ("beit", "data2vec-vision")},
    "perceiver": {},  # its width has another name
    "glm_image_vision": {"hidden_size": 2400},
    "clap_audio_model": {"num_attention_heads": [4, 8]},
    "vitdet": {**SIZES, "use_relative_position_embeddings": True},
}
BY_SURVEY = {name for name, row in ARCHITECTURES.items() if row.rotary} - ROTARY_KEYS.keys()
DEFAULTS = [
    name
    for name, row in ARCHITECTURES.items()
    if row.defaults and not name.startswith("qwen2_") and name not in BY_SURVEY and name in CONFIG_MAPPING
]
"""The others' are compared in test_every_rotary_module.py."""


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_equal_to_the_class_in_transformers(model_type: str) -> None:
    given = OTHER_SIZES.get(model_type, SIZES)
    theirs = AutoConfig.for_model(model_type, **given).get_text_config()
    sizes = {key: value for key, value in theirs.to_dict().items() if key in KEPT}
    ours = with_defaults({"model_type": model_type, **given, **sizes})
    assert explain(ours).longest == explain(theirs).longest
    assert layer_types(ours) == layer_types(theirs) or set(layer_types(ours)) == set(layer_types(theirs))
    for kind in layer_types(ours) or (None,):
        one, other = (locant.encoding_from_config(config, layer_type=kind) for config in (ours, theirs))
        assert repr(one) == repr(other)


KEPT = (
    "layer_types", "num_hidden_layers", "d_model", "n_embd", "num_heads", "n_head", "n_heads", "dim", "embedding_size",
    "d_kv", "input_embedding_size",
)  # fmt: skip


def test_stated_values_are_never_replaced() -> None:
    config = {"model_type": "phi", "rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.25}}
    assert with_defaults(config) == {**config, "max_position_embeddings": 2048}
    assert with_defaults({"model_type": "gpt2", "max_position_embeddings": 7})["max_position_embeddings"] == 7
    assert "n_positions" not in with_defaults({"model_type": "gpt2", "max_position_embeddings": 7})
    assert with_defaults({"model_type": "cohere2", "sliding_window": None})["sliding_window"] is None


def test_a_default_causes_a_warning_unless_it_is_requested() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}
    with pytest.warns(UserWarning, match="rope_theta.*10000.0"):
        assert Rotary.from_config(config).base == 10_000.0
    assert Rotary.from_config(with_defaults(config)).base == 10_000.0


def test_every_field_of_a_row_is_documented() -> None:
    for kind in (Architecture, RotaryKeys):
        for field in dataclasses.fields(kind):
            assert f"{field.name}:" in (kind.__doc__ or ""), field.name


def test_widths_of_single_layers_override_a_default() -> None:
    single = {"5": {"head_dim": 64}}
    assert with_defaults({"model_type": "gemma4_text"})["global_head_dim"] == 512
    assert "global_head_dim" not in with_defaults({"model_type": "gemma4_text", "per_layer_config": single})


@pytest.mark.unchecked  # or the shape checks would find the wrong types first
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: RotaryKeys(layout="neox"), "layout"),  # type: ignore[arg-type]
        (lambda: RotaryKeys(share_keys="rotary_pct"), "share_keys"),  # type: ignore[arg-type]
        (lambda: RotaryKeys(fixed_base="1e4"), "fixed_base"),  # type: ignore[arg-type]
        (lambda: LayerKind(base_key=None), "base_key"),  # type: ignore[arg-type]
        (lambda: Architecture(rotary={"layout": "half"}), "rotary"),  # type: ignore[arg-type]
        (lambda: Architecture(rotary=RotaryKeys(), defaults=["rope_theta"]), "defaults"),  # type: ignore[arg-type]
        (lambda: Architecture(rotary=RotaryKeys(), encoding=5), "encoding"),  # type: ignore[arg-type]
    ],
)
def test_a_field_of_a_wrong_type_is_named(make: Callable[[], object], field: str) -> None:
    with refuses(RangeError, f"for {field} of", "expected", "help(locant.models."):
        make()
