"""The rotations of a rotary encoding, pair by pair, and the measured error of float32 angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.kernels.rotary import Layout
from locant.kernels.rotary.reference import cos_sin
from locant.positions.angles import Angles
from locant.positions.encodings.rotary import Rotary
from locant.positions.scaling import Unscaled

VISIBLE = 1e-3
"""The smallest visible error of a cosine. Near 1, bfloat16 has steps of 8e-3 and float16 of 5e-4."""

CHUNK = 4096
SEARCHED = 2**20
MOST_ROUNDED = 2**-18
"""The largest relative error of a float32 angle. For a base of 10^9, the actual error is a tenth of this."""

MAX_UNCHANGED = 1e-6
"""The largest relative change of a frequency that counts as unchanged."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Positions per full rotation of a pair, and the scaling's factor on them. ``None`` means no rotation."""

    wavelength: float | None
    stretch: float | None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The error of cosines with float32 angles.

    Args:
        first_visible: the first position with an error above 1e-3. ``None`` means that there is no such position below
            2**20.
        at_longest: the largest error in the last 4096 positions that the model is made for.
    """

    first_visible: int | None
    at_longest: float


@dataclass(frozen=True, kw_only=True)
class RotarySettings:
    """The rotations of sequences of `length` positions by a rotary encoding."""

    head_dim: int
    rotary_dim: int
    layout: Layout | None
    table: str | None
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
        """Pairs that the scaling does not change."""
        return self.bands["kept"]

    @property
    def stretched(self) -> list[int]:
        """Pairs with the largest factor on their wavelength."""
        return self.bands["stretched"]

    @property
    def between(self) -> list[int]:
        """All other pairs that are rotated."""
        return self.bands["between"]

    @property
    def still(self) -> list[int]:
        """Pairs that are not rotated."""
        return self.bands["still"]

    @property
    def bands(self) -> dict[str, list[int]]:
        """All pairs, grouped by the effect of the scaling."""
        return bands_of(self.pairs)

    @property
    def never_round(self) -> list[int]:
        """Pairs that did not complete one rotation in training, so their later angles were never seen."""
        plain = [pair.wavelength / (pair.stretch or 1) if pair.wavelength else math.inf for pair in self.pairs]
        return [i for i, wavelength in enumerate(plain) if self.trained < wavelength < math.inf]


def pair_settings(rotary: Rotary) -> tuple[PairSettings, ...]:
    """Return the settings of every pair, for the length of the encoding."""
    plain, _ = rotary.pairs.frequencies(Unscaled(), rotary.base, rotary.seq_len)
    return tuple(
        PairSettings(
            wavelength=2 * math.pi / float(frequency) if frequency else None,
            stretch=float(before / frequency) if frequency else None,
        )
        for before, frequency in zip(plain, rotary.angles.frequencies, strict=True)
    )


def bands_of(pairs: Sequence[PairSettings]) -> dict[str, list[int]]:
    """Return the numbers of the pairs by band: unchanged, stretched less, stretched most, and not rotated."""
    most = max((pair.stretch or 0.0 for pair in pairs), default=0.0)

    def band(pair: PairSettings) -> str:
        if pair.stretch is None:
            return "still"
        if abs(pair.stretch - 1) <= MAX_UNCHANGED:
            return "kept"
        return "stretched" if most - 1 > MAX_UNCHANGED and abs(pair.stretch / most - 1) <= MAX_UNCHANGED else "between"

    named = [band(pair) for pair in pairs]
    return {
        name: [number for number, each in enumerate(named) if each == name]
        for name in ("kept", "between", "stretched", "still")
    }


def rotary_settings(rotary: Rotary, length: int, trained: int) -> RotarySettings:
    """Return the rotations of an encoding for sequences of `length`. `trained` is the length before any extension."""
    rotary = rotary.for_length(length)
    frequencies, rounded = rotary.pairs.frequencies(rotary.scaling, rotary.base, rotary.seq_len or 1)
    return RotarySettings(
        head_dim=rotary.head_dim,
        rotary_dim=rotary.rotary_dim,
        layout=rotary.pairs.layout,
        table=None if rotary.has_named_layout else repr(rotary.pairs).strip("<>"),
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
        pairs=pair_settings(rotary),
        precision=_precision(tuple(frequencies), tuple(rounded.tolist()), length),
    )


def rounding_errors(
    rotary: Rotary, index: Int[Tensor, " positions"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "positions pairs"]:
    """Return the error of cosines if position, frequency and their product are in this dtype.

    In float32 they are rounded as in `transformers`. The attention factor is left out.
    """
    frequencies, rounded = rotary.pairs.frequencies(rotary.scaling, rotary.base, rotary.seq_len or 1)
    factor = rotary.scaling.effective_attention_factor
    exact = rotary.angles if rotary.angles.mode == "exact" else Angles(frequencies, attention_factor=factor)
    usual = Angles(frequencies, "float32", rounded=rounded, attention_factor=factor)
    return _errors(exact, usual, index, dtype)


def _errors(exact: Angles, rounded: Angles, index: Tensor, dtype: torch.dtype) -> Tensor:
    true = _cosines(exact, index)
    if dtype == torch.float32:
        cosine = _cosines(rounded, index)
    else:
        frequencies = torch.tensor([*map(float, exact.frequencies)], dtype=dtype)
        cosine = (index.to(dtype)[:, None] * frequencies).double().cos() * exact.attention_factor
    return ((true - cosine) / exact.attention_factor).abs()


def _cosines(angles: Angles, index: Tensor, pairs: Tensor | None = None) -> Tensor:
    """Return the cosines of these pairs. Default: all."""
    tables = angles.tables(index.device, int(index.max()))
    if pairs is not None:
        tables = tables._replace(table=tables.table[..., pairs, :] if tables.exact() else tables.table[pairs])
    return cos_sin(index, tables, torch.float64)[0]


@lru_cache(maxsize=8)  # a model that is extended to many lengths is measured once before that
def _precision(frequencies: tuple[Decimal, ...], rounded: tuple[float, ...], length: int) -> Precision:
    """Return the error of float32 angles over all pairs, without the attention factor.

    `frequencies` are exact, and `rounded` are their float32 values.
    """
    exact, usual = Angles([*frequencies]), Angles([*frequencies], "float32", rounded=torch.tensor(rounded))
    last = torch.arange(max(0, length - CHUNK), max(length, 1))
    at_longest = float(_errors(exact, usual, last, torch.float32).max())
    return Precision(first_visible=_first_visible(exact, usual), at_longest=at_longest)


def _first_visible(exact: Angles, rounded: Angles) -> int | None:
    """Return the first position with a visible error. Only pairs that rotate fast enough are searched."""
    frequencies = torch.tensor([*map(float, exact.frequencies)], dtype=torch.float64).abs()
    for start in range(0, SEARCHED, CHUNK):
        index = torch.arange(start, start + CHUNK)
        pairs = (frequencies * (start + CHUNK) * MOST_ROUNDED > VISIBLE).nonzero()[:, 0]
        errors = (_cosines(exact, index, pairs) - _cosines(rounded, index, pairs)).abs() / exact.attention_factor
        visible = (errors > VISIBLE).any(-1).nonzero()
        if len(visible):
            return start + int(visible[0])
    return None
