"""Architectures by the ``model_type`` of their configurations: the families of this package, and registered ones."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError, RangeError
from locant.models import (
    additive_positions,
    audio,
    deepseek,
    gpt,
    image_tables,
    lab_decoder,
    learned_tables,
    llama,
    mixed_layers,
    multimodal,
    relative_biases,
    remote_code,
    sinusoids,
    vision,
    without_positions,
)
from locant.models.architecture import UNKNOWN, Architecture
from locant.models.class_sizes import CLASS_SIZES
from locant.models.config_values import HEADS, LENGTHS, WIDTHS, Config, config_dict, part_key, per_layer_configs
from locant.models.parts import TYPE_OF_PART
from locant.registry import Registry

TABLES = (learned_tables, sinusoids, relative_biases, without_positions)
FAMILIES = (
    llama,
    mixed_layers,
    deepseek,
    gpt,
    additive_positions,
    *TABLES,
    audio,
    vision,
    image_tables,
    multimodal,
    remote_code,
)


def _require_architecture(name: str, architecture: Architecture) -> None:
    if not isinstance(architecture, Architecture):
        got = f"got {short_repr(architecture)} for {name}, expected a locant.models.Architecture"
        raise RangeError(got, "Architecture(rotary=RotaryKeys(...))")
    if architecture.rotary is not None and architecture.rotary.layout is None:
        raise RangeError(f"got layout=None for {name}", "layout='half' or 'interleaved'")


def _register_families(registry: Registry[Architecture]) -> None:
    for family in FAMILIES:
        for name, architecture in family.ARCHITECTURES.items():
            registry.register(name, architecture)


ARCHITECTURES = Registry[Architecture](
    "architecture", "locant.architectures", _require_architecture, _register_families
)


def register_architecture(name: str, architecture: Architecture, aliases: Iterable[str] = ()) -> None:
    """Register an architecture, so that this package reads configurations with its ``model_type``.

    `Rotary.from_config`, `encoding_from_config`, `convert_layout`, ``locant explain`` and ``locant extend`` then
    support it like the built-in ones. An installed package can also register architectures without being imported:
    through entry points in the group ``locant.architectures``, each with a name and an `Architecture`.

    Args:
        name: the ``model_type`` of its configurations.
        architecture: the row that describes how to read them. See `locant.models.Architecture`.
        aliases: other values of ``model_type`` for the same architecture.

    Raises:
        RangeError: the name is taken, or the architecture has no layout.

    >>> from locant import Rotary
    >>> from locant.models import Architecture, RotaryKeys
    >>> keys = RotaryKeys(layout="interleaved", base_key="rotary_base")
    >>> register_architecture("our_model", Architecture(rotary=keys, attribute_map={"num_attention_heads": "n_attn"}))
    >>> Rotary.from_config({"model_type": "our_model", "hidden_size": 256, "n_attn": 4, "rotary_base": 5e5})
    Rotary(head_dim=64, base=500000, layout='interleaved', angles='exact')
    """
    ARCHITECTURES.register(name, architecture, aliases)


def read_config(config: Config | object) -> tuple[dict[str, Any], Architecture]:
    """Return a configuration as a dictionary with standard keys, and its row. An unknown architecture has no layout."""
    values = config_dict(config)
    name = values.get("model_type") or ("" if isinstance(config, Mapping) else type(config).__name__)
    if not isinstance(name, str):
        raise InputError(f"got model_type={short_repr(name)}, expected a name", "'model_type': 'llama'")
    architecture = _row(name)
    if architecture.rotary is UNKNOWN and (part := flat_part(values)) is not None:
        values, architecture = {**values, "model_type": part}, _row(part)
    standard = {name: key for key, name in architecture.attribute_map.items()}
    values, respell = {standard.get(key, key): value for key, value in values.items()}, architecture.rotary_keys.respell
    return (values if respell is None else dict(respell(values))), architecture


def _row(name: str) -> Architecture:
    if name == lab_decoder.MODEL_TYPE:  # not a published model, so it is not in the list
        return lab_decoder.ROW
    try:
        return ARCHITECTURES.find(name)
    except RangeError:
        return Architecture(rotary=UNKNOWN)


def flat_part(config: Config) -> str | None:
    """Return the model type of the text part if a composite configuration has the keys of this part at its top level.

    The first published files of PaddleOCR-VL, GOT-OCR2 and Step-3.7 have this form. Return ``None`` if the
    configuration has parts, or belongs to a single model.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or part_key(config) is not None or _row(name).rotary is not UNKNOWN:
        return None
    return TYPE_OF_PART.get(name) if any(config.get(key) is not None for key in WIDTHS) else None


def read_known_config(config: Config | object) -> tuple[dict[str, Any], Architecture]:
    """Call `read_config`, and raise an error with known names if the ``model_type`` is unknown."""
    values, architecture = read_config(config)
    if architecture.rotary is UNKNOWN:
        name, names = str(values.get("model_type", "")), sorted(each for each, _ in ARCHITECTURES.items())
        near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.5)) or "llama, qwen3, gemma3_text"
        got = f"got model_type={short_repr(name)}" if name else "got a configuration without model_type"
        raise InputError(
            f"{got}, expected one of {len(names)} known architectures, such as {near}",
            "call locant.register_architecture (see docs/extending.md), or Rotary.from_config(config, layout=...) if "
            "it has rotary positions",
        )
    return values, architecture


def with_defaults(config: Config | object) -> dict[str, Any]:
    """Return a configuration whose missing keys have the defaults of `transformers`, if the row of its model has them.

    `Rotary.from_config` and `encoding_from_config` use the defaults that they need, and warn. ``locant explain`` uses
    all of them, and prints their values. Sizes of the model are not filled in.

    >>> with_defaults({"model_type": "gpt_neox", "max_position_embeddings": 4096})
    {'model_type': 'gpt_neox', 'max_position_embeddings': 4096, 'rotary_emb_base': 10000.0, 'rotary_pct': 0.25}
    """
    values, architecture = read_config(config)
    missing = {key: value for key, value in architecture.defaults.items() if not _is_stated(key, values, architecture)}
    return {**values, **missing}


def class_sizes(config: Config | object) -> dict[str, int]:
    """Return the default width and number of heads of the class in `transformers`, if a configuration lacks them."""
    values, _ = read_config(config)
    synonyms = {"hidden_size": WIDTHS, "num_attention_heads": HEADS}
    sizes = CLASS_SIZES.get(name, {}) if isinstance(name := values.get("model_type"), str) else {}
    return {key: size for key, size in sizes.items() if not any(name in values for name in synonyms[key])}


def _is_stated(key: str, config: Config, architecture: Architecture) -> bool:
    """Return whether a configuration has a key under any of its names, in or outside its rope parameters."""
    keys = architecture.rotary_keys
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    names = {name for one in inner if isinstance(one, Mapping) for name in one}
    if key == "rope_parameters":  # a class with default rope parameters ignores the keys outside them
        return bool(rope) or any(kind.base_key in config for kind in keys.layer_kinds.values())
    if key in keys.base_keys:
        return key in config or "rope_theta" in names
    if key == keys.full_head_dim_key:
        widths = (layer.get("head_dim") for layer in per_layer_configs(config).values())
        return key in config or any(width is not None for width in widths)
    if key in keys.share_keys:
        return any(name in config for name in keys.share_keys) or "partial_rotary_factor" in names
    return any(name in config for name in (LENGTHS if key in LENGTHS else (key,)))


def presets() -> dict[str, dict[str, Any]]:
    """Return configurations of published models by name, with only the keys that matter here."""
    return {
        name: {"model_type": model_type, **copy.deepcopy(dict(config))}
        for model_type, architecture in ARCHITECTURES.items()
        for name, config in architecture.presets.items()
    }
