"""Gemma: heads of a width of their own; since Gemma 3, a base for each type of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from locant.models.architecture import Architecture, LayerKind, RotaryKeys, standard
from locant.models.config_values import WIDTHS, Config, required
from locant.models.input_tables import InputTables
from locant.models.like_llama import part_of_head, whole_head

__all__ = ["ARCHITECTURES"]


def _rounded_to_8_bits(config: Config) -> float:
    """RecurrentGemma has the square root of its width in bfloat16, whatever its own dtype."""
    mantissa, exponent = math.frexp(required(config, *WIDTHS) ** 0.5)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)


SHARE = ("partial_rotary_factor",)
SCALED = InputTables(scale="sqrt_d_model_rounded")
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

LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
PROPORTIONAL = {
    **LAYERS, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
}  # fmt: skip

GEMMA_3_4B = {
    "vocab_size": 262208, "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "num_hidden_layers": 34,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 1024, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip

BEFORE_GEMMA_3 = Architecture(rotary=GEMMA, defaults=standard(1e4, 8192, head_dim=256), inputs=SCALED, vllm=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": BEFORE_GEMMA_3,
    "gemma2": replace(BEFORE_GEMMA_3, full_attention_every=2),
    "gemma3_text": Architecture(
        rotary=GEMMA_3,
        full_attention_every=6,
        defaults=standard(1e6, 131072, head_dim=256, rope_local_base_freq=1e4),
        inputs=SCALED,
        presets={"gemma-3-4b": GEMMA_3_4B},
        vllm=True,
    ),
    "gemma4_text": Architecture(
        rotary=GEMMA_4,
        defaults={
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "global_head_dim": 512,
            "rope_parameters": PROPORTIONAL,
        },
        inputs=SCALED,
        vllm=True,
    ),
    "gemma3n_text": Architecture(
        rotary=GEMMA_3,
        defaults=standard(1e6, 32768, head_dim=256, rope_local_base_freq=1e4),
        inputs=replace(SCALED, why_not="the layers get four mixtures of a sum (AltUp)"),
    ),
    **{
        name: Architecture(
            rotary=replace(GEMMA_4, share_keys=SHARE if name == "diffusion_gemma_text" else ()),
            defaults={
                "max_position_embeddings": longest,
                "head_dim": 256,
                "global_head_dim": 512,
                "rope_parameters": rope,
            },
            inputs=SCALED,
        )
        for name, longest, rope in (
            ("gemma4_unified_text", 262144, PROPORTIONAL),
            ("diffusion_gemma_text", 131072, PROPORTIONAL),
            ("embedding_gemma2_text", 262144, LAYERS),
        )
    },
    **dict.fromkeys(
        ("t5gemma2_text", "t5gemma2_decoder"),
        Architecture(
            rotary=RotaryKeys(head_dim_required=True, per_layer=True),
            defaults={"max_position_embeddings": 131072, "head_dim": 256, "rope_parameters": LAYERS},
            inputs=SCALED,
        ),
    ),
    **dict.fromkeys(("t5_gemma_module", "vaultgemma"), replace(whole_head(1e4, 8192, 256), inputs=SCALED)),
    "recurrent_gemma": replace(part_of_head(1e4, None, 0.5), inputs=InputTables(scale=_rounded_to_8_bits)),
}
