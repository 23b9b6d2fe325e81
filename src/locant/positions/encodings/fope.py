"""Fourier positions (FoPE): Hua et al. 2024, https://arxiv.org/abs/2412.17739."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, MAX_WIDTH, Real, real, shape_error, whole
from locant.errors import RangeError
from locant.kernels.rotary import rotate_pairs
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, Keys, ModelShape, PositionEncoding, Queries, require_heads
from locant.positions.frequencies import TWO_PI, base_of, inverse_frequencies, width_of
from locant.positions.positions import Positions

__all__ = ["FoPE"]


class FoPE(PositionEncoding):
    r"""Rotary positions in which every pair hears several frequencies, and none that the trained length cannot tell.

    .. math:: \cos_{h,i}(n) = \sum_j C_{h,j,i} \cos(n \theta_j), \qquad
        \sin_{h,i}(n) = \sum_j S_{h,j,i} \sin(n \theta_j)

    over the frequencies of `Rotary` that come round at least once within `original_max_seq_len`; pairs with slower
    ones have frequency 0, and are not rotated. C and S are learned for each head, and start near the identity.

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
        base: float = 10_000.0,
        *,
        original_max_seq_len: int,
        noise: Real = 0.3,
        angles: AngleMode = "exact",
    ) -> None:
        super().__init__()
        self.head_dim = width_of("head_dim", head_dim, remedy="head_dim=64, an even width")
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy="num_heads=8")
        self.base = base_of(base)
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

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Both, in the dtype they came in; the arithmetic is float32 at least."""
        keys = positions if k_positions is None else k_positions
        rotated = self._turned("q", q, positions), self._turned("k", k, keys)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def _turned(self, name: str, x: Tensor, positions: Positions) -> Tensor:
        require_heads(name, x, positions, self.head_dim)
        positions.require_single_axis("FoPE")
        if x.shape[1] % self.num_heads:
            raise shape_error(name, x, f"a multiple of {self.num_heads} heads", f"num_heads={x.shape[1]}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        plain = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        mixed = (
            torch.einsum("bsj,hji->bhsi", each, weight.double()).to(dtype)  # rounded once: the same bits in any row
            for each, weight in zip(plain, (self.cosines, self.sines), strict=True)
        )
        silent = self.head_dim // 2 - self.cosines.shape[-1]
        group = x.shape[1] // self.num_heads
        cos, sin = (
            nn.functional.pad(each, (0, silent), value=at_zero).expand(x.shape[0], -1, -1, -1).flatten(0, 1)
            for each, at_zero in zip(mixed, (1.0, 0.0), strict=True)
        )
        rows = x.reshape(x.shape[0] * self.num_heads, group, *x.shape[2:])
        return rotate_pairs(rows, cos, sin, "half").view(x.shape)

    def extra_repr(self) -> str:
        shape = f"head_dim={self.head_dim}, num_heads={self.num_heads}, base={self.base:g}"
        return f"{shape}, original_max_seq_len={self.original_max_seq_len}, angles={self.angles.mode!r}"
