"""What can be compared: every encoding by name, and every scaling of those whose frequencies can be scaled."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from locant.arguments import one_of, shown
from locant.errors import RangeError
from locant.positions import PositionEncoding
from locant.positions.base import ModelShape
from locant.positions.registry import encodings, find
from locant.positions.scaling import EXTENDING, SCALINGS, DynamicNTK, scaling_by_name

__all__ = ["EXTENSIONS", "Contestant"]

EXTENSIONS = tuple(name for name in EXTENDING if name != DynamicNTK.info.name)
"""The scalings that extend a context by a factor, whatever the length of a sequence."""

OPTIONS: dict[str, dict[str, float]] = {
    "learned": {"init_std": 1.0},  # as large as the decoder's scaled token rows, or it would have little effect
    "learned_grid": {"init_std": 1.0},
    "convolutional": {"causal": True},
}


@dataclass(frozen=True)
class Contestant:
    """An encoding, and how it is scaled beyond the trained length.

    The model is trained with the plain encoding, and not again with the scaled one: at each longer length the
    frequencies are scaled by length / trained length, as for a model whose context is extended without fine-tuning.
    """

    encoding: str
    scaling: str = ""

    @classmethod
    def of(cls, name: str) -> Contestant:
        """The contestant of a name such as ``alibi`` or ``rotary+yarn``."""
        encoding, plus, scaling = str(name).replace("++", "_plus_plus").partition("+")  # of RoPE++
        if encoding in SCALINGS:
            raise RangeError(f"got {shown(name)}, which is a scaling of rotary", f"rotary+{encoding}")
        kind = find(encoding)
        encoding = next(known for known, each in encodings().items() if each is kind)
        if plus and "scaling" not in inspect.signature(kind).parameters:
            cause = f"got {shown(name)}, but {encoding} has no frequencies to scale"
            raise RangeError(cause, f"{encoding}, or rotary+yarn")
        if plus:
            remedy = " or ".join(f"{encoding}+{known}" for known in EXTENSIONS)
            scaling = one_of("a scaling", scaling.strip().lower(), EXTENSIONS, remedy)
        return cls(encoding, scaling)

    @property
    def name(self) -> str:
        return f"{self.encoding}+{self.scaling}" if self.scaling else self.encoding

    def build(self, shape: ModelShape) -> PositionEncoding:
        """The encoding as it is trained."""
        return find(self.encoding).for_model(shape, **OPTIONS.get(self.encoding, {}))

    def at_length(self, trained: Any, length: int, train_length: int, shape: ModelShape) -> PositionEncoding:
        """The trained encoding as it is used in windows of `length` tokens."""
        if not self.scaling or length <= train_length:
            return trained
        dim, base = getattr(trained, "rotary_dim", shape.head_dim), getattr(trained, "base", 10_000.0)
        scaling = scaling_by_name(f"{self.scaling}:{length / train_length}", train_length, dim, base)
        scaled = find(self.encoding).for_model(shape, scaling=scaling)
        scaled.load_state_dict(trained.state_dict())
        return scaled
