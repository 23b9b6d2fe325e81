"""Images and video: tokens with an index per axis, which pair turns with which, and text before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from locant.checkpoints.rotary_settings import pair_settings
from locant.errors import RangeError
from locant.explore.screen import Screen
from locant.explore.session import Session
from locant.explore.state import State
from locant.positions import Pairs, Positions, Rotary

__all__ = ["SCREEN"]

AXES = ("frame", "row", "column")
FRAME, ROW, COLUMN = range(3)
SCHEMES = ("contiguous", "stride", "turns", "axial")
"""One ladder of frequencies, in sections (Qwen2-VL), every third pair (Qwen3-VL) or rows and columns in turns and then
frames (ERNIE 4.5 VL); or a ladder for each axis, as in vision encoders."""
MOST = 32
"""Frames, rows, columns, and tokens of text on either side."""


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """The index of every token on every axis, the axis of every pair, and how alike two places are after rotation."""
    frames, rows, columns = (
        state.whole(name, n, 1, MOST) for name, n in (("frames", 2), ("rows", 12), ("columns", 16))
    )
    before, after = state.whole("before", 5, 0, MOST), state.whole("after", 4, 0, MOST)
    pairs = state.whole("pairs", 64, 3, 128)
    first = state.whole("frame_pairs", min(16, pairs - 2), 1, pairs - 2)
    second = state.whole("row_pairs", min(24, pairs - first - 1), 1, pairs - 2)
    if first + second >= pairs:
        got = f"got {first} pairs for frames and {second} for rows of {pairs} in all, expected one for columns"
        raise RangeError(got, f"row_pairs={pairs - first - 1}")
    sections = (first, second, pairs - first - second)
    scheme = state.one_of("scheme", "axial", SCHEMES)
    base = state.real("base", 10_000.0, 2, 1e9, log=True)
    axes = _axes(scheme, sections)
    rotary = Rotary(2 * pairs, base, **_table(scheme, sections, axes))
    grid = frames * rows * columns
    positions = _positions(before, (frames, rows, columns), after)
    at = state.whole("at", before + rows * columns // 2 + columns // 2, 0, positions.seq_len - 1)
    return {
        "axes": list(AXES),
        "index": positions.index[0].numpy(),
        "grid": [frames, rows, columns],
        "image": [before, before + grid],
        "at": at,
        "alike": _alike(rotary, positions, at),
        "axis_of_pair": np.array(axes),
        "wavelengths": [pair.wavelength for pair in pair_settings(rotary)],
        "python": _code(rotary, axes, base, before, (frames, rows, columns), after),
    }


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
    return {"pairs": Pairs(dims=[(pair, pair + len(axes)) for pair in range(len(axes))], axes=axes, num_axes=len(AXES))}


def _positions(before: int, sizes: tuple[int, int, int], after: int) -> Positions:
    """An image begins where the text before it ended, on every axis, and the text after it past its largest index."""
    image = Positions.of(Positions.grid(*sizes).index + before)
    return Positions.cat([_text(0, before), image, _text(before + max(sizes), after)])


def _text(start: int, count: int) -> Positions:
    return Positions.of(torch.arange(start, start + count)[None, :, None].expand(1, count, 3))


def _alike(rotary: Rotary, positions: Positions, at: int) -> np.ndarray:
    """For each token, the mean over pairs of the cosine of the angle between it and the token that is chosen."""
    cos, sin = (each[0] for each in rotary.cos_sin(positions, torch.float64))
    return (cos * cos[at] + sin * sin[at]).mean(-1).numpy()


def _code(rotary: Rotary, axes: list[int], base: float, before: int, sizes: tuple[int, ...], after: int) -> str:
    made = f"sections={rotary.sections}{', axial=True' if rotary.axial else ''}"
    written = ""
    if not rotary.is_short:
        written = f"axes = {axes}\ndims = [(pair, pair + {len(axes)}) for pair in range({len(axes)})]\n"
        made = "pairs=Pairs(dims=dims, axes=axes, num_axes=3)"
    return (
        "import torch\n\nfrom locant import Positions, Rotary\nfrom locant.positions import Pairs\n\n\n"
        "def text(start, count):\n"
        "    return Positions.of(torch.arange(start, start + count)[None, :, None].expand(1, count, 3))\n\n\n"
        f"image = Positions.of(Positions.grid{sizes}.index + {before})\n"
        f"positions = Positions.cat([text(0, {before}), image, text({before + max(sizes)}, {after})])\n"
        f"{written}rotary = Rotary({rotary.head_dim}, base={base!r}, {made})\n"
        "cos, sin = rotary.cos_sin(positions)\n"
    )


SCREEN = Screen(
    title="Images and video",
    place=5,
    about="A token of an image has a frame, a row and a column: each turns pairs of its own, and text goes on behind.",
    numbers=numbers,
)
