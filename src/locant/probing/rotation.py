"""The matrix by which each position multiplies a head, what it is made of, and the encoding that is made of the same.

Unit vectors are rotated, so that what comes back are the entries of the matrix: cosines and sines as they are, with no
rounding but their own. Everything is measured at positions up to 61 first, where no angle of a usual frequency has
gone round so often that rounding would matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locant.errors import LocantError
from locant.positions.encodings.rotary import Rotary
from locant.positions.pair_table import Pairs
from locant.positions.scaling import Linear, Llama3, Proportional, Scaling, Unscaled, YaRN
from locant.probing.subject import Subject
from locant.probing.token_calls import HEADS

NEAR = (1, 2, 3, 5, 8, 13, 21, 34, 61)
"""Each at most twice the one before: a frequency known from one says how often the next went round."""

EVEN = 1e-3
"""How far angles may be off a straight line, in radians at positions up to 61."""

NOTHING = 1e-9
"""Entries of a matrix up to here are 0, and angles too."""

ROUNDED = 2e-5
"""Angles up to 61 radians and products of them agree to this in float32."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One pair of dimensions.

    Args:
        dims: the two; a positive angle rotates the first towards the second.
        frequencies: of the first member, in radians per position, for each axis; a single one is not 0, as a rule.
        of_second: of the second member; the same in a rotation.
        offset: the angle at position 0.
        cosine_axes: axes that change its cosine and leave its sine 0: none, in a rotation.
    """

    dims: tuple[int, int]
    frequencies: tuple[float, ...]
    of_second: tuple[float, ...]
    offset: float
    cosine_axes: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """Those that rotate it."""
        return tuple(axis for axis, one in enumerate(self.frequencies) if abs(one) > NOTHING)

    @property
    def is_rotation(self) -> bool:
        """Whether both members have one angle."""
        return _near(self.frequencies, self.of_second, 1e-4, NOTHING)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What one side, queries or keys, is multiplied by.

    Args:
        blocks: the rotated pairs; empty where dimensions are mixed in larger groups.
        mixed: the largest number of dimensions that depend on each other; 2 in a rotation of pairs.
        factor: by which lengths are multiplied at position 0.
        change: the largest relative change of the length of a pair beside that, among positions up to 61.
        bent: how far angles are from frequency x position, in radians.
        order: the dimension of the input that each one of the output is; ``None``: itself.
        num_heads: how many heads are rotated, from the first on; ``None``: all.
        same_heads: whether all of these are rotated alike.
        moves: whether what is done depends on the position.
        is_multiple: whether position 0 is multiplied by one number, up to the order of dimensions.
    """

    blocks: tuple[Block, ...]
    mixed: int
    factor: float
    change: float
    bent: float
    order: tuple[int, ...] | None
    num_heads: int | None
    same_heads: bool
    moves: bool = True
    is_multiple: bool = True

    @property
    def begin(self) -> float | None:
        """The position as which 0 is rotated; ``None``: its angles are those of no position."""
        moving = [(block.offset, sum(block.frequencies)) for block in self.blocks if sum(block.frequencies)]
        steps = 0.0
        for offset, speed in sorted(moving, key=lambda each: abs(each[1])):  # the slow ones have not gone round yet
            steps += math.remainder(offset - steps * speed, math.tau) / speed
        for begin in (float(round(steps)), steps):
            if all(abs(math.remainder(offset - begin * speed, math.tau)) < ROUNDED for offset, speed in moving):
                return begin
        return None

    def in_order(self, x: Tensor) -> Tensor:
        """Rotated tokens with each dimension where it was in the input."""
        return x if self.order is None else x[..., torch.tensor(self.order).argsort()]


def _near(one: Sequence[float], other: Sequence[float], share: float, least: float) -> bool:
    return all(math.isclose(a, b, rel_tol=share, abs_tol=least) for a, b in zip(one, other, strict=False))


def odd_pairs(one: Rotation, other: Rotation, least: float) -> tuple[list[tuple[Block, Block]], bool]:
    """Of rotations of the same pairs those whose frequencies differ, and whether all of these are opposite."""
    both = zip(one.blocks, other.blocks, strict=True)
    odd = [(a, b) for a, b in both if not _near(a.frequencies, b.frequencies, 1e-5, least)]
    return odd, all(_near(a.frequencies, [-each for each in b.frequencies], 1e-5, least) for a, b in odd)


def rotations(subject: Subject) -> tuple[Rotation, Rotation]:
    """What is done to queries, and to keys; one object, where it is the same."""
    steps = [step for step in NEAR if step <= subject.limit]
    index = torch.cat([subject.index(0), *(subject.index(*steps, axis=axis) for axis in range(subject.axes))], 1)
    basis = torch.eye(subject.width)[:, None, None, :].expand(-1, HEADS, index.shape[1], -1).clone()
    q, k = (side.double().permute(1, 2, 3, 0) for side in subject.rotate(basis, index))
    of_q = _rotation(q, steps, subject.axes)
    same = float((q - k).abs().max()) < ROUNDED * of_q.factor
    return of_q, of_q if same else _rotation(k, steps, subject.axes)


def _rotation(heads: Tensor, steps: Sequence[int], axes: int) -> Rotation:
    """What matrices ``[heads, positions, width, width]`` of position 0 and of steps on each axis are."""
    matrix, order, blocks, bent = heads[0], None, (), 0.0
    still = [bool((head == head[:1]).all()) for head in heads]
    num_heads = still.index(True) if not still[0] and any(still) else None
    there = matrix[0].abs() > NOTHING
    if bool((there.sum(0) == 1).all() and (there.sum(1) == 1).all()):
        places = there.double().argmax(1)
        if not torch.equal(places, torch.arange(len(places))):
            order = tuple(places.tolist())
            matrix = matrix[:, places.argsort()]
    entries = (matrix.abs() > NOTHING).any(0)
    partners = [row.nonzero().flatten().tolist() for row in entries | entries.T]
    moving = (matrix - matrix[:1]).abs().amax(0) > NOTHING
    mixed = max(map(len, partners)) if bool(moving.any()) else 1
    if mixed == 2:
        dims = [(i, j) for i, row in enumerate(partners) for j in row if i < j and bool(moving[i].any())]
        i, j = torch.tensor(dims).T
        a, b, c, d = (matrix[:, row, column] for row, column in itertools.product((i, j), repeat=2))
        factor = float(torch.hypot(a[0], c[0]).median())
        lengths = torch.linalg.svdvals(torch.stack([torch.stack([a, b], -1), torch.stack([c, d], -1)], -2))
        of_first, of_second = torch.atan2(-b, a), torch.atan2(c, d)
        slopes, bends = zip(*(slopes_of(angles, steps, axes) for angles in (of_first, of_second)), strict=True)
        cosines, sines = ((each[1:] - each[:1]).abs().unflatten(0, (axes, len(steps))).amax(1) for each in (a, c))
        torn = ((cosines > ROUNDED) & (sines < NOTHING)).T.tolist()
        rows = zip(dims, slopes[0].tolist(), slopes[1].tolist(), of_first[0].tolist(), torn, strict=True)
        blocks = tuple(
            Block(
                dims=pair, frequencies=tuple(first), of_second=tuple(second), offset=offset,
                cosine_axes=tuple(axis for axis, each in enumerate(alone) if each),
            )
            for pair, first, second, offset, alone in rows
        )  # fmt: skip
        bent = max(bends)
    else:
        factor = float(heads[0, 0].norm() / math.sqrt(len(there)))
        lengths = torch.linalg.svdvals(matrix)
    return Rotation(
        blocks=blocks, mixed=mixed, factor=factor, change=float((lengths / factor - 1).abs().max()), bent=bent,
        order=order, num_heads=num_heads, same_heads=all(torch.equal(heads[0], head) for head in heads[:num_heads]),
        moves=bool(moving.any()), is_multiple=bool((matrix[0] - factor * torch.eye(len(there))).abs().max() < ROUNDED),
    )  # fmt: skip


def slopes_of(angles: Tensor, steps: Sequence[int], axes: int) -> tuple[Tensor, float]:
    """Radians per position, ``[pairs, axes]``, and how far angles are from them times position."""
    slopes, bent = [], 0.0
    for line in wrapped(angles[1:] - angles[:1]).unflatten(0, (axes, len(steps))):
        slope = line[0] / steps[0]
        for step, angle in zip(steps, line, strict=True):
            slope = slope + wrapped(angle - step * slope) / step
        apart = wrapped(line - torch.tensor(steps, dtype=torch.float64)[:, None] * slope)
        bent = max(bent, float(apart.abs().max()))
        slopes.append(slope)
    return torch.stack(slopes, -1), bent


def wrapped(angle: Tensor) -> Tensor:
    """From -pi to pi."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


SAME = 4e-6
"""How far a measured frequency may be from one of a formula, over its size: float32 made it, and measured it."""

LENGTHS = tuple(2**power for power in range(8, 21))
"""Trained lengths that are tried."""


def encoding_of(rotation: Rotation, width: int, axes: int) -> Rotary | None:
    """The rotary encoding with these pairs and frequencies; ``None``: there is none, a pair follows two axes."""
    blocks = rotation.blocks
    if not blocks or rotation.bent > EVEN or not all(block.is_rotation and len(block.axes) == 1 for block in blocks):
        return None
    axis = [block.axes[0] for block in blocks]
    signed = [block.frequencies[block.axes[0]] for block in blocks]
    frequencies = torch.tensor(signed, dtype=torch.float64).abs()
    dims = [block.dims if each > 0 else block.dims[::-1] for block, each in zip(blocks, signed, strict=True)]
    shape: dict[str, Any] = {"dims": dims, "axes": axis, "num_axes": axes, "num_heads": rotation.num_heads}
    ladders = _ladders(frequencies, axis, width, abs(dims[0][1] - dims[0][0]))
    fits: list[Rotary] = []
    trials = ((base, scaling, rungs) for exact, scaling, rungs in ladders for base in (_round(exact), exact))
    for base, scaling, rungs in trials:
        try:
            encoding = Rotary(width, base=base, scaling=scaling, pairs=Pairs(**shape, rungs=rungs))
        except LocantError:
            continue
        if torch.allclose(encoding.inv_freq.abs(), frequencies, rtol=SAME, atol=0):
            fits.append(encoding)
            if _round(base, 1e-12) == _round(base, 1e-2):  # two digits: no coincidence
                break
    if fits:
        return _with_factor(_short(fits[-1] if len(f"{fits[-1].base:g}") <= 5 else fits[0]), rotation.factor)
    return _with_factor(Rotary(width, pairs=Pairs(**shape, inv_freq=frequencies.tolist())), rotation.factor)


def is_recognised(encoding: Rotary) -> bool:
    """Whether its frequencies follow from numbers of three digits, which no measurement gives by chance.

    Others are known as far as they were measured, and no error of an angle is told by them.
    """
    names = ("factor", "low_freq_factor", "high_freq_factor", "rotated_share")
    given = [encoding.base, *(getattr(encoding.scaling, name, 1.0) for name in names)]
    return encoding.pairs.inv_freq is None and all(float(f"{each:.2e}") == each for each in given)


Ladder = tuple[float, Scaling | None, list[tuple[int, int]]]


def _ladders(frequencies: Tensor, axis: Sequence[int], width: int, apart: int) -> Iterator[Ladder]:
    """Bases, scalings and rungs that may have made these frequencies, the plain first.

    Where the members of a pair are half a head apart, the ladder is likely over the whole head.
    """
    count = len(frequencies)
    per_axis = tuple(axis[:pair].count(each) for pair, each in enumerate(axis))
    ranks = sorted(range(count), key=lambda pair: -float(frequencies[pair]))
    sizes = [2 * count, width][:: -1 if apart == width // 2 else 1]
    for order in dict.fromkeys((tuple(range(count)), per_axis, tuple(map(ranks.index, range(count))))):
        largest = 2 * (max(order) + 1)
        for ladder in dict.fromkeys((*sizes, largest, 2 * max(per_axis) + 2)):
            if ladder >= largest:
                rungs = [(ladder, rung) for rung in order]
                yield from ((base, scaling, rungs) for base, scaling in _scaled(frequencies, order, ladder))


def _scaled(frequencies: Tensor, order: Sequence[int], ladder: int) -> Iterator[tuple[float, Scaling | None]]:
    """With each scaling whose frequencies follow from a few of these."""
    rungs = torch.tensor(order, dtype=torch.float64)
    first, last = int(rungs.argmin()), int(rungs.argmax())
    fastest = float(frequencies[first])
    if rungs[first] == rungs[last]:
        yield 10_000.0, None if abs(fastest - 1) < SAME else Linear(factor=1 / fastest)
        return
    power = -2 * (rungs[last] - rungs[first]) / ladder
    base = float((frequencies[last] / frequencies[first]) ** (1 / power))
    if not (0 < base < 1e12 and math.isfinite(base)):
        return
    at_0 = fastest * _round(base) ** (2 * float(rungs[first]) / ladder)
    yield base, None
    if abs(at_0 - 1) > SAME:
        yield base, Linear(factor=_round(1 / at_0))
    if 2 * len(frequencies) < ladder:
        yield base, Proportional(rotated_share=len(frequencies) / (ladder / 2), factor=_round(1 / at_0))
    second = int((rungs - rungs[first] - 1).abs().argmin())
    if rungs[second] != rungs[first] + 1:
        return
    fast = _round(float((frequencies[first] / frequencies[second]) ** (ladder / 2)), 2e-4)
    plain = fast ** (-2 * rungs / ladder)
    slowed = frequencies / plain
    if not 0 < float(slowed[last]) < 0.999:
        return
    factor = _round(1 / float(slowed[last]))
    share = (slowed - 1 / factor) / (1 - 1 / factor)
    inside = (share > 1e-4) & (share < 1 - 1e-4)
    if inside.sum() >= 2:  # a straight line, in Llama 3
        x, y = plain[inside], share[inside]
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        start = float(y.mean() - slope * x.mean())
        if start < 0 < slope:
            high = _round(1 - 1 / start, 1e-3)
            length = 256 * max(round(2 * math.pi * slope * (high - 1) / 256), 1)
            yield fast, Llama3(factor=factor, original_max_seq_len=length, low_freq_factor=1.0, high_freq_factor=high)
    for length, truncate in itertools.product(LENGTHS, (True, False)):
        yield fast, YaRN(factor=factor, original_max_seq_len=length, truncate=truncate)


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
    own = _turning(encoding)
    for layout, choice in itertools.product(("half", "interleaved"), choices if pairs.num_heads is None else ()):
        options: dict[str, Any] = {"scaling": encoding.scaling, "layout": layout, **choice}
        try:
            short = Rotary(width, base=encoding.base, **options)
        except LocantError:
            continue
        other = _turning(short)
        if own.keys() == other.keys() and all(
            axis == other[pair][0] and math.isclose(each, other[pair][1], rel_tol=SAME)
            for pair, (axis, each) in own.items()
        ):
            return short
    return encoding


def _turning(encoding: Rotary) -> dict[tuple[int, int], tuple[int, float]]:
    """Axis and frequency of each pair that is rotated, by its dimensions."""
    rows = zip(encoding.pairs.dims, encoding.pairs.axes or (), encoding.inv_freq.tolist(), strict=True)
    return {pair: (axis, abs(each)) for pair, axis, each in rows if each}


def _with_factor(encoding: Rotary, factor: float) -> Rotary:
    """With the attention factor that was measured, where it is another."""
    scaling, usual = encoding.scaling, encoding.scaling.effective_attention_factor
    if math.isclose(usual, factor, rel_tol=SAME) or math.isclose(usual, _round(factor), rel_tol=SAME):
        return encoding
    if isinstance(scaling, YaRN):
        return encoding.alike(scaling=replace(scaling, attention_factor=_round(factor)))
    alone = YaRN(factor=1.0, original_max_seq_len=4096, attention_factor=_round(factor))  # which keeps frequencies
    if isinstance(scaling, Unscaled):
        return encoding.alike(scaling=alone)
    pairs = replace(encoding.pairs, rungs=None, inv_freq=encoding.inv_freq.tolist())
    return Rotary(encoding.head_dim, scaling=alone, pairs=pairs)
