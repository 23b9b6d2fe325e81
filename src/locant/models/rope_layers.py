"""Which dictionary of rope parameters holds for which layers, in all the forms that configurations have had.

Up to transformers 4 there was one ``rope_scaling``, and each architecture decided in its code which layers it acts on;
since 5 there is a dictionary per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.models.architecture import Architecture, LayerKind, RotaryKeys
from locant.models.config_values import TRAINED, Config, integer_at, layer_types_in, missing, value_at

__all__ = ["is_per_layer", "rope_dictionary", "rope_of_layers", "ropes_by_layer", "stated_trained_length"]


def rope_of_layers(config: Config, architecture: Architecture, layer_type: str | None) -> Config:
    """The dictionary of rope parameters for these layers."""
    nested = ropes_by_layer(config, architecture.rotary_keys)
    if nested is None:
        if layer_type is not None and layer_type not in layer_types_in(config):
            got = f"got layer_type={shown(layer_type)} for a configuration whose layers share one encoding"
            raise InputError(got, "no layer_type")
        rope = rope_dictionary(config)
        if not rope and architecture.scaling_required:
            remedy = "'rope_scaling', as the model has it, or {'rope_type': 'default'} for none"
            raise missing(config, "rope parameters, where its class takes a scaling", remedy)
        return rope
    if layer_type not in [*nested]:
        got = f"got layer_type={shown(layer_type)}, expected one of {', '.join(nested)}: their rotary positions differ"
        raise InputError(got, f"layer_type={next(iter(nested))!r}")
    rope = nested[layer_type]
    if rope is None:
        raise InputError(f"got layer_type={layer_type!r}, which has no rotary positions", "PositionEncoding() for them")
    return rope


def ropes_by_layer(config: Config, keys: RotaryKeys) -> dict[str, Config | None] | None:
    """Rope parameters per layer type, where there are such."""
    rope = rope_dictionary(config)
    if is_per_layer(rope):
        if keys.layer_kinds and not config.get("rope_parameters"):
            got = f"got a dictionary per layer type as rope_scaling, which {config['model_type']} reads as one for all"
            raise InputError(got, "the same as 'rope_parameters'")
        return _nested(config, rope, keys)
    if keys.layer_kinds:
        if config.get("rope_parameters"):
            raise InputError(
                f"got rope_parameters for all layers alike, of which {config['model_type']} reads none",
                f"a dictionary for each of {', '.join(keys.layer_kinds)}, or rope_scaling for what the scaling acts on",
            )
        return {name: _older(config, rope, name, kind) for name, kind in keys.layer_kinds.items()}
    if keys.per_layer and keys.layout is not None:
        remedy = "{'full_attention': {'rope_type': ..., 'rope_theta': ...}, 'sliding_attention': ...}"
        raise missing(config, "rope_parameters per layer type", remedy)
    return None


def rope_dictionary(config: Config) -> Config:
    """The dictionary of rope parameters, or an empty one."""
    rope = value_at(config, "rope_parameters", "rope_scaling")
    if rope is not None and not isinstance(rope, Mapping):
        raise InputError(f"got rope parameters {shown(rope)}, expected a dictionary", "{'rope_theta': ...}")
    return rope or {}


def stated_trained_length(config: Config) -> int | None:
    """What a model was trained with before it was stretched, where its rope parameters or a key beside them say it."""
    return integer_at(rope_dictionary(config), TRAINED) or integer_at(config, TRAINED)


def is_per_layer(rope: Config) -> bool:
    """Whether it holds a dictionary per layer type; ``None`` is for layers without rotation."""
    return bool(rope) and all(value is None or isinstance(value, Mapping) for value in rope.values())


def _nested(config: Config, rope: Config, keys: RotaryKeys) -> dict[str, Config | None]:
    if not keys.per_layer:
        raise InputError(
            f"got rope parameters per layer type ({', '.join(map(str, rope))}), of which {config['model_type']} reads "
            "none: its layers share one encoding",
            "{'rope_type': ..., 'rope_theta': ...} for all layers",
        )
    missing = [name for name in keys.layer_kinds if rope.get(name) is None]
    if missing:
        raise InputError(f"got rope parameters without those of {' and '.join(missing)} layers", f"{missing[0]!r}")
    for name, kind in keys.layer_kinds.items():
        if rope[name].get("rope_theta") is None:
            _require_base_counts(config.get(kind.base_key), name, kind)
    return dict(rope)


def _older(config: Config, rope: Config, name: str, kind: LayerKind) -> dict[str, Any]:
    """What `transformers` makes of one base per layer type, and of a ``rope_scaling`` that acts on some of them."""
    base = config.get(kind.base_key)
    if base is None:
        remedy = f"{kind.base_key!r}, or 'rope_parameters' with a dictionary per layer type"
        raise InputError(f"got a configuration without {kind.base_key}, the base of {name} layers", remedy)
    _require_base_counts(base, name, kind)
    return {"rope_theta": base, **(rope if kind.scaled else {})}


def _require_base_counts(base: object, name: str, kind: LayerKind) -> None:
    if base is not None and kind.only_base not in (None, base):
        raise InputError(
            f"got {kind.base_key}={shown(base)}, but transformers rotates {name} layers with {kind.only_base:g}, "
            "whatever stands outside of their own dictionary",
            "'rope_parameters' with a dictionary per layer type, and rope_theta in each",
        )
