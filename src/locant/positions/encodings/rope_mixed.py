"""RoPE-Mixed: learned frequencies, per head and axis. Heo et al. 2024, https://arxiv.org/abs/2403.13298."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, shape_error, whole
from locant.errors import ShapeError
from locant.kernels.rotary import rotate_pairs
from locant.positions.base import EncodingInfo, Keys, Output, PositionEncoding, Queries, require_heads
from locant.positions.frequencies import base_of, inverse_frequencies, width_of
from locant.positions.positions import Positions

__all__ = ["MixedRotary"]


class MixedRotary(PositionEncoding):
    r"""Rotary positions whose frequencies are learned, for every head and every axis of a position (RoPE-Mixed).

    .. math:: \text{angle}_{h,i}(n) = \sum_a n_a \, f_{a,h,i}

    Of a pair, the angle mixes the axes: with rows and columns it can follow any diagonal (Heo et al. 2024, arXiv
    2403.13298). With one axis these are learned frequencies in the planes of `Rotary`, as GRAPE-M has them. Keys and
    queries of one key/value head share frequencies, so scores depend on distances alone, whatever is learned. Angles
    are formed in float64.

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
        super().__init__()
        self.head_dim = width_of("head_dim", head_dim, remedy="head_dim=64, an even width")
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy="num_heads=8")
        self.num_axes = whole("num_axes", num_axes, 1, MAX_WIDTH, remedy="num_axes=2 for rows and columns")
        self.base = base_of(base)
        self.frequencies = nn.Parameter(torch.empty(self.num_axes, self.num_heads, self.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The frequencies of `Rotary`, in a direction drawn for each head and pair where there are several axes."""
        with torch.no_grad():
            size = torch.tensor([*map(float, inverse_frequencies(self.head_dim, self.base))]).to(self.frequencies)
            direction = torch.randn_like(self.frequencies)
            mixed = size * direction / direction.norm(dim=0, keepdim=True).clamp(min=1e-6)
            self.frequencies.copy_(mixed if self.num_axes > 1 else size.expand_as(mixed))

    def rotate_one(self, x: Queries, positions: Positions) -> Queries:
        """One tensor, queries or keys."""
        return self._turned("x", x, positions, 1)

    def rotate(
        self, q: Queries, k: Keys, positions: Positions, k_positions: Positions | None = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Both, in the dtype they came in; the arithmetic is float32 at least."""
        keys = positions if k_positions is None else k_positions
        rotated = self._turned("q", q, positions, 1), self._turned("k", k, keys, 1)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def unrotate(self, y: Output, positions: Positions) -> Output:
        """The inverse of `rotate_one`."""
        return self._turned("y", y, positions, -1)

    def _turned(self, name: str, x: Tensor, positions: Positions, direction: int) -> Tensor:
        require_heads(name, x, positions, self.head_dim)
        if positions.axes != self.num_axes:
            got = f"got positions with {positions.axes} axes for num_axes={self.num_axes}"
            raise ShapeError(got, f"MixedRotary({self.head_dim}, {self.num_heads}, num_axes={positions.axes})")
        if x.shape[1] % self.num_heads:
            raise shape_error(name, x, f"a multiple of {self.num_heads} heads", f"num_heads={x.shape[1]}")
        place = positions.index.view(*positions.index.shape[:2], self.num_axes).double() / positions.denominator
        angle = torch.einsum("bsa,ahp->bhsp", place, self.frequencies.double())
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angle.cos().to(dtype), (angle.sin() * direction).to(dtype)
        group = x.shape[1] // self.num_heads
        rows = (x.shape[0] * self.num_heads, group, *x.shape[2:])
        cos, sin = (each.expand(x.shape[0], -1, -1, -1).flatten(0, 1) for each in (cos, sin))
        return rotate_pairs(x.reshape(rows), cos, sin, "half").view(x.shape)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_heads={self.num_heads}, num_axes={self.num_axes}, base={self.base:g}"
