"""Models whose layers differ: some have no positions, or each type of layers has rope parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from locant.models.architecture import Architecture, RotaryKeys, standard
from locant.models.config_values import Config, missing
from locant.models.input_tables import RMS_NORMED
from locant.models.rotated_layers import (
    WINDOWED,
    based_layers,
    none_where_full,
    none_without,
    nope_in_full_attention,
    windowed_layers,
)
from locant.positions.base import PositionEncoding

__all__ = ["ARCHITECTURES"]

SHARE = ("partial_rotary_factor",)


def _cohere_2_moe(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions where attention slides, and in dense layers if ``prefix_dense_sliding_window_pattern`` is 1."""
    if layer_type != "full_attention":
        return None
    if "prefix_dense_sliding_window_pattern" not in config:
        raise missing(config, "prefix_dense_sliding_window_pattern", "1, as released models have it")
    return PositionEncoding()


def _dense_layers_of_cohere(config: Config, encoding: PositionEncoding) -> str | None:
    if config.get("prefix_dense_sliding_window_pattern") != 1:
        return None
    return "layers of full attention have no positions, but dense ones among them are rotated as sliding ones are"


def _olmo_hybrid(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """No positions at all where the base is null, as in released models."""
    rope = config.get("rope_parameters")
    return PositionEncoding() if isinstance(rope, Mapping) and rope.get("rope_theta") is None else None


def _scaled_layers_of_molmo(config: Config, encoding: PositionEncoding) -> str | None:
    layers = config.get("rope_scaling_layers")
    if layers is None or getattr(encoding, "scaling", None) is None or len(layers) == config.get("num_hidden_layers"):
        return None
    return "only the layers in rope_scaling_layers have this scaling: the others have the same base without it"


def _by_layer_type(
    max_seq_len: int, head_dim: int | None, share_required: bool = False, **ropes: dict[str, Any]
) -> Architecture:
    """Rope parameters per layer type, with a share of each head."""
    keys = RotaryKeys(
        per_layer=True, head_dim_required=head_dim is not None, share_keys=SHARE, share_required=share_required
    )
    width = {} if head_dim is None else {"head_dim": head_dim}
    return Architecture(
        rotary=keys, defaults={"max_position_embeddings": max_seq_len, **width, "rope_parameters": ropes}
    )


def _rope(base: float, share: float | None = None, rope_type: str = "default") -> dict[str, Any]:
    part = {} if share is None else {"partial_rotary_factor": share}
    return {"rope_type": rope_type, "rope_theta": base, **part}


def _based(base: float, max_seq_len: int, head_dim: int | None = None) -> Architecture:
    """A base for each layer in ``layer_rope_theta``, of which 0 means no positions."""
    sizes = {} if head_dim is None else {"head_dim": head_dim}
    return Architecture(
        rotary=RotaryKeys(head_dim_required=head_dim is not None, other_keys=("layer_rope_theta",)),
        encoding=none_without,
        layer_types=lambda config: () if based_layers(config) == ("with",) else based_layers(config),
        defaults=standard(base, max_seq_len, **sizes),
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture(
        rotary=RotaryKeys(head_dim_required=True),
        encoding=none_where_full,
        layer_types=lambda config: WINDOWED,
        defaults=standard(1e4, 16384, head_dim=128),
    ),
    "beam": Architecture(
        rotary=RotaryKeys(per_layer=True, head_dim_required=True),
        defaults={
            "max_position_embeddings": 8192,
            "head_dim": 128,
            "rope_parameters": {"sliding_attention": _rope(1e4), "full_attention": None},
        },
    ),
    "cohere2_moe": Architecture(
        rotary=RotaryKeys(layout="interleaved", head_dim_required=True),
        encoding=_cohere_2_moe,
        layer_types=windowed_layers,
        defaults=standard(1e4, 8192, head_dim=128, sliding_window=4096, prefix_dense_sliding_window_pattern=1),
        warnings=(_dense_layers_of_cohere,),
    ),
    "exaone_moe": Architecture(
        rotary=RotaryKeys(),
        encoding=nope_in_full_attention(rotary_without_windows=True),
        layer_types=windowed_layers,
        defaults=standard(1e4, 2048, sliding_window=4096),
    ),
    "flint": Architecture(
        rotary=RotaryKeys(head_dim_required=True),
        encoding=nope_in_full_attention(rotary_without_windows=False),
        layer_types=windowed_layers,
        defaults=standard(1e4, 262144, head_dim=128, sliding_window=513),
    ),
    "granite_swa": _based(1e4, 8192),
    "granitemoe_swa": _based(1e4, 2048),
    "kolibri1": Architecture(
        rotary=RotaryKeys(head_dim_required=True),
        encoding=nope_in_full_attention(rotary_without_windows=True),
        layer_types=windowed_layers,
        defaults=standard(1e4, 262144, head_dim=128, sliding_window=513),
    ),
    "laguna": _by_layer_type(131072, 128, full_attention=_rope(5e5, 0.5), sliding_attention=_rope(1e4, 1.0)),
    "lfm3": _by_layer_type(128000, 128, sliding_attention=_rope(1e4), full_attention=_rope(1e6, 0.5, "proportional")),
    "mellum": _by_layer_type(131072, 128, full_attention=_rope(5e5), sliding_attention=_rope(1e4)),
    "mimo_v2_flash": _by_layer_type(
        131072, 192, True, full_attention=_rope(5e6, 0.334), sliding_attention=_rope(1e4, 0.334)
    ),
    "molmo2_text": Architecture(
        rotary=RotaryKeys(head_dim_required=True, other_keys=("rope_scaling_layers",)),
        defaults=standard(1e4, 36864, head_dim=128),
        warnings=(_scaled_layers_of_molmo,),
    ),
    "muse_glimmer_text": replace(_based(1e4, 131072, 128), inputs=RMS_NORMED),
    "muse_spark_text": replace(_based(5e5, 1048576, 64), inputs=RMS_NORMED),
    "olmo_hybrid": Architecture(rotary=RotaryKeys(), encoding=_olmo_hybrid, defaults=standard(1e4, 65536)),
    "step3p5": _by_layer_type(128000, 128, full_attention=_rope(1e4), sliding_attention=_rope(1e4)),
    "zaya": _by_layer_type(131072, 128, hybrid=_rope(5e6, 0.5), hybrid_sliding=_rope(1e4, 0.5)),
}
