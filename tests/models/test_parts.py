"""A configuration of several models is read by the part that writes or reads text, and any part can be asked for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, EncoderDecoderConfig

from locant import GridBias, InputError, Learned, PositionEncoding, Sinusoidal
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
def test_a_text_part_without_a_type_has_that_of_the_class(name: str) -> None:
    whole = AutoConfig.for_model(name).to_dict()
    key = part_key(whole)
    assert key is not None
    assert whole[key]["model_type"] == TYPE_OF_PART[name]


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
