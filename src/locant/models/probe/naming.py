"""From measured pairs and frequencies to the encoding that has them: base, scaling, sections, or a table of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from locant.errors import LocantError
from locant.models.probe.rotation import EVEN, Rotation
from locant.positions.encodings.rotary import Rotary
from locant.positions.pair_table import Pairs
from locant.positions.scaling import Linear, Llama3, Proportional, Scaling, Unscaled, YaRN

__all__ = ["is_recognised", "named"]

SAME = 4e-6
"""How far a measured frequency may be from one of a formula, over its size: float32 made it, and measured it."""

LENGTHS = tuple(2**power for power in range(8, 21))
"""Trained lengths that are tried."""


def named(rotation: Rotation, width: int, axes: int) -> Rotary | None:
    """The rotary encoding with these pairs and frequencies; ``None``: there is none, a pair follows two axes."""
    blocks = rotation.blocks
    if not blocks or rotation.bent > EVEN or not all(block.is_rotation and len(block.axes) == 1 for block in blocks):
        return None
    axis = [block.axes[0] for block in blocks]
    frequencies = torch.tensor([block.frequencies[block.axes[0]] for block in blocks], dtype=torch.float64)
    dims = [block.dims if each > 0 else block.dims[::-1] for block, each in zip(blocks, frequencies, strict=True)]
    found = frequencies.abs()
    shape = {"dims": dims, "axes": axis, "num_axes": axes, "num_heads": rotation.num_heads}
    ladders = _ladders(found, axis, width, abs(dims[0][1] - dims[0][0]))
    fits: list[Rotary] = []
    for base, scaling, rungs in ((base, *rest) for exact, *rest in ladders for base in (_round(exact), exact)):
        try:
            encoding = Rotary(width, base, scaling=scaling, pairs=Pairs(**shape, rungs=rungs))  # type: ignore[arg-type]
        except LocantError:
            continue
        if torch.allclose(encoding.inv_freq.abs(), found, rtol=SAME, atol=0):
            fits.append(encoding)
            if _round(base, 1e-12) == _round(base, 1e-2):  # two digits: no coincidence
                break
    if fits:
        return _with_factor(_short(fits[-1] if len(f"{fits[-1].base:g}") <= 5 else fits[0]), rotation.factor)
    return _with_factor(Rotary(width, pairs=Pairs(**shape, inv_freq=found.tolist())), rotation.factor)  # type: ignore[arg-type]


def is_recognised(encoding: Rotary) -> bool:
    """Whether its frequencies follow from numbers of three digits, which no measurement gives by chance.

    Others are known as far as they were measured, and no error of an angle is told by them.
    """
    scaling = encoding.scaling
    names = ("factor", "low_freq_factor", "high_freq_factor", "rotated_share")
    given = [encoding.base, *(getattr(scaling, name, 1.0) for name in names)]
    return encoding.pairs.inv_freq is None and all(float(f"{each:.2e}") == each for each in given)


Ladder = tuple[float, Scaling | None, list[tuple[int, int]]]


def _ladders(found: Tensor, axis: Sequence[int], width: int, apart: int) -> Iterator[Ladder]:
    """Bases, scalings and rungs that may have made these frequencies, the plain first.

    Where the members of a pair are half a head apart, the ladder is likely over the whole head.
    """
    count = len(found)
    groups = [[pair for pair, each in enumerate(axis) if each == one] for one in sorted({*axis})]
    in_line = list(range(count))
    own = [0] * count
    for group in groups:
        for rung, pair in enumerate(group):
            own[pair] = rung
    sizes = [2 * count, width][:: -1 if apart == width // 2 else 1]
    orders = [in_line, own] if len(groups) > 1 else [in_line]
    ranks = sorted(in_line, key=lambda pair: -float(found[pair]))
    by_rank = [ranks.index(pair) for pair in in_line]
    orders += [] if by_rank in orders else [by_rank]
    for order in orders:
        largest = 2 * (max(order) + 1)
        for ladder in dict.fromkeys((*sizes, largest, 2 * max(map(len, groups)))):
            if ladder < largest:
                continue
            rungs = [(ladder, rung) for rung in order]
            yield from ((base, scaling, rungs) for base, scaling in _scaled(found, order, ladder))


def _scaled(found: Tensor, order: Sequence[int], ladder: int) -> Iterator[tuple[float, Scaling | None]]:
    """With each scaling whose frequencies follow from a few of these."""
    rungs = torch.tensor(order, dtype=torch.float64)
    first, last = int(rungs.argmin()), int(rungs.argmax())
    if rungs[first] == rungs[last]:
        yield 10_000.0, None if abs(float(found[first]) - 1) < SAME else Linear(factor=1 / float(found[first]))
        return
    power = -2 * (rungs[last] - rungs[first]) / ladder
    base = float((found[last] / found[first]) ** (1 / power))
    if not (0 < base < 1e12 and math.isfinite(base)):
        return
    at_0 = float(found[first]) * _round(base) ** (2 * float(rungs[first]) / ladder)
    yield base, None
    if abs(at_0 - 1) > SAME:
        yield base, Linear(factor=_round(1 / at_0))
    share = len(found) / (ladder / 2)
    if share < 1:
        yield base, Proportional(rotated_share=share, factor=_round(1 / at_0))
    second = int((rungs - rungs[first] - 1).abs().argmin())
    if rungs[second] != rungs[first] + 1:
        return
    fast = _round(float((found[first] / found[second]) ** (ladder / 2)), 2e-4)
    plain = fast ** (-2 * rungs / ladder)
    kept = found / plain
    if not 0 < float(kept[last]) < 0.999:
        return
    factor = _round(1 / float(kept[last]))
    share_kept = (kept - 1 / factor) / (1 - 1 / factor)
    inside = (share_kept > 1e-4) & (share_kept < 1 - 1e-4)
    if inside.sum() >= 2:
        slope, start = _line(plain[inside], share_kept[inside])
        if start < 0 < slope:
            high = _round(1 - 1 / start, 1e-3)
            length = 256 * max(round(2 * math.pi * slope * (high - 1) / 256), 1)
            yield fast, Llama3(factor=factor, original_max_seq_len=length, low_freq_factor=1.0, high_freq_factor=high)
    for length in LENGTHS:
        for truncate in (True, False):
            yield fast, YaRN(factor=factor, original_max_seq_len=length, truncate=truncate)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return slope, float(y.mean() - slope * x.mean())


def _round(value: float, rel: float | None = None) -> float:
    """The number of fewest digits that it may be, as far as float32 tells; of more digits fewer agree by chance."""
    for digits in range(1, 7):
        shorter = float(f"{value:.{digits - 1}e}")
        if math.isclose(shorter, value, rel_tol=min(2e-5, 10.0 ** -(digits + 2)) if rel is None else rel):
            return shorter
    return float(f"{value:.6e}")


def _short(encoding: Rotary) -> Rotary:
    """The same by ``layout``, ``rotary_dim``, ``sections`` and ``axial``, where these write the same table."""
    pairs, width = encoding.pairs, encoding.head_dim
    runs = [pairs.axes.count(axis) for axis in range(pairs.num_axes or 1)] if pairs.axes else []
    choices: list[dict[str, Any]] = [{}, {"rotary_dim": 2 * len(pairs)}]
    if len(runs) > 1:
        choices = [{**choice, "sections": tuple(runs), "axial": axial} for choice in choices for axial in (False, True)]
    elif 2 * len(pairs) < width and isinstance(encoding.scaling, Unscaled):
        choices.append({"scaling": Proportional(rotated_share=2 * len(pairs) / width)})
    own = {pair: facts for pair, *facts in _rows(encoding)}
    for layout, choice in itertools.product(("half", "interleaved"), choices if pairs.num_heads is None else ()):
        options: dict[str, Any] = {"scaling": encoding.scaling, "layout": layout, **choice}
        try:
            short = Rotary(width, encoding.base, **options)
        except LocantError:
            continue
        other = {pair: facts for pair, *facts in _rows(short)}
        if own.keys() == other.keys() and all(
            own[pair][0] == axis and math.isclose(own[pair][1], each, rel_tol=SAME)
            for pair, (axis, each) in other.items()
        ):
            return short
    return encoding


def _rows(encoding: Rotary) -> Iterator[tuple[tuple[int, int], int, float]]:
    """Dimensions, axis and frequency of each rotated pair."""
    for pair, axis, each in zip(encoding.pairs.dims, encoding.pairs.axes or (), encoding.inv_freq, strict=True):
        if each:
            yield pair, axis, abs(float(each))


def _with_factor(encoding: Rotary, factor: float) -> Rotary:
    """With the attention factor that was measured, where it is another."""
    if math.isclose(encoding.scaling.effective_attention_factor, factor, rel_tol=SAME):
        return encoding
    if isinstance(encoding.scaling, YaRN):
        return encoding.alike(scaling=replace(encoding.scaling, attention_factor=_round(factor)))
    if not isinstance(encoding.scaling, Unscaled):
        return Rotary(
            encoding.head_dim,
            scaling=_only_a_factor(factor),
            pairs=replace(encoding.pairs, rungs=None, inv_freq=encoding.inv_freq.tolist()),
        )
    return encoding.alike(scaling=_only_a_factor(factor))


def _only_a_factor(factor: float) -> YaRN:
    """A scaling that leaves frequencies as they are."""
    return YaRN(factor=1.0, original_max_seq_len=4096, attention_factor=_round(factor))
