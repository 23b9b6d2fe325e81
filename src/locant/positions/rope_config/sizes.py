"""The numbers of a configuration outside its dictionary of rope parameters: base, sizes, sections, layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locant.arguments import shown
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.positions.rope_config.dialects import DIALECTS, Dialect
from locant.positions.rope_config.types import Lengths, integer, number

__all__ = [
    "HEADS", "LENGTHS", "TRAINED", "WIDTHS", "Config", "base_of", "head_dim_of", "integer_of", "layer_types_in",
    "layout_of", "lengths_of", "named_layout", "one_of", "own_of_layers", "rotary_dim_of", "sections_of",
]  # fmt: skip

Config = Mapping[str, Any]

WIDTHS = ("hidden_size", "n_embd", "d_model", "n_embed")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
TRAINED = "original_max_position_embeddings"
AXES = ("time", "height", "width")
"""Of positions in images and video."""


def one_of(config: Config, *keys: str) -> Any:
    """The value of whichever of these synonyms is there, or ``None``; two that differ raise."""
    return _agreed({key: config[key] for key in keys if config.get(key) is not None})


def integer_of(config: Config, *keys: str, low: int = 1) -> int | None:
    """The integer under whichever of these synonyms is there, or ``None``."""
    value = one_of(config, *keys)
    return None if value is None else integer(next(key for key in keys if config.get(key) is not None), value, low)


def lengths_of(config: Config) -> Lengths:
    """The longest sequence, and the trained one where it is said apart."""
    return Lengths(longest=integer_of(config, *LENGTHS), trained=integer_of(config, TRAINED))


def base_of(config: Config, rope: Config, dialect: Dialect, layer_type: str | None) -> float:
    """The base of the frequencies, which has no default but where the modeling code knows no other."""
    said = {key: config[key] for key in dialect.base_keys_of(layer_type) if key in config}
    if rope.get("rope_theta") is not None:
        said["rope_theta of the rope parameters"] = rope["rope_theta"]
    base = dialect.fixed_base if dialect.fixed_base is not None else _agreed(said)
    if base is None:
        raise InputError(
            f"got a configuration without {dialect.base_keys_of(layer_type)[-1]}, the base of the frequencies",
            "the base that the model was trained with, or a configuration object, which knows its class's default",
        )
    return number("rope_theta", base)


def head_dim_of(config: Config, dialect: Dialect, layer_type: str | None) -> int:
    """The width of a head, or of that part of it that is turned in multi-head latent attention."""
    stated = _head_dim_of_layers(config, dialect, layer_type) or config.get(dialect.head_dim_key)
    if stated is not None:
        return integer(dialect.head_dim_key, stated)
    width, heads = integer_of(config, *WIDTHS), integer_of(config, *HEADS)
    derived = dialect.head_dim_key == "head_dim" and not dialect.head_dim_required
    if not derived or width is None or heads is None:
        what = f"a {config['model_type']} configuration" if dialect.head_dim_required else "a configuration"
        or_else = ", or hidden_size and num_attention_heads" if derived else ", as the model was trained with it"
        raise InputError(f"got {what} without {dialect.head_dim_key}", f"'{dialect.head_dim_key}': ...{or_else}")
    if width % heads:
        raise InputError(f"got hidden_size={width} for {heads} heads, expected a multiple", "head_dim, which is clear")
    return width // heads


def rotary_dim_of(config: Config, rope: Config, dialect: Dialect, head_dim: int) -> int:
    """How many dimensions are turned; a share of the head is rounded down, as the reference does."""
    keys = dict.fromkeys(("partial_rotary_factor", *dialect.share_keys))
    said = {key: config[key] for key in keys if key in config and key != "rotary_dim"}
    if rope.get("partial_rotary_factor") is not None:
        said["partial_rotary_factor of the rope parameters"] = rope["partial_rotary_factor"]
    share = _agreed(said)
    dims = (
        {} if share is None else {f"int({head_dim} x {shown(share)})": _share_of(head_dim, *next(iter(said.items())))}
    )
    if "rotary_dim" in config and "rotary_dim" in dialect.share_keys:
        dims["rotary_dim"] = integer("rotary_dim", config["rotary_dim"])
    if not dims and dialect.share_required:
        raise InputError(
            f"got a {config['model_type']} configuration without {' or '.join(dialect.share_keys)}, though it turns a "
            "part of each head",
            f"{dialect.share_keys[0]!r}, as the model was trained with",
        )
    turned = _agreed(dims) if dims else head_dim
    if turned != head_dim and not dialect.share_keys:
        raise InputError(
            f"got partial_rotary_factor={shown(share)} for {config['model_type']}, whose code in transformers turns "
            "the whole head, or stops, where other programs turn a part",
            "the configuration without it, if the model was trained that way",
        )
    return turned


def _share_of(head_dim: int, key: str, share: Any) -> int:
    share = number(key, share)
    if not 0 < share <= 1:
        raise InputError(
            f"got {key}={share:g}, expected a number above 0 and of at most 1", "0.5 for half of each head"
        )
    return int(head_dim * share)


def sections_of(config: Config, rope: Config, dialect: Dialect) -> tuple[int, ...] | None:
    """Pairs per position axis, for models that read images or video."""
    sections = rope.get("mrope_section")
    if rope.get("mrope_interleaved"):
        raise InputError("got mrope_interleaved, expected a section of pairs for each axis", "a model without it")
    if sections is None:
        if dialect.sections_required:
            raise InputError(f"got a {config['model_type']} configuration without mrope_section", "'mrope_section'")
        return None
    if dialect.layout is not None and not dialect.sections_required and not dialect.refused_sections:
        raise InputError(f"got mrope_section, of which {config['model_type']} reads nothing", "a configuration without")
    if dialect.refused_sections:
        raise InputError(f"got mrope_section of {config['model_type']}: {dialect.refused_sections}", "another model")
    if not isinstance(sections, Sequence) or isinstance(sections, str):
        raise InputError(
            f"got mrope_section={shown(sections)}, expected a list", "pairs per axis, such as [16, 24, 24]"
        )
    if dialect.sections_required and len(sections) != len(AXES):
        raise InputError(
            f"got mrope_section={shown(sections)}, expected one each for {', '.join(AXES)}", "[16, 24, 24]"
        )
    return tuple(0 if section == 0 else integer("mrope_section", section) for section in sections)


def layout_of(config: Config, dialect: Dialect, layout: Layout | None) -> Layout:
    """Which dimensions form a pair: what was asked for, what the configuration says, or what the architecture does."""
    named = named_layout(config)
    if layout is not None:
        return layout
    if dialect.layout is None:
        if named is None:
            raise InputError(
                f"got model_type={shown(config.get('model_type'))}, whose layout is not known; known are "
                + ", ".join(sorted(DIALECTS)),
                "layout='half' or 'interleaved', as its weights were trained with",
            )
        return named
    if named not in (None, dialect.layout) and not dialect.interleave_key:
        raise InputError(
            f"got rope_interleave={config['rope_interleave']} for {config['model_type']}, whose layout is "
            f"{dialect.layout!r} whatever is said",
            f"weights converted to {dialect.layout!r}, and no rope_interleave",
        )
    return named or dialect.layout


def named_layout(config: Config) -> Layout | None:
    """What ``rope_interleave`` says."""
    said = config.get("rope_interleave")
    if said is None:
        return None
    if not isinstance(said, bool):
        raise InputError(f"got rope_interleave={shown(said)}, expected true or false", "a boolean")
    return "interleaved" if said else "half"


def layer_types_in(config: Config) -> tuple[str, ...]:
    """The type of each layer, where a configuration lists them."""
    types = config.get("layer_types", ())
    if not isinstance(types, (list, tuple)) or not all(isinstance(one, str) for one in types):
        raise InputError(f"got layer_types={shown(types)}, expected a list of names", "['full_attention', ...]")
    return tuple(types)


def own_of_layers(config: Config) -> dict[int, Config]:
    """What single layers have of their own, by their number."""
    layers = config.get("per_layer_config", {})
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise InputError(f"got per_layer_config={shown(layers)}, expected a dictionary per layer", "{'5': {...}}")
    numbers = [str(place) for place in layers]
    if not all(place.isdecimal() and len(place) < 10 for place in numbers):
        raise InputError(f"got per_layer_config of layers {shown(numbers)}, expected numbers", "{'5': {...}}")
    return {int(place): layer for place, layer in zip(numbers, layers.values(), strict=True)}


def _head_dim_of_layers(config: Config, dialect: Dialect, layer_type: str | None) -> Any:
    """What layers of this type have of their own (Gemma 4: wider heads where attention is full)."""
    if dialect.full_head_dim_key is None:
        return None
    types, layers = layer_types_in(config), own_of_layers(config)
    if any(place >= len(types) for place in layers):
        raise InputError(
            f"got per_layer_config of layer {max(layers)}, and layer_types of {len(types)} layers", "the type of each"
        )
    widths = {
        f"head_dim of layer {place}": layer["head_dim"]
        for place, layer in layers.items()
        if types[place] == layer_type and layer.get("head_dim") is not None
    }
    if layer_type == "full_attention" and dialect.full_head_dim_key in config:
        widths[dialect.full_head_dim_key] = config[dialect.full_head_dim_key]
    if layer_type == "full_attention" and not widths:
        raise InputError(
            f"got a configuration without {dialect.full_head_dim_key}",
            f"{dialect.full_head_dim_key!r}, or per_layer_config",
        )
    return _agreed(widths)


def _agreed(said: Mapping[str, Any]) -> Any:
    """The one value that all of these say; ``None`` where nothing is said."""
    values = list(said.values())
    if any(value is not values[0] and value != values[0] for value in values):  # NaN differs from itself
        got = " and ".join(f"{key}={shown(value)}" for key, value in said.items())
        raise InputError(f"got {got}, expected one value", "a configuration that says it once")
    return values[0] if values else None
