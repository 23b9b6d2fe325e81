"""Text models that rotate as Llama does, but for the sizes: a line each.

Those that differ in more are in the file of their family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.arguments import Real
from locant.models.architecture import Architecture, RotaryKeys, standard
from locant.models.config_values import Config, flag, missing
from locant.models.input_tables import InputTables
from locant.positions.base import PositionEncoding

__all__ = ["ARCHITECTURES", "part_of_head", "whole_head"]


def whole_head(
    base: float, max_seq_len: int | None = None, head_dim: int | None = None, *, interleaved: bool = False
) -> Architecture:
    """All dimensions of a head are rotated; with a `head_dim`, the class has one that is no share of the width."""
    keys = RotaryKeys(layout="interleaved" if interleaved else "half", head_dim_required=head_dim is not None)
    return Architecture(rotary=keys, defaults=_defaults(base, max_seq_len, head_dim=head_dim))


def part_of_head(
    base: float,
    max_seq_len: int | None,
    share: float | None,
    head_dim: int | None = None,
    *,
    interleaved: bool = False,
    rounds_down: bool = False,
) -> Architecture:
    """``partial_rotary_factor`` is read; a `share` is what the class takes without it, in the place of the whole."""
    keys = RotaryKeys(
        layout="interleaved" if interleaved else "half",
        share_keys=("partial_rotary_factor",),
        share_required=share is not None,
        head_dim_required=head_dim is not None,
        rounds_down=rounds_down,
    )
    return Architecture(
        rotary=keys, defaults=_defaults(base, max_seq_len, head_dim=head_dim, partial_rotary_factor=share)
    )


def _defaults(base: float, max_seq_len: int | None, **others: Real | None) -> dict[str, object]:
    sizes = {"rope_theta": base, "max_position_embeddings": max_seq_len, **others}
    return {key: value for key, value in sizes.items() if value is not None}


def _granite_hybrid(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions if ``position_embedding_type`` says so; none where it is null, as it is by default."""
    return None if config.get("position_embedding_type") == "rope" else PositionEncoding()


def _zamba_2(config: Config, layer_type: str | None) -> PositionEncoding | None:
    if "use_mem_rope" not in config:
        raise missing(config, "use_mem_rope", "'use_mem_rope': false, unless the model was trained with it")
    return None if flag("use_mem_rope", config["use_mem_rope"]) else PositionEncoding()


def _unread_rotary_dim(config: Config, encoding: PositionEncoding) -> str | None:
    rotated = getattr(encoding, "rotary_dim", None)
    if config.get("rotary_dim") in (None, rotated):
        return None
    return f"rotary_dim={config['rotary_dim']} is not read by its code, which rotates {rotated} dimensions of a head"


HUNYUAN = RotaryKeys(ntk_alpha=True)


ARCHITECTURES: Mapping[str, Architecture] = {
    "aria_text": whole_head(1e4, 2048),
    "bamba": part_of_head(1e4, 262144, 0.5),
    "blt_global_transformer": whole_head(5e5, 4096, interleaved=True),
    "blt_local_decoder": whole_head(5e5, 24576, interleaved=True),
    "blt_local_encoder": whole_head(5e5, 24576, interleaved=True),
    "blt_patcher": whole_head(1e4, 8192, interleaved=True),
    "chameleon": whole_head(1e4, 4096),
    "csm": whole_head(5e5, 2048),
    "csm_depth_decoder_model": whole_head(5e5, 33),
    "cwm": Architecture(
        rotary=RotaryKeys(scaling_required=True, head_dim_required=True),
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "dbrx": Architecture(
        rotary=RotaryKeys(),
        defaults={"rope_theta": 1e4, "max_seq_len": 2048},
        inputs=InputTables(tokens="wte"),
    ),
    "deepseek_ocr2_text": whole_head(1e4, 2048),
    "deepseek_ocr2_encoder": whole_head(1e4, 32768),
    "diffllama": whole_head(1e4, 2048),
    "doge": whole_head(1e4, 2048),
    "dots1": whole_head(1e4, 2048),
    "emu3_text_model": whole_head(1e6, 9216),
    "evolla": whole_head(5e5, 8192),
    "falcon_h1": whole_head(1e4, 8192),
    "flex_olmo": whole_head(5e5, 4096),
    "gpt_neox_japanese": replace(part_of_head(1e4, 2048, None), inputs=InputTables(tokens="embed_in", padding=False)),
    **dict.fromkeys(("granite4_vision_text", "granitemoeshared"), whole_head(1e4, 2048)),
    "granite_docling_text": whole_head(1e4, 32768),
    "granitemoehybrid": Architecture(rotary=RotaryKeys(), encoding=_granite_hybrid, defaults=standard(1e4, 2048)),
    "hrm_text": replace(whole_head(1e4, 2048, 128), inputs=InputTables(scale_key="embedding_scale")),
    "hy_v3": whole_head(11158840.0, 131072, 128),
    "hyperclovax": whole_head(1e4, 2048),
    "idefics": whole_head(1e4, 2048),
    "jais2": whole_head(1e4, 8192),
    "jetmoe": Architecture(
        rotary=RotaryKeys(head_dim_key="kv_channels", head_dim_required=True),
        defaults=standard(1e4, 4096, kv_channels=128),
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), Architecture(rotary=HUNYUAN, defaults=standard(1e4, 2048))),
    "lfm2": whole_head(1e6, 128000),
    "lfm2_moe": whole_head(1e6, 128000),
    "minimax": whole_head(1e6, 131072),
    "minimax_m2": Architecture(
        rotary=RotaryKeys(share_keys=("partial_rotary_factor", "rotary_dim"), head_dim_required=True),
        defaults=standard(5e6, 196608, head_dim=128),
    ),
    "minimax_m3_vl_text": Architecture(
        rotary=RotaryKeys(share_keys=("partial_rotary_factor",), head_dim_required=True, other_keys=("rotary_dim",)),
        defaults=standard(5e6, 524288, head_dim=128),
        warnings=(_unread_rotary_dim,),
    ),
    "mllama_text_model": whole_head(5e5, 131072),
    "muse_glimmer_assistant": whole_head(5e5, 131072, 128),
    "solar_open": part_of_head(1e6, 131072, None, 128),
    "unlimited_ocr_text": whole_head(1e4, 32768),
    "zamba2": Architecture(
        rotary=RotaryKeys(head_dim_key="attention_head_dim", head_dim_required=True, other_keys=("use_mem_rope",)),
        encoding=_zamba_2,
        defaults=standard(1e4, 4096, use_mem_rope=False),
    ),
}
