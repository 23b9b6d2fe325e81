"""Llama, and the models that are built like it: rotary positions over whole heads, the base as ``rope_theta``.

Some of them rotate the queries and keys of some of their layers only.
"""

from __future__ import annotations

from collections.abc import Mapping

from locant.models.architecture import Architecture, LayerKind, RotaryKeys, standard
from locant.models.config_values import Config, flag, missing, number, required
from locant.models.rotated_layers import listed_layers, none_without, nope_in_full_attention, windowed_layers
from locant.positions.base import PositionEncoding
from locant.positions.encodings.tempered import Tempered

__all__ = ["ARCHITECTURES"]


def _llama_4(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Layers without rotary positions let queries grow with their position, if they are asked to."""
    if layer_type != "without":
        return None
    key = "attn_temperature_tuning"
    if key not in config:
        raise missing(config, key, "true beside floor_scale and attn_scale, or false, as the model was trained with")
    if not flag(key, config[key]):
        return PositionEncoding()
    if "attn_scale" not in config:
        raise missing(config, "attn_scale", "'attn_scale': 0.1, usually")
    return Tempered(required(config, "floor_scale"), number("attn_scale", config["attn_scale"]))


def _growing_queries(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Tempered):
        return None
    weight, step = encoding.temperature.weight, encoding.temperature.step
    return (
        f"attn_temperature_tuning: queries are multiplied by 1 + {weight:g} log(1 + floor((n + 1) / {step:,})) at "
        "position n, which changes nothing in the first ones; keys stay as they are, and nothing is rotated"
    )


WHOLE = RotaryKeys()
OWN_WIDTH = RotaryKeys(head_dim_required=True)
INTERLEAVED = RotaryKeys(layout="interleaved")
INTERLEAVED_OWN_WIDTH = RotaryKeys(layout="interleaved", head_dim_required=True)
SHARE = ("partial_rotary_factor",)
PART = RotaryKeys(share_keys=SHARE, share_required=True)
GLM = RotaryKeys(layout="interleaved", share_keys=SHARE, share_required=True, head_dim_required=True)
GLM_MOE = RotaryKeys(share_keys=SHARE, share_required=True, rounds_down=True)
OLMO_3 = RotaryKeys(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_theta", scaled=False, only_base=500_000.0),
    },
)

LLAMA_3_1_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
MISTRAL_7B = {
    "vocab_size": 32768, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        rotary=WHOLE, defaults=standard(1e4, 2048), presets={"llama-3.1-8b": LLAMA_3_1_8B}, vllm=True
    ),
    "llama4_text": Architecture(
        rotary=INTERLEAVED_OWN_WIDTH,
        encoding=_llama_4,
        layer_types=listed_layers(default_interval=4),
        defaults=standard(
            5e5, 131072, head_dim=128, no_rope_layer_interval=4, attn_temperature_tuning=True, floor_scale=8192,
            attn_scale=0.1,
        ),
        warnings=(_growing_queries,),
        vllm=True,
    ),
    "mistral": Architecture(
        rotary=WHOLE, defaults=standard(1e4, 131072), presets={"mistral-7b": MISTRAL_7B}, vllm=True
    ),
    "ministral": Architecture(rotary=WHOLE, defaults=standard(1e4, 131072)),
    "mixtral": Architecture(rotary=WHOLE, defaults=standard(1e6, 131072), vllm=True),
    "arcee": Architecture(rotary=WHOLE, defaults=standard(1e4, 4096), vllm=True),
    "apertus": Architecture(
        rotary=RotaryKeys(scaling_required=True),
        defaults={
            "max_position_embeddings": 65536,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
        vllm=True,
    ),
    "bitnet": Architecture(rotary=WHOLE, defaults=standard(5e5, 2048)),
    "cohere": Architecture(rotary=INTERLEAVED, defaults=standard(5e5, 8192), vllm=True),
    "cohere2": Architecture(
        rotary=INTERLEAVED,
        encoding=nope_in_full_attention(rotary_without_windows=False),
        layer_types=windowed_layers,
        full_attention_every=4,
        defaults=standard(1e4, 8192, sliding_window=4096),
        vllm=True,
    ),
    "ernie4_5": Architecture(rotary=INTERLEAVED_OWN_WIDTH, defaults=standard(5e5, 131072, head_dim=128), vllm=True),
    "ernie4_5_moe": Architecture(rotary=INTERLEAVED, defaults=standard(5e5, 131072)),
    "exaone4": Architecture(
        rotary=WHOLE,
        encoding=nope_in_full_attention(rotary_without_windows=True),
        layer_types=windowed_layers,
        full_attention_every=4,
        defaults=standard(1e4, 2048, sliding_window=4096),
        vllm=True,
    ),
    **dict.fromkeys(
        ("glm", "glm4"),
        Architecture(
            rotary=GLM, defaults=standard(1e4, 131072, head_dim=128, partial_rotary_factor=0.5), vllm=True
        ),
    ),
    "glm4_moe": Architecture(rotary=GLM_MOE, defaults=standard(1e4, 131072, partial_rotary_factor=0.5), vllm=True),
    **dict.fromkeys(
        ("granite", "granitemoe", "olmo", "olmo2"), Architecture(rotary=WHOLE, defaults=standard(1e4, 2048), vllm=True)
    ),
    "olmoe": Architecture(rotary=WHOLE, defaults=standard(1e4, 4096), vllm=True),
    "olmo3": Architecture(rotary=OLMO_3, full_attention_every=4, defaults=standard(5e5, 2048), vllm=True),
    "helium": Architecture(rotary=INTERLEAVED_OWN_WIDTH, defaults=standard(1e5, 4096, head_dim=128)),
    "nemotron": Architecture(rotary=PART, defaults=standard(1e4, 4096, partial_rotary_factor=0.5), vllm=True),
    "seed_oss": Architecture(rotary=OWN_WIDTH, defaults=standard(1e4, 524288, head_dim=128), vllm=True),
    "smollm3": Architecture(
        rotary=WHOLE,
        encoding=none_without,
        layer_types=listed_layers(),
        defaults=standard(2e6, 32768, no_rope_layer_interval=4),
        vllm=True,
    ),
    "stablelm": Architecture(rotary=PART, defaults=standard(1e4, 4096, partial_rotary_factor=0.25), vllm=True),
    "starcoder2": Architecture(rotary=WHOLE, defaults=standard(1e4, 4096), vllm=True),
}  # fmt: skip
