"""The screens Rotary, and Images and video: a clock for every pair of dimensions, in text and on several axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from locant.arguments import MAX_INT32
from locant.checkpoints.rotary_settings import bands_of, pair_settings, rounding_errors
from locant.explore.screens import Screen, evenly_spaced_numbers
from locant.explore.session import SCALING_TITLES, Session, State
from locant.positions import Pairs, Positions, Rotary
from locant.positions.scaling import EXTENDING, SCALINGS, scaling_by_name

NONE = "none"
MAX_LENGTH = 2**22
NUM_POINTS = 128
NUM_PLACES = 96
NEAR = 8
"""The number of positions in each point of the error curve. The curve shows their largest error."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AXES = ("frame", "row", "column")
FRAME, ROW, COLUMN = range(3)
SCHEMES = ("contiguous", "stride", "turns", "axial", "heads")
"""The axis of each pair. The first three use one series of frequencies: in sections (Qwen2-VL), every third pair
(Qwen3-VL), or rows and columns alternately and then frames (ERNIE 4.5 VL). The others use a series for each axis, as in
vision encoders, or an axis for each group of heads (MHRoPE)."""
MAX_SIZE = 32
"""The largest number of frames, of rows, of columns, and of text tokens on either side."""


def clocks(state: State, session: Session) -> Mapping[str, Any]:
    """Return the pairs of a rotary encoding at a position, the scalings to compare with, and the rounding errors."""
    dim = state.whole("head_dim", 64, 4, 256, even=True)
    base = state.real("base", 10_000.0, 2, 1e9, log=True)
    trained = state.whole("trained", 4096, 16, MAX_LENGTH, log=True)
    method = state.one_of("scaling", "yarn", [NONE, *SCALINGS], SCALING_TITLES)
    factor = state.real("factor", 8.0, 1, 128, log=True)
    position = state.whole("position", 1000, 0, MAX_INT32, log=True)
    pair = state.whole("pair", min(dim // 2 - 1, 12), 0, dim // 2 - 1, follows=True)
    length, sizes = round(trained * factor), (dim, base, factor, trained)
    rotary = _rotary(method, length, *sizes)
    if rotary.seq_len is not None and position >= length:
        length = position + 1  # the sequence is at least that long, and frequencies depend on its length
        rotary = rotary.for_length(length)
    attention_factor = rotary.scaling.effective_attention_factor
    cos, sin = (
        each[0, 0].numpy() / attention_factor
        for each in rotary.cos_sin(Positions.of(torch.tensor([[position]])), torch.float64)
    )
    pairs = pair_settings(rotary)
    bands = {number: name for name, members in bands_of(pairs).items() for number in members}
    return {
        "position": position,
        "pair": pair,
        "trained": trained,
        "length": length,
        "scaling": method,
        "cos": cos,
        "sin": sin,
        "wavelengths": [each.wavelength for each in pairs],
        "plain": [each.wavelength for each in pair_settings(_rotary(NONE, length, *sizes))],
        "rotations": [position / each.wavelength if each.wavelength else 0.0 for each in pairs],
        "bands": [bands[number] for number in range(dim // 2)],
        **side_by_side(*sizes),
        "precision": precision(rotary, position),
        "python": _codes_of_clocks(rotary, position, pair, sizes),
    }


@lru_cache(maxsize=80)
def _rotary(method: str, length: int, dim: int, base: float, factor: float, trained: int) -> Rotary:
    """Return the encoding, for this length if the frequencies depend on it."""
    scaling = None if method == NONE else scaling_by_name(f"{method}:{factor!r}", trained, dim, base)
    rotary = Rotary(dim, base=base, scaling=scaling)
    return rotary if rotary.scaling.length_threshold is None else rotary.for_length(length)


def side_by_side(*sizes: Any) -> Mapping[str, Any]:
    """Return the factor of each method on the wavelength of each pair, and how well its cached keys fit.

    The keys were cached at the trained length. For each position, the fit of a key is the cosine of the angle
    difference, averaged over pairs. It is 1 if the angles equal the angles of the new length. `sizes` are head_dim,
    base, factor and trained length.
    """
    *_, factor, trained = sizes
    positions, curves = evenly_spaced_numbers(trained, NUM_POINTS), dict[str, Any]()
    at, stretch = Positions.of(torch.from_numpy(positions)[None]), []
    for method in EXTENDING:
        now = _rotary(method, round(trained * factor), *sizes)
        stretch.append([each.stretch or np.nan for each in pair_settings(now)])
        if now.scaling.length_threshold is not None:
            then = _rotary(method, trained, *sizes)
            (cos_then, sin_then), (cos_now, sin_now) = (each.cos_sin(at, torch.float64) for each in (then, now))
            size = now.scaling.effective_attention_factor**2
            curves[method] = ((cos_then * cos_now + sin_then * sin_now)[0].mean(-1) / size).numpy()
    most = max(float(np.nanmax(stretch)), 1.001)
    unchanged = [name for name in EXTENDING if name not in curves]
    return {
        "methods": {"names": list(EXTENDING), "stretch": np.array(stretch), "most": most},
        "cache": {"positions": positions, "curves": curves, "kept": unchanged},
    }


def precision(rotary: Rotary, position: int) -> Mapping[str, Any]:
    """Return the errors of cosines by dtype.

    These are the largest error near each of `NUM_PLACES` positions up to 2^31 - 1, and each pair's error at `position`.
    """
    places = np.unique(np.geomspace(1, MAX_INT32, NUM_PLACES).round().astype(np.int64))
    near = np.clip(places[:, None] - np.arange(NEAR), 0, None)
    curves, pairs = {}, {}
    for name, dtype in DTYPES.items():
        largest = rounding_errors(rotary, torch.from_numpy(near.ravel()), dtype).amax(-1)
        curves[name] = largest.reshape(near.shape).amax(-1).numpy()
        pairs[name] = rounding_errors(rotary, torch.tensor([position]), dtype)[0].numpy()
    return {"position": position, "positions": places.astype(np.float64), "curves": curves, "pairs": pairs}


def _codes_of_clocks(rotary: Rotary, position: int, pair: int, sizes: tuple[Any, ...]) -> dict[str, str]:
    scaling = "" if type(rotary.scaling).__name__ == "Unscaled" else f", scaling=scaling.{rotary.scaling!r}"
    for_length = "" if rotary.seq_len is None else f".for_length({rotary.seq_len})"
    plain = f"Rotary({rotary.head_dim}, base={rotary.base!r}"
    built = f"import torch\n\nfrom locant import Positions, Rotary, scaling\n\nrotary = {plain}{scaling}){for_length}\n"
    clocks = (
        f"{built}cos, sin = rotary.cos_sin(Positions.of(torch.tensor([[{position}]])), torch.float64)\n"
        "factor = rotary.scaling.effective_attention_factor\ncos, sin = cos[0, 0] / factor, sin[0, 0] / factor\n"
    )
    common = f"from locant.explore.screens.rotary import side_by_side\n\nfound = side_by_side{sizes}\n"
    return {
        "clocks": clocks,
        "clock": f"{clocks}print(cos[{pair}], sin[{pair}])\n",
        "wavelengths": f"from locant.checkpoints.rotary_settings import pair_settings\n{built}"
        f"plain = [each.wavelength for each in pair_settings({plain}))]\n"
        "wavelengths = [each.wavelength for each in pair_settings(rotary)]\n",
        "methods": f'{common}stretch = dict(zip(found["methods"]["names"], found["methods"]["stretch"]))\n',
        "cached-keys": f'{common}curves = found["cache"]["curves"]\n',
        "precision": f"from locant.explore.screens.rotary import precision\n{built}"
        f"errors = precision(rotary, {position})\n",
    }


def images(state: State, session: Session) -> Mapping[str, Any]:
    """Return the index of every token on every axis, the axis of every pair, and the similarity after rotation."""
    frames, rows, columns = (
        state.whole(name, n, 1, MAX_SIZE) for name, n in (("frames", 2), ("rows", 12), ("columns", 16))
    )
    before, after = state.whole("before", 5, 0, MAX_SIZE), state.whole("after", 4, 0, MAX_SIZE)
    step = state.whole("step", 1, 1, 25)
    continue_from = state.one_of("continue_from", "largest", ["largest", "sides"])
    pairs = state.whole("pairs", 64, 3, 128)
    scheme = state.one_of("scheme", "axial", SCHEMES)
    base = state.real("base", 10_000.0, 2, 1e9, log=True)
    axes, options = _axes(state, pairs, scheme)
    rotary = Rotary(2 * pairs, base=base, **options)
    parts = [before, (frames, rows, columns, step), after]
    positions, behind = (Positions.multimodal([*parts[:2], text], continue_from=continue_from) for text in (after, 1))
    at = state.whole("at", before + rows * columns // 2 + columns // 2, 0, positions.seq_len - 1, follows=True)
    cos, sin = (each[0] for each in rotary.cos_sin(positions, torch.float64))
    return {
        "axes": list(AXES),
        "index": positions.index[0].numpy(),
        "grid": [frames, rows, columns],
        "image": [before, before + frames * rows * columns],
        "next": int(behind.index[0, -1, 0]),
        "at": at,
        "alike": (cos * cos[at] + sin * sin[at]).mean(-1).numpy(),
        "axis_of_pair": np.array(axes),
        "wavelengths": [pair.wavelength for pair in pair_settings(rotary)],
        "python": _codes_of_images(
            rotary, axes, f"{parts}, continue_from={continue_from!r}", at, before, (frames, rows, columns)
        ),
    }


def _axes(state: State, pairs: int, scheme: str) -> tuple[list[int], dict[str, Any]]:
    """Return the axis of each pair, from the fastest to the slowest, and the options of `Rotary` for them.

    With an axis for each group of heads, one group is shown. Otherwise the settings give the pairs of each axis.
    """
    if scheme == "heads":
        axes = [AXES.index(state.one_of("group", AXES[ROW], AXES))] * pairs
    else:
        first = state.whole("frame_pairs", min(16, pairs - 2), 1, pairs - 2, follows=True)
        second = state.whole("row_pairs", min(24, pairs - first - 1), 1, pairs - first - 1, follows=True)
        sections = first, second, pairs - first - second
        axes = np.repeat(np.arange(3), sections).tolist()
        if scheme in ("contiguous", "axial"):
            return axes, {"sections": sections, "axial": scheme == "axial"}
        if scheme == "stride":  # for the sections of rows and columns; the other pairs are for frames
            axes = [pair % 3 if pair < 3 * sections[pair % 3] else FRAME for pair in range(pairs)]
        else:
            _, rows, columns = sections
            both = min(rows, columns)
            axes = [ROW, COLUMN] * both + [ROW] * (rows - both) + [COLUMN] * (columns - both) + [FRAME] * first
    return axes, {"pairs": Pairs(dims=[(pair, pair + pairs) for pair in range(pairs)], axes=axes, num_axes=len(AXES))}


def _codes_of_images(
    rotary: Rotary, axes: list[int], parts: str, at: int, begin: int, grid: tuple[int, int, int]
) -> dict[str, str]:
    positions = f"from locant import Positions, Rotary\n\npositions = Positions.multimodal({parts})\n"
    options = f"sections={rotary.sections}{', axial=True' if rotary.axial else ''}"
    pairs = f"axes = {axes}  # frame, row, column\n"
    if not rotary.has_named_layout:
        dims = f"dims = [(pair, pair + {len(axes)}) for pair in range({len(axes)})]\n"
        pairs = f"from locant.positions import Pairs\n\n{pairs}{dims}"
        options = "pairs=Pairs(dims=dims, axes=axes, num_axes=3)"
    rotated = f"{positions}{pairs}rotary = Rotary({rotary.head_dim}, base={rotary.base!r}, {options})\n"
    alike = f"{rotated}cos, sin = (each[0] for each in rotary.cos_sin(positions, torch.float64))\n"
    alike = f"import torch\n\n{alike}alike = (cos * cos[{at}] + sin * sin[{at}]).mean(-1)\n"
    frames, rows, columns = grid
    starts = range(begin, begin + frames * rows * columns, rows * columns)
    return {
        "index": f"{positions}index = positions.index[0]  # frame, row and column of every token\n",
        "pairs": f"{positions}{pairs}",
        "wavelengths": f"{rotated}from locant.checkpoints.rotary_settings import pair_settings\n\n"
        "wavelengths = [pair.wavelength for pair in pair_settings(rotary)]\n",
    } | {
        f"frame-{frame}": f"{alike}frame = alike[{start} : {start + rows * columns}].view({rows}, {columns})\n"
        for frame, start in enumerate(starts)
    }


SCREENS = {
    "rotary": Screen(
        "Rotary", 2, "Every pair of dimensions is a clock that turns with the position. Fast clocks separate near "
        "tokens, slow clocks distant ones.", clocks,
    ),
    "images": Screen(
        "Images and video", 6, "A token of an image has a frame, a row and a column. Each rotates different pairs, and "
        "text continues after it.", images,
    ),
}  # fmt: skip
