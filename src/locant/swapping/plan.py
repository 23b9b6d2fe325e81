"""The encoding of every layer, and the `locant` entry of the configuration that stores it.

`from_pretrained` of `transformers` would load a saved model without its encoding and without an error. So the
configuration also names functions and a fusion that do not exist. `from_pretrained` checks these names, and raises an
error that contains `LOADER`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from locant.arguments import short_repr, whole
from locant.errors import InputError, RangeError
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding
from locant.swapping.new_encoding import NewEncoding

LayerPlan = Mapping[str, Any] | Callable[[int, str | None], PositionEncoding | None]
"""``{"every": 4, "encoding": other}``, or a function of the layer's index and type."""

REMEDY = 'layers={"every": 4, "encoding": locant.encoding("nope")}, or pass a function of a layer\'s index and type'


def encodings_by_layer(
    encoding: PositionEncoding | None, layers: LayerPlan | None, types: Sequence[str | None]
) -> list[PositionEncoding | None]:
    """Return the encoding of each layer, or ``None`` for a layer that keeps its own encoding."""
    if layers is None:
        return [_require_encoding("encoding", encoding)] * len(types)
    plan = _assign_encodings(encoding, layers, types)
    if all(each is None for each in plan):
        raise RangeError(f"got layers that select none of the {len(types)} layers", REMEDY)
    return plan


def _assign_encodings(
    encoding: PositionEncoding | None, layers: LayerPlan, types: Sequence[str | None]
) -> list[PositionEncoding | None]:
    count = len(types)
    if isinstance(layers, Mapping):
        if set(layers) != {"every", "encoding"}:
            raise RangeError(f"got {short_repr(dict(layers))} for layers, expected the keys every and encoding", REMEDY)
        every = whole("every", layers["every"], 1, count, remedy=f"use 1 to {count}, the number of layers")
        other = _require_encoding("layers['encoding']", layers["encoding"])
        default = _require_encoding("encoding", encoding)
        return [other if (index + 1) % every == 0 else default for index in range(count)]
    if not callable(layers):
        raise RangeError(f"got {short_repr(layers)} for layers", REMEDY)
    if encoding is not None:
        got = "got both encoding and a function for layers, which returns the encoding of every layer"
        raise InputError(got, "swap(model, layers=function)")
    return [_require_encoding(f"layer {index}", layers(index, kind)) for index, kind in enumerate(types)]


def _require_encoding(name: str, encoding: Any) -> PositionEncoding | None:
    if encoding is not None and not isinstance(encoding, PositionEncoding):
        raise RangeError(
            f"got {short_repr(encoding)} for {name}, expected an encoding", 'locant.encoding("alibi", ...)'
        )
    return encoding


# ---------------------------------------------------------------------- the entry in the configuration

CONFIG_KEY = "locant"
"""The entry in the configuration that stores the encodings."""
LOADER = "locant.checkpoints.load_swapped"
"""The function that loads a saved model."""
FUSION_KEY = "fusion_config"
"""The entry that names fusions of modules. Newer releases of `transformers` check it first, for every class."""
FUSION = f"this folder has encodings of locant, load it with {LOADER}"
"""The fusion that does not exist. The error of `transformers` is ``Unknown fusion type:`` and this text."""
FUNCTION_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""The entries that name functions, here `LOADER`. No function has this name, even if locant is imported.

They are needed for releases of `transformers` that do not know fusions, and for ``from_config``. The last one, for
mixtures of experts, is checked for every class. It is needed if the caller passes another attention function.
"""


def copy_configurations(model: nn.Module) -> None:
    """Replace the configurations of the model by copies, because other models may share them."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def record(
    config: Any,
    encodings: Sequence[NewEncoding],
    layers: Sequence[NewEncoding | None],
    angles: AngleMode,
    undo: ExitStack,
) -> None:
    """Write the encodings, and the index of each layer's encoding, into the configuration."""
    indices = [None if each is None else each.index for each in layers]
    entry = {"encodings": [each.description for each in encodings], "layers": indices, "angles": angles}
    values = vars(config)  # not the property of the private key, so that the model itself keeps its attention function
    fusions = values.get(FUSION_KEY)
    undo.callback(values.update, {} if fusions is None else {FUSION_KEY: fusions})
    new = {CONFIG_KEY: entry, **dict.fromkeys(FUNCTION_KEYS, LOADER), FUSION_KEY: {**(fusions or {}), FUSION: True}}
    for key, value in new.items():
        values[key] = value
        undo.callback(values.pop, key, None)  # a user may have removed it


def remove_record(config: Any) -> None:
    """Remove everything that `record` wrote from a configuration that `transformers` read from a file."""
    delattr(config, CONFIG_KEY)
    config._attn_implementation = config._experts_implementation = None
    fusions = vars(config).pop(FUSION_KEY, None) or {}
    if others := {name: each for name, each in fusions.items() if name != FUSION}:
        config.fusion_config = others
