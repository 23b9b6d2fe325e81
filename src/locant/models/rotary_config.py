"""Rotary positions from a configuration: base, sizes, sections, layout and scaling, by the keys of its architecture.

This module reads ``rope_parameters`` (transformers 5), the older ``rope_scaling`` with ``rope_theta``, dictionaries per
layer type, and the many names of partial rotation. It never assumes a base of 10 000. A key that the modeling code does
not read is ignored with a warning, unless it contradicts the keys that are read: see `unread_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, PythonRemedy
from locant.kernels.rotary import Layout
from locant.models.architecture import Architecture, RotaryKeys
from locant.models.config_values import (
    HEADS,
    LENGTHS,
    TRAINED,
    WIDTHS,
    Config,
    common_value,
    flag,
    integer,
    integer_at,
    layer_types_in,
    number,
    per_layer_configs,
    required,
    sections_in,
    value_at,
    width_per_head,
)
from locant.models.rope_parameters import (
    dictionaries,
    is_per_layer,
    read_scaling,
    rope_dictionary,
    rope_of_layers,
    rope_type_of,
    ropes_by_layer,
)
from locant.models.unread_keys import RotaryFacts, check_unread_keys, find_unread_keys, is_number
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.rotary_by_head import UnequalAngles
from locant.positions.pair_table import Pairs
from locant.positions.scaling import NTK, LongRoPE, Proportional, Scaling
from locant.positions.temperature import Temperature
from locant.shell import shell_word

SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class Reading:
    """The arguments of `Rotary` without its angles, and the warnings for the user."""

    arguments: dict[str, Any]
    notes: tuple[str, ...]


def read_rotary(
    config: Config,
    architecture: Architecture,
    *,
    layer_type: str | None,
    layout: Layout | None,
    allow_no_rotation: bool = False,
) -> Reading:
    """Read the rotary positions of these layers from a configuration of this architecture.

    With `allow_no_rotation`, a model that does not rotate is read as well. The result has the angles of the first
    members of its pairs. See `second_members`.
    """
    keys = architecture.rotary_keys
    _require_rotary(config, keys, allow_no_rotation)
    rope = rope_of_layers(config, architecture, layer_type)
    nested = layer_type is not None and keys.layout is not None and ropes_by_layer(config, keys) is not None
    is_inside = nested and rope.get(TRAINED) is None
    rope, overridden = (_complete_nested_rope if nested else _override_trained_length)(config, rope, architecture)
    rope_type = rope_type_of(rope, {"su": "longrope", **keys.rope_types}, weighted=keys.weighted_longrope)
    proportional = rope_type.scaling is Proportional
    head_dim = head_dim_of(config, architecture, layer_type)
    lengths = integer_at(config, *LENGTHS), None if is_inside else integer_at(config, TRAINED)
    scaled = {**rope, **_rotated_share(config, rope)} if proportional else rope
    larger_base = _larger_base(rope, keys)
    read = read_scaling(scaled, rope_type, *lengths, keys.other_keys)
    base, scaling = _base(config, rope, architecture, layer_type), larger_base or read.scaling
    arguments: dict[str, Any] = {"head_dim": head_dim, "base": base, "scaling": scaling}
    if (temperature := _temperature(rope, keys)) is not None:
        arguments["temperature"] = temperature
    rotated = head_dim if proportional else rotary_dim_of(config, rope, architecture, head_dim)
    if keys.pairs is not None:
        arguments["pairs"] = _pairs(keys.pairs(config, rope, rotated), config, layout)
    elif rotated % 2 and keys.rounds_down:  # its code adds a dimension beyond the share, as the partner of the last one
        arguments["pairs"] = Pairs.of(rotated, layout=_choose_layout(config, keys, layout))
    else:
        sections = _sections(rope, keys)
        arguments |= {"layout": _choose_layout(config, keys, layout), "rotary_dim": rotated, "sections": sections}
    _require_lengths(scaling, rotated)
    facts = _facts(config, keys, arguments, rotated, layout)
    model_type = str(config.get("model_type", "a configuration of this kind"))
    unknown = check_unread_keys(config, find_unread_keys(config, (*keys.keys, "qk_rope_head_dim")), facts, model_type)
    if larger_base is None:
        axes = [key for key in ("mrope_section", "mrope_interleaved") if key in rope and _has_one_axis(keys)]
        unknown += check_unread_keys(
            rope, (*read.unread, *axes), facts, f"rope_type {rope_type.name!r} of {model_type}"
        )
    ignored = [f"got {', '.join(unknown)}, which {model_type} does not read: ignored"] if unknown else []
    return Reading(arguments, (*overridden, *read.notes, *ignored))


def _complete_nested_rope(config: Config, rope: Config, architecture: Architecture) -> tuple[Config, tuple[str, ...]]:
    """Return the rope parameters of a layer type as `transformers` reads them, and warnings about differing values.

    `transformers` reads ``truncate`` only outside the dictionaries of the layer types, and the trained length only
    inside.
    """
    rope_type, outer, notes = rope.get("rope_type", rope.get("type")), rope_dictionary(config), []
    outside = outer if is_per_layer(outer) else {}
    model_type = config["model_type"]
    if rope_type == "yarn":
        read, inside = outside.get("truncate", True), rope.get("truncate")
        if inside not in (None, read):
            got = f"got truncate={short_repr(inside)} in the rope parameters of one layer type"
            notes.append(f"{got}, which {model_type} does not read: using {short_repr(read)}")
        rope = {**rope, "truncate": read}
    trained = integer_at(config, TRAINED) or integer_at(outside, TRAINED)
    if rope_type in TRAINED_ELSEWHERE and rope.get(TRAINED) is None and trained is not None:
        longest = integer_at(config, *LENGTHS)
        if longest is None:
            raise architecture.lacks("max_position_embeddings", config, "the trained length of its rope parameters")
        if trained != longest:
            got = f"got {TRAINED}={trained} outside the rope parameters of one layer type"
            notes.append(f"{got}, where {model_type} does not read it: using max_position_embeddings={longest}")
        rope = {**rope, TRAINED: longest}
    return rope, tuple(notes)


TRAINED_ELSEWHERE = ("llama3", "yarn", "longrope")
"""Rope types whose trained length is ``max_position_embeddings`` in `transformers` if no key states it."""


def _override_trained_length(
    config: Config, rope: Config, architecture: Architecture
) -> tuple[Config, tuple[str, ...]]:
    """Return the rope parameters with the trained length from outside them, and a warning if the lengths differ."""
    trained = architecture.rotary_keys.trained_beside
    if trained is None or TRAINED in config or rope.get(TRAINED) in (None, trained):
        return rope, ()
    got = f"got {TRAINED}={short_repr(rope[TRAINED])} in rope parameters, where {config['model_type']} does not read it"
    return {**rope, TRAINED: trained}, (f"{got}: using {trained}, which its class has outside them",)


def _facts(
    config: Config, keys: RotaryKeys, arguments: Mapping[str, Any], rotated: int, layout: Layout | None
) -> RotaryFacts:
    """Return the values that are read for all layers, with which unread keys are compared."""
    head_dim, scaling, pairs = arguments["head_dim"], arguments["scaling"], arguments.get("pairs")
    ropes = [rope for rope in dictionaries(config) if isinstance(rope, Mapping)]
    bases = [rope.get("rope_theta") for rope in ropes] + [config.get(key) for key in keys.base_keys]
    shares = [rope.get(SHARE) for rope in ropes]
    named = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
    factor = getattr(scaling, "factor", 1.0)
    return RotaryFacts(
        bases={float(one) for one in (arguments["base"], *bases) if is_number(one)},
        widths={rotated, *(int(head_dim * share) for share in shares if is_number(share))},
        shares={rotated / head_dim, *(float(share) for share in shares if is_number(share))},
        layout=(pairs.layout or "") if pairs is not None else arguments["layout"],
        types={scaling.info.rope_type, *(name for name in named if isinstance(name, str))},
        factors={float(factor)},
        has_axes=bool(arguments.get("sections")) or (pairs is not None and (pairs.num_axes or 1) > 1),
    )


def _require_lengths(scaling: Scaling | None, rotated: int) -> None:
    """Raise `InputError` unless LongRoPE has a factor for each pair."""
    if not isinstance(scaling, LongRoPE):
        return
    for key in ("short_factor", "long_factor"):
        count = len(getattr(scaling, key))
        if count != rotated // 2:
            got = f"got {key} with {count} numbers, expected {rotated // 2}: one for each pair of dimensions"
            raise InputError(got, f"use the {key!r} of a model with {rotated} rotated dimensions per head")


def second_members(rotary: Rotary, config: Config, architecture: Architecture) -> UnequalAngles | None:
    """Return the unequal angles of a model that does not rotate, or ``None`` if the model does.

    `rotary` has the angles of the first members of pairs.
    """
    keys = architecture.rotary_keys
    if keys.second_pairs is None:
        return None
    rope = rope_of_layers(config, architecture, None)
    return UnequalAngles(rotary, rotary.replace(pairs=keys.second_pairs(config, rope, rotary.head_dim)))


def _pairs(pairs: Pairs, config: Config, layout: Layout | None) -> Pairs:
    """Return the table of an architecture in this layout, else in the layout that the configuration names."""
    wanted_layout = named_layout(config) if layout is None else layout
    if wanted_layout in (None, pairs.layout):
        return pairs
    if pairs.runs_as is None or any(i > j for i, j in pairs.dims):
        got = f"got layout={wanted_layout!r} for {config['model_type']}, whose pairs do not have a layout"
        raise InputError(got, "leave the layout out")
    return replace(pairs, dims=Pairs.of(2 * len(pairs), layout=wanted_layout).dims)


def _require_rotary(config: Config, keys: RotaryKeys, allow_no_rotation: bool) -> None:
    """Raise `InputError` for a model without rotation."""
    if config.get("alibi"):
        raise InputError("got alibi=true, a model without rotary positions", "locant.encoding_from_config(config)")
    if keys.no_rotation is not None and not allow_no_rotation:
        remedy = PythonRemedy(
            "locant.encoding_from_config(config, allow_no_rotation=True), to compute what its code computes",
            words=f"locant explain {shell_word(config['model_type'])}, which shows what its code computes",
        )
        raise InputError(f"got {config['model_type']}, {keys.no_rotation}", remedy)


def _larger_base(rope: Config, keys: RotaryKeys) -> NTK | None:
    """Return the larger base that HunYuan derives from ``dynamic`` with ``alpha``. It then ignores all other keys."""
    if not keys.ntk_alpha or rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return None
    return NTK(factor=number("alpha", rope["alpha"]), form="aware")


def _temperature(rope: Config, keys: RotaryKeys) -> Temperature | None:
    """Return the temperature of queries. It grows with every trained length that their position has passed."""
    weight = None if keys.temperature_key is None else rope.get(keys.temperature_key)
    if weight is None:
        return None
    return Temperature(step=integer(TRAINED, rope.get(TRAINED)), weight=number(str(keys.temperature_key), weight))


def _rotated_share(config: Config, rope: Config) -> dict[str, Any]:
    """Return the share of rotated pairs, from inside or outside the rope parameters. No other key may state it."""
    key, others = SHARE, [other for other in ("rotary_pct", "rotary_dim") if other in config]
    if others:
        got = f"got {others[0]!r} with rope_type 'proportional', which reads {key}"
        raise InputError(got, f"rename it to {key!r}")
    values = {"in the rope parameters": rope.get(key), "outside them": config.get(key)}
    share = value_at(values, *values)
    return {} if share is None else {key: share}


def _base(config: Config, rope: Config, architecture: Architecture, layer_type: str | None) -> float:
    """Return the base of the frequencies. It has a default only if the modeling code fixes it."""
    keys = architecture.rotary_keys
    bases = {key: config[key] for key in keys.base_keys_of(layer_type) if key in config}
    if rope.get("rope_theta") is not None:
        bases["rope_theta of the rope parameters"] = rope["rope_theta"]
    base = keys.fixed_base if keys.fixed_base is not None else common_value(bases)
    if base is None:
        raise architecture.lacks(
            (keys.base_keys_of(layer_type) or ("rope_theta",))[-1], config, "the base of the frequencies"
        )
    return number("rope_theta", base)


def head_dim_of(config: Config, architecture: Architecture, layer_type: str | None) -> int:
    """Return the width of a head, or of its rotated part in multi-head latent attention."""
    keys = architecture.rotary_keys
    if keys.head_dim_of is not None:
        return keys.head_dim_of(config)
    width = _head_dim_of_layers(config, architecture, layer_type) or config.get(keys.head_dim_key)
    if width is not None:
        return integer(keys.head_dim_key, width)
    if architecture.head_dim_required or value_at(config, *WIDTHS) is None or value_at(config, *HEADS) is None:
        raise architecture.lacks(keys.head_dim_key, config)
    return required(config, *WIDTHS) // required(config, *HEADS) if keys.rounds_down else width_per_head(config)


def rotary_dim_of(config: Config, rope: Config, architecture: Architecture, head_dim: int) -> int:
    """Return the number of rotated dimensions. A share of the head is rounded down, as in `transformers`."""
    keys = architecture.rotary_keys
    names = (keys.share_keys or (SHARE,)) if keys.flat_keys else ()  # a share of 1 is a whole head
    names = [key for key in names if key not in (*keys.other_keys, "rotary_dim")]
    shares = {key: config[key] for key in names if key in config}
    if rope.get(SHARE) is not None and SHARE not in keys.other_keys:
        shares[f"{SHARE} of the rope parameters"] = rope[SHARE]
    share = common_value(shares)
    dims: dict[str, int] = {}
    if share is not None:
        whole = integer("head_dim", config.get("head_dim", head_dim)) if keys.latent else head_dim
        exact = whole * number(next(iter(shares)), share, above=0, high=1)
        dims[f"int({whole} x {short_repr(share)})"] = int(exact)
        dims |= {keys.head_dim_key: head_dim} if keys.latent and keys.share_keys else {}
    if "rotary_dim" in config and "rotary_dim" in keys.share_keys:
        dims["rotary_dim"] = integer("rotary_dim", config["rotary_dim"])
    if not dims and architecture.share_required:
        raise architecture.lacks(keys.share_keys[0], config, "the part of each head that is rotated")
    rotated = common_value(dims) if dims else head_dim
    if rotated != head_dim and not keys.share_keys:
        raise InputError(
            f"got partial_rotary_factor={short_repr(share)} for {config['model_type']}, whose code in transformers "
            "rotates the whole head, or stops, but other programs rotate a part",
            "remove it from the configuration, if the model was trained with whole heads",
        )
    return rotated


def _sections(rope: Config, keys: RotaryKeys) -> tuple[int, ...] | None:
    """Return the number of pairs of each position axis, for models that read images or video."""
    if _has_one_axis(keys):
        return None
    if rope.get("mrope_interleaved"):
        remedy = "remove it from the configuration, if all positions are positions of text"
        raise InputError("got mrope_interleaved, expected a section of pairs for each axis", remedy)
    if rope.get("mrope_section") is None:
        return keys.default_sections
    return sections_in(rope, axes=None if keys.default_sections is None else 3)


def _has_one_axis(keys: RotaryKeys) -> bool:
    """Return whether the architecture is known and has one axis for all pairs. If so, it does not read sections."""
    return keys.layout is not None and keys.default_sections is None and keys.pairs is None


def _choose_layout(config: Config, keys: RotaryKeys, layout: Layout | None) -> Layout:
    """Return `layout`, else the layout that ``rope_interleave`` names, else the layout of the architecture."""
    named = named_layout(config)
    if layout is not None:
        return layout
    if keys.layout and named not in (None, keys.layout) and not keys.interleave_key:
        raise InputError(
            f"got rope_interleave={config['rope_interleave']} for {config['model_type']}, whose layout is always "
            f"{keys.layout!r}",
            f"convert the weights to {keys.layout!r}, and remove rope_interleave",
        )
    chosen = named or keys.layout
    if chosen is None:
        raise InputError(
            f"got model_type={short_repr(config.get('model_type'))}, whose layout is not known",
            "layout='half' or 'interleaved', as its weights were trained with, or locant.register_architecture (see "
            "docs/extending.md)",
        )
    return chosen


def named_layout(config: Config) -> Layout | None:
    """Return the layout that ``rope_interleave`` names, or ``None``."""
    if config.get("rope_interleave") is None:
        return None
    return "interleaved" if flag("rope_interleave", config["rope_interleave"]) else "half"


def _head_dim_of_layers(config: Config, architecture: Architecture, layer_type: str | None) -> Any:
    """Return the width of heads that only layers of this type have (Gemma 4: wider heads in full attention)."""
    key = architecture.rotary_keys.full_head_dim_key
    if key is None:
        return None
    types, layers = layer_types_in(config), per_layer_configs(config)
    if any(place >= len(types) for place in layers):
        got = f"got per_layer_config of layer {max(layers)}, and layer_types of {len(types)} layers"
        raise InputError(got, "write layer_types with the type of each layer")
    widths = {
        f"head_dim of layer {place}": layer["head_dim"]
        for place, layer in layers.items()
        if types[place] == layer_type and layer.get("head_dim") is not None
    }
    if layer_type == "full_attention":
        widths |= {key: config[key]} if key in config else {}
        if not widths:
            raise architecture.lacks(key, config)
    return common_value(widths)
