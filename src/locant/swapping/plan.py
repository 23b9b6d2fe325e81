"""Which layer of a model gets which encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locant.arguments import shown, whole
from locant.errors import InputError, RangeError
from locant.positions.base import PositionEncoding

__all__ = ["LayerPlan", "planned"]

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
