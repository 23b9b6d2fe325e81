"""Gemma: heads of a width of their own; since Gemma 3, a base for each type of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from locant.models.architecture import SHARE, Architecture, LayerKind, RotaryKeys, rotary_row
from locant.models.config_values import WIDTHS, Config, required
from locant.models.weights import InputTables

__all__ = ["ARCHITECTURES"]


def _rounded_to_8_bits(config: Config) -> float:
    """RecurrentGemma has the square root of its width in bfloat16, whatever its own dtype."""
    mantissa, exponent = math.frexp(required(config, *WIDTHS) ** 0.5)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)


SCALED = InputTables(scale="sqrt_d_model_rounded")
GEMMA_3 = RotaryKeys(
    per_layer=True,
    layer_kinds={
        "full_attention": LayerKind(base_key="rope_theta"),
        "sliding_attention": LayerKind(base_key="rope_local_base_freq", scaled=False),
    },
)
GEMMA_4 = RotaryKeys(full_head_dim_key="global_head_dim", per_layer=True)

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


def _gemma_4(max_seq_len: int, rope: Mapping[str, Any], *, keys: RotaryKeys = GEMMA_4, **row: Any) -> Architecture:
    defaults = {"global_head_dim": 512, "rope_parameters": rope}
    return rotary_row(None, max_seq_len, 256, keys=keys, defaults=defaults, inputs=SCALED, **row)


BEFORE_GEMMA_3 = rotary_row(1e4, 8192, 256, inputs=SCALED, vllm=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": BEFORE_GEMMA_3,
    "gemma2": replace(BEFORE_GEMMA_3, full_attention_every=2),
    "gemma3_text": rotary_row(
        1e6, 131072, 256, keys=GEMMA_3, full_attention_every=6, defaults={"rope_local_base_freq": 1e4}, inputs=SCALED,
        presets={"gemma-3-4b": GEMMA_3_4B}, vllm=True,
    ),
    "gemma3n_text": rotary_row(
        1e6, 32768, 256, keys=GEMMA_3, defaults={"rope_local_base_freq": 1e4},
        inputs=replace(SCALED, why_not="the layers get four mixtures of a sum (AltUp)"),
    ),
    "gemma4_text": _gemma_4(131072, PROPORTIONAL, vllm=True),
    "gemma4_unified_text": _gemma_4(262144, PROPORTIONAL),
    "diffusion_gemma_text": _gemma_4(131072, PROPORTIONAL, keys=replace(GEMMA_4, share_keys=SHARE)),
    "embedding_gemma2_text": _gemma_4(262144, LAYERS),
    **dict.fromkeys(
        ("t5gemma2_text", "t5gemma2_decoder"),
        rotary_row(
            None, 131072, 256, keys=RotaryKeys(per_layer=True), defaults={"rope_parameters": LAYERS}, inputs=SCALED
        ),
    ),
    **dict.fromkeys(("t5_gemma_module", "vaultgemma"), rotary_row(1e4, 8192, 256, inputs=SCALED)),
    "recurrent_gemma": rotary_row(1e4, share=0.5, inputs=InputTables(scale=_rounded_to_8_bits)),
}  # fmt: skip
