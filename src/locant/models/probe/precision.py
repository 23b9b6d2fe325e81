"""How far angles are from the truth, from position 1 to 2^31 - 1, and what rounding explains it.

The truth is that of the encoding which the frequencies were found to be, in float64. Frequencies of no formula are
known as far as they were measured, so no errors are told of them: only whether their angles go on evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant.arguments import MAX_INT32
from locant.models.probe.rotation import NEAR, Rotation, angles_at, begins_at, wrapped
from locant.models.probe.subject import Subject
from locant.models.probe.trial import FAILED, HEADS
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions

__all__ = ["EXACT", "FLOAT32", "READ_OFF_NARROW", "UNHARMED", "Precision", "errors_of", "rounding_of", "uneven_at"]

FAR = (1, 257, 1025, 4097, 16_385, 65_537, 2**20 + 1, 2**24 + 1, 2**28 + 1, MAX_INT32)
"""One past powers of two, which narrow numbers round away."""

MOST_ELEMENTS = 2**23
"""The largest tensor that a call may make: what keeps a table of all positions is asked no further."""

EXPLAINED = 4e-6
"""How far angles may be from those of the rounding that explains them; an angle read off float32 is good for 1e-7."""

READ_OFF = 5e-7
"""How far an angle that is read off float32 may be from what it was."""

READ_OFF_NARROW = 1.2e-2
"""The same read off bfloat16."""

EXACT = "exact"
FLOAT32 = "float32(position) x float32(frequency)"
IN_FLOAT32 = "arithmetic in float32"
UNHARMED = (EXACT, FLOAT32, IN_FLOAT32)
"""No mistakes: what models are trained with."""

FEW_ROUNDINGS = 2.0**-21
"""By how much of itself an angle may be off after a few operations in float32."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How angles are computed, up to the last position that could be asked for.

    Args:
        errors: the largest error of an angle at a position, in radians; empty where the truth is not known.
        last: the last position whose angles were measured.
        rounding: which arithmetic explains the angles; ``None``: none that is known.
        uneven: where the truth is not known, nor an exact rounding, the first position whose angles do not go on
            evenly, and by how much.
        casts: for each narrower dtype, the error up to position 4,097 after its module was cast, and what explains it.
        narrow: what explains the angles of bfloat16 tokens; ``None``: nothing, or it does not take them.
    """

    errors: Mapping[int, float] = field(default_factory=dict)
    last: int = 4097
    rounding: str | None = None
    uneven: tuple[int, float] | None = None
    casts: Mapping[str, tuple[float, str | None]] = field(default_factory=dict)
    narrow: str | None = None

    @property
    def error(self) -> float:
        """The largest that is known, in radians."""
        return max([*self.errors.values(), 0.0 if self.uneven is None else self.uneven[1]], default=0.0)

    def is_like(self, other: Precision) -> bool:
        """Whether the same explains both."""
        return (self.rounding, self.narrow, self.uneven is None) == (other.rounding, other.narrow, other.uneven is None)


def _narrow(index: torch.dtype | None, frequency: torch.dtype | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Products of positions and frequencies in these dtypes, float32 where there is none."""

    def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
        one, other = positions.to(index or torch.float32), frequencies.to(frequency or torch.float32)
        return (one * other if index == frequency else one.float() * other.float()).double()

    return angles


ROUNDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    FLOAT32: _narrow(None, None),
    **{
        name: _narrow(index, frequency)
        for dtype, kind in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))
        for name, index, frequency in (
            (f"{kind} frequencies", None, dtype),
            (f"positions counted in {kind}", dtype, None),
            (f"{kind}(position) x {kind}(frequency)", dtype, dtype),
        )
    },
}
"""Angles as they may have been computed, from float32 frequencies, the best first."""

ULPS = 4
"""Float32 frequencies may be so many units of the last digit away: each program has its own power function."""


def errors_of(
    subject: Subject, rotation: Rotation, encoding: Rotary, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[int, float]]:
    """Positions, the angles there of tokens in a dtype, ``[positions, pairs]``, and the largest error at each."""
    found: dict[int, float] = {}
    rows: list[Tensor] = []
    for place in FAR if subject.limit is None else (*(p for p in FAR if p < subject.limit), subject.limit):
        index = _everywhere(subject, place)
        with _Largest() as sizes:
            try:
                angle = angles_at(subject, rotation, index, dtype) - _offsets(rotation)
            except (*FAILED, MemoryError):
                break
        found[place] = float(wrapped(angle - _truth(encoding, rotation, index)).abs().max())
        rows.append(angle)
        if sizes.largest > MOST_ELEMENTS // 16 and sizes.largest >= place // 2:  # the next would be 16 times as large
            break
    if not rows:
        raise ValueError("at no position")
    return torch.tensor([*found]), torch.cat(rows), found


def uneven_at(
    angles: Tensor, index: Tensor, frequencies: Tensor, of: int, share: float = FEW_ROUNDINGS
) -> tuple[int, float] | None:
    """The first position whose angles no frequency explains that explains those before, and how far they are off.

    A frequency is known from positions up to `of`, and better from each farther one that it explains. An angle may be
    off by a share of itself.
    """
    for place, row in zip(index.tolist(), angles, strict=True):
        apart = wrapped(row - place * frequencies)
        if bool((apart.abs() > READ_OFF * (1 + place / of) + share * place * frequencies.abs()).any()):
            return place, float(apart.abs().max())
        if place > of:
            frequencies, of = frequencies + apart / place, place
    return None


def rounding_of(
    angles: Tensor,
    index: Tensor,
    rotation: Rotation,
    frequencies: Tensor,
    within: float = EXPLAINED,
    *,
    is_measured: bool = False,
    is_scaled: bool = False,
) -> str | None:
    """What gives these angles, ``[positions, pairs]``: ``"exact"``, one of `ROUNDINGS`; ``None``: none of them.

    Cosines of narrow angles are narrow too, which moves the angle that is read off them. Frequencies that were measured
    are exact where angles go on evenly. Scaled ones may have taken a rounding more.
    """
    if is_measured and uneven_at(angles, index, frequencies, NEAR[-1], 0.0) is None:
        return EXACT
    begin = begins_at(rotation) or 0.0
    if begin and begin.is_integer():
        index, angles = index + int(begin), angles + _offsets(rotation)
    exact = wrapped(index[:, None].double() * frequencies - angles).abs()
    if float(exact.max()) <= within:
        return EXACT
    candidates = [frequencies.float()]
    for end in (torch.inf, -torch.inf):
        near = candidates[0]
        for _ in range(ULPS):
            near = torch.nextafter(near, torch.full_like(near, end))
            candidates.append(near)
    for allowed in sorted({within, READ_OFF_NARROW}):
        for name, way in ROUNDINGS.items():
            ways = torch.stack([wrapped(way(index[:, None], each) - angles).abs().amax(0) for each in candidates])
            if float(ways.amin(0).max()) <= (within if name == FLOAT32 else allowed):
                return name
        if allowed == within:
            few = exact <= within + FEW_ROUNDINGS * index[:, None] * frequencies.abs()
            even = is_measured and uneven_at(angles, index, frequencies, NEAR[-1]) is None
            if even or (is_scaled and bool(few.all())):
                return IN_FLOAT32
    return None


def _everywhere(subject: Subject, place: int) -> Tensor:
    return torch.full((1, 1, subject.axes), place, dtype=torch.int64)


def _offsets(rotation: Rotation) -> Tensor:
    return torch.tensor([block.offset for block in rotation.blocks], dtype=torch.float64)


def _truth(encoding: Rotary, rotation: Rotation, index: Tensor) -> Tensor:
    """The exact angles of the same pairs, read in the same way."""
    dims = torch.tensor([block.dims for block in rotation.blocks])
    x = torch.zeros(1, HEADS, index.shape[1], encoding.head_dim, dtype=torch.float64)
    x[..., dims[:, 0]] = 1
    positions = Positions.of(index if index.shape[-1] > 1 else index[..., 0])
    rotated = encoding.rotate_one(x, positions)[0, 0]
    return torch.atan2(rotated[:, dims[:, 1]], rotated[:, dims[:, 0]])


class _Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return made
