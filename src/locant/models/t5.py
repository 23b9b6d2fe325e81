"""T5: a bias by buckets of distances, with a table of its own for the encoder and for the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from locant.models.architecture import Architecture
from locant.models.config_values import HEADS, Config, integer, required
from locant.models.input_tables import InputTables
from locant.positions.base import PositionEncoding
from locant.positions.encodings.t5 import T5Bias

__all__ = ["ARCHITECTURES"]


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


def _unscaled_scores(config: Config, encoding: PositionEncoding) -> str:
    return "T5 does not divide scores by sqrt(head_dim): attend with scale=1.0; and it has no bias in cross-attention"


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
    warnings=(_unscaled_scores,),
)

ARCHITECTURES: Mapping[str, Architecture] = {"t5": replace(T5, presets={"t5-base": T5_BASE}), "mt5": T5}
