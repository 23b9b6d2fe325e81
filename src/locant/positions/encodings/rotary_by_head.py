"""Rotary positions that differ from head to head (MHRoPE): Huang et al. 2025, https://arxiv.org/abs/2510.23095."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import entries, shown
from locant.errors import RangeError, ShapeError
from locant.positions.base import (
    EncodingInfo,
    Keys,
    ModelShape,
    Output,
    PositionEncoding,
    Queries,
    build,
    require_heads,
)
from locant.positions.encodings.rotary import Rotary
from locant.positions.pair_table import Pairs
from locant.positions.positions import Positions

__all__ = ["RotaryByHead"]


class RotaryByHead(PositionEncoding):
    r"""Heads in as many equal groups as there are encodings, each rotated by its own: multi-head RoPE.

    .. math:: q'_h = R^{(g(h))}_n q_h, \qquad g(h) = \lfloor h G / H \rfloor

    of H heads in G groups. So MHRoPE deals out time, row and column to heads. Key/value heads are divided alike, so
    that a query's head and its key's are in one group.

    Args:
        groups: how the heads of each group are rotated.

    Limits:
        In text, whose axes are all one, groups that differ by their axis alone are plain rotary positions.

    Tested against:
        `Rotary` of each group, in its heads.

    >>> from locant.positions import Pairs
    >>> time, row, column = (Rotary(8, pairs=Pairs(dims=[(0, 1), (2, 3)], axes=[a, a], num_axes=3)) for a in range(3))
    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 3, 4, 8)
    >>> [x.shape for x in RotaryByHead([time, row, column]).rotate(q, k, Positions.grid(1, 2, 2))]
    [torch.Size([1, 6, 4, 8]), torch.Size([1, 3, 4, 8])]
    """

    info = EncodingInfo(
        name="rotary_by_head",
        aliases=("mhrope", "multi_head_rope"),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, what rotary costs, and a copy of q and k",
        cost_of_pairs="nothing",
        extrapolation="poor beyond the trained length, as of rotary",
        used_by="its paper's models",
        paper="Huang 2025, arXiv 2510.23095",
    )

    def __init__(self, groups: Iterable[Rotary]) -> None:
        super().__init__()
        groups = entries("groups", groups, "[Rotary(64, ...), Rotary(64, ...)]")
        strange = [one for one in groups if not isinstance(one, Rotary)]
        if strange or not groups or len({one.head_dim for one in groups}) > 1:
            got = f"got {shown(strange[0] if strange else groups)} in groups, expected rotary encodings of one head_dim"
            raise RangeError(got, "[Rotary(64, pairs=...), Rotary(64, pairs=...)]")
        self.groups = nn.ModuleList(groups)
        self.head_dim = groups[0].head_dim

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> RotaryByHead:
        """A group for time, for rows and for columns; two groups, or one, where heads are no multiple of three."""
        heads, width = shape.num_kv_heads or shape.num_heads, shape.head_dim
        count = next(count for count in (3, 2, 1) if heads % count == 0)
        dims = [(pair, pair + width // 2) for pair in range(width // 2)]
        by_axis = [Pairs(dims=dims, axes=[axis] * len(dims), num_axes=count) for axis in range(count)]
        return build(cls, {"groups": [Rotary(width, pairs=pairs) for pairs in by_axis]} | options)

    def rotate_one(self, x: Queries, positions: Positions) -> Queries:
        """One tensor, queries or keys."""
        parts = self._parts("x", x, positions)
        return torch.cat([one.rotate_one(part, positions) for one, part in zip(self.groups, parts, strict=True)], dim=1)  # type: ignore[operator]

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Both, in the dtype they came in."""
        rotated = self.rotate_one(q, positions), self.rotate_one(k, k_positions or positions)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def unrotate(self, y: Output, positions: Positions) -> Output:
        """The inverse of `rotate_one`."""
        parts = self._parts("y", y, positions)
        return torch.cat([one.unrotate(part, positions) for one, part in zip(self.groups, parts, strict=True)], dim=1)  # type: ignore[operator]

    def _parts(self, name: str, x: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        require_heads(name, x, positions, self.head_dim)
        if x.shape[1] % len(self.groups):
            got = f"got {name} with {x.shape[1]} heads for {len(self.groups)} groups of heads"
            raise ShapeError(got, f"a multiple of {len(self.groups)} heads")
        return x.chunk(len(self.groups), dim=1)
