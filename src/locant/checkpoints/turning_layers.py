"""Models that turn the queries and keys of some of their layers only, and which layers those are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locant.arguments import shown
from locant.checkpoints.readers import Request, read_rotary, required
from locant.errors import InputError
from locant.positions.base import PositionEncoding
from locant.positions.encodings.tempered import Tempered
from locant.positions.rope_config.types import integer, number

__all__ = ["read_rotary_in_some_layers", "read_rotary_in_windows", "some_layers", "turns_nowhere", "window_layers"]

TURNS_WITHOUT_WINDOWS: Mapping[str, bool] = {"cohere2": False, "exaone4": True}
"""Where no layer has a window: whether the code of a model turns all layers, or none."""

EMPTY_SAYS: Mapping[str, int] = {"llama4_text": 4}
"""Every how many layers one has no rotary positions, where ``no_rope_layers`` is an empty list and nothing else is
said: published configurations of Llama 4 are like that. The code of other models does not take an empty list."""

SOME_TURN = ("smollm3", "llama4_text")
"""Models with a list of the layers that turn."""

TEMPERED = ("llama4_text",)
"""Models whose layers without rotary positions let queries grow with their position, if they are asked to."""


def read_rotary_in_windows(request: Request) -> PositionEncoding:
    """Rotary positions where attention slides, and none where it is full (Cohere 2, Exaone 4)."""
    turns = request.layer_type != "full_attention"
    if not window_layers(request.facts):
        turns = TURNS_WITHOUT_WINDOWS[request.facts["model_type"]]
    return _of_all(request) if turns else PositionEncoding()


def window_layers(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The two types of layers, unless no layer has a window."""
    if "sliding_window" not in facts:
        raise InputError(
            f"got a {facts['model_type']} configuration without sliding_window",
            "its width, or null where no layer has a window",
        )
    return () if facts["sliding_window"] is None else ("sliding_attention", "full_attention")


def read_rotary_in_some_layers(request: Request) -> PositionEncoding:
    """Rotary positions in the layers that a list names, and none in the others (SmolLM 3, Llama 4)."""
    return _unturned(request.facts) if request.layer_type == "without" else _of_all(request)


def some_layers(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """``with`` and ``without``, as far as there are such layers; none, where all layers have rotary positions."""
    turning = _turning(facts)
    kinds = tuple(kind for kind, turns in (("with", True), ("without", False)) if turns in turning)
    return () if kinds == ("with",) else kinds


def turns_nowhere(facts: Mapping[str, Any]) -> bool:
    """Whether no layer of a model has rotary positions, though its architecture knows them."""
    name = facts["model_type"]
    if name in TURNS_WITHOUT_WINDOWS:
        return not (window_layers(facts) or TURNS_WITHOUT_WINDOWS[name])
    return name in SOME_TURN and some_layers(facts) == ("without",)


def _turning(facts: Mapping[str, Any]) -> set[bool]:
    """Whether layers turn, over all layers."""
    name, listed = facts["model_type"], facts.get("no_rope_layers")
    every = facts.get("no_rope_layer_interval", EMPTY_SAYS.get(name) if listed == [] else None)
    if listed or every is None or (listed == [] and name not in EMPTY_SAYS):
        return _listed(facts)
    every = integer("no_rope_layer_interval", every)
    return {(layer + 1) % every != 0 for layer in range(required(facts, "num_hidden_layers"))}


def _listed(facts: Mapping[str, Any]) -> set[bool]:
    listed, remedy = facts.get("no_rope_layers"), "1 for each layer with positions, else 0"
    if listed is None:
        raise InputError(f"got a {facts['model_type']} configuration without no_rope_layers", remedy)
    count = integer("num_hidden_layers", facts["num_hidden_layers"]) if "num_hidden_layers" in facts else None
    right = isinstance(listed, (list, tuple)) and all(isinstance(one, int) and one in (0, 1) for one in listed)
    if not right or not listed or count not in (None, len(listed)):
        expected = "ones and zeros" if count is None else f"{count} ones and zeros"
        raise InputError(f"got no_rope_layers={shown(listed)}, expected a list of {expected}", remedy)
    return {bool(one) for one in listed}


def _unturned(facts: Mapping[str, Any]) -> PositionEncoding:
    if facts["model_type"] not in TEMPERED:
        return PositionEncoding()
    tuned = facts.get("attn_temperature_tuning")
    if tuned is None:
        raise InputError(
            f"got a {facts['model_type']} configuration without attn_temperature_tuning",
            "true beside floor_scale and attn_scale, or false, as the model was trained with",
        )
    if not isinstance(tuned, bool):
        raise InputError(f"got attn_temperature_tuning={shown(tuned)}, expected true or false", "a boolean")
    if not tuned:
        return PositionEncoding()
    if "attn_scale" not in facts:
        raise InputError(f"got a {facts['model_type']} configuration without attn_scale", "'attn_scale': 0.1, usually")
    return Tempered(required(facts, "floor_scale"), number("attn_scale", facts["attn_scale"]))


def _of_all(request: Request) -> PositionEncoding:
    """What the layers that turn have, whatever they are called."""
    return read_rotary(Request(facts=request.facts, angles=request.angles, layout=request.layout))
