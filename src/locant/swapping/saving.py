"""How a swapped model is written down: a `locant` key in its configuration, and parameters beside the model's.

`from_pretrained` of `transformers` would load such a folder without its encoding, in silence. So the configuration also
names an attention function that does not exist, whose name is a sentence: `from_pretrained` refuses it and prints that.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.registry import encoding as encoding_of
from locant.positions.registry import encodings
from locant.positions.scaling import Scaling, Unscaled
from locant.swapping.weightless import Weightless

__all__ = ["KEY", "built", "described", "forget", "own_configurations", "record"]

KEY = "locant"
"""The entry of a configuration."""
FUNCTION = "attn_implementation"
SENTENCE = "the positions of this model are locant's: load it with locant.checkpoints.load_swapped(folder)"
OURS = "locant."
HEADS = "head_slice"


def own_configurations(model: nn.Module) -> None:
    """Give the model copies of its configurations: another model may have been built from the same ones."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def record(
    config: Any, foreign: Sequence[PositionEncoding], places: Sequence[int | None], angles: AngleMode
) -> list[dict[str, Any] | None]:
    """Write into the configuration which layer has which encoding; those that cannot be told are ``None``."""
    told = [described(each) for each in foreign]
    setattr(config, KEY, {"encodings": told, "layers": list(places), "angles": angles})
    setattr(config, FUNCTION, SENTENCE)
    return told


def forget(config: Any) -> None:
    """Take it out of the configuration."""
    delattr(config, KEY)
    delattr(config, FUNCTION)


def described(encoding: PositionEncoding) -> dict[str, Any] | None:
    """Its name and options; ``None`` where these are not enough to build it again."""
    kind = type(encoding)
    name = next((name for name, each in encodings().items() if each is kind), None)
    if name is None:
        return None
    options = {}
    for option, parameter in inspect.signature(kind).parameters.items():
        kept = getattr(encoding, option, parameter.default)
        value = _plain(kept)
        is_told = hasattr(encoding, option) and (value is not None or kept is None)
        if not (is_told or option == HEADS or kind.__module__.startswith(OURS)):
            return None  # ours show such options in their `repr`, where they matter
        if value is not None and value != parameter.default:
            options[option] = value
    weightless = any(each.is_meta for each in encoding.parameters())
    try:
        with Weightless() if weightless else nullcontext():
            again = built({"name": name, "options": options})
    except ValueError:
        return None
    same = repr(again) == repr(encoding) and _shapes(again) == _shapes(encoding)
    return {"name": name, "options": options} if same else None


def built(description: Mapping[str, Any]) -> PositionEncoding:
    """The encoding that was described, untrained."""
    options = dict(description["options"])
    if isinstance(options.get("scaling"), Mapping):
        import locant.scaling

        given = dict(options["scaling"])
        options["scaling"] = getattr(locant.scaling, given.pop("kind"))(**given)
    return encoding_of(description["name"], **options)


def _plain(value: Any) -> Any:
    """As JSON can hold it; ``None`` for what it cannot."""
    mode = getattr(value, "mode", None)
    if isinstance(mode, str):  # angles
        return mode
    if isinstance(value, Scaling) and not isinstance(value, Unscaled):
        given = {name: each for name, each in vars(value).items() if each is not None}
        return {"kind": type(value).__name__} | {name: _plain(each) for name, each in given.items()}
    if isinstance(value, (tuple, list)):
        return [*value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _shapes(encoding: PositionEncoding) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in encoding.state_dict().items()}
