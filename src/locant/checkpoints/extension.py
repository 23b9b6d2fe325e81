"""Change the configuration of a model with rotary positions for a longer context, and compute the effect.

A scaling keeps the angles within the trained range. It does not guarantee that the model reads the longer context well.
Measure how much is lost, and how much a short training recovers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from locant.arguments import one_of, whole
from locant.checkpoints.config_source import CONFIG, as_json, read_source
from locant.checkpoints.explanation import trained_length
from locant.checkpoints.rotary_settings import RotarySettings, pair_settings, rotary_settings
from locant.errors import InputError, RangeError, Remedy
from locant.files import NewFile
from locant.models.architecture import Architecture, RotaryKeys
from locant.models.config_values import LENGTHS, TRAINED, Config, integer_at, part_key
from locant.models.encodings import layer_types, rotary_from_config, rotary_layer_types
from locant.models.lab_decoder import is_lab_decoder
from locant.models.registry import read_known_config
from locant.models.rope_parameters import WEIGHTS, ropes_by_layer, write_scaling
from locant.models.rotary_config import named_layout
from locant.models.rotary_to_config import with_base
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import EXTENDING, SCALINGS, LongRoPE, Scaling, Unscaled, YaRN


class LongFactors(NamedTuple):
    """The divisors of the pairs' frequencies in LongRoPE, and a sentence about the origin of the divisors."""

    values: tuple[float, ...]
    origin: str


@dataclass(frozen=True, kw_only=True)
class Extension:
    """A complete configuration for longer sequences, and its changes.

    Args:
        changed: the keys that differ, with their old and new values.
        layer_type: the type of the changed layers, if layers differ.
        rotary: the encodings of these layers for the trained length and for the new length.
    """

    method: str
    trained: int
    to: int
    config: dict[str, Any]
    changed: dict[str, tuple[Any, Any]]
    layer_type: str | None
    rotary: tuple[Rotary, Rotary]
    notes: tuple[str, ...]

    @cached_property
    def before(self) -> RotarySettings:
        """The encoding at the trained length, with its precision, which takes some milliseconds to measure."""
        return rotary_settings(self.rotary[0], self.trained, self.trained)

    @cached_property
    def after(self) -> RotarySettings:
        """The encoding at the new length."""
        return rotary_settings(self.rotary[1], self.to, self.trained)

    @cached_property
    def wavelengths(self) -> tuple[list[float | None], list[float | None]]:
        """Positions per full rotation of each pair, before and after. ``None`` means a pair that is not rotated."""
        before, after = ([pair.wavelength for pair in pair_settings(each)] for each in self.rotary)
        return before, after

    @property
    def stretches(self) -> list[float | None]:
        """The factor on each pair's wavelength. ``None`` means a pair that is not rotated."""
        return [new / old if new and old else None for old, new in zip(*self.wavelengths, strict=True)]


METHODS: Mapping[str, str] = {name: SCALINGS[name].info.extends for name in sorted(EXTENDING, key="yarn".__ne__)}
"""The scalings that `locant extend --method` accepts, the usual one first, with a note on each."""


def extend(
    config: Mapping[str, Any] | object, *, to: int, method: str = "yarn", factors: LongFactors | None = None
) -> Extension:
    """Return the configuration of a model for sequences of `to` tokens.

    Args:
        config: a Hugging Face configuration of a model with rotary positions and no scaling. It is not changed.
        to: the new length, which exceeds the trained length.
        method: one of `METHODS`.
        factors: long factors for ``longrope``, instead of the factors of YaRN's ramp.

    Raises:
        InputError: the model cannot be extended by this method.
        RangeError: the method is unknown, or `to` does not exceed the trained length.

    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 10000.0}
    >>> extend({**config, "max_position_embeddings": 4096}, to=16384, method="linear").config["rope_scaling"]
    {'rope_type': 'linear', 'factor': 4.0}
    """
    values, architecture = read_known_config(config)
    _require_method(values, architecture, method)
    layer_type = _layers_to_change(values, architecture)
    layout = named_layout(values)  # converted weights may not have the layout of the architecture
    options: dict[str, Any] = {"layer_type": layer_type, "angles": "exact", "layout": layout, "for_all_layers": False}
    rotary = rotary_from_config(Rotary, values, **options)
    trained = _require_trained_length(values, rotary)
    to = whole("the new length", to, 1, remedy=Remedy(to=4 * trained))
    if to <= trained:
        raise RangeError(f"got {to} tokens for a model of {trained}, expected more", Remedy(to=4 * trained))
    scaling = _scaling(method, rotary, trained, to / trained, architecture.rotary_keys.latent)
    if factors is not None and isinstance(scaling, LongRoPE):
        scaling = replace(scaling, long_factor=factors.values)
    changed = _changed_values(values, architecture, layer_type, rotary, scaling, trained if method == "dynamic" else to)
    after = rotary_from_config(Rotary, {**values, **changed}, **options)
    names = {key: architecture.attribute_map.get(key, key) for key in changed}
    return Extension(
        method=method,
        trained=trained,
        to=to,
        config=_with_values(config, {names[key]: value for key, value in changed.items()}),
        changed={names[key]: (values.get(key), value) for key, value in changed.items() if values.get(key) != value},
        layer_type=layer_type,
        rotary=(rotary.for_length(trained), after.for_length(to)),
        notes=tuple(_notes(values, architecture, layer_type, METHODS[method] if factors is None else factors.origin)),
    )


def extension_path(source: str, *, to: int, method: str = "yarn", output: Path | None = None) -> Path:
    """Return the path of the extended configuration: `output`, or ``NAME-METHOD-TOKENS.json`` in the current folder."""
    name = Path(source).name.removesuffix(".json") or "config"
    path = Path(f"{name}-{method}-{to}.json") if output is None else output
    here = Path(source) / CONFIG if Path(source).is_dir() else Path(source)
    if path.exists() and here.exists() and path.samefile(here):
        got = f"got {path} as the file to write, which is the configuration itself"
        raise InputError(got, Remedy(output="another-name.json"))
    return path


def write_extension(
    source: str,
    *,
    to: int,
    method: str = "yarn",
    output: Path | None = None,
    factors: LongFactors | None = None,
    write_related: Callable[[Extension], None] = lambda extension: None,
) -> tuple[Extension, Path]:
    """Extend the configuration at `source`, and write it to `extension_path`.

    `write_related` writes related files, such as a picture. If it fails, the configuration is not written either.
    """
    path = extension_path(source, to=to, method=method, output=output)
    extension = extend(read_source(source), to=to, method=method, factors=factors)
    with NewFile(path) as file:
        file.write(as_json(extension.config).encode())
        file.fsync()
        write_related(extension)
        file.publish()
    return extension, path


def _require_method(config: Config, architecture: Architecture, method: str) -> None:
    one_of("method", method, METHODS)
    name = config["model_type"]
    if is_lab_decoder(config):
        got = "got a model of locant train, which no other program reads, so its configuration cannot be extended"
        raise InputError(got, "measure a scaling with locant evaluate MODEL --with own,yarn:4")
    if architecture.rotary is None or not rotary_layer_types(config):
        got = f"got a {name} without rotary layers, but a scaling extends only rotary positions"
        raise InputError(got, "use a model with rotary positions, such as llama-3.1-8b")
    if architecture.rotary.fixed_base is not None:
        got = f"got a {name}, whose code has no scaling and a fixed base"
        raise InputError(got, "use a model whose configuration has rope_theta")
    if method not in (architecture.extend_methods or METHODS):
        got = f"got method {method!r}, but {name} accepts only {' or '.join(architecture.extend_methods or ())}"
        raise InputError(got, Remedy(method=(architecture.extend_methods or ("",))[-1]))


def _layers_to_change(config: Config, architecture: Architecture) -> str | None:
    """Return the type of the layers to change, or None for all layers.

    With sliding windows of fixed width, only layers with full attention reach longer distances.
    """
    kinds, rotary = layer_types(config), rotary_layer_types(config)
    if rotary == ("sliding_attention",):
        got = f"got a {config['model_type']}, whose rotary layers attend only to a window"
        raise InputError(got, "keep the configuration: its full-attention layers have no positions to scale")
    if architecture.layer_types is not None or not kinds:
        return None
    if "full_attention" not in kinds:
        got = f"got layers of types {', '.join(kinds)}, expected full_attention among them"
        raise InputError(got, "add rope parameters of 'full_attention'")
    return "full_attention"


def _require_trained_length(config: Config, rotary: Rotary) -> int:
    if not isinstance(rotary.scaling, Unscaled):
        name = type(rotary.scaling).__name__
        raise InputError(f"got a configuration that already has {name} scaling", "use it without its scaling")
    trained = trained_length(config, rotary)
    if trained is None:
        got = "got a configuration without max_position_embeddings"
        raise InputError(got, "add 'max_position_embeddings': the trained length")
    return trained


def _scaling(method: str, rotary: Rotary, trained: int, factor: float, latent: bool) -> Scaling:
    """Return the scaling with rounded factors, and with DeepSeek's weights (mscale) if attention is latent."""
    scaling = SCALINGS[method].by_factor(factor, trained, rotary.rotary_dim, rotary.base)
    if isinstance(scaling, LongRoPE):
        return replace(scaling, long_factor=tuple(round(each, 6) for each in scaling.long_factor))
    return replace(scaling, mscale=1.0, mscale_all_dim=1.0) if isinstance(scaling, YaRN) and latent else scaling


def _changed_values(
    config: Config, architecture: Architecture, layer_type: str | None, rotary: Rotary, scaling: Scaling, longest: int
) -> dict[str, Any]:
    """Return the new values of the keys that change, in the form of the configuration."""
    scaling, base = with_base(scaling, rotary)
    keys = architecture.rotary_keys
    written = write_scaling(scaling)
    if isinstance(scaling, LongRoPE) and keys.weighted_longrope:
        written |= dict.fromkeys(WEIGHTS, scaling.effective_attention_factor)
    lengths = {key: longest for key in LENGTHS if key in config}
    if isinstance(scaling, LongRoPE) and (TRAINED in config or architecture.extend_methods):
        lengths[TRAINED] = scaling.original_max_seq_len  # it overrides the default in the classes of Phi
    rope: Any = config.get("rope_parameters")
    if rope is None and _reaches_other_layers(keys, layer_type, written, base != rotary.base):
        rope = ropes_by_layer(config, keys)  # the older form cannot express it
        lengths |= {"rope_scaling": None} if "rope_scaling" in config else {}
    if rope is None:
        return {**_write_older_form(config, keys, written, base, layer_type), **lengths}
    inner: Mapping[str, Any] = rope if layer_type is None else rope[layer_type]
    new = {**{key: value for key, value in inner.items() if key not in ("type", "rope_type")}, **written}
    new["rope_theta"] = base
    bases = {key: base for key in keys.base_keys_of(layer_type) if key in config}
    return {"rope_parameters": new if layer_type is None else {**rope, layer_type: new}, **bases, **lengths}


def _reaches_other_layers(
    keys: RotaryKeys, layer_type: str | None, written: Mapping[str, Any], other_base: bool
) -> bool:
    """Return whether a ``rope_scaling`` would act on layers that must not change.

    Raise `InputError` if the method changes a base that all layers share.
    """
    others = [kind for name, kind in keys.layer_kinds.items() if name != layer_type]
    if other_base and any(kind.base_key in keys.base_keys_of(layer_type) for kind in others):
        got = "got a configuration with one base for all layers, and a method that changes it only for some"
        raise InputError(got, "use another method, or rope_parameters with a dictionary per layer type")
    return written != {"rope_type": "default"} and any(kind.scaled for kind in others)


def _write_older_form(
    config: Config, keys: RotaryKeys, written: Mapping[str, Any], base: float, layer_type: str | None
) -> dict[str, Any]:
    """Return `rope_scaling` and the base, or only the base if there is no scaling."""
    replaced = ("type", "rope_type", "rope_theta")
    others = {key: value for key, value in config.get("rope_scaling", {}).items() if key not in replaced}
    key = next((key for key in keys.base_keys_of(layer_type) if key in config), keys.base_key)
    changes: dict[str, Any] = {key: base} if config.get(key) != base else {}
    if written == {"rope_type": "default"} and not others:
        return changes
    return {"rope_scaling": {**written, **others}, **changes}


def _with_values(config: Mapping[str, Any] | object, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the whole configuration with these new values, in its text part if it has one."""
    to_dict = getattr(config, "to_dict", None)
    whole: Any = copy.deepcopy(to_dict() if callable(to_dict) else config)
    whole = inner = {**whole}
    while (key := part_key(inner)) is not None:
        inner = inner[key]
    inner.update(changed)
    return whole


def _notes(config: Config, architecture: Architecture, layer_type: str | None, method_note: str) -> Iterator[str]:
    yield method_note
    window = integer_at(config, "sliding_window", low=0)
    if layer_type is not None:
        yield f"only {layer_type} layers change, because the others attend only to their window"
    elif window is not None:
        yield f"sliding_window is {window:,}: layers with a window attend to no more tokens at any position"
    if architecture.rotary_keys.latent:
        yield "mscale and mscale_all_dim are set as in DeepSeek: the temperature acts on all scores"
