"""An encoding as JSON can hold it, by its name and its options, and built from that again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from locant.positions.base import PositionEncoding
from locant.positions.registry import encoding as encoding_of
from locant.positions.registry import name_of_class
from locant.positions.scaling import KINDS, Scaling, Unscaled

OURS = "locant."
HEADS = "head_slice"


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
        given = dict(options["scaling"])
        options["scaling"] = KINDS[given.pop("kind")](**given)
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
