"""Every kind of rotary next to the frequencies that it means to rotate by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mpmath
import torch
from torch import Tensor

from locant import Positions
from locant.positions.scaling import Unscaled
from tests.known_bugs.oracle import frequencies, rounded_frequencies, true_cos_sin
from tests.known_bugs.subjects import ROTARY_OPTIONS, rotary

__all__ = ["CosSin", "Rotation", "bound", "rotation", "rotations", "worst_error"]

CosSin = Callable[[Positions], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """What rotates pairs, the frequencies it means to rotate them by, and the length it gives them."""

    cos_sin: CosSin
    frequencies: Sequence[mpmath.mpf] | Tensor
    attention_factor: float = 1.0


def rotation(**options: Any) -> Rotation:
    """One of our rotaries, seen with one number per token. What its scaling makes of a base is tested elsewhere."""
    encoding = rotary(**options)
    dims = [2 * pairs for pairs in encoding.sections or ()] if encoding.axial else [encoding.rotary_dim]
    scaling = None if isinstance(encoding.scaling, Unscaled) else encoding.scaling
    meant: Sequence[mpmath.mpf] | Tensor
    if encoding.angles.mode == "float32":
        rounded = rounded_frequencies if scaling is None else partial(scaling.rounded, seq_len=encoding.seq_len)
        meant = torch.cat([rounded(dim, encoding.base) for dim in dims])
    elif scaling is None:
        meant = [frequency for dim in dims for frequency in frequencies(dim, encoding.base)]
    else:
        exact = [frequency for dim in dims for frequency in scaling.frequencies(dim, encoding.base, encoding.seq_len)]
        with mpmath.workdps(50):
            meant = [mpmath.mpf(str(frequency)) for frequency in exact]
    return Rotation(encoding.cos_sin, meant, encoding.scaling.effective_attention_factor)


def rotations() -> dict[str, Rotation]:
    """All of them, by name."""
    return {name: rotation(**options) for name, options in ROTARY_OPTIONS.items()}


def worst_error(subject: Rotation, index: list[int]) -> float:
    """How far any cosine or sine is from the truth. Each position comes alone, with bounds that fit it."""
    ours = zip(*(subject.cos_sin(Positions.of([position])) for position in index), strict=True)
    true = true_cos_sin(index, subject.frequencies)
    pairs = zip(ours, true, strict=True)
    return max(
        float((torch.cat(some, 1)[0].double() / subject.attention_factor - truth).abs().max()) for some, truth in pairs
    )


def bound(subject: Rotation) -> float:
    """Half a unit of float32 for the exact mode; one more for torch's cosine in the other; another for a factor."""
    roundings = 1 + isinstance(subject.frequencies, Tensor) + (subject.attention_factor != 1)
    return 1.01 * 2.0**-25 * 2 ** (roundings - 1)
