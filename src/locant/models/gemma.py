"""Gemma: heads of a width of their own; since Gemma 3, a base for each type of layers."""

from __future__ import annotations

from collections.abc import Mapping

from locant.models.architecture import Architecture, LayerKind, RotaryKeys, standard

__all__ = ["ARCHITECTURES"]

GEMMA = RotaryKeys(head_dim_required=True)
GEMMA_3 = RotaryKeys(
    head_dim_required=True,
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_local_base_freq", scaled=False),
    },
)
GEMMA_4 = RotaryKeys(head_dim_required=True, full_head_dim_key="global_head_dim", per_layer=True)

GEMMA_3_4B = {
    "vocab_size": 262208, "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "num_hidden_layers": 34,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 1024, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(
        ("gemma", "gemma2"), Architecture(rotary=GEMMA, defaults=standard(1e4, 8192, head_dim=256), vllm=True)
    ),
    "gemma3_text": Architecture(
        rotary=GEMMA_3,
        defaults=standard(1e6, 131072, head_dim=256, rope_local_base_freq=1e4),
        presets={"gemma-3-4b": GEMMA_3_4B},
        vllm=True,
    ),
    "gemma4_text": Architecture(
        rotary=GEMMA_4,
        defaults={
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "global_head_dim": 512,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
        vllm=True,
    ),
}
