"""The matrix by which each position multiplies a head, and what it is made of: pairs, axes, frequencies, lengths.

Unit vectors are rotated, so that what comes back are the entries of the matrix: cosines and sines as they are, with no
rounding but their own. Everything is measured at positions up to 61 first, where no angle of a usual frequency has
gone round so often that rounding would matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locant.models.probe.subject import Subject
from locant.models.probe.trial import HEADS

__all__ = ["EVEN", "NEAR", "ROUNDED", "Block", "Rotation", "angles_at", "begins_at", "measured_rotation", "wrapped"]

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
    """

    dims: tuple[int, int]
    frequencies: tuple[float, ...]
    of_second: tuple[float, ...]
    offset: float

    @property
    def axes(self) -> tuple[int, ...]:
        """Those that rotate it."""
        return tuple(axis for axis, one in enumerate(self.frequencies) if abs(one) > NOTHING)

    @property
    def is_rotation(self) -> bool:
        """Whether both members have one angle."""
        return all(
            math.isclose(a, b, rel_tol=1e-4, abs_tol=NOTHING)
            for a, b in zip(self.frequencies, self.of_second, strict=True)
        )


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
    """

    blocks: tuple[Block, ...]
    mixed: int
    factor: float
    change: float
    bent: float
    order: tuple[int, ...] | None
    num_heads: int | None
    same_heads: bool


def begins_at(rotation: Rotation) -> float | None:
    """The position as which 0 is rotated; ``None``: its angles are those of no position."""
    moving = [(block.offset, sum(block.frequencies)) for block in rotation.blocks if sum(block.frequencies)]
    steps = 0.0
    for offset, speed in sorted(moving, key=lambda each: abs(each[1])):  # the slow ones have not gone round yet
        steps += math.remainder(offset - steps * speed, math.tau) / speed
    for begin in (float(round(steps)), steps):
        if all(abs(math.remainder(offset - begin * speed, math.tau)) < ROUNDED for offset, speed in moving):
            return begin
    return None


def matrices(subject: Subject, index: Tensor) -> tuple[Tensor, Tensor]:
    """Of these positions, for queries and for keys: ``[heads, positions, width, width]``, float64."""
    basis = torch.eye(subject.width)[:, None, None, :].expand(-1, HEADS, index.shape[1], -1).clone()
    q, k = (side.double().permute(1, 2, 3, 0) for side in subject.rotate(basis, index))
    return q, k


def measured_rotation(subject: Subject) -> tuple[Rotation, Rotation]:
    """What is done to queries, and to keys."""
    steps = [step for step in NEAR if subject.limit is None or step <= subject.limit]
    lines = [subject.places(*steps, axis=axis) for axis in range(subject.axes)]
    sides = matrices(subject, torch.cat([subject.places(0), *lines], 1))
    of_q = _side(sides[0], steps, subject.axes)
    if float((sides[0] - sides[1]).abs().max()) < ROUNDED * of_q.factor:
        return of_q, of_q
    return of_q, _side(sides[1], steps, subject.axes)


def _side(heads: Tensor, steps: Sequence[int], axes: int) -> Rotation:
    at_0 = heads[0, 0]
    still = [bool((head == head[:1]).all()) for head in heads]
    num_heads = still.index(True) if not still[0] and any(still) else None
    same = all(torch.equal(heads[0], head) for head in heads[:num_heads])
    matrix, order = heads[0], None
    there = at_0.abs() > NOTHING
    if bool((there.sum(0) == 1).all() and (there.sum(1) == 1).all()):
        places = there.double().argmax(1)
        if not torch.equal(places, torch.arange(len(places))):
            order = tuple(places.tolist())
            matrix = matrix[:, places.argsort()]
    entries = (matrix.abs() > NOTHING).any(0)
    entries = entries | entries.T
    partners = [row.nonzero().flatten().tolist() for row in entries]
    factor = float(at_0.norm() / math.sqrt(len(at_0)))
    moving = (matrix - matrix[:1]).abs().amax(0) > NOTHING
    mixed = max(map(len, partners)) if bool(moving.any()) else 1
    if mixed != 2:
        lengths = torch.linalg.svdvals(matrix) / factor - 1
        return Rotation(
            blocks=(), mixed=mixed, factor=factor, change=float(lengths.abs().max()), bent=0.0, order=order,
            num_heads=num_heads, same_heads=same,
        )  # fmt: skip
    dims = [(i, j) for i, found in enumerate(partners) for j in found if i < j and bool(moving[i].any())]
    firsts, seconds = (torch.tensor([pair[place] for pair in dims]) for place in (0, 1))
    a, b, c, e = (matrix[:, r, s] for r, s in ((firsts, firsts), (firsts, seconds), (seconds, firsts), (seconds,) * 2))
    of_first, of_second = torch.atan2(-b, a), torch.atan2(c, e)
    factor = float(torch.hypot(a[0], c[0]).median())
    blocks = torch.stack([torch.stack([a, b], -1), torch.stack([c, e], -1)], -2)
    change = float((torch.linalg.svdvals(blocks) / factor - 1).abs().max())
    slopes, bends = zip(*(_slopes(angles, steps, axes) for angles in (of_first, of_second)), strict=True)
    rows = zip(dims, slopes[0].tolist(), slopes[1].tolist(), of_first[0].tolist(), strict=True)
    return Rotation(
        blocks=tuple(
            Block(dims=pair, frequencies=tuple(first), of_second=tuple(second), offset=offset)
            for pair, first, second, offset in rows
        ),
        mixed=mixed,
        factor=factor,
        change=change,
        bent=max(bends),
        order=order,
        num_heads=num_heads,
        same_heads=same,
    )


def _slopes(angles: Tensor, steps: Sequence[int], axes: int) -> tuple[Tensor, float]:
    """Radians per position, ``[pairs, axes]``, and how far angles are from them times position."""
    found, bent = [], 0.0
    for line in wrapped(angles[1:] - angles[:1]).unflatten(0, (axes, len(steps))):
        slope = line[0] / steps[0]
        for step, angle in zip(steps, line, strict=True):
            slope = slope + wrapped(angle - step * slope) / step
        apart = wrapped(line - torch.tensor(steps, dtype=torch.float64)[:, None] * slope)
        bent = max(bent, float(apart.abs().max()))
        found.append(slope)
    return torch.stack(found, -1), bent


def wrapped(angle: Tensor) -> Tensor:
    """From -pi to pi."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def angles_at(subject: Subject, rotation: Rotation, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """By how much each pair of a query is rotated there, ``[positions, pairs]``: one vector tells all pairs."""
    dims = torch.tensor([block.dims for block in rotation.blocks])
    x = torch.zeros(1, HEADS, index.shape[1], subject.width, dtype=dtype)
    x[..., dims[:, 0]] = 1
    rotated = subject.rotate(x, index)[0][0, 0].double()
    if rotation.order is not None:
        rotated = rotated[:, torch.tensor(rotation.order).argsort()]
    return torch.atan2(rotated[:, dims[:, 1]], rotated[:, dims[:, 0]])
