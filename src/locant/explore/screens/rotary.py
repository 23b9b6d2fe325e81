"""Rotary: a clock for every pair of dimensions, what scalings do to each, what a cache and rounding cost."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from locant.arguments import MAX_INT32
from locant.checkpoints.rotary_settings import bands_of, pair_settings, rounding_errors
from locant.explore.screens import Screen
from locant.explore.session import Session
from locant.explore.state import SCALING_TITLES, State
from locant.positions import Positions, Rotary
from locant.positions.scaling import EXTENDING, SCALINGS, Scaling, scaling_by_name

__all__ = ["SCREEN"]

NONE = "none"
MAX_LENGTH = 2**22
NUM_POINTS = 128
NUM_PLACES = 96
NEAR = 8
"""So many positions around each place of the curve of errors are computed, and the largest error is drawn."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """For one rotary encoding: its pairs at a position, beside those of every scaling, and what is lost."""
    dim = state.whole("head_dim", 64, 4, 256, even=True)
    base = state.real("base", 10_000.0, 2, 1e9, log=True)
    trained = state.whole("trained", 4096, 16, MAX_LENGTH, log=True)
    method = state.one_of("scaling", "yarn", [NONE, *SCALINGS], SCALING_TITLES)
    factor = state.real("factor", 8.0, 1, 128, log=True)
    position = state.whole("position", 1000, 0, MAX_INT32, log=True)
    pair = state.whole("pair", min(dim // 2 - 1, 12), 0, dim // 2 - 1, follows=True)
    length = min(round(trained * factor), MAX_INT32)
    plain, rotary = _rotary(dim, base, NONE, factor, trained), _rotary(dim, base, method, factor, trained)
    if rotary.seq_len is not None and position >= length:
        length = position + 1  # the sequence is at least as long as that, and the frequencies follow
        rotary = rotary.for_length(length)
    cos, sin = rotary.cos_sin(Positions.of(torch.tensor([[position]])), torch.float64)
    pairs = pair_settings(rotary)
    bands = {number: name for name, members in bands_of(pairs).items() for number in members}
    return {
        "position": position,
        "pair": pair,
        "trained": trained,
        "length": length,
        "scaling": method,
        "cos": cos[0, 0].numpy() / rotary.scaling.effective_attention_factor,
        "sin": sin[0, 0].numpy() / rotary.scaling.effective_attention_factor,
        "wavelengths": [each.wavelength for each in pairs],
        "plain": [each.wavelength for each in pair_settings(plain)],
        "rotations": [position / each.wavelength if each.wavelength else 0.0 for each in pairs],
        "bands": [bands[number] for number in range(dim // 2)],
        "attention_factor": rotary.scaling.effective_attention_factor,
        "methods": _side_by_side(dim, base, factor, trained),
        "cache": _cached_keys(dim, base, factor, trained, length),
        "precision": _precision(rotary, position),
        "python": _code(rotary, position, trained),
    }


@lru_cache(maxsize=64)
def _rotary(dim: int, base: float, method: str, factor: float, trained: int) -> Rotary:
    """For the length that it is scaled to, where the frequencies depend on it."""
    rotary = Rotary(dim, base, scaling=_scaling(dim, base, method, factor, trained))
    return rotary if rotary.scaling.length_that_matters is None else rotary.for_length(round(trained * factor))


def _scaling(dim: int, base: float, method: str, factor: float, trained: int) -> Scaling | None:
    return None if method == NONE else scaling_by_name(f"{method}:{factor!r}", trained, dim, base)


def _side_by_side(dim: int, base: float, factor: float, trained: int) -> Mapping[str, Any]:
    """By how much each method stretches the wavelength of each pair."""
    rows = [pair_settings(_rotary(dim, base, method, factor, trained)) for method in EXTENDING]
    stretch = np.array([[each.stretch or np.nan for each in row] for row in rows])
    return {"names": list(EXTENDING), "stretch": stretch, "most": max(float(np.nanmax(stretch)), 1.001)}


def _cached_keys(dim: int, base: float, factor: float, trained: int, length: int) -> Mapping[str, Any]:
    """How well a key that was cached at the trained length fits a query at the new one, by the key's position.

    1 where its angles are those of the new length; the mean over pairs of the cosine of the difference elsewhere.
    """
    positions = np.unique(np.linspace(0, trained - 1, min(trained, NUM_POINTS)).round().astype(np.int64))
    at = Positions.of(torch.from_numpy(positions)[None])
    curves: dict[str, Any] = {}
    for method in EXTENDING:
        now = _rotary(dim, base, method, factor, trained)
        if now.scaling.length_that_matters is None:
            continue
        (cos_then, sin_then), (cos_now, sin_now) = (
            each.cos_sin(at, torch.float64) for each in (_then(dim, base, method, factor, trained), now)
        )
        size = now.scaling.effective_attention_factor**2
        curves[method] = ((cos_then * cos_now + sin_then * sin_now)[0].mean(-1) / size).numpy()
    return {"positions": positions, "curves": curves, "kept": [name for name in EXTENDING if name not in curves]}


@lru_cache(maxsize=16)
def _then(dim: int, base: float, method: str, factor: float, trained: int) -> Rotary:
    return _rotary(dim, base, method, factor, trained).for_length(trained)


def _precision(rotary: Rotary, position: int) -> Mapping[str, Any]:
    """The errors of cosines by dtype: the largest near positions up to 2^31, and of each pair at this position."""
    places = np.unique(np.geomspace(1, MAX_INT32, NUM_PLACES).round().astype(np.int64))
    near = np.clip(places[:, None] - np.arange(NEAR), 0, None)
    here = torch.tensor([position])
    found: dict[str, Any] = {"positions": places.astype(np.float64), "curves": {}, "pairs": {}}
    for name, dtype in DTYPES.items():
        largest = rounding_errors(rotary, torch.from_numpy(near.ravel()), dtype).amax(-1)
        found["curves"][name] = largest.reshape(near.shape).amax(-1).numpy()
        found["pairs"][name] = rounding_errors(rotary, here, dtype)[0].numpy()
    return found


def _code(rotary: Rotary, position: int, trained: int) -> str:
    made = f"Rotary({rotary.head_dim}, base={rotary.base!r}"
    if rotary.scaling.length_that_matters is not None or type(rotary.scaling).__name__ != "Unscaled":
        made += f", scaling=scaling.{rotary.scaling!r}"
    made += ")" if rotary.seq_len is None else f").for_length({rotary.seq_len})"
    return (
        "import torch\n\nfrom locant import Positions, Rotary, plot, scaling\n\n"
        f"rotary = {made}\n"
        f"cos, sin = rotary.cos_sin(Positions.of(torch.tensor([[{position}]])))\n"
        "wavelengths = [float(2 * torch.pi / float(each)) for each in rotary.angles.frequencies]\n"
        f'plot(rotary).savefig("rotary.png")  # its wavelengths; trained with {trained} positions\n'
    )


SCREEN = Screen(
    title="Rotary",
    place=2,
    about="Every pair of dimensions is a clock that turns with the position: fast ones tell near tokens apart, slow "
    "ones far ones.",
    numbers=numbers,
)
