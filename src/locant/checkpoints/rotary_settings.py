"""What a rotary encoding does, pair by pair, and what float32 angles lose of it, measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Unscaled

__all__ = ["PairSettings", "Precision", "RotarySettings", "rotary_settings"]

VISIBLE = 1e-3
"""An error of a cosine that is more than a rounding: a bfloat16 of 1 has steps of 8e-3, a float16 of 5e-4."""

CHUNK = 4096
SEARCHED = 2**20
KEPT = 1e-6
"""A pair whose frequency changed by less than this share was left alone."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Positions per full rotation of a pair, and by how much the scaling stretches them; ``None``: it is still."""

    wavelength: float | None
    stretch: float | None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What float32 angles miss of cosines.

    Args:
        first_visible: the first position where that is more than 1e-3; ``None``: not below 2**20.
        at_longest: the most over the last 4096 positions that the model is made for.
    """

    first_visible: int | None
    at_longest: float


@dataclass(frozen=True, kw_only=True)
class RotarySettings:
    """How a rotary encoding rotates sequences of `length` positions."""

    head_dim: int
    rotary_dim: int
    layout: str
    base: float
    sections: tuple[int, ...] | None
    scaling: str
    scaling_options: dict[str, Any]
    attention_factor: float
    length: int
    trained: int
    pairs: tuple[PairSettings, ...]
    precision: Precision

    @property
    def kept(self) -> list[int]:
        """Pairs that are rotated as without a scaling."""
        return [i for i, pair in enumerate(self.pairs) if pair.stretch is not None and abs(pair.stretch - 1) <= KEPT]

    @property
    def stretched(self) -> list[int]:
        """Pairs stretched as much as any."""
        most = max((pair.stretch or 0.0 for pair in self.pairs), default=0.0)
        if most - 1 <= KEPT:
            return []
        return [i for i, pair in enumerate(self.pairs) if pair.stretch and abs(pair.stretch / most - 1) <= KEPT]

    @property
    def between(self) -> list[int]:
        """All others that are rotated."""
        done = {*self.kept, *self.stretched}
        return [i for i, pair in enumerate(self.pairs) if pair.stretch is not None and i not in done]

    @property
    def still(self) -> list[int]:
        """Pairs that are not rotated."""
        return [i for i, pair in enumerate(self.pairs) if pair.wavelength is None]

    @property
    def never_round(self) -> list[int]:
        """Pairs that did not complete one rotation in training: what they do later was never seen."""
        plain = [pair.wavelength / (pair.stretch or 1) if pair.wavelength else math.inf for pair in self.pairs]
        return [i for i, wavelength in enumerate(plain) if self.trained < wavelength < math.inf]


def rotary_settings(rotary: Rotary, length: int, trained: int) -> RotarySettings:
    """What an encoding does with sequences of `length`; `trained`: its length before it was stretched."""
    rotary = rotary.for_length(length)
    plain = Unscaled().frequencies(rotary.rotary_dim, rotary.base)
    pairs = [
        PairSettings(
            wavelength=2 * math.pi / float(frequency) if frequency else None,
            stretch=float(before / frequency) if frequency else None,
        )
        for before, frequency in zip(plain, rotary.angles.frequencies, strict=True)
    ]
    return RotarySettings(
        head_dim=rotary.head_dim,
        rotary_dim=rotary.rotary_dim,
        layout=rotary.layout,
        base=float(rotary.base),
        sections=rotary.sections,
        scaling=type(rotary.scaling).__name__,
        scaling_options={
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(rotary.scaling).items()
            if value is not None
        },
        attention_factor=rotary.scaling.effective_attention_factor,
        length=length,
        trained=trained,
        pairs=tuple(pairs),
        precision=_precision(rotary, length),
    )


def _precision(rotary: Rotary, length: int) -> Precision:
    """The difference between float32 and exact cosines, apart from the attention factor."""
    exact, rounded = (
        Rotary(rotary.head_dim, rotary.base, scaling=rotary.scaling, rotary_dim=rotary.rotary_dim, angles=mode)
        .for_length(rotary.seq_len or 1)
        .angles
        for mode in ("exact", "float32")
    )

    def errors(start: int, stop: int) -> torch.Tensor:
        """The largest over all pairs, for each of these positions."""
        index = torch.arange(start, max(stop, start + 1))
        cosines = [angles.cos_sin(index, stop, 0, torch.float64)[0] for angles in (exact, rounded)]
        return ((cosines[0] - cosines[1]) / rotary.scaling.effective_attention_factor).abs().amax(dim=-1)

    visible = ((errors(start, start + CHUNK) > VISIBLE).nonzero() + start for start in range(0, SEARCHED, CHUNK))
    first = next((int(places[0]) for places in visible if len(places)), None)
    return Precision(first_visible=first, at_longest=float(errors(max(0, length - CHUNK), length).max()))
