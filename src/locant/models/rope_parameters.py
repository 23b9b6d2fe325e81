"""The dictionaries of rope parameters in Hugging Face configurations, converted to and from scalings.

Up to transformers 4 there was one ``rope_scaling``, and the code of each architecture decided which layers it affects.
Since transformers 5 there is a dictionary per layer type.

It is an error if one key cancels the effect of another, or if two lengths contradict each other. `unread_keys` decides
about keys that the rope type does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import isclose, log
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, Remedy
from locant.models.architecture import Architecture, LayerKind, RotaryKeys
from locant.models.config_values import (
    TRAINED,
    Config,
    flag,
    integer,
    integer_at,
    layer_types_in,
    missing_key_error,
    number,
    value_at,
)
from locant.positions.scaling import SCALINGS, DynamicNTK, LongRoPE, Proportional, Scaling, Unscaled, YaRN
from locant.spelling import literal, spell

FIELDS = {TRAINED: "original_max_seq_len", "partial_rotary_factor": "rotated_share"}
"""Keys of configurations whose fields have other names in our dataclasses, and these names."""

OPTIONAL: Mapping[tuple[type[Scaling], str], bool] = {
    (DynamicNTK, TRAINED): True,
    (LongRoPE, "factor"): True,
    (Proportional, "partial_rotary_factor"): False,
}
"""The exceptions to the rule that a key is optional if its field has a default. The value is true for optional keys."""

SHARED_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Keys in any dictionary of rope parameters that concern something other than the scaling."""


@dataclass(frozen=True)
class RopeType:
    """One value of ``rope_type``, and the keys that it reads."""

    name: str
    scaling: type[Scaling]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return self.required + self.optional


WEIGHTS = ("short_mscale", "long_mscale")
"""The keys of Phi-3.5-MoE for an attention factor, up to the trained length and beyond it."""


def _rope_type(kind: type[Scaling]) -> RopeType:
    names = {field: key for key, field in FIELDS.items()}
    defaults = {names.get(each.name, each.name): each.default for each in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    optional = {key: OPTIONAL.get((kind, key), default is not MISSING) for key, default in defaults.items()}
    required = tuple(key for key in optional if not optional[key])
    return RopeType(kind.info.rope_type, kind, required, tuple(key for key in optional if optional[key]))


ROPE_TYPES: Mapping[str, RopeType] = {
    kind.info.rope_type: _rope_type(kind) for kind in (Unscaled, *SCALINGS.values()) if kind.info.rope_type
}
LONGROPE = ROPE_TYPES[LongRoPE.info.rope_type]
WEIGHTED_LONGROPE = replace(LONGROPE, required=(*WEIGHTS, *LONGROPE.required), optional=("factor",))


def rope_type_of(rope: Mapping[str, Any], aliases: Mapping[str, str], *, weighted: bool = False) -> RopeType:
    """Return the type that ``rope_type`` or the older ``type`` names. If it is `weighted`, LongRoPE has `WEIGHTS`."""
    names = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    resolved = {aliases.get(name, name) for name in names if isinstance(name, str)}
    if len(resolved) > 1 or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"got the types {short_repr(names)} in rope parameters, expected one name", "keep rope_type alone"
        )
    name = resolved.pop() if resolved else "default"
    if name not in ROPE_TYPES:
        got = f"got rope_type {name!r}, expected one of {', '.join(ROPE_TYPES)}"
        raise InputError(got, "'rope_type': 'default', if the model has no scaling")
    return WEIGHTED_LONGROPE if weighted and name == WEIGHTED_LONGROPE.name else ROPE_TYPES[name]


@dataclass(frozen=True)
class ScalingReading:
    """A scaling, the keys of its dictionary that its type does not read, and the warnings for the user."""

    scaling: Scaling
    unread: tuple[str, ...]
    notes: tuple[str, ...]


def read_scaling(
    rope: Mapping[str, Any],
    rope_type: RopeType,
    longest: int | None,
    trained: int | None,
    other_keys: tuple[str, ...] = (),
) -> ScalingReading:
    """Read the scaling that a dictionary of rope parameters describes.

    `longest` and `trained` are the lengths outside the dictionary. `other_keys` are keys in it that do not affect the
    rotation. An `InputError` names a wrong key.
    """
    entries, unread = _split_keys({key: value for key, value in rope.items() if key not in other_keys}, rope_type)
    _set_trained_length(entries, rope_type, longest, trained)
    missing = [key for key in rope_type.required if key not in entries]
    if missing:
        got = f"got rope parameters of type {rope_type.name!r} without {' and '.join(missing)}"
        raise InputError(got, f"add {missing[0]!r}, with the value that the model was trained with")
    notes = _complete_yarn(entries, longest) if rope_type.name == "yarn" else ()
    if rope_type.name == "longrope":
        _complete_longrope(entries, longest)
    read = {key: READERS.get(key, number)(key, value) for key, value in entries.items() if value is not None}
    scaling = rope_type.scaling(**{FIELDS.get(key, key): value for key, value in read.items()})
    return ScalingReading(scaling, unread, notes)


def write_scaling(scaling: Scaling) -> dict[str, Any]:
    """Return the dictionary of a scaling, without its base and without fields that have no effect."""
    rope_type = next((each for each in ROPE_TYPES.values() if each.scaling is type(scaling)), None)
    if rope_type is None:
        got = f"got {type(scaling).__name__}, which no configuration can express"
        raise InputError(got, f"use one of {', '.join(each.scaling.__name__ for each in ROPE_TYPES.values())}")
    values = {key: getattr(scaling, FIELDS.get(key, key)) for key in rope_type.keys}
    weighted = isinstance(scaling, YaRN) and scaling.attention_factor is None and scaling.mscale
    if isinstance(scaling, YaRN) and not (weighted and scaling.mscale_all_dim):
        values |= {"mscale": None, "mscale_all_dim": None}
    if isinstance(scaling, DynamicNTK):
        del values[TRAINED]  # transformers reads max_position_embeddings instead
    written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": rope_type.name, **{key: value for key, value in written.items() if value is not None}}


def _factors(key: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InputError(
            f"got {key}={short_repr(value)}, expected a list of numbers", "write one number per pair of dimensions"
        )
    return tuple(number(f"{key}[{place}]", one) for place, one in enumerate(value))


READERS: Mapping[str, Callable[[str, object], Any]] = {
    TRAINED: integer, "truncate": flag, "short_factor": _factors, "long_factor": _factors,
}  # fmt: skip
"""The functions that read these keys. Every other key is a number."""


def _split_keys(rope: Mapping[str, Any], rope_type: RopeType) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys that concern the scaling, and the keys that the type does not read.

    A null means absent, except for the factor of YaRN, which is then derived.
    """
    keeps_null = {"factor"} if rope_type.name == "yarn" else set[str]()
    entries = {key: value for key, value in rope.items() if value is not None or key in keeps_null}
    read = {key: value for key, value in entries.items() if key in rope_type.keys}
    return read, tuple(key for key in entries if key not in read and key not in SHARED_KEYS)


def _set_trained_length(entries: dict[str, Any], rope_type: RopeType, longest: int | None, trained: int | None) -> None:
    """Set the trained length from outside the dictionary, or from the longest one (dynamic). Raise if two differ."""
    dynamic = rope_type.name == "dynamic"
    if dynamic and longest is None:
        cause = "got rope parameters of type 'dynamic' without max_position_embeddings"
        raise InputError(cause, "add the trained length as max_position_embeddings")
    outside = longest if dynamic else trained
    if TRAINED in rope_type.keys and outside is not None and entries.setdefault(TRAINED, outside) != outside:
        where = "max_position_embeddings" if dynamic else f"{TRAINED} outside the rope parameters"
        got = f"got {TRAINED}={short_repr(entries[TRAINED])} and {where}={outside}"
        raise InputError(f"{got}, expected one value", f"{TRAINED}={outside}")


def _derive_factor(longest: int | None, trained: int) -> float:
    if longest is None:
        raise InputError("got no factor and no max_position_embeddings to derive it from", "factor=...")
    return longest / trained


def _complete_yarn(entries: dict[str, Any], longest: int | None) -> tuple[str, ...]:
    """Derive a factor that is null, and drop weights that `transformers` does not read. Return warnings about them."""
    if entries["factor"] is None:
        entries["factor"] = _derive_factor(longest, integer(TRAINED, entries[TRAINED]))
    weights = {key: number(key, entries[key]) for key in ("mscale", "mscale_all_dim") if key in entries}
    both = len(weights) == 2 and all(weights.values())
    if not weights or (both and "attention_factor" not in entries):
        return ()
    factor = number("factor", entries["factor"])
    over, under = weights.get("mscale", 1.0), weights.get("mscale_all_dim", 0.0)
    deepseek_factor = _mscale(factor, over) / _mscale(factor, under)
    read = number("attention_factor", entries.get("attention_factor", _mscale(factor, 1.0)))
    stated = " and ".join(f"{key}={literal(value)}" for key, value in weights.items())
    if both and not isclose(read, deepseek_factor, rel_tol=1e-6):
        got = f"got attention_factor and {stated}, of which only attention_factor would count"
        raise InputError(got, f"remove {' and '.join(weights)} from the configuration")
    for key in weights:
        del entries[key]
    if isclose(read, deepseek_factor, rel_tol=1e-6):
        return ()
    note = f"got {stated}: the attention factor is {spell(read)} as in transformers, but DeepSeek's own code makes"
    return (f"{note} it {spell(deepseek_factor)}",)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def _complete_longrope(entries: dict[str, Any], longest: int | None) -> None:
    trained = integer(TRAINED, entries[TRAINED])
    if WEIGHTS[0] in entries:
        short, long = (number(key, entries.pop(key)) for key in WEIGHTS)
        if short != long:
            raise InputError(
                f"got short_mscale={literal(short)} and long_mscale={literal(long)}, expected one value: the "
                "attention factor of an "
                "encoding does not change with the length",
                "make two encodings, one with each value",
            )
        entries["attention_factor"] = short
    if "factor" not in entries:
        entries["factor"] = _derive_factor(longest, trained)
    elif "attention_factor" in entries and round(number("factor", entries["factor"]) * trained) != longest:
        raise InputError(
            f"got factor={entries['factor']} and an attention factor, of which only the latter would count, and "
            f"max_position_embeddings={longest} instead of factor x {trained}",
            "remove factor from the configuration",
        )


def rope_of_layers(config: Config, architecture: Architecture, layer_type: str | None) -> Config:
    """Return the rope parameters of these layers."""
    keys = architecture.rotary_keys
    unnamed = layer_type is None and keys.layer_kinds  # even if other keys are missing
    nested = dict.fromkeys(keys.layer_kinds) if unnamed else ropes_by_layer(config, keys)
    if nested is None:
        if layer_type is not None and layer_type not in layer_types_in(config):
            got = f"got layer_type={short_repr(layer_type)} for a configuration whose layers share one encoding"
            raise InputError(got, "leave layer_type out")
        rope = rope_dictionary(config)
        if not rope and architecture.scaling_required:
            remedy = "'rope_parameters' with rope_theta, and {'rope_type': 'default'} for no scaling"
            raise missing_key_error(
                config, "rope parameters, whose defaults in its class override all keys outside them", remedy
            )
        return rope
    if layer_type not in [*nested]:
        got = f"got layer_type={short_repr(layer_type)}, expected one of {', '.join(nested)}, which differ"
        raise InputError(got, Remedy(layer_type=next(iter(nested))))
    rope = nested[layer_type]
    if rope is None:
        got = f"got layer_type={layer_type!r}, which has no rotary positions"
        raise InputError(got, "use PositionEncoding() for these layers")
    return rope


def ropes_by_layer(config: Config, keys: RotaryKeys) -> dict[str, Config | None] | None:
    """Return the rope parameters per layer type, or ``None`` if all layers share them."""
    rope = rope_dictionary(config if keys.flat_keys else {key: config[key] for key in config if key != "rope_scaling"})
    if is_per_layer(rope):
        if keys.layer_kinds and not config.get("rope_parameters"):
            got = f"got a dictionary per layer type as rope_scaling, which {config['model_type']} reads as one for all"
            raise InputError(got, "rename it to 'rope_parameters'")
        return _ropes_by_layer_type(config, rope, keys)
    if keys.layer_kinds:
        if _is_one_base_for_all(rope, keys) and config.get("rope_parameters"):
            config, rope = {**config, **rope}, {}
        elif config.get("rope_parameters"):
            raise InputError(
                f"got one rope_parameters for all layers, which {config['model_type']} does not read",
                f"write a dictionary for each of {', '.join(keys.layer_kinds)}, or use rope_scaling",
            )
        return {name: _rope_from_base_key(config, rope, name, kind) for name, kind in keys.layer_kinds.items()}
    if keys.per_layer and keys.layout is not None:
        remedy = "{'full_attention': {'rope_type': ..., 'rope_theta': ...}, 'sliding_attention': ...}"
        raise missing_key_error(config, "rope_parameters per layer type", remedy)
    return None


def _is_one_base_for_all(rope: Config, keys: RotaryKeys) -> bool:
    """Return whether all layers have one base without a scaling, as older `transformers` write for OLMo 3."""
    shares_key = {kind.base_key for kind in keys.layer_kinds.values()} == {"rope_theta"}
    return shares_key and set(rope) == {"rope_theta", "rope_type"} and rope["rope_type"] == "default"


DICTIONARIES = ("rope_parameters", "rope_scaling")


def rope_dictionary(config: Config) -> Config:
    """Return the dictionary of rope parameters, or an empty one."""
    entries = {key: config[key] for key in DICTIONARIES if config.get(key) not in (None, {})}
    rope = value_at(entries, *DICTIONARIES)
    if rope is not None and not isinstance(rope, Mapping):
        raise InputError(f"got rope parameters {short_repr(rope)}, expected a dictionary", "{'rope_theta': ...}")
    return rope or {}


def stated_trained_length(config: Config) -> int | None:
    """Return the trained length before any scaling, if the rope parameters or a key outside them state it."""
    return integer_at(rope_dictionary(config), TRAINED) or integer_at(config, TRAINED)


def is_per_layer(rope: Config) -> bool:
    """Return whether rope parameters have a dictionary per layer type, or ``None`` for layers without rotation.

    Some published rope parameters also have single values, which no code reads.
    """
    reserved = {*SHARED_KEYS, *(key for each in ROPE_TYPES.values() for key in each.keys)}
    one = any(isinstance(value, Mapping) and key not in reserved for key, value in rope.items())
    return one or (bool(rope) and all(value is None for value in rope.values()))


def dictionaries(config: Config) -> tuple[Config | None, ...]:
    """Return the dictionary of rope parameters, or the dictionaries of all layer types."""
    rope = rope_dictionary(config)
    return tuple(_by_type(rope).values()) if is_per_layer(rope) else (rope,)


def _by_type(rope: Config) -> dict[str, Config | None]:
    return {key: value for key, value in rope.items() if value is None or isinstance(value, Mapping)}


def _ropes_by_layer_type(config: Config, rope: Config, keys: RotaryKeys) -> dict[str, Config | None]:
    if not keys.per_layer:
        raise InputError(
            f"got rope parameters per layer type ({', '.join(map(str, _by_type(rope)))}), which "
            f"{config['model_type']} does not read: its layers share one encoding",
            "{'rope_type': ..., 'rope_theta': ...} for all layers",
        )
    missing = [name for name in keys.layer_kinds if rope.get(name) is None]
    if missing:
        raise InputError(
            f"got rope parameters without an entry for {' and '.join(missing)} layers", f"add {missing[0]!r}"
        )
    for name, kind in keys.layer_kinds.items():
        if rope[name].get("rope_theta") is None:
            _require_base_counts(config.get(kind.base_key), name, kind)
    return _by_type(rope)


def _rope_from_base_key(config: Config, rope: Config, name: str, kind: LayerKind) -> dict[str, Any]:
    """Return the rope parameters that `transformers` makes of one base per layer type and a common ``rope_scaling``."""
    base = config.get(kind.base_key)
    if base is None:
        remedy = f"{kind.base_key!r}, or 'rope_parameters' with a dictionary per layer type"
        raise InputError(f"got a configuration without {kind.base_key}, the base of {name} layers", remedy)
    _require_base_counts(base, name, kind)
    # These classes put rope_scaling into a dictionary that already has a rope_type.
    default = {"rope_type": "default"} if kind.scaled and "type" in rope else {}
    return {"rope_theta": base, **default, **(rope if kind.scaled else {})}


def _require_base_counts(base: object, name: str, kind: LayerKind) -> None:
    if base is not None and kind.only_base not in (None, base):
        raise InputError(
            f"got {kind.base_key}={short_repr(base)}, but transformers rotates {name} layers with "
            f"{spell(kind.only_base)}, unless they have a dictionary with another base",
            "'rope_parameters' with a dictionary per layer type, and rope_theta in each",
        )
