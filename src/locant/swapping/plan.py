"""Which layer of a model gets which encoding, and how that is written down: a `locant` key in the configuration.

`from_pretrained` of `transformers` would load such a folder without its encoding, in silence. So the configuration also
names an attention function that does not exist, whose name is a sentence: `from_pretrained` refuses it and prints that.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from locant.arguments import shown, whole
from locant.errors import InputError, RangeError
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.positions.registry import encoding as encoding_of
from locant.positions.registry import name_of_class
from locant.positions.scaling import KINDS, Scaling, Unscaled

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
    vars(config)[PRIVATE_FUNCTION] = SENTENCE  # past the property of that name: the model goes on as it does
    return told


def forget(config: Any) -> None:
    """Take it out of the configuration."""
    delattr(config, KEY)
    delattr(config, FUNCTION)
    del vars(config)[PRIVATE_FUNCTION]


def described(encoding: PositionEncoding) -> dict[str, Any] | None:
    """Its name and options; ``None`` where these are not enough to build it again."""
    kind = type(encoding)
    name = name_of_class(kind)
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
        if KINDS.get(type(value).__name__) is not type(value):
            return None  # of another package
        given = {name: each for name, each in vars(value).items() if each is not None}
        return {"kind": type(value).__name__} | {name: _plain(each) for name, each in given.items()}
    if isinstance(value, (tuple, list)):
        return [*value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _shapes(encoding: PositionEncoding) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in encoding.state_dict().items()}


MADE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
DRAWN = (torch.Tensor.normal_, torch.Tensor.uniform_)


class Weightless(TorchFunctionMode):
    """Models and encodings without the memory of their weights, to look at what would be done with them.

    What is made of a size alone, as parameters are, gets no memory; what is computed, as angles are, does.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in MADE:
            given["device"] = "meta"
        elif getattr(func, "__module__", "") == "torch.nn.init" or func in DRAWN:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
