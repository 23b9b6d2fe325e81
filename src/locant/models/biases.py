"""Models with biases: linear ones (ALiBi) in BLOOM, MPT and, besides rotary positions, Falcon; T5's by buckets.

T5's are of distances, with a table of its own for the encoder and for the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture, rotary_row
from locant.models.config_values import HEADS, Config, flag, integer, missing, number, required, width_per_head
from locant.models.weights import InputTables, group_by_group
from locant.positions.base import PositionEncoding
from locant.positions.encodings.alibi import ALiBi, alibi_slopes
from locant.positions.encodings.t5 import T5Bias

__all__ = ["ARCHITECTURES"]


def _mpt(config: Config, layer_type: str | None) -> PositionEncoding:
    """Slopes of which the smallest is ``2 ** -alibi_bias_max``.

    Where the number of heads is not a power of two, MPT sorts the slopes of the next larger one into odd and even
    places; that is the paper's rule in other words.
    """
    attention = config.get("attn_config", {})
    if not isinstance(attention, Mapping):
        raise InputError(f"got attn_config={shown(attention)}, expected a dictionary", "{'alibi': True, ...}")
    missing = [key for key in ("alibi", "alibi_bias_max") if attention.get(key) is None]
    if missing or not flag("alibi", attention["alibi"]):
        got = f"without {' and '.join(missing)}" if missing else "with alibi=false, which transformers does not know"
        raise InputError(f"got an attn_config {got}", "{'alibi': True, 'alibi_bias_max': 8}")
    heads = required(config, *HEADS)
    reach = number("alibi_bias_max", attention["alibi_bias_max"]) / 8
    return ALiBi(heads, slopes=[slope**reach for slope in alibi_slopes(heads)])


def _falcon(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions, or ALiBi, whose slopes Falcon adds before it divides the scores by ``sqrt(head_dim)``."""
    if "alibi" not in config:
        raise missing(config, "alibi", "'alibi': False for rotary positions")
    if not flag("alibi", config["alibi"]):
        return None
    heads, width = required(config, *HEADS), width_per_head(config)
    return ALiBi(heads, slopes=[slope / math.sqrt(width) for slope in alibi_slopes(heads)])


def _falcon_keys(config: Config, queries: int) -> int | None:
    """One key/value head, or as many as queries, unless it is of the newer architecture."""
    if config.get("new_decoder_architecture"):
        return None
    if "multi_query" not in config:
        raise missing(config, "multi_query", "'multi_query': true or false in it")
    return 1 if flag("multi_query", config["multi_query"]) else queries


def _falcon_rounds(config: Config, encoding: PositionEncoding) -> str | None:
    if not isinstance(encoding, ALiBi):
        return None
    return (
        "the slopes are the paper's divided by sqrt(head_dim), as Falcon adds them before it scales; transformers "
        "rounds them to bfloat16, and long prompts show the difference"
    )


def _t5(config: Config, layer_type: str | None) -> PositionEncoding:
    """The table of relative buckets; the encoder's tells earlier keys from later ones."""
    buckets = required(config, "relative_attention_num_buckets")
    distance = config.get("relative_attention_max_distance", 128)  # as T5's code had it before there was a key
    return T5Bias(
        required(config, *HEADS),
        num_buckets=buckets,
        max_distance=integer("relative_attention_max_distance", distance),
        bidirectional=layer_type == "encoder",
    )


UNSCALED_SCORES = (
    "T5 does not divide scores by sqrt(head_dim): attend with scale=1.0; and it has no bias in cross-attention"
)
BLOOM_7B1 = {"vocab_size": 250880, "hidden_size": 4096, "n_head": 32, "n_layer": 30, "seq_length": 2048}
MPT_7B = {
    "vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048,
    "attn_config": {"alibi": True, "alibi_bias_max": 8},
}  # fmt: skip
FALCON_7B = {
    "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
    "max_position_embeddings": 2048, "alibi": False, "rope_theta": 10000.0,
}  # fmt: skip

T5_BASE = {
    "vocab_size": 32128, "d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12, "n_positions": 512,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
}  # fmt: skip

T5 = Architecture(
    encoding=_t5,
    layer_types=lambda config: ("encoder", "decoder"),
    default_layer_type="encoder",
    inputs=InputTables(tokens="shared", padding=False, dropout_key="dropout_rate"),
    defaults={"relative_attention_num_buckets": 32},
    warnings=(UNSCALED_SCORES,),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "t5": replace(T5, presets={"t5-base": T5_BASE}),
    "mt5": T5,
    "bloom": Architecture(
        encoding=lambda config, _: ALiBi(required(config, *HEADS)),
        inputs=InputTables(
            tokens="word_embeddings", norm="word_embeddings_layernorm", norm_eps="layer_norm_epsilon", padding=False
        ),
        presets={"bloom-7b1": BLOOM_7B1}, vllm=True,
    ),
    "mpt": Architecture(
        encoding=_mpt, defaults={"max_seq_len": 2048, "attn_config": {"alibi": True, "alibi_bias_max": 8}},
        inputs=InputTables(tokens="wte", padding=False), presets={"mpt-7b": MPT_7B}, vllm=True,
    ),
    "falcon": rotary_row(
        1e4, 2048, encoding=_falcon, defaults={"alibi": False},
        inputs=InputTables(tokens="word_embeddings", padding=False), projections={"query_key_value": group_by_group},
        key_heads=_falcon_keys, warnings=(_falcon_rounds,), presets={"falcon-7b": FALCON_7B}, vllm=True,
    ),
}  # fmt: skip
