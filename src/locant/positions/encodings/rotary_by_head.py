"""Rotary positions that differ from head to head: RoPE-Mixed, FoPE, and groups of heads (MHRoPE)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, MAX_WIDTH, Real, entries, real, shape_error, short_repr, whole
from locant.errors import RangeError, Remedy, ShapeError
from locant.kernels.rotary import rotate_pairs
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, ModelShape, Output, PositionEncoding, build, require_heads
from locant.positions.constant import Constant
from locant.positions.encodings.rotary import Rotary
from locant.positions.frequencies import TWO_PI, check_base, check_width, inverse_frequencies
from locant.positions.pair_table import Pairs
from locant.positions.positions import OptionalPositions, Positions
from locant.positions.same_rotation import SameRotationForQueriesAndKeys
from locant.spelling import literal


class PerHeadRotation(SameRotationForQueriesAndKeys):
    """The base class of rotations with different angles for each key/value head and its query heads.

    A subclass implements `cos_sin_per_head`.

    Args:
        head_dim: dimensions per head. Dimension i pairs with i + head_dim / 2.
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        base: the base of the frequencies.
    """

    def __init__(self, head_dim: int, num_heads: int, base: Real) -> None:
        super().__init__()
        self.head_dim = check_width("head_dim", head_dim, remedy=Remedy("{}, an even width", head_dim=64))
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy=Remedy(num_heads=8))
        self.base = check_base(base)

    def cos_sin_per_head(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of each pair of each head, ``#batch heads seq pairs``. Subclasses implement it."""
        raise NotImplementedError

    def _rotate_tensor(self, name: str, x: Tensor, positions: OptionalPositions, *, inverse: bool = False) -> Tensor:
        positions = require_heads(name, x, positions, self.head_dim, self.num_axes)
        cos, sin = self.cos_sin_per_head(positions, torch.promote_types(x.dtype, torch.float32))
        if x.shape[1] % self.num_heads:
            raise shape_error(name, x, f"a multiple of {self.num_heads} heads", f"num_heads={x.shape[1]}")
        cos, sin = (each.expand(len(x), -1, -1, -1).flatten(0, 1) for each in (cos, -sin if inverse else sin))
        rows = x.reshape(x.shape[0] * self.num_heads, x.shape[1] // self.num_heads, *x.shape[2:])
        return rotate_pairs(rows, cos, sin, "half").view(x.shape)


class MixedRotary(PerHeadRotation):
    r"""Rotary positions whose frequencies are learned, for every head and every axis of a position (RoPE-Mixed).

    .. math:: \text{angle}_{h,i}(n) = \sum_a n_a \, f_{a,h,i}

    The angle of a pair mixes the axes, so with rows and columns it can follow any diagonal (Heo et al. 2024,
    https://arxiv.org/abs/2403.13298). With one axis, these are learned frequencies in the planes of `Rotary`, as in
    GRAPE-M. A key/value head and its query heads share frequencies, so scores always depend on distances alone. Angles
    are computed in float64.

    Args:
        head_dim: dimensions per head.
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        num_axes: the number of indices per token.
        base: initial frequencies fall from 1 towards 1 / base. With several axes each head has a random direction.

    Limits:
        A model may learn frequencies at which distant positions have the same angle.

    Tested against:
        The formula in NumPy, forward and every gradient, including the gradient of the frequencies.

    >>> q, k = torch.randn(2, 8, 6, 16), torch.randn(2, 4, 6, 16)
    >>> [x.shape for x in MixedRotary(16, num_heads=4, num_axes=2).rotate(q, k, Positions.grid(2, 3))]
    [torch.Size([2, 8, 6, 16]), torch.Size([2, 4, 6, 16])]
    """

    info = EncodingInfo(
        name="rope_mixed",
        aliases=("mixed_rotary", "grape_m"),
        kind="relative",
        parameters="num_axes x num_heads x head_dim / 2 frequencies",
        cost_of_tokens="in every layer, 3 head_dim operations per head of q and k, and cosines and sines for each head",
        cost_of_pairs="nothing",
        extrapolation="poor beyond the trained length, as for rotary",
        used_by="RoPE-ViT",
        paper="Heo 2024, arXiv 2403.13298",
    )

    def __init__(self, head_dim: int, num_heads: int, *, num_axes: int = 1, base: Real = 10_000.0) -> None:
        super().__init__(head_dim, num_heads, base)
        self.num_axes = whole("num_axes", num_axes, 1, MAX_WIDTH, remedy="num_axes=2 for rows and columns")
        self.frequencies = nn.Parameter(torch.empty(self.num_axes, self.num_heads, self.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the frequencies of `Rotary`. With several axes, draw a direction for each head and pair."""
        with torch.no_grad():
            size = torch.tensor([*map(float, inverse_frequencies(self.head_dim, self.base))]).to(self.frequencies)
            direction = torch.randn_like(self.frequencies)
            mixed = size * direction / direction.norm(dim=0, keepdim=True).clamp(min=1e-6)
            self.frequencies.copy_(mixed if self.num_axes > 1 else size.expand_as(mixed))

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo `rotate_one`."""
        return self._rotate_tensor("y", y, positions, inverse=True)

    def cos_sin_per_head(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions.axes != self.num_axes:
            got = f"got positions with {positions.axes} axes for num_axes={self.num_axes}"
            raise ShapeError(got, f"MixedRotary({self.head_dim}, {self.num_heads}, num_axes={positions.axes})")
        place = positions.index.view(*positions.index.shape[:2], self.num_axes).double() / positions.denominator
        angle = torch.einsum("bsa,ahp->bhsp", place, self.frequencies.double())
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, num_heads={self.num_heads}, num_axes={self.num_axes}, base={literal(self.base)}"
        )


class FoPE(PerHeadRotation):
    r"""Rotary positions in which every pair mixes several frequencies, without the slowest ones.

    .. math:: \cos_{h,i}(n) = \sum_j C_{h,j,i} \cos(n \theta_j), \qquad
        \sin_{h,i}(n) = \sum_j S_{h,j,i} \sin(n \theta_j)

    The sums run over the frequencies of `Rotary` that complete a turn within `original_max_seq_len`. Pairs with slower
    frequencies are not rotated. C and S are learned for each head and start near the identity (Hua et al. 2024,
    https://arxiv.org/abs/2412.17739).

    Args:
        head_dim: dimensions per head. Dimension i pairs with i + head_dim / 2.
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        base: the frequencies fall from 1 towards 1 / base.
        original_max_seq_len: the trained length.
        noise: the standard deviation of the noise in the initial C and S, as a multiple of the standard deviation of
            Xavier initialisation.
        angles: as in `Rotary`.

    Limits:
        A learned mixture is not a rotation: lengths change, and scores depend on more than distances. For pairs that
        are not rotated, the authors' program sets the sine to 1. The paper and this class set it to 0.

    Tested against:
        The formula in NumPy, and gradients in float64.

    >>> q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    >>> [x.shape for x in FoPE(16, num_heads=2, original_max_seq_len=512).rotate(q, k, Positions.arange(5))]
    [torch.Size([1, 4, 5, 16]), torch.Size([1, 2, 5, 16])]
    """

    info = EncodingInfo(
        name="fope",
        aliases=("fourier",),
        kind="absolute",
        parameters="two matrices of frequencies by pairs for each head",
        cost_of_tokens="in every layer, the cost of rotary, and a mix of cosines and sines for each head",
        cost_of_pairs="nothing",
        extrapolation="drops frequencies too slow to complete a turn in the trained length",
        used_by="its paper's models",
        paper="Hua 2024, arXiv 2412.17739",
    )

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        base: Real = 10_000.0,
        original_max_seq_len: int,
        noise: Real = 0.3,
        angles: AngleMode = "exact",
    ) -> None:
        super().__init__(head_dim, num_heads, base)
        remedy = "pass the trained length"
        self.original_max_seq_len = whole("original_max_seq_len", original_max_seq_len, 1, MAX_INT32, remedy=remedy)
        self.noise = real("noise", noise, low=0, remedy="noise=0.3")
        usable = [f for f in inverse_frequencies(self.head_dim, self.base) if f * self.original_max_seq_len >= TWO_PI]
        if not usable:
            got = f"got original_max_seq_len={self.original_max_seq_len}, in which no frequency completes a turn"
            raise RangeError(got, "use original_max_seq_len=7 or more")
        self.angles = Angles(usable, angles)
        self.cosines = nn.Parameter(torch.empty(self.num_heads, len(usable), len(usable)))
        self.sines = nn.Parameter(torch.empty(self.num_heads, len(usable), len(usable)))
        self.reset_parameters()

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> PositionEncoding:
        """Build the encoding with the model's longest length as the trained length."""
        return super().for_model(shape, **{"original_max_seq_len": max(7, shape.max_seq_len)} | options)

    def reset_parameters(self) -> None:
        """Set C and S to the identity, which is plain RoPE, plus noise."""
        with torch.no_grad():
            count = self.cosines.shape[-1]
            eye = torch.eye(count, device=self.cosines.device, dtype=self.cosines.dtype)
            for weight in (self.cosines, self.sines):
                weight.copy_(eye + torch.randn_like(weight) * self.noise / math.sqrt(count))

    def cos_sin_per_head(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions.require_single_axis("FoPE")
        plain = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        cos, sin = (
            torch.einsum("bsj,hji->bhsi", each, weight.double()).to(dtype)  # rounded once, so bits match in any row
            for each, weight in zip(plain, (self.cosines, self.sines), strict=True)
        )
        unrotated_pairs = (0, self.head_dim // 2 - self.cosines.shape[-1])
        return nn.functional.pad(cos, unrotated_pairs, value=1.0), nn.functional.pad(sin, unrotated_pairs)

    def extra_repr(self) -> str:
        shape = f"head_dim={self.head_dim}, num_heads={self.num_heads}, base={literal(self.base)}"
        return f"{shape}, original_max_seq_len={self.original_max_seq_len}, angles={self.angles.mode!r}"


class RotaryByHead(SameRotationForQueriesAndKeys):
    r"""Equal groups of heads with a rotary encoding for each group: multi-head RoPE.

    .. math:: q'_h = R^{(g(h))}_n q_h, \qquad g(h) = \lfloor h G / H \rfloor

    H heads are in G groups. MHRoPE assigns time, row and column to groups of heads this way (Huang et al. 2025,
    https://arxiv.org/abs/2510.23095). Key/value heads are divided equally, too, so that a query head and its key head
    are in the same group.

    Args:
        groups: the rotary encoding of each group of heads.

    Limits:
        In text, all axes are equal, so groups that differ only in their axis are plain RoPE.

    Tested against:
        The `Rotary` of each group, on its heads.

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
        cost_of_tokens="in every layer, the cost of rotary, and a copy of q and k",
        cost_of_pairs="nothing",
        extrapolation="poor beyond the trained length, as for rotary",
        used_by="its paper's models",
        paper="Huang 2025, arXiv 2510.23095",
    )

    def __init__(self, groups: Iterable[Rotary]) -> None:
        super().__init__()
        groups = entries("groups", groups, "[Rotary(64, ...), Rotary(64, ...)]")
        invalid = [group for group in groups if not isinstance(group, Rotary)]
        if invalid or not groups or len({group.head_dim for group in groups}) > 1:
            got = f"got {short_repr(invalid[0] if invalid else groups)} in groups, expected rotaries of one head_dim"
            raise RangeError(got, "[Rotary(64, pairs=...), Rotary(64, pairs=...)]")
        self.groups = nn.ModuleList(groups)
        self.head_dim, self.num_axes = groups[0].head_dim, max(group.num_axes for group in groups)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> RotaryByHead:
        """Build groups for time, rows and columns, or fewer groups if three does not divide the number of heads."""
        heads, width = shape.num_kv_heads or shape.num_heads, shape.head_dim
        count = next(count for count in (3, 2, 1) if heads % count == 0)
        dims = [(pair, pair + width // 2) for pair in range(width // 2)]
        by_axis = [Pairs(dims=dims, axes=[axis] * len(dims), num_axes=count) for axis in range(count)]
        return build(cls, {"groups": [Rotary(width, pairs=pairs) for pairs in by_axis]} | options)

    def _rotate_tensor(self, name: str, x: Tensor, positions: OptionalPositions) -> Tensor:
        parts = self._parts(name, x, positions)
        results = [group.rotate_one(part, positions) for group, part in zip(self.groups, parts, strict=True)]  # type: ignore[operator]
        return torch.cat(results, dim=1)

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo `rotate_one`."""
        parts = self._parts("y", y, positions)
        results = [group.unrotate(part, positions) for group, part in zip(self.groups, parts, strict=True)]  # type: ignore[operator]
        return torch.cat(results, dim=1)

    def _parts(self, name: str, x: Tensor, positions: OptionalPositions) -> tuple[Tensor, ...]:
        require_heads(name, x, positions, self.head_dim)
        if x.shape[1] % len(self.groups):
            got = f"got {name} with {x.shape[1]} heads for {len(self.groups)} groups of heads"
            raise ShapeError(got, f"use a multiple of {len(self.groups)} heads")
        return x.chunk(len(self.groups), dim=1)


class UnequalAngles(SameRotationForQueriesAndKeys):
    r"""A different angle for each member of a pair: the first uses one rotary encoding, the second another.

    .. math:: x_a' = x_a \cos\alpha - x_b \sin\alpha, \qquad x_b' = x_b \cos\beta + x_a \sin\beta

    HunYuan-VL uses two axes for the two angles, and V-JEPA 2 uses two frequencies. Lengths change by up to
    :math:`\sqrt{1 + |\sin(\alpha - \beta)|}`, and scores depend on more than distances. It costs twice as much as
    `Rotary`.

    Args:
        first, second: two encodings of the same dimensions.

    >>> from locant.scaling import Linear
    >>> first, second = Rotary(2), Rotary(2, scaling=Linear(factor=2.0))
    >>> low, high = UnequalAngles(first, second).stretch(Positions.of([1]))
    >>> round(low, 3), round(high, 3)
    (0.722, 1.216)
    """

    def __init__(self, first: Rotary, second: Rotary) -> None:
        super().__init__()
        if first.pairs.dims != second.pairs.dims or first.head_dim != second.head_dim:
            got = "got first and second with pairs of different dimensions"
            raise RangeError(got, "use second=first.replace(pairs=...) with the same dims")
        self.first, self.second = first, second
        self.head_dim, self.num_axes = first.head_dim, max(first.num_axes, second.num_axes)
        is_second = torch.zeros(self.head_dim, dtype=torch.bool, device="cpu")
        is_second[[b for _, b in first.pairs.dims]] = True
        self._is_second = Constant(is_second)

    def _rotate_tensor(self, name: str, x: Tensor, positions: OptionalPositions) -> Tensor:
        first, second = self.first.rotate_one(x, positions), self.second.rotate_one(x, positions)
        return torch.where(self._is_second.on(x.device), second, first)

    def stretch(self, positions: Positions) -> tuple[float, float]:
        """Return the smallest and the largest factor by which these positions change the length of a pair."""
        (cos, sin), (other_cos, other_sin) = (
            rotary.cos_sin(positions, torch.float64) for rotary in (self.first, self.second)
        )
        apart = float((sin * other_cos - cos * other_sin).abs().max()) if positions.seq_len else 0.0
        return (1 - apart) ** 0.5, (1 + apart) ** 0.5

    def _example_call(self, method: str) -> str:
        return super()._example_call(method) + ", or encoding.rotate_one(x, positions) for one tensor"
