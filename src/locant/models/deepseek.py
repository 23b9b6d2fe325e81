"""DeepSeek: multi-head latent attention, where a part of each head has no positions and all heads share one key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from locant.models.architecture import Architecture, RotaryKeys, standard
from locant.models.config_values import Config, required
from locant.models.projections import HeadRows, HeadShape, query_rows
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import YaRN

__all__ = ["ARCHITECTURES"]


def _latent_keys(shape: HeadShape) -> tuple[HeadRows, ...]:
    """What keys and values are made of, then the part of the keys that is rotated, once for all heads."""
    return HeadRows(count=1, width=shape.latent), HeadRows(count=1, width=shape.rotated, rotated=shape.rotated)


def _latent_attention(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Rotary) or "qk_nope_head_dim" not in config:
        return None
    return (
        f"each head has {required(config, 'qk_nope_head_dim')} more dimensions without positions beside these "
        f"{encoding.head_dim}, and all heads share one rotated key"
    )


def _scale_of_scores(config: Config, encoding: PositionEncoding) -> str | None:
    scaling = encoding.scaling if isinstance(encoding, Rotary) and "qk_nope_head_dim" in config else None
    if not isinstance(encoding, Rotary) or not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return None
    width = required(config, "qk_nope_head_dim") + encoding.head_dim
    weight = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    factor = scaling.effective_attention_factor
    return (
        f"the attention factor is {factor:g}, because mscale_all_dim acts on all scores instead: attend "
        f"with scale={weight**2 / math.sqrt(width):.6g}, which is {weight**2:.4g} / sqrt({width})"
    )


DEEPSEEK_V3 = {
    "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

V2 = Architecture(
    rotary=RotaryKeys(layout="interleaved", head_dim_key="qk_rope_head_dim"),
    defaults=standard(1e4, 2048, qk_rope_head_dim=64),
    projections={"q_b_proj": lambda shape: (query_rows(shape),), "kv_a_proj_with_mqa": _latent_keys},
    warnings=(_latent_attention, _scale_of_scores),
    vllm=True,
)
V3 = replace(
    V2,
    rotary=RotaryKeys(layout="interleaved", head_dim_key="qk_rope_head_dim", interleave_key=True),
    defaults=standard(1e4, 4096, qk_rope_head_dim=64),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek_v2": V2,
    "deepseek_v3": replace(V3, presets={"deepseek-v3": DEEPSEEK_V3}),
    "kimi_k2": replace(V3, defaults={}),
}
