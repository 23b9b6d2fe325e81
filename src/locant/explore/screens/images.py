"""Images and video: tokens with an index per axis, which pair turns with which, and text before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from locant.checkpoints.rotary_settings import pair_settings
from locant.explore.screens import Screen
from locant.explore.session import Session
from locant.explore.state import State
from locant.positions import Pairs, Positions, Rotary

__all__ = ["SCREEN"]

AXES = ("frame", "row", "column")
FRAME, ROW, COLUMN = range(3)
SCHEMES = ("contiguous", "stride", "turns", "axial", "heads")
"""One ladder of frequencies, in sections (Qwen2-VL), every third pair (Qwen3-VL) or rows and columns in turns and then
frames (ERNIE 4.5 VL); or a ladder for each axis, as in vision encoders; or an axis for each group of heads (MHRoPE)."""
MOST = 32
"""Frames, rows, columns, and tokens of text on either side."""


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The index of every token on every axis, the axis of every pair, and how alike two places are after rotation."""
    frames, rows, columns = (
        state.whole(name, n, 1, MOST) for name, n in (("frames", 2), ("rows", 12), ("columns", 16))
    )
    before, after = state.whole("before", 5, 0, MOST), state.whole("after", 4, 0, MOST)
    step = state.whole("step", 1, 1, 25)
    goes_on = state.one_of("goes_on", "largest", ["largest", "sides"])
    pairs = state.whole("pairs", 64, 3, 128)
    scheme = state.one_of("scheme", "axial", SCHEMES)
    base = state.real("base", 10_000.0, 2, 1e9, log=True)
    axes, options = _by_head(state, pairs) if scheme == "heads" else _by_pair(state, pairs, scheme)
    rotary = Rotary(2 * pairs, base, **options)
    grid = frames * rows * columns
    parts = [before, (frames, rows, columns, step), after]
    positions, behind = (Positions.multimodal([*parts[:2], text], goes_on=goes_on) for text in (after, 1))
    at = state.whole("at", before + rows * columns // 2 + columns // 2, 0, positions.seq_len - 1, follows=True)
    return {
        "axes": list(AXES),
        "index": positions.index[0].numpy(),
        "grid": [frames, rows, columns],
        "image": [before, before + grid],
        "next": int(behind.index[0, -1, 0]),
        "at": at,
        "alike": _alike(rotary, positions, at),
        "axis_of_pair": np.array(axes),
        "wavelengths": [pair.wavelength for pair in pair_settings(rotary)],
        "python": _code(rotary, scheme, axes, base, f"{parts}, goes_on={goes_on!r}"),
    }


def _by_head(state: State, pairs: int) -> tuple[list[int], dict[str, Any]]:
    """Heads in three groups, of which one is shown: all its pairs turn with one axis."""
    group = AXES.index(state.one_of("group", AXES[ROW], AXES))
    return [group] * pairs, {"pairs": _pairs_of([group] * pairs)}


def _by_pair(state: State, pairs: int, scheme: str) -> tuple[list[int], dict[str, Any]]:
    """All heads alike: so many pairs for each axis."""
    first = state.whole("frame_pairs", min(16, pairs - 2), 1, pairs - 2, follows=True)
    second = state.whole("row_pairs", min(24, pairs - first - 1), 1, pairs - first - 1, follows=True)
    sections = (first, second, pairs - first - second)
    axes = _axes(scheme, sections)
    return axes, _table(scheme, sections, axes)


def _axes(scheme: str, sections: tuple[int, int, int]) -> list[int]:
    """Which axis each pair turns with, from the fastest pair to the slowest."""
    if scheme == "stride":  # as far as the sections of rows and columns reach; frames have the rest
        reach = [3 * count for count in sections]
        return [pair % 3 if pair < reach[pair % 3] else FRAME for pair in range(sum(sections))]
    if scheme == "turns":
        frames, rows, columns = sections
        both = min(rows, columns)
        return [ROW, COLUMN] * both + [ROW] * (rows - both) + [COLUMN] * (columns - both) + [FRAME] * frames
    return np.repeat(np.arange(3), sections).tolist()


def _table(scheme: str, sections: tuple[int, int, int], axes: list[int]) -> dict[str, Any]:
    """What a `Rotary` is told of its pairs: their sections where it has a word for them, else the whole table."""
    if scheme in ("contiguous", "axial"):
        return {"sections": sections, "axial": scheme == "axial"}
    return {"pairs": _pairs_of(axes)}


def _pairs_of(axes: list[int]) -> Pairs:
    return Pairs(dims=[(pair, pair + len(axes)) for pair in range(len(axes))], axes=axes, num_axes=len(AXES))


def _alike(rotary: Rotary, positions: Positions, at: int) -> np.ndarray:
    """For each token, the mean over pairs of the cosine of the angle between it and the token that is chosen."""
    cos, sin = (each[0] for each in rotary.cos_sin(positions, torch.float64))
    return (cos * cos[at] + sin * sin[at]).mean(-1).numpy()


def _code(rotary: Rotary, scheme: str, axes: list[int], base: float, parts: str) -> str:
    made = f"sections={rotary.sections}{', axial=True' if rotary.axial else ''}"
    written, imported, beside = "", "", ""
    if not rotary.is_short:
        imported = "from locant.positions import Pairs\n"
        written = f"axes = {axes}\ndims = [(pair, pair + {len(axes)}) for pair in range({len(axes)})]\n"
        made = "pairs=Pairs(dims=dims, axes=axes, num_axes=3)"
    if scheme == "heads":
        imported = "from locant.positions import Pairs, RotaryByHead\n"
        one = "Pairs(dims=dims, axes=[axis] * len(axes), num_axes=3)"
        beside = (
            f"by_head = RotaryByHead([Rotary({rotary.head_dim}, base={base!r}, pairs={one}) for axis in range(3)])\n"
        )
    return (
        f"from locant import Positions, Rotary\n{imported}\n"
        f"positions = Positions.multimodal({parts})\n"
        f"{written}rotary = Rotary({rotary.head_dim}, base={base!r}, {made})\n{beside}"
        "cos, sin = rotary.cos_sin(positions)\n"
    )


SCREEN = Screen(
    title="Images and video",
    place=6,
    about="A token of an image has a frame, a row and a column: each turns pairs of its own, and text goes on behind.",
    numbers=numbers,
)
