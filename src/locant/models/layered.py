"""Models whose layers differ: some have no positions, or each type of layers has rope parameters of its own.

Which layers are rotated is told by their windows, by a list, or by a base of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import SHARE, Architecture, RotaryKeys, rotary_row
from locant.models.config_values import Config, integer, missing, number, required
from locant.models.weights import RMS_NORMED
from locant.positions.base import PositionEncoding

__all__ = [
    "ARCHITECTURES", "LISTED", "WINDOWED", "listed_layers", "none_without", "nope_in_full_attention", "windowed_layers",
]  # fmt: skip

WINDOWED = ("sliding_attention", "full_attention")
LISTED = ("with", "without")


def windowed_layers(config: Config) -> tuple[str, ...]:
    """``sliding_attention`` and ``full_attention``, unless no layer has a window (Cohere 2, Exaone 4)."""
    if "sliding_window" not in config:
        raise missing(config, "sliding_window", "'sliding_window': its width, or null where no layer has a window")
    return () if config["sliding_window"] is None else WINDOWED


def nope_in_full_attention(*, rotary_without_windows: bool) -> Callable[[Config, str | None], PositionEncoding | None]:
    """Rotary positions where attention slides, and none where it is full; without windows, in all layers or in none."""

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding | None:
        rotary = layer_type != "full_attention" if windowed_layers(config) else rotary_without_windows
        return None if rotary else PositionEncoding()

    return encoding


def none_where_full(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions where attention slides, and none where it is full, whatever its windows are (AFMoE)."""
    return PositionEncoding() if layer_type == "full_attention" else None


def none_without(config: Config, layer_type: str | None) -> PositionEncoding | None:
    """Rotary positions for layers of the kind ``with``, as `listed_layers` and `based_layers` have them."""
    return PositionEncoding() if layer_type == "without" else None


def based_layers(config: Config) -> tuple[str, ...]:
    """``with`` and ``without`` rotary positions by ``layer_rope_theta``: a base for each layer, of which 0 means none.

    Layers with several bases are refused: they want an encoding each.
    """
    bases = config.get("layer_rope_theta")
    if bases is None:
        return ()
    if not isinstance(bases, (list, tuple)) or not bases:
        raise InputError(f"got layer_rope_theta={shown(bases)}, expected a base for each layer", "[10000.0, 0, ...]")
    distinct = {number("layer_rope_theta", base) for base in bases}
    if len(distinct - {0.0}) > 1:
        got = f"got layer_rope_theta with {len(distinct - {0.0})} bases, and one encoding for all layers to make"
        raise InputError(got, "a configuration with layer_rope_theta of the layers of one base, for each base")
    return tuple(kind for kind, has in zip(LISTED, (distinct != {0.0}, 0.0 in distinct), strict=True) if has)


def listed_layers(*, default_interval: int | None = None) -> Callable[[Config], tuple[str, ...]]:
    """``with`` and ``without`` rotary positions, as far as there are such layers; none, where all layers have them.

    ``no_rope_layers`` is a list with 1 for layers that do have rotary positions; ``no_rope_layer_interval`` gives every
    how many layers one has none. Published configurations of Llama 4 have an empty list and mean the default interval.
    """

    def layer_types(config: Config) -> tuple[str, ...]:
        rotary = _rotary_layers(config, default_interval)
        kinds = tuple(kind for kind, has in zip(LISTED, (True, False), strict=True) if has in rotary)
        return () if kinds == ("with",) else kinds

    return layer_types


def _rotary_layers(config: Config, default_interval: int | None) -> set[bool]:
    """Whether layers have rotary positions, over all layers."""
    listed = config.get("no_rope_layers")
    every = config.get("no_rope_layer_interval", default_interval if listed == [] else None)
    if listed or every is None or (listed == [] and default_interval is None):
        return _listed(config)
    every = integer("no_rope_layer_interval", every)
    return {(layer + 1) % every != 0 for layer in range(required(config, "num_hidden_layers"))}


def _listed(config: Config) -> set[bool]:
    listed, remedy = config.get("no_rope_layers"), "1 for each layer with positions, else 0"
    if listed is None:
        raise missing(config, "no_rope_layers", remedy)
    count = integer("num_hidden_layers", config["num_hidden_layers"]) if "num_hidden_layers" in config else None
    right = isinstance(listed, (list, tuple)) and all(isinstance(one, int) and one in (0, 1) for one in listed)
    if not right or not listed or count not in (None, len(listed)):
        expected = "ones and zeros" if count is None else f"{count} ones and zeros"
        raise InputError(f"got no_rope_layers={shown(listed)}, expected a list of {expected}", remedy)
    return {bool(one) for one in listed}


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
    max_seq_len: int, head_dim: int, share_required: bool = False, **ropes: dict[str, Any]
) -> Architecture:
    """Rope parameters per layer type, with a share of each head."""
    keys = RotaryKeys(per_layer=True, share_keys=SHARE, share_required=share_required)
    return rotary_row(None, max_seq_len, head_dim, keys=keys, defaults={"rope_parameters": ropes})


def _rope(base: float, share: float | None = None, rope_type: str = "default") -> dict[str, Any]:
    part = {} if share is None else {"partial_rotary_factor": share}
    return {"rope_type": rope_type, "rope_theta": base, **part}


def _based(base: float, max_seq_len: int, head_dim: int | None = None, **row: Any) -> Architecture:
    """A base for each layer in ``layer_rope_theta``, of which 0 means no positions."""
    return rotary_row(
        base,
        max_seq_len,
        head_dim,
        keys=RotaryKeys(other_keys=("layer_rope_theta",)),
        encoding=none_without,
        layer_types=lambda config: () if based_layers(config) == ("with",) else based_layers(config),
        **row,
    )


def _windowed(max_seq_len: int, head_dim: int | None, window: int, *, rotary_without_windows: bool) -> Architecture:
    return rotary_row(
        1e4,
        max_seq_len,
        head_dim,
        encoding=nope_in_full_attention(rotary_without_windows=rotary_without_windows),
        layer_types=windowed_layers,
        defaults={"sliding_window": window},
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": rotary_row(1e4, 16384, 128, encoding=none_where_full, layer_types=lambda config: WINDOWED),
    "beam": rotary_row(
        None, 8192, 128, keys=RotaryKeys(per_layer=True),
        defaults={"rope_parameters": {"sliding_attention": _rope(1e4), "full_attention": None}},
    ),
    "cohere2_moe": rotary_row(
        1e4, 8192, 128, keys=RotaryKeys(layout="interleaved"), encoding=_cohere_2_moe, layer_types=windowed_layers,
        defaults={"sliding_window": 4096, "prefix_dense_sliding_window_pattern": 1},
        warnings=(_dense_layers_of_cohere,),
    ),
    "exaone_moe": _windowed(2048, None, 4096, rotary_without_windows=True),
    "flint": _windowed(262144, 128, 513, rotary_without_windows=False),
    "granite_swa": _based(1e4, 8192),
    "granitemoe_swa": _based(1e4, 2048),
    "kolibri1": _windowed(262144, 128, 513, rotary_without_windows=True),
    "laguna": _by_layer_type(131072, 128, full_attention=_rope(5e5, 0.5), sliding_attention=_rope(1e4, 1.0)),
    "lfm3": _by_layer_type(128000, 128, sliding_attention=_rope(1e4), full_attention=_rope(1e6, 0.5, "proportional")),
    "mellum": _by_layer_type(131072, 128, full_attention=_rope(5e5), sliding_attention=_rope(1e4)),
    "mimo_v2_flash": _by_layer_type(
        131072, 192, True, full_attention=_rope(5e6, 0.334), sliding_attention=_rope(1e4, 0.334)
    ),
    "molmo2_text": rotary_row(
        1e4, 36864, 128, keys=RotaryKeys(other_keys=("rope_scaling_layers",)), warnings=(_scaled_layers_of_molmo,),
    ),
    "muse_glimmer_text": _based(1e4, 131072, 128, inputs=RMS_NORMED),
    "muse_spark_text": _based(5e5, 1048576, 64, inputs=RMS_NORMED),
    "olmo_hybrid": rotary_row(1e4, 65536, encoding=_olmo_hybrid),
    "step3p5": _by_layer_type(128000, 128, full_attention=_rope(1e4), sliding_attention=_rope(1e4)),
    "zaya": _by_layer_type(131072, 128, hybrid=_rope(5e6, 0.5), hybrid_sliding=_rope(1e4, 0.5)),
}  # fmt: skip
