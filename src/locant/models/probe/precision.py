"""How far angles are from the truth, from position 1 to 2^31 - 1, and what rounding explains it.

The truth is that of the encoding which the frequencies were found to be, in float64. Frequencies of no formula have no
truth beyond what was measured, so nothing is said about them far away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locant.arguments import MAX_INT32
from locant.models.probe.rotation import Rotation, angles_at, begins_at, wrapped
from locant.models.probe.subject import Subject
from locant.models.probe.trial import FAILED, HEADS
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions

__all__ = ["EXACT", "FLOAT32", "READ_OFF_NARROW", "errors_of", "rounding_of"]

FAR = (1, 257, 1025, 4097, 16_385, 65_537, 2**20 + 1, 2**24 + 1, 2**28 + 1, MAX_INT32)
"""One past powers of two, which narrow numbers round away."""

MOST_ELEMENTS = 2**23
"""The largest tensor that a call may make: what keeps a table of all positions is asked no further."""

EXPLAINED = 4e-6
"""How far angles may be from those of the rounding that explains them; an angle read off float32 is good for 1e-7."""

READ_OFF_NARROW = 1.2e-2
"""The same read off bfloat16."""

EXACT = "exact"
FLOAT32 = "float32(position) x float32(frequency)"


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


def rounding_of(
    angles: Tensor, index: Tensor, rotation: Rotation, frequencies: Tensor, within: float = EXPLAINED
) -> str | None:
    """What gives these angles, ``[positions, pairs]``: ``"exact"``, one of `ROUNDINGS`; ``None``: none of them.

    Cosines of narrow angles are narrow too, which moves the angle that is read off them.
    """
    index = index + begins_at(rotation)
    angles = angles + (_offsets(rotation) if begins_at(rotation) else 0)
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
