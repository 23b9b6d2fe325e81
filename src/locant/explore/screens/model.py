"""The screens Model and Swap: the position encoding of each layer of a model, and other encodings in its layers.

For a swap, the model is built from its configuration without weights, and its encodings are swapped. The sentences
about the layers come from the handle that `locant.swap` returns.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import lru_cache
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import locant.scaling
from locant.checkpoints.explanation import Explanation, explain
from locant.checkpoints.extension import METHODS, Extension, extend
from locant.checkpoints.layer_strip import layer_strip
from locant.errors import InputError, LocantError
from locant.explore.screens import Screen
from locant.explore.session import SCALING_TITLES, Session, State
from locant.lab.language_model import CAUSAL, auto_class, stated_length, trained_length, without_weights
from locant.lab.position_overrides import TAKE_NUMBER, USUAL_FACTOR, PositionOverride
from locant.models.registry import presets
from locant.positions.base import PositionEncoding
from locant.positions.description import Weightless, to_config
from locant.report.explain import layers_rows, spans, summary_rows, swapped_layers
from locant.shell import shell_path, shell_word
from locant.spelling import number_list
from locant.swapping import swap
from locant.swapping.added_point import bias_points, layer_types
from locant.swapping.rotary_point import rotary_points

NO_KIND = {"name": None, "methods": [], "base": None, "warnings": [],
           "facts": [["swapped", ["replaces the encoding of the model"]]]}  # fmt: skip
"""The facts about layers whose own encoding was replaced by another encoding."""
STRETCH = 4
LONGEST = 2**30
ALL, EVERY = "all", "every"
OWN = "its own"
USUAL = 4.0
UNSTATED = 4096
SWAPPING = threading.Lock()
"""The lock for the cached model, which only one request at a time can swap."""
BY_LAYER = "only locant.swap takes a plan by layer"
OTHER_MODELS = "evaluate and tune are for causal language models"


def model_screen(state: State, session: Session) -> Mapping[str, Any]:
    """Return the facts of `locant explain` about a model, its layers in order, and the changes of `locant extend`."""
    name, title, config = session.choose_model(state)
    text = json.dumps(config)
    explanation = _explain(text)
    rotary = [layers for layers in explanation.layers if layers.rotary is not None]
    trained = explanation.trained or explanation.longest or 4096
    to = state.whole("to", STRETCH * trained, 1, LONGEST, log=True)
    method = state.one_of("method", "yarn", list(METHODS), SCALING_TITLES)
    pairs = len(rotary[0].rotary.pairs) if rotary else 0  # type: ignore[union-attr]
    extension, refused = _extend(text, to, method) if rotary else (None, "no layer has rotary positions to extend")
    source = "config.json" if name in session.configs or name not in presets() else name
    return {
        "model": title,
        "model_type": explanation.model_type,
        "pair": state.whole("pair", pairs // 2, 0, max(pairs - 1, 0), follows=True),
        "facts": _rows(summary_rows(explanation, title)),
        "kinds": [
            *map(_kind, explanation.layers),
            *({**NO_KIND, "kind": encoding} for encoding in swapped_layers(explanation)),
        ],
        "layers": _layers(config, explanation),
        "wavelengths": [_wavelengths(layers) for layers in rotary],
        "extension": None if extension is None else _extension(extension, session),
        "refused": refused,
        "python": _codes_of_model(source, to, method, extended=extension is not None),
    }


@lru_cache(maxsize=32)
def _explain(text: str) -> Explanation:
    return explain(json.loads(text))


@lru_cache(maxsize=64)
def _extend(text: str, to: int, method: str) -> tuple[Extension | None, str]:
    """Return the extension, or the reason why there is none. Usually the configuration is already extended."""
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
        "methods": list(layers.methods),
        "base": None if rotary is None else rotary.base,
        "facts": _rows(row for row in layers_rows(layers) if row[0] != "beware"),
        "warnings": list(layers.warnings),
    }


def _layers(config: Mapping[str, Any], explanation: Explanation) -> list[Mapping[str, Any]]:
    """Return the number of each layer's kind, and the layer's window.

    The kinds of `Explanation.layers` come first.
    """
    numbers = {layers.name: number for number, layers in enumerate(explanation.layers)}
    placed = enumerate(swapped_layers(explanation).values(), len(numbers))
    swapped = {place: kind for kind, places in placed for place in places}
    return [
        {"kind": swapped.get(at, numbers[layer.kind]), "window": layer.window}
        for at, layer in enumerate(layer_strip(config))
    ]


def _wavelengths(layers: Any) -> Mapping[str, Any]:
    rotary = layers.rotary
    now = [pair.wavelength for pair in rotary.pairs]
    plain = [pair.wavelength / (pair.stretch or 1) if pair.wavelength else None for pair in rotary.pairs]
    lengths = {"trained": rotary.trained, "longest": rotary.length}
    return {"name": layers.name, "plain": plain, "now": now, **lengths, "scaling": rotary.scaling}


def _extension(extension: Extension, session: Session) -> Mapping[str, Any]:
    before, after = extension.wavelengths
    config = _without_folders(extension.config) if session.is_shared else extension.config
    return {
        **{name: getattr(extension, name) for name in ("method", "trained", "to", "stretches", "notes")},
        "layers": extension.layer_type,
        "before": before,
        "after": after,
        "changed": [[key, json.dumps(old), json.dumps(new)] for key, (old, new) in extension.changed.items()],
        "config": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _without_folders(value: Any) -> Any:
    """Return a configuration without absolute paths, because `transformers` records the folder of a model."""

    def is_path(value: Any) -> bool:
        return isinstance(value, str) and any(kind(value).is_absolute() for kind in (PurePosixPath, PureWindowsPath))

    if isinstance(value, Mapping):
        return {key: _without_folders(each) for key, each in value.items() if not is_path(each)}
    return value


def _codes_of_model(source: str, to: int, method: str, *, extended: bool) -> dict[str, str]:
    read = "from locant.checkpoints.config_source import read_source\n"
    config = f"\nconfig = read_source({source!r})\n"
    explained = f"{read}from locant.checkpoints.explanation import explain\n"
    explained += f"from locant.checkpoints.layer_strip import layer_strip\n{config}"
    pairs = f"{explained}rotary = [layers.rotary for layers in explain(config).layers if layers.rotary]\n"
    pairs += "wavelengths = [[pair.wavelength for pair in each.pairs] for each in rotary]\n"
    if extended:
        pairs = f"{read}from locant.checkpoints.extension import extend\n{config}"
        pairs += f"longer = extend(config, to={to}, method={method!r})\nbefore, after = longer.wavelengths\n"
        pairs += "print(longer.changed)\n"
    return {
        "layers": f"{explained}layers = [(layer.kind, layer.window) for layer in layer_strip(config)]\n"
        "for each in explain(config).layers:\n    print(each.name, each.encoding, *each.warnings)\n",
        "pairs": pairs,
    }


def swap_screen(state: State, session: Session) -> Mapping[str, Any]:
    """Return the sentence of each layer, the frequencies before and after, and the code, or the error of the swap."""
    with SWAPPING:
        return _swap(state, session)


def _swap(state: State, session: Session) -> Mapping[str, Any]:
    name, title, config = session.choose_model(state)
    way = _read_override(state)
    name_of_way = _format_override(way)
    folder = session.path_in_code(name) if name in session.models else "MODEL"
    answer: dict[str, Any] = {"model": title, "way": name_of_way, "pair": 0, "layers": [], "groups": [],
                              "pairs": None, "refused": None, "ways": [], "python": {}}  # fmt: skip
    try:
        model = _build_without_weights(json.dumps(config))
        trained, longest = _lengths(model.config)
        types = layer_types(bias_points(model), model.config.get_text_config())
        every, of_type = _plan(state, way, types)
        with nullcontext() if way.is_built_from_rotary else Weightless():
            encoding = way.encoding(model, trained, longest, of_type)
        arguments: dict[str, Any] = {"encoding": encoding}
        if of_type is not None:
            arguments = {"layers": lambda _, kind: encoding if kind == of_type else None}
        elif every is not None:
            arguments = {"layers": {"every": every, "encoding": encoding}}
        with swap(model, **arguments) as handle:
            sentences = [each.partition(": ")[2] for each in handle.sentences]
    except LocantError as error:
        return {**answer, "refused": [error.cause, error.remedy]}
    to = max(way.stretched_length(trained), 2 * trained)
    auto, pairs = auto_class(model.config), _pairs(state, model, encoding, of_type, trained, to)
    refused = BY_LAYER if every is not of_type else None if auto == CAUSAL else OTHER_MODELS
    code = _code_of_encoding(encoding, way, (trained, longest, of_type))
    lengths = shell_word(number_list([trained, to]))
    alone = f"{way.name} is for models without further training" if way.is_for_reading_only else None
    return {
        **answer,
        "layers": [
            {"type": kind, "changed": encoding is None or not sentence.startswith(OWN), "sentence": sentence}
            for kind, sentence in zip(types, sentences, strict=True)
        ],
        "groups": [[spans([at for at, each in enumerate(sentences) if each == sentence]), sentence]
                   for sentence in dict.fromkeys(sentences)],
        **pairs,
        "ways": [
            [f"locant evaluate {shell_path(folder)} my.txt --lengths {lengths} --with own,{name_of_way}", refused],
            [f"locant tune {shell_path(folder)} my.txt --with {name_of_way} --minutes 30", refused or alone],
        ],
        "python": _codes_of_swap(auto, folder, code, every, of_type, pairs.get("pairs")),
    }  # fmt: skip


@lru_cache(maxsize=2)
def _build_without_weights(text: str) -> Any:
    return without_weights(json.loads(text))


def _read_override(state: State) -> PositionOverride:
    name = state.one_of("with", "yarn", [each for each in PositionOverride.names() if each != "own"], SCALING_TITLES)
    if name not in TAKE_NUMBER:
        return PositionOverride(name)
    usual = USUAL_FACTOR.get(name, USUAL)
    whole = name == "self-extend"
    factor = state.whole("factor", int(usual), 2, 64) if whole else state.real("factor", usual, 1, 64, log=True)
    return PositionOverride(name, float(factor))


def _format_override(way: PositionOverride) -> str:
    return way.name if way.factor is None else f"{way.name}:{way.factor:g}"


def _plan(state: State, way: PositionOverride, types: Sequence[str | None]) -> tuple[int | None, str | None]:
    """Return the interval between the layers that get the encoding, or their type.

    If both are None, all layers get it.
    """
    if way.name == "exact":
        return None, None
    kinds = [kind for kind in dict.fromkeys(types) if kind is not None]
    plan = state.one_of("layers", ALL, [ALL, EVERY, *(kinds if len(kinds) > 1 else [])])
    every = state.whole("every", min(4, len(types)), 1, len(types), follows=True) if plan == EVERY else None
    return every, plan if plan in kinds else None


def _lengths(config: Any) -> tuple[int, int]:
    """Return the trained and the stated length, or `UNSTATED` for both if one is missing. `swap` needs neither."""
    try:
        return trained_length(config), stated_length(config)
    except InputError:
        return UNSTATED, UNSTATED


def _pairs(state: State, model: Any, encoding: Any, of_type: str | None, trained: int, to: int) -> dict[str, Any]:
    """Return the inverse frequencies and attention factors of the model's own rotary encoding and of another one."""
    own_rotaries = {
        kind: rotary for point in rotary_points(model, angles="exact") for kind, rotary in point.own.items()
    }
    if not own_rotaries or not hasattr(encoding, "pairs"):
        return {}
    before, after = (
        rotary if rotary.scaling.length_threshold is None else rotary.for_length(length)
        for rotary, length in (
            (own_rotaries.get(of_type) or next(iter(own_rotaries.values())), trained),
            (encoding, to),
        )
    )
    return {
        "pair": state.whole("pair", len(before.pairs) // 2, 0, len(before.pairs) - 1, follows=True),
        "pairs": {
            "before": before.inv_freq.tolist(),
            "after": after.inv_freq.tolist(),
            "factors": [each.scaling.effective_attention_factor for each in (before, after)],
            "to": None if after.seq_len is None else to,
        },
    }


def _code_of_encoding(
    encoding: PositionEncoding | None, way: PositionOverride, sizes: tuple[int, int, str | None]
) -> str:
    """Return the Python code that makes the encoding."""
    if encoding is None:
        return ""
    if (description := to_config(encoding)) is None:
        lengths = ", ".join(repr(each) for each in sizes if each is not None)
        return (
            f"locant.lab.position_overrides.PositionOverride.of({_format_override(way)!r}).encoding(model, {lengths})"
        )
    options = [f", {name}={_option(value)}" for name, value in description["options"].items()]
    return f"locant.encoding({description['name']!r}{''.join(options)})"


def _option(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    (_, kind), *options = value.items()
    usual = {field.name: field.default for field in fields(getattr(locant.scaling, kind))}
    return f"locant.scaling.{kind}({', '.join(f'{name}={each!r}' for name, each in options if usual[name] != each)})"


def _codes_of_swap(
    auto: str | None, folder: str, made: str, every: int | None, of_type: str | None, pairs: Any
) -> dict[str, str]:
    call = "locant.swap(model, encoding)" if made else "locant.swap(model)"
    if every is not None:
        call = f'locant.swap(model, layers={{"every": {every}, "encoding": encoding}})'
    if of_type is not None:
        call = f"locant.swap(model, layers=lambda layer, kind: encoding if kind == {of_type!r} else None)"
    ways = "import locant.lab.position_overrides\n" if ".lab.position_overrides." in made else ""
    model = f"from transformers import {auto}\n\nimport locant\n{ways}\nmodel = {auto}.from_pretrained({folder!r})\n"
    built = f"encoding = {made}\n" if made else ""
    own_code = (
        "from locant.swapping.rotary_point import rotary_points\n\nown = {}\n"
        'for point in rotary_points(model, angles="exact"):\n'
        f"    own |= point.own\nbefore = (own.get({of_type!r}) or next(iter(own.values()))).inv_freq\n"
    )
    length = "" if pairs is None or pairs["to"] is None else f".for_length({pairs['to']})"
    return {
        "layers": f"{model}{built}swapped = {call}\nprint(swapped)  # a sentence for each layer\nswapped.undo()\n",
        "pairs": f"{model}{built}{own_code}after = encoding{length}.inv_freq\n",
    }


SCREENS = {
    "model": Screen(
        "Model", 3, "The position encoding of a config.json in words and numbers, and the changes for a longer "
        "context.", model_screen,
    ),
    "swap": Screen(
        "Swap", 4, "Other position encodings in a model's layers: the result of locant.swap for each layer, its "
        "errors, and the commands.", swap_screen,
    ),
}  # fmt: skip
