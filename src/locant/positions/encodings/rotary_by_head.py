"""Rotary positions that differ from head to head: RoPE-Mixed, FoPE, and groups of heads (MHRoPE)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, MAX_WIDTH, Real, entries, real, shape_error, shown, whole
from locant.errors import RangeError, Remedy, ShapeError
from locant.kernels.rotary import rotate_pairs
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, ModelShape, Output, PositionEncoding, build, require_heads
from locant.positions.constant import Constant
from locant.positions.encodings.rotary import Rotary, RotatedAlike
from locant.positions.frequencies import TWO_PI, check_base, check_width, inverse_frequencies
from locant.positions.pair_table import Pairs
from locant.positions.positions import Positions, Where


class RotaryOfHeads(RotatedAlike):
    """The base of rotations whose angles each key/value head has for itself and its queries.

    A subclass writes `cos_sin_of_heads`.

    Args:
        head_dim: dimensions per head; dimension i pairs with i + head_dim / 2.
        num_heads: of keys and values; query heads are a multiple.
        base: of the frequencies.
    """

    def __init__(self, head_dim: int, num_heads: int, base: float) -> None:
        super().__init__()
        self.head_dim = check_width("head_dim", head_dim, remedy=Remedy("{}, an even width", head_dim=64))
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy=Remedy(num_heads=8))
        self.base = check_base(base)

    def cos_sin_of_heads(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """By which each pair of each head is rotated, ``#batch heads seq pairs``: a subclass writes this."""
        raise NotImplementedError

    def _rotated(self, name: str, x: Tensor, positions: Where, *, inverse: bool = False) -> Tensor:
        positions = require_heads(name, x, positions, self.head_dim, self.num_axes)
        cos, sin = self.cos_sin_of_heads(positions, torch.promote_types(x.dtype, torch.float32))
        if x.shape[1] % self.num_heads:
            raise shape_error(name, x, f"a multiple of {self.num_heads} heads", f"num_heads={x.shape[1]}")
        cos, sin = (each.expand(len(x), -1, -1, -1).flatten(0, 1) for each in (cos, -sin if inverse else sin))
        rows = x.reshape(x.shape[0] * self.num_heads, x.shape[1] // self.num_heads, *x.shape[2:])
        return rotate_pairs(rows, cos, sin, "half").view(x.shape)


class MixedRotary(RotaryOfHeads):
    r"""Rotary positions whose frequencies are learned, for every head and every axis of a position (RoPE-Mixed).

    .. math:: \text{angle}_{h,i}(n) = \sum_a n_a \, f_{a,h,i}

    Of a pair, the angle mixes the axes: with rows and columns it can follow any diagonal (Heo et al. 2024,
    https://arxiv.org/abs/2403.13298). With one axis these are learned frequencies in the planes of `Rotary`, as GRAPE-M
    has them. Keys and queries of one key/value head share frequencies, so scores depend on distances alone, whatever is
    learned. Angles are formed in float64.

    Args:
        head_dim: dimensions per head.
        num_heads: of keys and values; query heads are a multiple.
        num_axes: how many indices a token has.
        base: at first the frequencies fall from 1 towards 1 / base, in a direction drawn for each head, where there
            are several axes.

    Limits:
        Nothing keeps a learned frequency from being one at which far positions cannot be told apart.

    Tested against:
        The formula in NumPy, forward and by every gradient, that of the frequencies included.

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
        extrapolation="poor beyond the trained length, as of rotary",
        used_by="RoPE-ViT",
        paper="Heo 2024, arXiv 2403.13298",
    )

    def __init__(self, head_dim: int, num_heads: int, *, num_axes: int = 1, base: float = 10_000.0) -> None:
        super().__init__(head_dim, num_heads, base)
        self.num_axes = whole("num_axes", num_axes, 1, MAX_WIDTH, remedy="num_axes=2 for rows and columns")
        self.frequencies = nn.Parameter(torch.empty(self.num_axes, self.num_heads, self.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The frequencies of `Rotary`, in a direction drawn for each head and pair where there are several axes."""
        with torch.no_grad():
            size = torch.tensor([*map(float, inverse_frequencies(self.head_dim, self.base))]).to(self.frequencies)
            direction = torch.randn_like(self.frequencies)
            mixed = size * direction / direction.norm(dim=0, keepdim=True).clamp(min=1e-6)
            self.frequencies.copy_(mixed if self.num_axes > 1 else size.expand_as(mixed))

    def unrotate(self, y: Output, positions: Where = None) -> Output:
        """The inverse of `rotate_one`."""
        return self._rotated("y", y, positions, inverse=True)

    def cos_sin_of_heads(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions.axes != self.num_axes:
            got = f"got positions with {positions.axes} axes for num_axes={self.num_axes}"
            raise ShapeError(got, f"MixedRotary({self.head_dim}, {self.num_heads}, num_axes={positions.axes})")
        place = positions.index.view(*positions.index.shape[:2], self.num_axes).double() / positions.denominator
        angle = torch.einsum("bsa,ahp->bhsp", place, self.frequencies.double())
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}, num_axes={self.num_axes}, base={self.base:g}"


class FoPE(RotaryOfHeads):
    r"""Rotary positions in which every pair hears several frequencies, and none that the trained length cannot tell.

    .. math:: \cos_{h,i}(n) = \sum_j C_{h,j,i} \cos(n \theta_j), \qquad
        \sin_{h,i}(n) = \sum_j S_{h,j,i} \sin(n \theta_j)

    over the frequencies of `Rotary` that come round at least once within `original_max_seq_len`; pairs with slower
    ones have frequency 0, and are not rotated. C and S are learned for each head, and start near the identity (Hua et
    al. 2024, https://arxiv.org/abs/2412.17739).

    Args:
        head_dim: dimensions per head; dimension i pairs with i + head_dim / 2.
        num_heads: of keys and values; query heads are a multiple.
        base: the frequencies fall from 1 towards 1 / base.
        original_max_seq_len: the trained length.
        noise: the deviation of what C and S start with beside the identity, in units of Xavier's.
        angles: as in `Rotary`.

    Limits:
        A learned mixture is no rotation: lengths change, and scores depend on more than distances. The authors'
        program fills the sines of pairs that are not rotated with 1; the paper, and this, with 0.

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
        cost_of_tokens="in every layer, what rotary costs, and cosines and sines mixed for each head",
        cost_of_pairs="nothing",
        extrapolation="frequencies that the trained length cannot tell are left out",
        used_by="its paper's models",
        paper="Hua 2024, arXiv 2412.17739",
    )

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        base: float = 10_000.0,
        original_max_seq_len: int,
        noise: Real = 0.3,
        angles: AngleMode = "exact",
    ) -> None:
        super().__init__(head_dim, num_heads, base)
        remedy = "the trained length"
        self.original_max_seq_len = whole("original_max_seq_len", original_max_seq_len, 1, MAX_INT32, remedy=remedy)
        self.noise = real("noise", noise, low=0, remedy="noise=0.3")
        heard = [f for f in inverse_frequencies(self.head_dim, self.base) if f * self.original_max_seq_len >= TWO_PI]
        if not heard:
            got = f"got original_max_seq_len={self.original_max_seq_len}, within which no frequency comes round"
            raise RangeError(got, "original_max_seq_len=7 or more")
        self.angles = Angles(heard, angles)
        self.cosines = nn.Parameter(torch.empty(self.num_heads, len(heard), len(heard)))
        self.sines = nn.Parameter(torch.empty(self.num_heads, len(heard), len(heard)))
        self.reset_parameters()

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> PositionEncoding:
        """Trained at the longest length."""
        return super().for_model(shape, **{"original_max_seq_len": max(7, shape.max_seq_len)} | options)

    def reset_parameters(self) -> None:
        """Plain rotary positions, and noise."""
        with torch.no_grad():
            count = self.cosines.shape[-1]
            eye = torch.eye(count, device=self.cosines.device, dtype=self.cosines.dtype)
            for weight in (self.cosines, self.sines):
                weight.copy_(eye + torch.randn_like(weight) * self.noise / math.sqrt(count))

    def cos_sin_of_heads(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions.require_single_axis("FoPE")
        plain = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        cos, sin = (
            torch.einsum("bsj,hji->bhsi", each, weight.double()).to(dtype)  # rounded once: the same bits in any row
            for each, weight in zip(plain, (self.cosines, self.sines), strict=True)
        )
        silent = (0, self.head_dim // 2 - self.cosines.shape[-1])
        return nn.functional.pad(cos, silent, value=1.0), nn.functional.pad(sin, silent)

    def extra_repr(self) -> str:
        shape = f"head_dim={self.head_dim}, num_heads={self.num_heads}, base={self.base:g}"
        return f"{shape}, original_max_seq_len={self.original_max_seq_len}, angles={self.angles.mode!r}"


class RotaryByHead(RotatedAlike):
    r"""Heads in as many equal groups as there are encodings, each rotated by its own: multi-head RoPE.

    .. math:: q'_h = R^{(g(h))}_n q_h, \qquad g(h) = \lfloor h G / H \rfloor

    of H heads in G groups. So MHRoPE deals out time, row and column to heads (Huang et al. 2025,
    https://arxiv.org/abs/2510.23095). Key/value heads are divided alike, so that a query's head and its key's are in
    one group.

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
        self.head_dim, self.num_axes = groups[0].head_dim, max(one.num_axes for one in groups)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> RotaryByHead:
        """A group for time, for rows and for columns; two groups, or one, where heads are no multiple of three."""
        heads, width = shape.num_kv_heads or shape.num_heads, shape.head_dim
        count = next(count for count in (3, 2, 1) if heads % count == 0)
        dims = [(pair, pair + width // 2) for pair in range(width // 2)]
        by_axis = [Pairs(dims=dims, axes=[axis] * len(dims), num_axes=count) for axis in range(count)]
        return build(cls, {"groups": [Rotary(width, pairs=pairs) for pairs in by_axis]} | options)

    def _rotated(self, name: str, x: Tensor, positions: Where) -> Tensor:
        parts = self._parts(name, x, positions)
        return torch.cat([one.rotate_one(part, positions) for one, part in zip(self.groups, parts, strict=True)], dim=1)  # type: ignore[operator]

    def unrotate(self, y: Output, positions: Where = None) -> Output:
        """The inverse of `rotate_one`."""
        parts = self._parts("y", y, positions)
        return torch.cat([one.unrotate(part, positions) for one, part in zip(self.groups, parts, strict=True)], dim=1)  # type: ignore[operator]

    def _parts(self, name: str, x: Tensor, positions: Where) -> tuple[Tensor, ...]:
        require_heads(name, x, positions, self.head_dim)
        if x.shape[1] % len(self.groups):
            got = f"got {name} with {x.shape[1]} heads for {len(self.groups)} groups of heads"
            raise ShapeError(got, f"a multiple of {len(self.groups)} heads")
        return x.chunk(len(self.groups), dim=1)


class UnequalAngles(RotatedAlike):
    r"""The first member of each pair as one table rotates it, and the second as another does.

    .. math:: x_a' = x_a \cos\alpha - x_b \sin\alpha, \qquad x_b' = x_b \cos\beta + x_a \sin\beta

    HunYuan-VL takes the two angles from different axes, V-JEPA 2 from different frequencies. Lengths change, by up to
    :math:`\sqrt{1 + |\sin(\alpha - \beta)|}`, and scores depend on more than distances. Costs twice what `Rotary` does.

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
            raise RangeError(got, "second=first.alike(pairs=...) with the same dims")
        self.first, self.second = first, second
        self.head_dim, self.num_axes = first.head_dim, max(first.num_axes, second.num_axes)
        of_second = torch.zeros(self.head_dim, dtype=torch.bool, device="cpu")
        of_second[[b for _, b in first.pairs.dims]] = True
        self._of_second = Constant(of_second)

    def _rotated(self, name: str, x: Tensor, positions: Where) -> Tensor:
        first, second = self.first.rotate_one(x, positions), self.second.rotate_one(x, positions)
        return torch.where(self._of_second.on(x.device), second, first)

    def stretch(self, positions: Positions) -> tuple[float, float]:
        """By what factors these positions change the length of a pair: the smallest, and the largest."""
        (cos, sin), (other_cos, other_sin) = (
            one.cos_sin(positions, torch.float64) for one in (self.first, self.second)
        )
        apart = float((sin * other_cos - cos * other_sin).abs().max()) if positions.seq_len else 0.0
        return (1 - apart) ** 0.5, (1 + apart) ** 0.5

    def _example_call(self, door: str) -> str:
        return super()._example_call(door) + ", or encoding.rotate_one(x, positions) for one tensor"
