"""The points at which positions enter a model, and the model's own positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from locant.arguments import short_repr
from locant.errors import InputError
from locant.extras import require
from locant.positions.angles import AngleMode
from locant.positions.encodings.rotary import Rotary
from locant.swapping.added_point import BiasPoint, bias_points, layer_types, learned_tables, self_attention
from locant.swapping.attention_point import attention_modules, has_learned_bias
from locant.swapping.forward_arguments import ForwardArguments
from locant.swapping.rotary_point import RotaryPoint, owner_around, receives_angles, rotary_points

SWAPPED_MARK = "_locant_swapped"
"""The attribute that marks a swapped model."""
REMOVABLE = "use a model with rotary positions, with one table of learned positions, or with T5's bias"
"""The positions that an encoding can replace."""


@dataclass(frozen=True)
class ModelPoints:
    """A model, and the points at which positions enter it.

    Args:
        model: the model that was passed to `swap`, which may be a PEFT model.
        owner: the innermost model that has the layers. It holds the new encodings in its attribute `locant`.
        rotary: the rotary modules.
        biases: the stacks whose layers add T5's bias. Empty if there is a rotary module.
        tables: the paths of tables of learned positions. Empty if there is a rotary module or T5's bias.
        angles: how the angles of the model's own encoding are computed while it is swapped.
    """

    model: Any
    owner: Any
    rotary: Sequence[RotaryPoint]
    biases: Sequence[BiasPoint]
    tables: Sequence[str]
    angles: AngleMode

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def own_rotations(self) -> list[Rotary]:
        """The rotary encodings of the configuration."""
        return [each for point in self.rotary for each in point.own.values()]

    def describe_own_rotation(self, layer: int) -> str:
        """Describe the rotary encoding of a layer, or all that may be its encoding if its type does not decide it."""
        kind = self.layer_types[layer]
        by_point = [[point.own[kind]] if kind in point.own else [*point.own.values()] for point in self.rotary]
        return " or ".join(dict.fromkeys(str(each) for encodings in by_point for each in encodings))

    @property
    def old_positions(self) -> str:
        """The positions that a new encoding replaces."""
        if self.biases:
            return "its learned bias"
        return "its rotary positions" if self.rotary else "the model's table of positions"

    @property
    def layer_types(self) -> list[str | None]:
        return layer_types(self.biases, self.owner.config)

    @cached_property
    def layers(self) -> Mapping[int, Sequence[nn.Module]]:
        """The attention modules of every layer. In models other than T5 some layers may be missing."""
        return self_attention(self.biases) or attention_modules(self.owner)

    @cached_property
    def bias_by_layer(self) -> Sequence[BiasPoint]:
        """The stack that each layer belongs to. Empty without T5's bias."""
        return [point for point in self.biases for _ in point.layers]

    @property
    def stacks(self) -> list[Any]:
        """The parts of the model that have token embeddings: its encoder and its decoder, or the whole model."""
        return [point.stack for point in self.biases] or [self.owner]

    @cached_property
    def forward_arguments(self) -> list[ForwardArguments]:
        """The arguments of every stack, which hooks read."""
        return [ForwardArguments(stack, generates=self.model.can_generate()) for stack in self.stacks]

    def require_different_layers(self) -> None:
        """Raise `InputError` if the layers of the model cannot have different encodings."""
        if self.tables:
            got = f"got an encoding for some layers of {self.name}, which adds positions once, before its first layer"
            raise InputError(got, "use one encoding for all layers")
        for module in (each for layer in self.layers.values() for each in layer if self.rotary):
            if not receives_angles(module):
                got = f"got {self.name}, whose {type(module).__name__} receives no angles"
                raise InputError(got, "use one encoding for all layers")

    def require_modules(self) -> None:
        """Raise `InputError` unless every layer has attention modules."""
        if sorted(self.layers) != list(range(len(self.layer_types))):
            got = f"got {self.name}, whose attention modules cannot be assigned to its layers"
            raise InputError(got, "use one encoding for all layers that rotates like the model's own")

    def require_forward_arguments(self) -> None:
        """Raise `InputError` unless the names of the arguments of every stack are known."""
        _ = self.forward_arguments

    def require_own_positions(self) -> None:
        """Raise `InputError` if the model has no positions of its own that can be computed in another way."""
        if not self.rotary and not self.biases:
            got = f"got {self.name}, which has no rotary positions to compute exactly"
            one_table = len(self.tables) == 1
            raise InputError(got, "swap(model, encoding) with an encoding of locant" if one_table else REMOVABLE)

    def require_removable(self) -> None:
        """Raise `InputError` if the model has positions that cannot be removed."""
        if not self.rotary and not self.biases and len(self.tables) != 1:
            count = len(self.tables)
            reason = f"with {count} tables of positions, expected one" if count else _irremovable(self.owner)
            raise InputError(f"got {self.name} {reason}", REMOVABLE)


def find_points(model: Any, angles: AngleMode) -> ModelPoints:
    """Return the points of a model.

    Raises:
        InputError: `model` is not a model of `transformers`, is already swapped, has positions that cannot be measured,
            or has rotary modules of several inner models.
    """
    inner = _require_model(model)
    rotary = rotary_points(inner, angles=angles)
    biases = [] if rotary else bias_points(inner)
    tables = [] if rotary or biases else [path for path, _ in learned_tables(inner)]
    # Take the innermost model, which has the layers: OPT's classes do not call the model around it.
    owner: Any = rotary[0].owner if rotary else inner.base_model
    if len(tables) == 1:
        owner = owner_around(inner, tables[0])
    if any(point.owner is not owner for point in rotary):
        got = f"got {type(model).__name__} with rotary modules of {len({id(point.owner) for point in rotary})} models"
        raise InputError(got, "swap the inner model that you mean, such as model.model.decoder")
    tables = [path for path, _ in learned_tables(owner)] if tables else []  # paths relative to the owner
    return ModelPoints(model, owner, rotary, biases, tables, angles)


def _require_model(model: Any) -> Any:
    """Return the model, or the model inside a PEFT model.

    Raises:
        InputError: its class is not part of `transformers`, or it is already swapped.
    """
    require("transformers", "swapping encodings")
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        name = short_repr(model) if len(repr(model)) < 80 else type(model).__name__
        got = f"got {name}, expected a model of transformers"
        raise InputError(got, "transformers.AutoModelForCausalLM.from_pretrained(folder)")
    if not any(cls.__module__.startswith("transformers.models.") for cls in type(inner).__mro__):
        got = f"got {type(inner).__name__}, whose code is not part of transformers ({type(inner).__module__})"
        raise InputError(got, "use a model whose class is part of transformers")
    if any(getattr(module, SWAPPED_MARK, False) for module in inner.modules()):
        got = f"got {type(inner).__name__}, which is already swapped, or is a copy of a swapped model"
        raise InputError(got, "call handle.undo() before the next swap, and copy or save a model before you swap it")
    return inner


def _irremovable(owner: Any) -> str:
    """Describe the positions of a model that has no rotary positions, no table and no T5 bias."""
    if has_learned_bias(owner):
        return "with a learned bias in its attention, which cannot be removed"
    if any("alibi" in name for name in dir(owner)):
        return "with ALiBi in its own code: its attention computes the scores itself and calls no function by name"
    return "with positions of an unknown kind, which cannot be removed"
