"""Measure the matrix by which each position multiplies a head, fit pairs and frequencies, and find the encoding.

The fit has five steps, and each step takes the result of the previous step:

1. `rotations` rotates the unit vectors. These determine a linear map, so other tokens are not needed. The results are
   the columns of the matrix. They are cosines and sines without additional rounding.
2. `_in_input_order` undoes a permutation, and `_partners` returns which dimensions depend on each other. If these are
   pairs, the matrix consists of blocks of 2 x 2, and is fitted block by block.
3. `_fit_blocks` reads two angles from each block, one for each row. A block is a rotation times a factor if both angles
   are equal and both singular values equal that factor. Other checks are not needed.
4. `fit_frequencies` unwraps the angles, which are known up to full turns, to radians per position.
5. `find_encoding` finds the base and the scaling whose formula gives these frequencies.

Positions up to 61 suffice, because no angle of a usual frequency has made enough turns for rounding to matter.
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
"""The measured positions. Each position is at most twice the previous one, as `fit_frequencies` requires."""

EVEN = 1e-3
"""The largest distance of angles from a straight line, in radians at positions up to 61."""

ZERO = 1e-9
"""Matrix entries and angles up to this size count as 0."""

ROUNDED = 2e-5
"""Float32 angles up to 61 radians, and their products, count as equal up to this difference."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One pair of dimensions.

    Args:
        dims: the two dimensions. A positive angle rotates the first towards the second.
        frequencies: the first member's frequency on each axis, in radians per position. Usually only one is not 0.
        of_second: the second member's frequencies, which are the same in a rotation.
        offset: the angle at position 0.
        cosine_axes: axes that change the cosine but leave the sine 0. A rotation does not have such axes.
    """

    dims: tuple[int, int]
    frequencies: tuple[float, ...]
    of_second: tuple[float, ...]
    offset: float
    cosine_axes: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that rotate the pair."""
        return tuple(axis for axis, one in enumerate(self.frequencies) if abs(one) > ZERO)

    @property
    def is_rotation(self) -> bool:
        """Return whether both members have the same angle."""
        return _are_near(self.frequencies, self.of_second, 1e-4, ZERO)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The matrices by which one side, queries or keys, is multiplied.

    Args:
        blocks: the rotated pairs, empty if dimensions are mixed in larger groups.
        mixed: the largest number of dimensions that depend on each other, 2 in a rotation of pairs.
        factor: the factor of lengths at position 0.
        change: the largest relative change of a pair's length apart from `factor`, at positions up to 61.
        bent: the largest difference of an angle from frequency x position, in radians.
        order: the input dimension of each output dimension, or ``None`` if the order does not change.
        num_heads: the number of rotated heads, counted from the first, or ``None`` if all heads are rotated.
        same_heads: whether all rotated heads are rotated equally.
        moves: whether the result depends on the position.
        is_multiple: whether tokens at position 0 are only multiplied by one number and reordered.
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
        """The position at which `frequencies` alone give the angles of position 0, or ``None`` if there is none.

        The offset of each pair is begin x frequency, up to full turns. The slowest pair has not made a full turn, so
        its offset gives `begin` roughly. Each faster pair makes it more exact, as later positions do in
        `fit_frequencies`.
        """
        moving = [(block.offset, sum(block.frequencies)) for block in self.blocks if sum(block.frequencies)]
        estimate = 0.0
        for offset, speed in sorted(moving, key=lambda each: abs(each[1])):
            estimate += math.remainder(offset - estimate * speed, math.tau) / speed
        for begin in (float(round(estimate)), estimate):
            if all(abs(math.remainder(offset - begin * speed, math.tau)) < ROUNDED for offset, speed in moving):
                return begin
        return None

    def reorder_to_input(self, x: Tensor) -> Tensor:
        """Return rotated tokens with their dimensions in the order of the input."""
        return x if self.order is None else x[..., torch.tensor(self.order).argsort()]


def _are_near(one: Sequence[float], other: Sequence[float], share: float, least: float) -> bool:
    return all(math.isclose(a, b, rel_tol=share, abs_tol=least) for a, b in zip(one, other, strict=False))


def odd_pairs(one: Rotation, other: Rotation, least: float) -> tuple[list[tuple[Block, Block]], bool]:
    """Return the pairs with different frequencies in two rotations, and whether all of these have opposite signs."""
    both = zip(one.blocks, other.blocks, strict=True)
    odd = [(a, b) for a, b in both if not _are_near(a.frequencies, b.frequencies, 1e-5, least)]
    return odd, all(_are_near(a.frequencies, [-each for each in b.frequencies], 1e-5, least) for a, b in odd)


def rotations(subject: Subject) -> tuple[Rotation, Rotation]:
    """Return the rotations of queries and of keys, one object twice if they are the same."""
    steps = [step for step in NEAR if step <= subject.limit]
    index = torch.cat([subject.index(0), *(subject.index(*steps, axis=axis) for axis in range(subject.axes))], 1)
    basis = torch.eye(subject.width)[:, None, None, :].expand(-1, HEADS, index.shape[1], -1).clone()
    q, k = (side.double().permute(1, 2, 3, 0) for side in subject.rotate(basis, index))
    queries = _analyse(q, steps, subject.axes)
    are_same = float((q - k).abs().max()) < ROUNDED * queries.factor
    return queries, queries if are_same else _analyse(k, steps, subject.axes)


def _analyse(heads: Tensor, steps: Sequence[int], axes: int) -> Rotation:
    """Analyse matrices ``[heads, positions, width, width]`` of position 0 and of steps on each axis."""
    num_heads = _count_rotated_heads(heads)
    matrix, order = _in_input_order(heads[0])
    width = matrix.shape[-1]
    partners = _partners(matrix)
    moving = (matrix - matrix[:1]).abs().amax(0) > ZERO
    mixed = max(map(len, partners)) if bool(moving.any()) else 1
    if mixed == 2:
        dims = [(i, j) for i, row in enumerate(partners) for j in row if i < j and bool(moving[i].any())]
        i, j = torch.tensor(dims).T
        a, b, c, d = (matrix[:, row, column] for row, column in itertools.product((i, j), repeat=2))
        factor = float(torch.hypot(a[0], c[0]).median())
        lengths = torch.linalg.svdvals(torch.stack([torch.stack([a, b], -1), torch.stack([c, d], -1)], -2))
        blocks, bent = _fit_blocks((a, b, c, d), dims, steps, axes)
    else:
        factor = float(heads[0, 0].norm() / math.sqrt(width))  # the norm of a rotation is sqrt(width)
        lengths = torch.linalg.svdvals(matrix)
        blocks, bent = (), 0.0
    rest = matrix[0] - factor * torch.eye(width)
    return Rotation(
        blocks=blocks, mixed=mixed, factor=factor, change=float((lengths / factor - 1).abs().max()), bent=bent,
        order=order, num_heads=num_heads, same_heads=all(torch.equal(heads[0], head) for head in heads[:num_heads]),
        moves=bool(moving.any()),
        is_multiple=bool(rest.abs().max() < ROUNDED),
    )  # fmt: skip


def _count_rotated_heads(heads: Tensor) -> int | None:
    """Return the number of heads before the first head that positions do not change.

    Return ``None`` if positions change all heads, or if they do not change head 0.
    """
    is_constant = [bool((head == head[:1]).all()) for head in heads]
    return is_constant.index(True) if not is_constant[0] and any(is_constant) else None


def _in_input_order(matrix: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the matrices ``[positions, width, width]`` without a permutation of dimensions, and that permutation.

    At position 0 a rotation multiplies by one factor. If its matrix then has one entry in each row and column, the
    column of a row's entry is the input dimension of the row. We sort the rows by these columns.
    """
    nonzero = matrix[0].abs() > ZERO
    if bool((nonzero.sum(0) == 1).all() and (nonzero.sum(1) == 1).all()):
        columns = nonzero.double().argmax(1)
        if not torch.equal(columns, torch.arange(len(columns))):
            return matrix[:, columns.argsort()], tuple(columns.tolist())
    return matrix, None


def _partners(matrix: Tensor) -> list[list[int]]:
    """Return, for each dimension, the dimensions that it depends on or that depend on it, at any position."""
    entries = (matrix.abs() > ZERO).any(0)
    return [row.nonzero().flatten().tolist() for row in entries | entries.T]


def _fit_blocks(
    entries: tuple[Tensor, Tensor, Tensor, Tensor], dims: Sequence[tuple[int, int]], steps: Sequence[int], axes: int
) -> tuple[tuple[Block, ...], float]:
    """Fit blocks with the rows (a, b) and (c, d), each ``[positions, pairs]``. Return the blocks and `Rotation.bent`.

    A rotation by an angle has the rows (cos, -sin) and (sin, cos). `atan2` computes an angle from each row, with any
    factor of the row.
    """
    a, b, c, d = entries
    first, second = torch.atan2(-b, a), torch.atan2(c, d)
    (frequencies, bent), (second_frequencies, second_bent) = (
        fit_frequencies(angles, steps, axes) for angles in (first, second)
    )
    cosines, sines = ((each[1:] - each[:1]).abs().unflatten(0, (axes, len(steps))).amax(1) for each in (a, c))
    moves_cosine_alone = (cosines > ROUNDED) & (sines < ZERO)
    rows = zip(
        dims, frequencies.tolist(), second_frequencies.tolist(), first[0].tolist(), moves_cosine_alone.T.tolist(),
        strict=True,
    )  # fmt: skip
    blocks = tuple(
        Block(
            dims=pair, frequencies=tuple(one), of_second=tuple(other), offset=offset,
            cosine_axes=tuple(axis for axis, is_alone in enumerate(alone) if is_alone),
        )
        for pair, one, other, offset, alone in rows
    )  # fmt: skip
    return blocks, max(bent, second_bent)


def fit_frequencies(angles: Tensor, steps: Sequence[int], axes: int) -> tuple[Tensor, float]:
    """Return frequencies ``[pairs, axes]``, and the largest difference of an angle from frequency x position.

    This is phase unwrapping. An angle is known up to full turns. At step 1 it is the frequency, if that is below pi.
    The frequency from one step predicts the angle at the next step, which is at most twice as far away. So the error at
    most doubles and stays far below pi. The prediction therefore gives the number of full turns. The rest of the angle
    corrects the frequency. The error of an angle is divided by its step, so the last step alone is nearly as exact as a
    least-squares fit of all steps. Positions are integers, so frequencies that differ by a full turn are the same.

    Args:
        angles: one row for position 0, then a row for each step on the first axis, on the second, and so on.
    """
    frequencies, bent = [], 0.0
    for turns in wrap_angle(angles[1:] - angles[:1]).unflatten(0, (axes, len(steps))):
        frequency = turns[0] / steps[0]
        for step, angle in zip(steps, turns, strict=True):
            frequency = frequency + wrap_angle(angle - step * frequency) / step
        difference = wrap_angle(turns - torch.tensor(steps, dtype=torch.float64)[:, None] * frequency)
        bent = max(bent, float(difference.abs().max()))
        frequencies.append(frequency)
    return torch.stack(frequencies, -1), bent


def wrap_angle(angle: Tensor) -> Tensor:
    """Return the angle plus the full turns that bring it between -pi and pi."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


SAME = 4e-6
"""The largest relative difference of a measured frequency from a formula. Both were computed in float32."""

LENGTHS = tuple(2**power for power in range(8, 21))
"""The trained lengths to try."""


def find_encoding(rotation: Rotation, width: int, axes: int) -> Rotary | None:
    """Return the rotary encoding with these pairs and frequencies, or ``None`` if there is none."""
    blocks = rotation.blocks
    if not blocks or rotation.bent > EVEN or not all(block.is_rotation and len(block.axes) == 1 for block in blocks):
        return None
    axis = [block.axes[0] for block in blocks]
    signed = [block.frequencies[block.axes[0]] for block in blocks]
    frequencies = torch.tensor(signed, dtype=torch.float64).abs()
    dims = [(i, j) if each > 0 else (j, i) for (i, j), each in zip((one.dims for one in blocks), signed, strict=True)]
    pairs = Pairs(dims=dims, axes=axis, num_axes=axes, num_heads=rotation.num_heads)
    fit = _fit_formula(pairs, frequencies, width)
    if fit is not None:
        return _with_factor(_simplify(fit), rotation.factor)
    measured = replace(pairs, rungs=None, inv_freq=frequencies.tolist())
    return _with_factor(Rotary(width, pairs=measured), rotation.factor)


def _fit_formula(pairs: Pairs, frequencies: Tensor, width: int) -> Rotary | None:
    """Return the encoding whose base and scaling give these frequencies, or ``None`` if no formula does.

    Each formula has fewer parameters than there are pairs. `_ladders` computes the parameters from as many pairs as
    there are parameters, and the other pairs decide whether the formula holds.
    """
    first, second = pairs.dims[0]
    ladders = _ladders(frequencies, pairs.axes or (), width, abs(second - first))
    fits: list[Rotary] = []
    trials = (
        (base, scaling, rungs) for exact, scaling, rungs in ladders for base in (_round_to_short_decimal(exact), exact)
    )
    for base, scaling, rungs in trials:
        try:
            encoding = Rotary(width, base=base, scaling=scaling, pairs=replace(pairs, rungs=rungs))
        except LocantError:
            continue
        if torch.allclose(encoding.inv_freq.abs(), frequencies, rtol=SAME, atol=0):
            fits.append(encoding)
            if _round_to_short_decimal(base, 1e-12) == _round_to_short_decimal(
                base, 1e-2
            ):  # a base of two digits is not a coincidence
                break
    if not fits:
        return None
    return fits[-1] if len(f"{fits[-1].base:g}") <= 5 else fits[0]


def is_recognised(encoding: Rotary) -> bool:
    """Return whether the frequencies follow from numbers with three digits, which do not arise by chance.

    Other frequencies are only as exact as the measurement, so that errors of angles cannot be computed from them.
    """
    names = ("factor", "low_freq_factor", "high_freq_factor", "rotated_share")
    numbers = [encoding.base, *(getattr(encoding.scaling, name, 1.0) for name in names)]
    return encoding.pairs.inv_freq is None and all(float(f"{each:.2e}") == each for each in numbers)


Ladder = tuple[float, Scaling | None, list[tuple[int, int]]]
"""A base, a scaling and the rung of each pair, which together give the frequency of each pair."""


def _ladders(frequencies: Tensor, axis: Sequence[int], width: int, apart: int) -> Iterator[Ladder]:
    """Yield bases, scalings and rungs that may give these frequencies, the simplest first.

    If the members of a pair are half a head apart, the ladder probably covers the whole head.
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
                yield from ((base, scaling, rungs) for base, scaling in _scaled_ladders(frequencies, order, ladder))


def _scaled_ladders(frequencies: Tensor, order: Sequence[int], ladder: int) -> Iterator[tuple[float, Scaling | None]]:
    """Yield a base with each scaling whose parameters follow from a few of the frequencies."""
    rungs = torch.tensor(order, dtype=torch.float64)
    if rungs.min() == rungs.max():
        fastest = float(frequencies[int(rungs.argmin())])
        yield 10_000.0, None if abs(fastest - 1) < SAME else Linear(factor=1 / fastest)
        return
    base = _base_of_ends(frequencies, rungs, ladder)
    if 0 < base < 1e12 and math.isfinite(base):
        yield from _equally_scaled_ladders(frequencies, rungs, ladder, base)
        yield from _scaled_by_frequency(frequencies, rungs, ladder)


def _base_of_ends(frequencies: Tensor, rungs: Tensor, ladder: int) -> float:
    """Return the base that, without a scaling, gives the ratio between the frequencies of the first and last rungs.

    The logarithm of a frequency is linear in the rung: ``-log(factor) - 2 rung / ladder log(base)``. So two frequencies
    give the base and the factor. The ends of the line give the most exact values.
    """
    first, last = int(rungs.argmin()), int(rungs.argmax())
    power = -2 * (rungs[last] - rungs[first]) / ladder
    return float((frequencies[last] / frequencies[first]) ** (1 / power))


def _equally_scaled_ladders(
    frequencies: Tensor, rungs: Tensor, ladder: int, base: float
) -> Iterator[tuple[float, Scaling | None]]:
    """Yield the base with the scalings that divide all frequencies by one factor."""
    first = int(rungs.argmin())
    at_rung_0 = float(frequencies[first]) * _round_to_short_decimal(base) ** (2 * float(rungs[first]) / ladder)
    yield base, None
    if abs(at_rung_0 - 1) > SAME:
        yield base, Linear(factor=_round_to_short_decimal(1 / at_rung_0))
    if 2 * len(frequencies) < ladder:
        share = len(frequencies) / (ladder / 2)
        yield base, Proportional(rotated_share=share, factor=_round_to_short_decimal(1 / at_rung_0))


def _scaled_by_frequency(frequencies: Tensor, rungs: Tensor, ladder: int) -> Iterator[tuple[float, Scaling]]:
    """Yield a base with the scalings that keep the fast frequencies and divide the slow ones by a factor.

    The two fastest frequencies give the base. The ratio of the slowest one to its value without scaling gives the
    factor.
    """
    first, last = int(rungs.argmin()), int(rungs.argmax())
    second = int((rungs - rungs[first] - 1).abs().argmin())
    if rungs[second] != rungs[first] + 1:
        return
    base = _round_to_short_decimal(float((frequencies[first] / frequencies[second]) ** (ladder / 2)), 2e-4)
    plain = base ** (-2 * rungs / ladder)
    slowed = frequencies / plain
    if not 0 < float(slowed[last]) < 0.999:
        return
    factor = _round_to_short_decimal(1 / float(slowed[last]))
    unscaled_share = (slowed - 1 / factor) / (1 - 1 / factor)
    if (llama := _llama3(plain, unscaled_share, factor)) is not None:
        yield base, llama
    for length, truncate in itertools.product(LENGTHS, (True, False)):
        yield base, YaRN(factor=factor, original_max_seq_len=length, truncate=truncate)


def _llama3(plain: Tensor, unscaled_share: Tensor, factor: float) -> Llama3 | None:
    """Return the scaling of Llama 3 that fits these shares, or ``None`` if there is none.

    The unscaled share of a frequency is 0 below one limit and 1 above the other. Between them it is
    ``(length / wavelength - low) / (high - low)``, which is linear in the frequency. A least-squares line over the
    pairs between the limits gives `high` and the length if `low` is 1, as in Llama 3.1.
    """
    inside = (unscaled_share > 1e-4) & (unscaled_share < 1 - 1e-4)
    if inside.sum() < 2:
        return None
    x, y = plain[inside], unscaled_share[inside]
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    start = float(y.mean() - slope * x.mean())
    if not start < 0 < slope:
        return None
    high = _round_to_short_decimal(1 - 1 / start, 1e-3)
    length = 256 * max(round(2 * math.pi * slope * (high - 1) / 256), 1)
    return Llama3(factor=factor, original_max_seq_len=length, low_freq_factor=1.0, high_freq_factor=high)


def _round_to_short_decimal(value: float, rel: float | None = None) -> float:
    """Return the number with the fewest digits that equals the value in float32. More digits need a closer match."""
    for digits in range(1, 7):
        shorter = float(f"{value:.{digits - 1}e}")
        if math.isclose(shorter, value, rel_tol=min(2e-5, 10.0 ** -(digits + 2)) if rel is None else rel):
            return shorter
    return float(f"{value:.6e}")


def _simplify(encoding: Rotary) -> Rotary:
    """Return the encoding in terms of ``layout``, ``rotary_dim``, ``sections`` and ``axial``, if these suffice."""
    pairs, width = encoding.pairs, encoding.head_dim
    runs = [pairs.axes.count(axis) for axis in range(pairs.num_axes or 1)] if pairs.axes else []
    choices: list[dict[str, Any]] = [{}, {"rotary_dim": 2 * len(pairs)}]
    if len(runs) > 1:
        choices = [{**choice, "sections": tuple(runs), "axial": axial} for choice in choices for axial in (False, True)]
    elif 2 * len(pairs) < width and isinstance(encoding.scaling, Unscaled):
        choices.append({"scaling": Proportional(rotated_share=2 * len(pairs) / width)})
    own_frequencies = _frequencies_of_pairs(encoding)
    for layout, choice in itertools.product(("half", "interleaved"), choices if pairs.num_heads is None else ()):
        options: dict[str, Any] = {"scaling": encoding.scaling, "layout": layout, **choice}
        try:
            short = Rotary(width, base=encoding.base, **options)
        except LocantError:
            continue
        other = _frequencies_of_pairs(short)
        if own_frequencies.keys() == other.keys() and all(
            axis == other[pair][0] and math.isclose(each, other[pair][1], rel_tol=SAME)
            for pair, (axis, each) in own_frequencies.items()
        ):
            return short
    return encoding


def _frequencies_of_pairs(encoding: Rotary) -> dict[tuple[int, int], tuple[int, float]]:
    """Return the axis and the frequency of each rotated pair, by its dimensions."""
    rows = zip(encoding.pairs.dims, encoding.pairs.axes or (), encoding.inv_freq.tolist(), strict=True)
    return {pair: (axis, abs(each)) for pair, axis, each in rows if each}


def _with_factor(encoding: Rotary, factor: float) -> Rotary:
    """Return the encoding with the measured attention factor, if it differs from the encoding's own."""
    scaling, usual = encoding.scaling, encoding.scaling.effective_attention_factor
    if math.isclose(usual, factor, rel_tol=SAME) or math.isclose(usual, _round_to_short_decimal(factor), rel_tol=SAME):
        return encoding
    if isinstance(scaling, YaRN):
        return encoding.replace(scaling=replace(scaling, attention_factor=_round_to_short_decimal(factor)))
    alone = YaRN(
        factor=1.0, original_max_seq_len=4096, attention_factor=_round_to_short_decimal(factor)
    )  # keeps the frequencies
    if isinstance(scaling, Unscaled):
        return encoding.replace(scaling=alone)
    pairs = replace(encoding.pairs, rungs=None, inv_freq=encoding.inv_freq.tolist())
    return Rotary(encoding.head_dim, scaling=alone, pairs=pairs)
