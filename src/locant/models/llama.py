"""Llama, and the models that are built like it: rotary positions over whole heads, with the base ``rope_theta``.

Many of them differ only in their sizes. Some rotate queries and keys in only some of their layers. The Qwen models for
images and video have sections of pairs for the axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.models.architecture import SHARE, Architecture, LayerKind, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import Config, flag, number, required, required_value
from locant.models.mixed_layers import (
    LISTED_KEYS,
    listed_kinds,
    listed_kinds_by_layer,
    nope_for_granite,
    nope_for_zamba,
    nope_if_without,
    nope_in_full_attention,
    windowed_kinds,
)
from locant.models.weights import InputTables
from locant.positions.base import PositionEncoding
from locant.positions.temperature import Tempered


def _llama_4(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Return a temperature for layers without rotary positions, whose queries can grow with their position."""
    if layer_type != "without":
        return None
    key = "attn_temperature_tuning"
    remedy = f"{key!r}: true with floor_scale and attn_scale, or false, as the model was trained with"
    if not flag(key, required_value(config, key, remedy)):
        return PositionEncoding()
    scale = required_value(config, "attn_scale", "'attn_scale': 0.1, usually")
    return Tempered(required(config, "floor_scale"), number("attn_scale", scale))


GROWING = warn_if(
    lambda config, encoding: isinstance(encoding, Tempered),
    "attn_temperature_tuning: queries are multiplied by 1 + {encoding.temperature.weight:g} log(1 + floor((n + 1) / "
    "{encoding.temperature.step:,})) at position n, which is 1 for the first positions. Keys do not change, and "
    "nothing is rotated",
)

UNREAD = warn_if(
    lambda config, encoding: config.get("rotary_dim") not in (None, getattr(encoding, "rotary_dim", None)),
    "rotary_dim={config[rotary_dim]} is not read by its code, which rotates {encoding.rotary_dim} dimensions of a head",
)

PART = RotaryKeys(share_keys=SHARE)
INTERLEAVED = RotaryKeys(layout="interleaved")
OLMO_3 = RotaryKeys(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_theta", scaled=False, only_base=500_000.0),
    },
)
HUNYUAN = RotaryKeys(ntk_alpha=True)
VISION = RotaryKeys(rope_types={"mrope": "default"}, default_sections=(16, 24, 24))

LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_3_1_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "rope_scaling": LLAMA_3_1,
}  # fmt: skip
MISTRAL_7B = {
    "vocab_size": 32768, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip
QWEN_2_5_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip
"""The instruction-tuned model. Its base model has 131,072 positions."""

QWEN_2_VL_7B = {**QWEN_2_5_7B, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}

EXAONE_4 = rotary_row(
    1e4,
    2048,
    encoding=nope_in_full_attention(rotary_without_windows=True),
    layer_types=windowed_kinds,
    full_attention_every=4,
    defaults={"sliding_window": 4096},
    vllm=True,
)


APERTUS = rotary_row(
    None, 65536, defaults={"rope_parameters": {"rope_type": "llama3", "rope_theta": 12000000.0, **LLAMA_3_1}}
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": rotary_row(1e4, 2048, presets={"llama-3.1-8b": LLAMA_3_1_8B}, vllm=True),
    "llama4_text": rotary_row(
        5e5, 131072, 128, keys=replace(INTERLEAVED, layer_keys=LISTED_KEYS), encoding=_llama_4,
        layer_types=listed_kinds(default_interval=4), kinds_by_layer=listed_kinds_by_layer(default_interval=4),
        defaults={"no_rope_layer_interval": 4, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        warnings=(GROWING,), vllm=True,
    ),
    "mistral": rotary_row(1e4, 131072, presets={"mistral-7b": MISTRAL_7B}, vllm=True),
    "ministral": rotary_row(1e4, 131072),
    "mixtral": rotary_row(1e6, 131072, vllm=True),
    **dict.fromkeys(("arcee", "olmoe", "starcoder2"), rotary_row(1e4, 4096, vllm=True)),
    "apertus": replace(APERTUS, vllm=True),
    "apertus1p5_text": APERTUS,
    **dict.fromkeys(("bitnet", "csm"), rotary_row(5e5, 2048)),
    "cohere": rotary_row(5e5, 8192, keys=INTERLEAVED, vllm=True),
    "cohere2": rotary_row(
        1e4, 8192, keys=INTERLEAVED, encoding=nope_in_full_attention(rotary_without_windows=False),
        layer_types=windowed_kinds, full_attention_every=4, defaults={"sliding_window": 4096}, vllm=True,
    ),
    "ernie4_5": rotary_row(5e5, 131072, 128, keys=INTERLEAVED, vllm=True),
    "ernie4_5_moe": rotary_row(5e5, 131072, keys=INTERLEAVED),
    "exaone": rotary_row(5e5, 4096, attribute_map={"num_hidden_layers": "num_layers"}),
    "internlm3": rotary_row(1e4, 32768, 128),
    "iquestcoder": rotary_row(1e4, 131072, 128),
    "exaone4": EXAONE_4,
    "exaone4_5_text": EXAONE_4,
    **dict.fromkeys(("glm", "glm4"), rotary_row(1e4, 131072, 128, 0.5, keys=INTERLEAVED, vllm=True)),
    "glm4_moe": rotary_row(1e4, 131072, None, 0.5, keys=RotaryKeys(rounds_down=True), vllm=True),
    "sarvam_moe": rotary_row(8e6, 131072, 64, keys=PART),
    **dict.fromkeys(("granite", "granitemoe", "olmo", "olmo2"), rotary_row(1e4, 2048, vllm=True)),
    "olmo3": rotary_row(5e5, 2048, keys=OLMO_3, full_attention_every=4, vllm=True),
    "helium": rotary_row(1e5, 4096, 128, keys=INTERLEAVED),
    "nemotron": rotary_row(1e4, 4096, None, 0.5, vllm=True),
    "seed_oss": rotary_row(1e4, 524288, 128, vllm=True),
    "smollm3": rotary_row(
        2e6, 32768, keys=RotaryKeys(layer_keys=LISTED_KEYS), encoding=nope_if_without, layer_types=listed_kinds(),
        kinds_by_layer=listed_kinds_by_layer(), defaults={"no_rope_layer_interval": 4}, vllm=True,
    ),
    "stablelm": rotary_row(1e4, 4096, None, 0.25, vllm=True),
    "bamba": rotary_row(1e4, 262144, None, 0.5),
    "blt_global_transformer": rotary_row(5e5, 4096, keys=INTERLEAVED),
    **dict.fromkeys(("blt_local_decoder", "blt_local_encoder"), rotary_row(5e5, 24576, keys=INTERLEAVED)),
    "blt_patcher": rotary_row(1e4, 8192, keys=INTERLEAVED),
    "csm_depth_decoder_model": rotary_row(5e5, 33),
    "cwm": rotary_row(
        defaults={
            "head_dim": 128, "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA_3_1, "factor": 16.0},
        },
    ),
    "dbrx": rotary_row(1e4, defaults={"max_seq_len": 2048}, inputs=InputTables(tokens="wte")),
    **dict.fromkeys(("deepseek_ocr2_encoder", "granite_docling_text", "unlimited_ocr_text"), rotary_row(1e4, 32768)),
    **dict.fromkeys(
        ("aria_moe_lm", "aria_text", "deepseek_ocr2_text", "diffllama", "doge", "dots1", "esmc", "granite4_vision_text",
         "granitemoeshared", "hyperclovax", "idefics"),
        rotary_row(1e4, 2048),
    ),
    "emu3_text_model": rotary_row(1e6, 9216),
    "evolla": rotary_row(5e5, 8192),
    **dict.fromkeys(("eurobert", "falcon_h1", "jais2"), rotary_row(1e4, 8192)),
    "flex_olmo": rotary_row(5e5, 4096),
    "gpt_neox_japanese": rotary_row(
        max_seq_len=2048, keys=RotaryKeys(base_key="rotary_emb_base", share_keys=("rotary_pct",)),
        defaults={"rotary_emb_base": 1e4}, inputs=InputTables(tokens="embed_in", padding=False)),
    "granitemoehybrid": rotary_row(1e4, 2048, encoding=nope_for_granite),
    "hrm_text": rotary_row(1e4, 2048, 128, inputs=InputTables(scale_key="embedding_scale")),
    "hy_v3": rotary_row(11158840.0, 131072, 128),
    "jetmoe": rotary_row(1e4, 4096, keys=RotaryKeys(head_dim_key="kv_channels"), defaults={"kv_channels": 128}),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), rotary_row(1e4, 2048, keys=HUNYUAN)),
    "chameleon": rotary_row(1e4, 4096),
    **dict.fromkeys(("lfm2", "lfm2_moe"), rotary_row(1e6, 128000)),
    "minimax": rotary_row(1e6, 131072),
    "minimax_m2": rotary_row(5e6, 196608, 128, keys=RotaryKeys(share_keys=(*SHARE, "rotary_dim"))),
    "minimax_m3_vl_text": rotary_row(
        5e6, 524288, 128, keys=RotaryKeys(share_keys=SHARE, other_keys=("rotary_dim",)), warnings=(UNREAD,),
    ),
    "mllama_text_model": rotary_row(5e5, 131072),
    "muse_glimmer_assistant": rotary_row(5e5, 131072, 128),
    "solar_open": rotary_row(1e6, 131072, 128, keys=PART),
    "zamba2": rotary_row(
        1e4, 4096, keys=RotaryKeys(head_dim_key="attention_head_dim", layer_keys=("use_mem_rope",)),
        encoding=nope_for_zamba, defaults={"use_mem_rope": False},
    ),
    "qwen2": rotary_row(1e4, 32768, presets={"qwen2.5-7b": QWEN_2_5_7B}, vllm=True),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), rotary_row(1e4, 32768, vllm=True)),
    "qwen3": rotary_row(1e4, 32768, 128, vllm=True),
    "qwen3_next": rotary_row(1e4, 32768, 256, 0.25),
    "qwen2_vl": rotary_row(1e6, 32768, keys=VISION, presets={"qwen2-vl-7b": QWEN_2_VL_7B}, vllm=True),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), rotary_row(1e6, 32768, keys=VISION, vllm=True)),
}  # fmt: skip
