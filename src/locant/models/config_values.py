"""Values of a configuration, read by key and checked. A wrong value raises an `InputError` that names its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from locant import arguments
from locant.arguments import Real, short_repr
from locant.errors import InputError, LocantError
from locant.models.parts import PART_WITHOUT_TEXT, PARTS, TYPE_OF_PART

T = TypeVar("T")
Config = Mapping[str, Any]

WIDTHS = ("hidden_size", "n_embd", "d_model", "n_embed")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
TRAINED = "original_max_position_embeddings"


NULLS = ("sliding_window", "position_embeddings_type")
"""Keys for which null is a value. It means no window or no positions, even if the class has another default."""


def part_key(config: Config) -> str | None:
    """Return the key of the part to read in a configuration of several models, or ``None`` if it describes one model.

    >>> part_key({"model_type": "vision-encoder-decoder", "encoder": {}, "decoder": {}})
    'decoder'
    """
    model_type = config.get("model_type")
    for key in (*PARTS, PART_WITHOUT_TEXT.get(model_type) if isinstance(model_type, str) else None):
        if key is not None and config.get(key) is not None:
            return key
    return None


def config_dict(config: Config | object) -> dict[str, Any]:
    """Return a configuration, or its text part, as a dictionary without nulls that mean absence."""
    to_dict = getattr(config, "to_dict", None)
    values: Any = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping):
        got = f"got {type(config).__name__}, expected a Hugging Face configuration or a dictionary"
        from_file = "json.loads(Path('config.json').read_text())"
        by_name = f"transformers.AutoConfig.from_pretrained({config!r}), or " if isinstance(config, str) else ""
        raise InputError(got, f"{by_name}{from_file}")
    if values is not config and (types := getattr(config, "layer_types", None)):  # a property in some classes
        values = {**values, "layer_types": [*types]}
    key = part_key(values)
    if key is not None:
        return part_of(values, values[key], values.get(f"{key}_dict"))
    return {key: value for key, value in values.items() if value is not None or key in NULLS}


def attribute(config: object, name: str, layer: int | None = None) -> Any:
    """Return an attribute of a configuration object, or ``None`` if it does not exist.

    Args:
        layer: the layer whose value is returned, if layers may have different values.

    Raises:
        InputError: the layers have different values, and `layer` is ``None`` (Gemma 4 from transformers 5.24 on).
    """
    if layer is not None and getattr(config, "is_heterogeneous", False):
        config = cast(Any, config).per_layer_config[layer]
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # transformers raises it for a value that differs between layers
        got = f"got {type(config).__name__}, whose layers differ in {name}"
        raise InputError(got, f"use a model whose layers have the same {name}") from error


def part_of(whole: Config, part: Config | object, others: Config | None = None) -> dict[str, Any]:
    """Return the configuration of a part. If it lacks a ``model_type``, add the one that the whole model implies.

    `others` are keys outside the part in older files of CLIP and similar models. They take precedence.
    """
    if not isinstance(part, Mapping):
        return config_dict(part)
    model_type = whole.get("model_type")
    name = TYPE_OF_PART.get(model_type) if isinstance(model_type, str) else None
    implied = {} if name is None or part.get("model_type") is not None else {"model_type": name}
    return config_dict({**part, **(others or {}), **implied})


def value_at(config: Config, *keys: str) -> Any:
    """Return the value under any of these synonyms, or ``None``. Raise `InputError` if two of them differ."""
    return common_value({key: config[key] for key in keys if config.get(key) is not None})


def common_value(values: Mapping[str, Any]) -> Any:
    """Return the one value that all of these keys have, or ``None`` if there are no keys."""
    first = next(iter(values.values()), None)
    if any(value is not first and value != first for value in values.values()):  # NaN differs from itself
        got = " and ".join(f"{key}={short_repr(value)}" for key, value in values.items())
        raise InputError(f"got {got}, expected one value", f"remove {next(iter(values))} from the configuration")
    return first


def integer_at(config: Config, *keys: str, low: int = 1) -> int | None:
    """Return the integer under any of these synonyms, or ``None``."""
    value = value_at(config, *keys)
    return None if value is None else integer(next(key for key in keys if config.get(key) is not None), value, low)


def required(config: Config, *keys: str, low: int = 1) -> int:
    """Return the integer under one of these synonyms. Raise `InputError` if there is none.

    >>> required({"n_head": 12}, "num_attention_heads", "n_head")
    12
    """
    value = integer_at(config, *keys, low=low)
    if value is None:
        raise missing_key_error(config, keys[0], f"add {keys[0]!r}, as the model has it")
    return value


def required_value(config: Config, key: str, remedy: str) -> Any:
    """Return the value under this key. Raise `InputError` if it is missing."""
    if key not in config:
        raise missing_key_error(config, key, remedy)
    return config[key]


def required_name(config: Config, key: str, names: Sequence[str], default: str | None = None, remedy: str = "") -> str:
    """Return the name under this key. Raise `InputError` unless it is one of `names`."""
    name = config.get(key, default)
    if not isinstance(name, str) or name not in names:
        expected = " or ".join(map(repr, names))
        got = f"got {key}={short_repr(name)} for {config.get('model_type')}, expected {expected}"
        raise InputError(got, remedy or f"{key!r}: {names[0]!r}")
    return name


def missing_key_error(config: Config, key: str, remedy: str) -> InputError:
    """Return the error for a configuration without this key."""
    return InputError(f"got a {config.get('model_type', '')} configuration without {key}".replace("  ", " "), remedy)


def width_per_head(config: Config) -> int:
    """Return the width of a model divided by its number of heads."""
    width, heads = required(config, *WIDTHS), required(config, *HEADS)
    if width % heads:
        raise InputError(
            f"got hidden_size={width} for {heads} heads, expected a multiple", "use the sizes of the model"
        )
    return width // heads


def patches(config: Config) -> tuple[int, int]:
    """Return how many patches an image has, down and across."""
    both = (config.get("image_size"), config.get("patch_size"))
    (height, width), (patch_height, patch_width) = (
        one if isinstance(one, (list, tuple)) and len(one) == 2 else (one, one) for one in both
    )
    sizes = {"image_size": (height, width), "patch_size": (patch_height, patch_width)}
    for key, (down, across) in sizes.items():
        if down is None or across is None:
            raise InputError(f"got {key}={short_repr(config.get(key))}, expected a size in pixels", f"{key!r}: 224")
    return (
        integer("image_size", height) // integer("patch_size", patch_height),
        integer("image_size", width) // integer("patch_size", patch_width),
    )


def sections_in(rope: Config, default: Sequence[int] = (16, 24, 24), axes: int | None = 3) -> tuple[int, ...]:
    """Return the number of pairs of each axis in ``mrope_section``, or the default of the modeling code."""
    sections = rope.get("mrope_section", default)
    if not isinstance(sections, (list, tuple)) or axes not in (None, len(sections)):
        got = f"got mrope_section={short_repr(sections)}, expected a list of pairs for each of time, height, width"
        raise InputError(got, f"{list(default)}")
    return tuple(integer("mrope_section", section, 0) for section in sections)


def flag(key: str, value: object) -> bool:
    """Return `value` if it is true or false. The text "false" is neither."""
    return _run_check(lambda: arguments.flag(key, value), f"{key!r}: true or false")


def flag_at(config: Config, key: str, *, default: bool = False) -> bool:
    """Return whether the value under this key is true."""
    return flag(key, config.get(key, default))


def number(key: str, value: object, **ends: Real) -> float:
    """Return `value` if it is a finite number within these bounds. See `arguments.real`."""
    return float(_run_check(lambda: arguments.real(key, value, **ends, remedy=""), f"{key!r}: a number"))


def integer(key: str, value: object, low: int = 1) -> int:
    """Return `value` if it is an integer of at least `low` that fits into 31 bits. 4096.0 counts as an integer."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return _run_check(lambda: arguments.whole(key, whole, low, remedy=""), f"{key!r}: an integer")


def layer_types_in(config: Config) -> tuple[str, ...]:
    """Return the type of each layer, or an empty tuple if a configuration does not list the types."""
    types = config.get("layer_types", ())
    if not isinstance(types, (list, tuple)) or not all(isinstance(one, str) for one in types):
        raise InputError(f"got layer_types={short_repr(types)}, expected a list of names", "['full_attention', ...]")
    return tuple(types)


def per_layer_configs(config: Config) -> dict[int, Config]:
    """Return the entries of ``per_layer_config`` by the number of their layer."""
    layers = config.get("per_layer_config", {})
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise InputError(f"got per_layer_config={short_repr(layers)}, expected a dictionary per layer", "{'5': {...}}")
    numbers = [str(place) for place in layers]
    if not all(place.isdecimal() and len(place) < 10 for place in numbers):
        raise InputError(f"got per_layer_config of layers {short_repr(numbers)}, expected numbers", "{'5': {...}}")
    return {int(place): layer for place, layer in zip(numbers, layers.values(), strict=True)}


def _run_check(check: Callable[[], T], remedy: str) -> T:
    """Return the result of a check of arguments, and raise its error as an `InputError`."""
    try:
        return check()
    except LocantError as error:
        raise InputError(error.cause, remedy) from None
