"""Convert an encoding to a name and options, which JSON can hold, and build it from them again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from locant.positions.base import PositionEncoding
from locant.positions.registry import encoding as encoding_by_name
from locant.positions.registry import name_of_class
from locant.positions.scaling import KINDS, Scaling, Unscaled

OWN_PREFIX = "locant."
HEADS = "head_slice"


def to_config(encoding: PositionEncoding) -> dict[str, Any] | None:
    """Return the name and the options of an encoding, or ``None`` if they are not enough to rebuild it."""
    cls = type(encoding)
    name = name_of_class(cls)
    if name is None:
        return None
    options = {}
    for option, parameter in inspect.signature(cls).parameters.items():
        attribute = getattr(encoding, option, parameter.default)
        value = _to_json(attribute)
        is_described = hasattr(encoding, option) and (value is not None or attribute is None)
        if not (is_described or option == HEADS or cls.__module__.startswith(OWN_PREFIX)):
            return None  # encodings of locant show such options in their `repr` if they matter
        if value is not None and value != parameter.default:
            options[option] = value
    is_weightless = any(each.is_meta for each in encoding.parameters())
    try:
        with Weightless() if is_weightless else nullcontext():
            rebuilt = from_config({"name": name, "options": options})
    except ValueError:
        return None
    is_same = repr(rebuilt) == repr(encoding) and _shapes(rebuilt) == _shapes(encoding)
    return {"name": name, "options": options} if is_same else None


def from_config(description: Mapping[str, Any]) -> PositionEncoding:
    """Return an untrained encoding from its description."""
    options = dict(description["options"])
    if isinstance(options.get("scaling"), Mapping):
        scaling = dict(options["scaling"])
        options["scaling"] = KINDS[scaling.pop("kind")](**scaling)
    return encoding_by_name(description["name"], **options)


def _to_json(value: Any) -> Any:
    """Convert a value to one that JSON can hold, or return ``None`` if that is not possible."""
    mode = getattr(value, "mode", None)
    if isinstance(mode, str):  # angles
        return mode
    if isinstance(value, Scaling) and not isinstance(value, Unscaled):
        if KINDS.get(type(value).__name__) is not type(value):
            return None  # a class of another package
        options = {name: each for name, each in vars(value).items() if each is not None}
        return {"kind": type(value).__name__} | {name: _to_json(each) for name, each in options.items()}
    if isinstance(value, (tuple, list)):
        return [*value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _shapes(encoding: PositionEncoding) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in encoding.state_dict().items()}


FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
INITIALIZERS = (torch.Tensor.normal_, torch.Tensor.uniform_)


class Weightless(TorchFunctionMode):
    """A mode that builds models and encodings without memory for their weights, to inspect them.

    Tensors that are made from a size alone, such as parameters, are on the meta device and have no memory. Tensors that
    are computed, such as angles, have memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in FACTORIES:
            options["device"] = "meta"
        elif getattr(func, "__module__", "") == "torch.nn.init" or func in INITIALIZERS:
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)
