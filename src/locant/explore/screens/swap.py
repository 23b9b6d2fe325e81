"""Swap: what `locant.swap` would put into which layer of a model, what it refuses, and what a scaling does to pairs.

The model is built from its configuration without weights, and really swapped: each sentence is that of the handle.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import locant.scaling
from locant.errors import InputError, LocantError
from locant.explore.screens import Screen
from locant.explore.session import Session
from locant.explore.state import SCALING_TITLES, State
from locant.lab.language_model import CAUSAL, auto_class, stated_length, trained_length, without_weights
from locant.lab.ways import NUMBERED, USUAL_FACTOR, Way
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary
from locant.report.explain import spans
from locant.swapping import swap
from locant.swapping.added_point import bias_points, layer_types
from locant.swapping.plan import Weightless, described
from locant.swapping.rotary_point import rotary_points

__all__ = ["SCREEN"]

ALL, EVERY = "all", "every"
OWN = "its own"
USUAL = 4.0
UNSTATED = 4096
BY_LAYER = "a plan by layer is for locant.swap alone"
OTHER_MODELS = "evaluate and tune are for causal language models"


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The sentence of each layer, the frequencies before and after, and the code; or why it is refused."""
    name, told, config = session.chosen_model(state)
    way = _way(state)
    folder = session.written(name) if name in session.models else "MODEL"
    answer: dict[str, Any] = {"model": told, "way": _text(way), "pair": 0, "layers": [], "groups": [], "pairs": None,
                              "refused": None, "ways": [], "python": ""}  # fmt: skip
    try:
        model = without_weights(config)
        trained, longest = _lengths(model.config)
        types = layer_types(bias_points(model), model.config.get_text_config())
        every, of_type = _plan(state, way, types)
        with nullcontext() if way.is_of_rotary else Weightless():
            encoding = way.encoding(model, trained, longest, of_type)
        given = _given(encoding, every, of_type)
        with swap(model, **given) as swapped:
            sentences = [each.partition(": ")[2] for each in swapped.sentences]
    except LocantError as error:
        return {**answer, "refused": [error.cause, error.remedy]}
    auto = auto_class(model.config)
    refused = BY_LAYER if every is not of_type else None if auto == CAUSAL else OTHER_MODELS
    made = _made(encoding, way, (trained, longest, of_type))
    to = max(way.stretched(trained), 2 * trained)
    return {
        **answer,
        "layers": [
            {"type": kind, "changed": encoding is None or not said.startswith(OWN), "sentence": said}
            for kind, said in zip(types, sentences, strict=True)
        ],
        "groups": [[spans([at for at, each in enumerate(sentences) if each == said]), said]
                   for said in dict.fromkeys(sentences)],
        **_pairs(state, model, encoding, of_type, trained, to),
        "ways": _commands(way, folder, trained, to, refused),
        "python": _code(auto, folder, made, every, of_type),
    }  # fmt: skip


def _way(state: State) -> Way:
    name = state.one_of("with", "yarn", [each for each in Way.names() if each != "own"], SCALING_TITLES)
    if name not in NUMBERED:
        return Way(name)
    usual = USUAL_FACTOR.get(name, USUAL)
    whole = name == "self-extend"
    factor = state.whole("factor", int(usual), 2, 64) if whole else state.real("factor", usual, 1, 64, log=True)
    return Way(name, float(factor))


def _text(way: Way) -> str:
    return way.name if way.factor is None else f"{way.name}:{way.factor:g}"


def _plan(state: State, way: Way, types: Sequence[str | None]) -> tuple[int | None, str | None]:
    """Every which layer gets it, or those of which type; with neither, all do."""
    if way.name == "exact":
        return None, None
    kinds = [kind for kind in dict.fromkeys(types) if kind is not None]
    plan = state.one_of("layers", ALL, [ALL, EVERY, *(kinds if len(kinds) > 1 else [])])
    every = state.whole("every", min(4, len(types)), 1, len(types), follows=True) if plan == EVERY else None
    return every, plan if plan in kinds else None


def _given(encoding: PositionEncoding | None, every: int | None, of_type: str | None) -> dict[str, Any]:
    """What `swap` is called with."""
    if of_type is not None:
        return {"layers": lambda _, kind: encoding if kind == of_type else None}
    return {"encoding": encoding} if every is None else {"layers": {"every": every, "encoding": encoding}}


def _lengths(config: Any) -> tuple[int, int]:
    """Trained and stated; a configuration without any is refused by `evaluate` and `tune`, and not by `swap`."""
    try:
        return trained_length(config), stated_length(config)
    except InputError:
        return UNSTATED, UNSTATED


def _pairs(
    state: State, model: Any, encoding: PositionEncoding | None, of_type: str | None, trained: int, to: int
) -> dict[str, Any]:
    """The inverse frequencies and attention factors of the model's own rotary encoding and of another one."""
    own = {kind: rotary for point in rotary_points(model, angles="exact") for kind, rotary in point.own.items()}
    if not own or not isinstance(encoding, Rotary):
        return {}
    before = _at_length(own.get(of_type) or next(iter(own.values())), trained)
    after = _at_length(encoding, to)
    return {
        "pair": state.whole("pair", len(before.pairs) // 2, 0, len(before.pairs) - 1, follows=True),
        "pairs": {
            "before": before.inv_freq.tolist(),
            "after": after.inv_freq.tolist(),
            "factors": [each.scaling.effective_attention_factor for each in (before, after)],
            "to": None if after.seq_len is None else to,
        },
    }


def _at_length(rotary: Rotary, length: int) -> Rotary:
    return rotary if rotary.scaling.length_that_matters is None else rotary.for_length(length)


def _commands(way: Way, folder: str, trained: int, to: int, refused: str | None) -> list[list[str | None]]:
    """What measures and what trains the same, and why it does not where it does not."""
    model, named = shlex.quote(folder), _text(way)
    alone = f"{way.name} is for a model as it is: nothing that it gets used to" if way.is_for_reading_alone else None
    return [
        [f"locant evaluate {model} my.txt --lengths {trained},{to} --with own,{named}", refused],
        [f"locant tune {model} my.txt --with {named} --minutes 30", refused or alone],
    ]


def _made(encoding: PositionEncoding | None, way: Way, sizes: tuple[int, int, str | None]) -> str:
    """The Python that makes the encoding."""
    if encoding is None:
        return ""
    if (said := described(encoding)) is None:
        lengths = ", ".join(repr(each) for each in sizes if each is not None)
        return f"locant.lab.ways.Way.of({_text(way)!r}).encoding(model, {lengths})"
    options = [f", {name}={_option(value)}" for name, value in said["options"].items()]
    return f"locant.encoding({said['name']!r}{''.join(options)})"


def _option(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    (_, kind), *given = value.items()
    usual = {field.name: field.default for field in fields(getattr(locant.scaling, kind))}
    return f"locant.scaling.{kind}({', '.join(f'{name}={each!r}' for name, each in given if usual[name] != each)})"


def _code(auto: str | None, folder: str, made: str, every: int | None, of_type: str | None) -> str:
    call = "locant.swap(model, encoding)" if made else "locant.swap(model)"
    if every is not None:
        call = f'locant.swap(model, layers={{"every": {every}, "encoding": encoding}})'
    if of_type is not None:
        call = f"locant.swap(model, layers=lambda layer, kind: encoding if kind == {of_type!r} else None)"
    ways = "import locant.lab.ways\n" if ".lab.ways." in made else ""
    return (
        f"from transformers import {auto}\n\nimport locant\n{ways}\n"
        f"model = {auto}.from_pretrained({folder!r})\n"
        + (f"encoding = {made}\n" if made else "")
        + f"swapped = {call}\nprint(swapped)  # a sentence for each layer\n"
        "swapped.undo()\n"
    )


SCREEN = Screen(
    title="Swap",
    place=4,
    about="Other positions in a model's layers: what locant.swap would put where, what it refuses, and what to type.",
    numbers=numbers,
)
