"""The new encodings of a swapped model. The model holds them, so it trains and saves their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from torch import nn

from locant.positions.base import PositionEncoding
from locant.positions.description import to_config
from locant.swapping.rotary_point import ForLongestRow

HOLDER = "locant"
"""The attribute of a model that holds its new encodings."""


class NewEncoding:
    """A new encoding of a model, for one layer or several.

    Args:
        owner: the model, which holds the encoding as `locant.<index>`.
        encoding: the encoding that was passed to `swap`.
    """

    def __init__(self, owner: nn.Module, index: int, encoding: PositionEncoding) -> None:
        self.owner = owner
        self.index = index
        self.encoding = encoding
        self.for_longest = ForLongestRow()

    @property
    def current(self) -> PositionEncoding:
        """The encoding that the model holds now. With PEFT it is a trained copy of the passed encoding."""
        return getattr(getattr(self.owner, HOLDER), str(self.index))

    @cached_property
    def description(self) -> dict[str, Any] | None:
        """The name and the options of the encoding, or ``None`` if they are not enough to rebuild it."""
        return to_config(self.encoding)


def hold_encodings(owner: Any, encodings: Sequence[NewEncoding], undo: ExitStack) -> None:
    """Move encodings to a model's device and dtype, and register them in the model. `undo` does not move them back."""
    parameters = [*owner.parameters()]
    first = next((each for each in parameters if not each.is_meta), None)  # offloaded parameters hold no numbers
    holder = nn.Module()  # not a list: PEFT does not train lists that modules_to_save names
    for each in encodings:
        holder.add_module(str(each.index), each.encoding)
    device = None if first is None else first.device  # the meta device would delete the encodings' numbers
    setattr(owner, HOLDER, holder.to(device=device, dtype=parameters[0].dtype))
    undo.callback(delattr, owner, HOLDER)
