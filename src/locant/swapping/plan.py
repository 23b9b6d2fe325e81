"""Which layer of a model gets which encoding, and how that is written down: a `locant` key in the configuration.

`from_pretrained` of `transformers` would load such a folder without its encoding, in silence. So the configuration also
names an attention function that does not exist, whose name is a sentence: `from_pretrained` refuses it and prints that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from locant.arguments import shown, whole
from locant.errors import InputError, RangeError
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.description import described

LayerPlan = Mapping[str, Any] | Callable[[int, str | None], PositionEncoding | None]
"""``{"every": 4, "encoding": other}``, or a function of the layer's index and type."""

REMEDY = 'layers={"every": 4, "encoding": locant.encoding("nope")}, or a function of a layer\'s index and type'


def planned(
    encoding: PositionEncoding | None, layers: LayerPlan | None, types: Sequence[str | None]
) -> list[PositionEncoding | None]:
    """The encoding of each layer; ``None``: its own."""
    if layers is None:
        return [_required("encoding", encoding)] * len(types)
    plan = _by_layer(encoding, layers, types)
    if all(each is None for each in plan):
        raise RangeError(f"got layers that give none of {len(types)} layers an encoding", REMEDY)
    return plan


def _by_layer(
    encoding: PositionEncoding | None, layers: LayerPlan, types: Sequence[str | None]
) -> list[PositionEncoding | None]:
    count = len(types)
    if isinstance(layers, Mapping):
        if set(layers) != {"every", "encoding"}:
            raise RangeError(f"got {shown(dict(layers))} for layers, expected the keys every and encoding", REMEDY)
        every = whole("every", layers["every"], 1, count, remedy=f"1 to {count}, the number of layers")
        other, rest = _required("layers['encoding']", layers["encoding"]), _required("encoding", encoding)
        return [other if (index + 1) % every == 0 else rest for index in range(count)]
    if not callable(layers):
        raise RangeError(f"got {shown(layers)} for layers", REMEDY)
    if encoding is not None:
        got = "got encoding beside a function for layers, which says the encoding of every layer"
        raise InputError(got, "swap(model, layers=function)")
    return [_required(f"layer {index}", layers(index, kind)) for index, kind in enumerate(types)]


def _required(name: str, encoding: Any) -> PositionEncoding | None:
    if encoding is not None and not isinstance(encoding, PositionEncoding):
        raise RangeError(f"got {shown(encoding)} for {name}, expected an encoding", 'locant.encoding("alibi", ...)')
    return encoding


# ---------------------------------------------------------------------- written down

KEY = "locant"
"""The entry of a configuration."""
FUNCTION = "attn_implementation"
PRIVATE_FUNCTION = "_attn_implementation"
"""What `transformers` before 5.4 reads in a file, where it passes over the key without the underscore."""
SENTENCE = "the positions of this model are locant's: load it with locant.checkpoints.load_swapped(folder)"


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
    vars(config)[PRIVATE_FUNCTION] = SENTENCE  # past the property of that name: the model goes on as it does
    return told


def forget(config: Any) -> None:
    """Take it out of the configuration."""
    delattr(config, KEY)
    delattr(config, FUNCTION)
    del vars(config)[PRIVATE_FUNCTION]
