"""Model: what a configuration means for positions, layer by layer, and what changes for a longer context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from locant.checkpoints.explanation import Explanation, explain, layer_strip
from locant.checkpoints.extension import METHODS, Extension, extend
from locant.errors import LocantError
from locant.explore.screens import Screen
from locant.explore.session import Session
from locant.explore.state import SCALING_TITLES, State
from locant.models.registry import presets
from locant.report.explain import layers_rows, summary_rows, swapped_layers

__all__ = ["SCREEN"]

STRETCH = 4
LONGEST = 2**30


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """What `locant explain` tells of a model, its layers in order, and what `locant extend` would change."""
    name, told, config = session.chosen_model(state)
    text = json.dumps(config)
    explanation = _explained(text)
    rotary = next((layers.rotary for layers in explanation.layers if layers.rotary is not None), None)
    trained = explanation.trained or explanation.longest or 4096
    to = state.whole("to", STRETCH * trained, 1, LONGEST, log=True)
    method = state.one_of("method", "yarn", list(METHODS), SCALING_TITLES)
    pairs = 0 if rotary is None else len(rotary.pairs)
    extension, refused = _extended(text, to, method) if rotary else (None, "no layer has rotary positions to stretch")
    return {
        "model": told,
        "model_type": explanation.model_type,
        "pair": state.whole("pair", pairs // 2, 0, max(pairs - 1, 0), follows=True),
        "facts": _rows(summary_rows(explanation, told)),
        "kinds": [*map(_kind, explanation.layers), *map(_swapped_kind, swapped_layers(explanation))],
        "layers": _layers(config, explanation),
        "wavelengths": [_wavelengths(layers) for layers in explanation.layers if layers.rotary is not None],
        "extension": None if extension is None else _extension(extension, session),
        "refused": refused,
        "python": _code("config.json" if name in session.configs or name not in presets() else name, to, method),
    }


@lru_cache(maxsize=32)
def _explained(text: str) -> Explanation:
    return explain(json.loads(text))


@lru_cache(maxsize=64)
def _extended(text: str, to: int, method: str) -> tuple[Extension | None, str]:
    """Or why it cannot be: most configurations that were stretched already."""
    try:
        return extend(json.loads(text), to=to, method=method), ""
    except LocantError as error:
        return None, error.cause


def _rows(named: Any) -> list[list[Any]]:
    return [[name, list(values)] for name, values in named if values]


def _kind(layers: Any) -> Mapping[str, Any]:
    rotary = layers.rotary
    return {
        "name": layers.name,
        "kind": "NoPE" if layers.kind == "none" else layers.kind,
        "doors": list(layers.doors),
        "base": None if rotary is None else rotary.base,
        "facts": _rows(row for row in layers_rows(layers) if row[0] != "beware"),
        "warnings": list(layers.warnings),
    }


def _swapped_kind(encoding: str) -> Mapping[str, Any]:
    facts = [["swapped", ["in the place of the encoding that the model had"]]]
    return {"name": None, "kind": encoding, "doors": [], "base": None, "facts": facts, "warnings": []}


def _layers(config: Mapping[str, Any], explanation: Explanation) -> list[Mapping[str, Any]]:
    """Of every layer, the number of its kind, those of `Explanation.layers` first, and its window."""
    numbers = {layers.name: number for number, layers in enumerate(explanation.layers)}
    placed = enumerate(swapped_layers(explanation).values(), len(numbers))
    swapped = {place: kind for kind, places in placed for place in places}
    return [
        {"kind": swapped.get(at, numbers[layer.kind]), "window": layer.window}
        for at, layer in enumerate(layer_strip(config))
    ]


def _wavelengths(layers: Any) -> Mapping[str, Any]:
    rotary = layers.rotary
    return {
        "name": layers.name,
        "plain": [pair.wavelength / (pair.stretch or 1) if pair.wavelength else None for pair in rotary.pairs],
        "now": [pair.wavelength for pair in rotary.pairs],
        "trained": rotary.trained,
        "longest": rotary.length,
        "scaling": rotary.scaling,
    }


def _extension(extension: Extension, session: Session) -> Mapping[str, Any]:
    before, after = extension.wavelengths
    config = _without_folders(extension.config) if session.is_shared else extension.config
    return {
        "method": extension.method,
        "trained": extension.trained,
        "to": extension.to,
        "layers": extension.layer_type,
        "before": before,
        "after": after,
        "stretches": extension.stretches,
        "notes": list(extension.notes),
        "changed": [[key, json.dumps(old), json.dumps(new)] for key, (old, new) in extension.changed.items()],
        "config": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _without_folders(value: Any) -> Any:
    """A configuration without the paths of a machine: `transformers` writes down where it found a model."""
    if isinstance(value, Mapping):
        return {key: _without_folders(each) for key, each in value.items() if not _is_absolute(each)}
    return value


def _is_absolute(value: Any) -> bool:
    """Of this system or another one."""
    return isinstance(value, str) and any(kind(value).is_absolute() for kind in (PurePosixPath, PureWindowsPath))


def _code(source: str, to: int, method: str) -> str:
    return (
        "from locant.checkpoints.config_source import read_source\n"
        "from locant.checkpoints.explanation import explain\n"
        "from locant.checkpoints.extension import extend\n\n"
        f"config = read_source({source!r})\n"
        "for layers in explain(config).layers:\n    print(layers.name, layers.encoding, *layers.warnings)\n"
        f"longer = extend(config, to={to}, method={method!r})  # refused where a scaling is there already\n"
        "print(longer.changed)\n"
    )


SCREEN = Screen(
    title="Model",
    place=3,
    about="What a config.json means for positions, in words and numbers, and what a longer context would change in it.",
    numbers=numbers,
)
