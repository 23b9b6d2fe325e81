"""Qwen, with sections of pairs for the axes of images and video in the models that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.models.architecture import Architecture, RotaryKeys, standard
from locant.models.like_llama import part_of_head

__all__ = ["ARCHITECTURES"]

VISION = RotaryKeys(rope_types={"mrope": "default"}, sections_required=True, default_sections=(16, 24, 24))
QWEN_2_5_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip
"""The instruction-tuned one; its base model has 131 072 positions."""

QWEN_2_VL_7B = {**QWEN_2_5_7B, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}

_VL = Architecture(rotary=VISION, defaults=standard(1e6, 32768), vllm=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2": Architecture(
        rotary=RotaryKeys(), defaults=standard(1e4, 32768), presets={"qwen2.5-7b": QWEN_2_5_7B}, vllm=True
    ),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe"), Architecture(rotary=RotaryKeys(), defaults=standard(1e4, 32768), vllm=True)
    ),
    "qwen3": Architecture(
        rotary=RotaryKeys(head_dim_required=True), defaults=standard(1e4, 32768, head_dim=128), vllm=True
    ),
    "qwen3_next": part_of_head(1e4, 32768, 0.25, 256),
    "qwen2_vl": replace(_VL, presets={"qwen2-vl-7b": QWEN_2_VL_7B}),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _VL),
}
