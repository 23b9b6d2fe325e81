"""A configuration of several models is read by the part that writes or reads text, and any part can be asked for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, EncoderDecoderConfig

from locant import GridBias, InputError, Learned, PositionEncoding, Rotary, Sinusoidal
from locant.models import encoding_from_config, layer_types, without_positions
from locant.models.config_values import part_key
from locant.models.parts import TYPE_OF_PART
from tests.refusal import refuses

DONUT = {
    "model_type": "vision-encoder-decoder",
    "encoder": {"model_type": "donut-swin", "num_heads": [4, 8], "window_size": 10},
    "decoder": {"model_type": "mbart", "d_model": 1024, "max_position_embeddings": 1536},
}


def test_a_vision_encoder_decoder_is_read_by_its_decoder_and_its_encoder_by_name() -> None:
    assert repr(encoding_from_config(DONUT)) == "Learned(max_seq_len=1536, d_model=1024, offset=2)"
    assert layer_types(DONUT) == ()
    encoder = encoding_from_config(DONUT, layer_type="encoder")
    assert isinstance(encoder, GridBias)
    assert repr(encoder) == repr(encoding_from_config(DONUT["encoder"]))
    with refuses(InputError, "middle", "mbart"):
        encoding_from_config(DONUT, layer_type="middle")


def test_parts_of_a_configuration_object_have_the_same_names() -> None:
    part = BertConfig(hidden_size=24, num_attention_heads=2, max_position_embeddings=48)
    longer = BertConfig(hidden_size=24, num_attention_heads=2, max_position_embeddings=64)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(longer, part)
    lengths = [encoding_from_config(config, layer_type=name).max_seq_len for name in (None, "encoder", "decoder")]
    assert lengths == [48, 64, 48]


@pytest.mark.parametrize("name", ["blip-2", "clip", "kosmos-2", "llava", "siglip"])
def test_a_text_part_without_a_type_has_the_type_of_the_class(name: str) -> None:
    whole = AutoConfig.for_model(name).to_dict()
    key = part_key(whole)
    assert key is not None
    assert whole[key]["model_type"] == TYPE_OF_PART[name]


TEXT = {"hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 4096, "rope_theta": 1e6}


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["got_ocr2", "paddleocr_vl", "step3p7"])
def test_keys_of_a_text_part_at_the_top_level_are_read_by_its_row(name: str) -> None:
    types = ["full_attention", "sliding_attention"]
    config = {"model_type": name, **TEXT, "head_dim": 128, "rope_scaling": None, "vision_config": {"model_type": ""}}
    config |= {"layer_types": types, "num_hidden_layers": 2} if name == "step3p7" else {}
    for kind in config.get("layer_types", [None]):
        for read in (encoding_from_config, Rotary.from_config):
            with pytest.warns(UserWarning, match=f"got a {name} configuration without text_config: ") as said:
                rotary = read(config, layer_type=kind)
            assert [each.category for each in said] == [UserWarning]
            alone = {**config, "model_type": TYPE_OF_PART[name]}
            assert repr(rotary) == repr(Rotary.from_config(alone, layer_type=kind))


def test_a_part_of_a_part_is_found() -> None:
    text = {**TEXT, "head_dim": 256}
    config = {"model_type": "colpali", "vlm_config": {"model_type": "paligemma", "text_config": text}}
    assert repr(encoding_from_config(config)) == repr(encoding_from_config({**text, "model_type": "gemma"}))


@pytest.mark.parametrize("key", ["text_config", "text_config_dict"])
def test_older_clip_has_its_text_in_either_dictionary(key: str) -> None:
    config: dict[str, Any] = {"model_type": "clip", "text_config": {"hidden_size": 512}}
    config.setdefault(key, {})["max_position_embeddings"] = 77
    encoding = encoding_from_config(config)
    assert isinstance(encoding, Learned)
    assert (encoding.max_seq_len, encoding.d_model) == (77, 512)


def test_musicgen_is_read_by_its_decoder() -> None:
    decoder = {"model_type": "musicgen_decoder", "hidden_size": 24}
    encoding = encoding_from_config({"model_type": "musicgen", "text_encoder": {}, "decoder": decoder})
    assert isinstance(encoding, Sinusoidal)
    assert encoding.first == "cosine"


@pytest.mark.parametrize("model_type", sorted(without_positions.ARCHITECTURES))
def test_a_model_without_positions_is_nope(model_type: str) -> None:
    assert type(encoding_from_config({"model_type": model_type})) is PositionEncoding
