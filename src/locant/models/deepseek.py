"""DeepSeek: multi-head latent attention, in which a part of each head has no positions and all heads share one key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row, warn_if
from locant.models.config_values import TRAINED, Config, layer_types_in, required
from locant.models.mixed_layers import (
    LISTED_KEYS,
    drop_outer_base,
    kinds_from_base_keys,
    listed_kinds,
    listed_kinds_by_layer,
    nope_if_without,
)
from locant.models.rope_parameters import rope_dictionary
from locant.models.weights import HeadRows, InputTables, query_rows
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.positions.pair_table import Pairs
from locant.positions.scaling import YaRN
from locant.spelling import spell


def _latent_attention(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Rotary) or "qk_nope_head_dim" not in config:
        return None
    return (
        f"each head has {required(config, 'qk_nope_head_dim')} more dimensions without positions, in addition to these "
        f"{encoding.head_dim}, and all heads share one rotated key"
    )


def _scale_of_scores(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, Rotary) or "qk_nope_head_dim" not in config:
        return None
    scaling = encoding.scaling
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return None
    width = required(config, "qk_nope_head_dim") + encoding.head_dim
    weight = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    factor = scaling.effective_attention_factor
    return (
        f"the attention factor is {spell(factor)}, because mscale_all_dim multiplies all scores instead: attend "
        f"with scale={spell(weight**2 / math.sqrt(width))}, which is {spell(weight**2, 4)} / sqrt({width})"
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

BETA = "llama_4_scaling_beta"
MISTRAL_OTHERS = (BETA, "max_position_embeddings")
MISTRAL_YARN = {
    "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
}  # fmt: skip


GROWING_QUERIES = warn_if(
    lambda config, encoding: getattr(encoding, "temperature", None) is not None,
    "the temperature multiplies whole queries: call encoding.temperature.scale(q, positions) for dimensions that are "
    "not rotated",
)


def _trailing(config: Config, rope: Config, rotary_dim: int) -> Pairs:
    """Return pairs of the last dimensions of a head (DeepSeek-V4)."""
    start = required(config, "head_dim") - rotary_dim
    return Pairs(dims=[(start + i, start + j) for i, j in Pairs.of(rotary_dim, layout="interleaved").dims])


def _two_ladders(config: Config) -> Config:
    """Rewrite DeepSeek-V4 as published.

    It has keys of DeepSeek-V3, and YaRN affects compressing layers but not scores.
    """
    ropes = rope_dictionary(config)
    if all(isinstance(ropes.get(kind), Mapping) for kind in V4_KINDS):  # the code then reads these dictionaries
        inside = {key for kind, key in V4_KINDS.items() if "rope_theta" in ropes[kind]}
        inside |= {*V4_FLAT} if any(SHARE[0] in ropes[kind] for kind in V4_KINDS) else {*V4_FLAT} - {*SHARE}
        rest = {key: value for key, value in config.items() if key not in inside}
        return {**rest, "rope_parameters": {kind: ropes[kind] for kind in V4_KINDS}}
    compress = {"rope_type": ropes.get("type", "default"), **ropes}
    if compress["rope_type"] == "yarn":
        compress.setdefault("attention_factor", 1.0)
    shares = {}
    if SHARE[0] in config:
        shares = {SHARE[0]: config[SHARE[0]]}
    elif "qk_rope_head_dim" in config:
        shares = {SHARE[0]: required(config, "qk_rope_head_dim") / required(config, "head_dim")}
    rest = {key: value for key, value in config.items() if key not in V4_FLAT}
    return {**rest, "rope_parameters": {"main": shares, "compress": {**compress, **shares}}}


V4_KINDS = {"main": "rope_theta", "compress": "compress_rope_theta"}
V4_FLAT = ("rope_parameters", "rope_scaling", "qk_rope_head_dim", *SHARE)
V4_LAYERS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _kinds_of_v4(config: Config) -> tuple[str, ...]:
    """Return ``main`` for layers with sliding windows, else ``compress``.

    ``compress_ratios`` may replace ``layer_types``.
    """
    types = layer_types_in(config)
    if not types and (ratios := config.get("compress_ratios")) is not None:
        if not isinstance(ratios, (list, tuple)) or not all(ratio in V4_LAYERS for ratio in ratios):
            got = f"got compress_ratios={short_repr(ratios)}, expected 0, 4 or 128 for each layer"
            raise InputError(got, "[0, 0, 4, 128, ...]")
        types = tuple(V4_LAYERS[ratio] for ratio in ratios)
    count = required(config, "num_hidden_layers")
    return tuple("main" if kind == "sliding_attention" else "compress" for kind in (types or ("",) * count)[:count])


def _one_base_for_a_scaling(config: Config) -> Config:
    """Raise `InputError` for Dots 3 with ``rope_scaling``, which changes the base of sliding layers."""
    if not config.get("rope_parameters") and rope_dictionary(config):
        got = f"got rope_scaling={short_repr(config['rope_scaling'])}, for which its code uses one base in all layers"
        raise InputError(got, "'rope_parameters' with a dictionary per layer type")
    return config


ROTATED_BACK = "keys are also values, and the output of attention is rotated back by the position of its query"
LEARNED_FREQUENCIES = (
    "a checkpoint's rotary_emb.alpha is learned: it multiplies each inverse frequency by e ** alpha, at first 1"
)
LATENT = RotaryKeys(layout="interleaved", head_dim_key="qk_rope_head_dim")
EITHER_LAYOUT = replace(LATENT, interleave_key=True)
DEEPSEEK_WEIGHTS: Mapping[str, Any] = {
    "projections": {
        "q_b_proj": lambda shape: (query_rows(shape),),
        # The latent vector of keys and values, then the rotated part of the keys, which all heads share.
        "kv_a_proj_with_mqa": lambda shape: (
            HeadRows(count=1, width=shape.latent),
            HeadRows(count=1, width=shape.rotated, rotated=shape.rotated),
        ),
    },
    "vllm": True,
}
"""The names of the weights. Other models with latent attention may have other names."""


def _latent_row(
    base: float, max_seq_len: int | None, width: int = 64, keys: RotaryKeys = LATENT, **row: Any
) -> Architecture:
    """Return a row with multi-head latent attention, in which `width` dimensions of a head are rotated."""
    warnings, defaults = (_latent_attention, _scale_of_scores), {"qk_rope_head_dim": width}
    return rotary_row(base, max_seq_len, keys=keys, defaults=defaults, warnings=warnings, **row)


V3 = _latent_row(1e4, 4096, keys=EITHER_LAYOUT, **DEEPSEEK_WEIGHTS)

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek_v2": _latent_row(1e4, 2048, **DEEPSEEK_WEIGHTS),
    "deepseek_v3": replace(V3, presets={"deepseek-v3": DEEPSEEK_V3}),
    "kimi_k2": replace(V3, defaults={}),
    "sarvam_mla": _latent_row(1e4, 4096, keys=replace(EITHER_LAYOUT, rope_types={"deepseek_yarn": "yarn"})),
    "axk1": _latent_row(1e4, 32768, keys=EITHER_LAYOUT),
    "axk2": _latent_row(1e4, 131072, 32),
    "bailing_hybrid": _latent_row(6e6, None, keys=replace(LATENT, respell=drop_outer_base)),
    "deepseek_v32": _latent_row(1e4, 163840),
    "dots3_note_text": rotary_row(
        keys=replace(
            LATENT, per_layer=True, respell=_one_base_for_a_scaling,
            layer_kinds=kinds_from_base_keys(sliding_attention="swa_rope_theta", indexed_attention="rope_theta"),
        ),
        defaults={
            "head_dim": 256, "qk_rope_head_dim": 64, "max_position_embeddings": 524288, "rope_theta": 8e7,
            "swa_rope_theta": 5e4,
        },
        warnings=(_latent_attention,),
    ),
    "deepseek_v4": rotary_row(
        keys=RotaryKeys(
            layout="interleaved", pairs=_trailing, share_keys=SHARE, per_layer=True,
            layer_kinds=kinds_from_base_keys(**V4_KINDS), respell=_two_ladders,
            not_converted="which rotates the last dimensions of its one key, and values with it",
        ),
        inputs=InputTables(tokens="embed"),
        defaults={
            "head_dim": 512, "max_position_embeddings": 1048576, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
            "partial_rotary_factor": 0.125,
        },
        kinds_by_layer=_kinds_of_v4,
        warnings=(ROTATED_BACK,),
    ),
    "glm4_moe_lite": _latent_row(1e4, 202752, keys=EITHER_LAYOUT),
    "glm_moe_dsa": _latent_row(1e4, 202752, keys=replace(LATENT, other_keys=("indexer_rope_interleave",))),
    "hy_v4": _latent_row(
        1e4, 262144,
        keys=replace(
            LATENT, layout="half",
            layout_doubt="hy_v4 pairs dimensions as 'half' in transformers, but users report that its published "
            "weights are 'interleaved' (loss 5.02 as half, 1.86 as interleaved): compare both on your own text, and "
            "pass layout=... with the better one",
        ),
    ),
    "longcat_flash": _latent_row(1e7, 131072),
    "ministral3": rotary_row(
        keys=RotaryKeys(temperature_key=BETA, other_keys=MISTRAL_OTHERS),
        defaults={
            "head_dim": 128, "max_position_embeddings": 262144,
            "rope_parameters": {**MISTRAL_YARN, "rope_theta": 1e6, "factor": 16.0, TRAINED: 16384},
        },
    ),
    "mistral4": rotary_row(
        keys=replace(EITHER_LAYOUT, share_keys=SHARE, temperature_key=BETA, other_keys=MISTRAL_OTHERS),
        defaults={
            "head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 1048576,
            "rope_parameters": {
                **MISTRAL_YARN, "rope_theta": 1e4, "factor": 128.0, TRAINED: 8192, "partial_rotary_factor": 0.5,
            },
        },
        warnings=(_latent_attention, _scale_of_scores, GROWING_QUERIES),
    ),
    "mistral_large4_text": rotary_row(
        keys=replace(LATENT, layer_keys=LISTED_KEYS), encoding=nope_if_without, layer_types=listed_kinds(),
        kinds_by_layer=listed_kinds_by_layer(),
        defaults={
            "qk_rope_head_dim": 64, "max_position_embeddings": 1048576,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, TRAINED: 512, "beta_fast": 32.0,
                "beta_slow": 1.0, "attention_factor": 1.0,
            },
        },
        warnings=(_latent_attention, LEARNED_FREQUENCIES),
    ),
    "minicpm3": _latent_row(1e4, 32768, 32, replace(LATENT, layout="half"), inputs=InputTables(scale_key="scale_emb")),
    "youtu": _latent_row(1e4, 131072, keys=EITHER_LAYOUT),
}  # fmt: skip
