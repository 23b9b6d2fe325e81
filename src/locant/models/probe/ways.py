"""The ways in which code that rotates tokens is called: with tokens alone, with positions, with an offset."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.models.probe.trial import FAILED, Rotate, Way, sides_of
from locant.positions.base import PositionEncoding
from locant.positions.positions import Positions

__all__ = [
    "ALONE", "BOTH_ALONE", "BOTH_ALONE_BY_NAME", "BOTH_WITH_POSITIONS", "ENCODING", "WITH_OFFSET", "WITH_POSITIONS",
    "counted",
]  # fmt: skip


def _alone(target: Any, axes: int) -> Rotate:
    return counted(lambda x: (rotated := target(x), rotated))


def _both_alone(target: Any, axes: int) -> Rotate:
    return counted(lambda x: target(x, x.clone()))


def counted(rotate: Callable[[Tensor], Any]) -> Rotate:
    """What counts tokens itself is given a row that is long enough, of which the tokens asked for are picked."""

    def rotated(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        row = index[0, :, 0]
        long = x.new_zeros(*x.shape[:2], int(row.max()) + 1, x.shape[-1])
        for place in range(len(row)):  # the same place may be asked for twice
            long[:, :, row[place]] = x[:, :, place]
        q, k = sides_of(rotate(long), long.shape, 2)
        picked = q[:, :, row]
        return picked, picked if k is q else k[:, :, row]

    return rotated


def _with_positions(target: Any, axes: int) -> Rotate:
    call = _in_some_shape(lambda x, index: target(x, index), 1)
    return lambda x, index: (rotated := call(x, index)[0], rotated)


def _both_with_positions(target: Any, axes: int) -> Rotate:
    call = _in_some_shape(lambda x, index: target(x, x.clone(), index), 2)

    def rotate(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        q, k = call(x, index)
        return q, k

    return rotate


def _in_some_shape(call: Callable[[Tensor, Tensor], Any], count: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Positions as ``[batch, seq]``, as ``[seq]``, or with axes last or first; tokens with heads before or after."""

    def called(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        failures: list[Exception] = []
        forms = [index.squeeze(-1), index.squeeze(-1)[0]] if index.shape[-1] == 1 else [index, index.movedim(-1, 0)]
        for swapped, form in itertools.product((False, True), forms if len(index) == 1 else forms[:1]):
            tokens = x.transpose(1, 2) if swapped else x
            try:
                sides = sides_of(call(tokens, form), tokens.shape, count)
            except FAILED as error:
                failures.append(error)
                continue
            return tuple(side.transpose(1, 2) if swapped else side for side in sides)
        raise failures[0]

    return called


def _encoding(target: PositionEncoding, axes: int) -> Rotate:
    def rotate(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return target.rotate(x, x.clone(), Positions.of(index if axes > 1 else index[..., 0]))

    return rotate


def _both_alone_by_name(target: Any, axes: int) -> Rotate:
    return counted(lambda x: target.rotate_queries_and_keys(x, x.clone()))


def _with_offset(target: Any, axes: int) -> Rotate:
    def rotate(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        rows = [
            torch.cat([
                target.rotate_queries_or_keys(row[:, :, place : place + 1], offset=int(where[place, 0]))
                for place in range(x.shape[2])
            ], 2)
            for row, where in zip(x.split(-(-len(x) // len(index))), index, strict=True)
        ]  # fmt: skip
        return (rotated := torch.cat(rows)), rotated

    return rotate


ALONE = Way("f(x): it counts tokens from 0", _alone, given=False)
BOTH_ALONE = Way("f(q, k): it counts tokens from 0", _both_alone, given=False)
BOTH_ALONE_BY_NAME = Way(
    "module.rotate_queries_and_keys(q, k): it counts tokens from 0", _both_alone_by_name, given=False
)
WITH_POSITIONS = Way("f(x, positions)", _with_positions)
BOTH_WITH_POSITIONS = Way("f(q, k, positions)", _both_with_positions)
WITH_OFFSET = Way("module.rotate_queries_or_keys(x, offset=...)", _with_offset)
ENCODING = Way("encoding.rotate(q, k, positions)", _encoding)
