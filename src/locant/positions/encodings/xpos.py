"""xPos: rotation with a decay of length. Sun et al. 2022, https://arxiv.org/abs/2212.10554."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from locant.arguments import MAX_INT32, Real, one_of, real, whole
from locant.errors import LocantError, Remedy, ShapeError
from locant.kernels.rotary import Layout, require_writable, rotate_pairs
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import (
    EncodingInfo,
    Keys,
    Output,
    PositionEncoding,
    Queries,
    require_heads,
    resolve_positions,
)
from locant.positions.constant import Constant
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.positions import OptionalPositions
from locant.spelling import dtype_name, literal

EXPONENT_RANGE = {torch.float64: 900, torch.float32: 100, torch.bfloat16: 100, torch.float16: 8}
"""The largest e for which queries and keys, multiplied by ``2**e`` or ``2**-e``, stay normal numbers."""


class XPos(PositionEncoding):
    r"""Rotates pairs of q and k like `Rotary`, and shrinks their product by ``zeta^(n - m)``, so that far tokens fade.

    .. math:: q_i \leftarrow q_i \, \zeta_i^{(n - c) / s}, \qquad k_i \leftarrow k_i \, \zeta_i^{-(m - c) / s}, \qquad
        \zeta_i = \frac{2 i / d + \gamma}{1 + \gamma}

    n is the position of a query, and m is the position of a key. c is `center`, and s is `scale_base`. Fast pairs i
    fade most. `center` cancels in the product of q and k and is fixed, so cached keys stay valid. Each of the two
    factors grows with the distance from `center`, up to `reach` (with the defaults, about 28,000 positions in either
    direction in float32 and bfloat16, and 2,200 in float16). Positions beyond `reach` raise `RangeError`.

    Args:
        head_dim: dimensions per head, an even number.
        base: the frequencies fall from 1 towards 1 / base.
        scale_base: after this many positions the fastest pair has faded to ``gamma / (1 + gamma)``.
        gamma: the decay of the fastest pair. A larger value fades less.
        center: the position at which q and k keep their length.
        layout, angles: as in `Rotary`.

    Limits:
        It is for causal attention, because a key after its query would be amplified.

    Tested against:
        rotary-embedding-torch, and cached decoding compared with a single pass.

    >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
    >>> [rotated.shape for rotated in XPos(64).rotate(q, k)]
    [torch.Size([2, 8, 5, 64]), torch.Size([2, 2, 5, 64])]
    >>> XPos(64).reach(torch.bfloat16)
    28328
    """

    info = EncodingInfo(
        name="xpos",
        aliases=("lex",),
        kind="relative",
        parameters="none",
        cost_of_tokens="the cost of rotary, and head_dim / 2 exponentials",
        cost_of_pairs="nothing",
        extrapolation="better than rotary: the product of far tokens fades; meant for windowed attention there",
        used_by="LeX, RetNet, TorchScale",
        paper="Sun 2022, arXiv 2212.10554",
    )

    def __init__(
        self,
        head_dim: int,
        *,
        base: Real = 10_000.0,
        scale_base: Real = 512.0,
        gamma: Real = 0.4,
        center: int = 0,
        layout: Layout = "half",
        angles: AngleMode = "exact",
    ) -> None:
        super().__init__()
        one_of("layout", layout, get_args(Layout), "use the layout that the weights were trained with")
        self.head_dim = check_width("head_dim", head_dim, remedy=Remedy("{}, an even width", head_dim=64))
        self.base = check_base(base)
        self.scale_base = real("scale_base", scale_base, above=0, remedy="scale_base=512.0")
        self.gamma = real("gamma", gamma, above=0, remedy="gamma=0.4")
        self.center = whole("center", center, -MAX_INT32, remedy="center=0")
        self.layout: Layout = layout
        self.angles = Angles(inverse_frequencies(self.head_dim, self.base), angles)
        place = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        zeta = (place + self.gamma) / (1 + self.gamma)
        self.fading = Constant(zeta.log() / self.scale_base)

    def reach(self, dtype: torch.dtype) -> int:
        """Return the largest distance from `center`, in tokens, at which q and k are normal numbers of this dtype."""
        fastest = math.log1p(1 / self.gamma) / self.scale_base
        return int(EXPONENT_RANGE.get(dtype, EXPONENT_RANGE[torch.float16]) * math.log(2) / fastest)

    def rotate_one(self, x: Queries, positions: OptionalPositions = None) -> Queries:
        """Raise `LocantError`, because queries and keys are scaled in opposite ways."""
        got = "got one tensor for XPos, which scales queries and keys in opposite ways"
        raise LocantError(got, "rotate(q, k, positions)")

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Queries, Keys]:
        """Rotate and scale queries and keys in their own dtype, with arithmetic in float32 or wider."""
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        rotated_q = rotate_pairs(q, *self._scaled_cos_sin(q, positions, "q", 1), self.layout)
        rotated_k = rotate_pairs(k, *self._scaled_cos_sin(k, keys, "k", -1), self.layout)
        if not inplace:
            return rotated_q, rotated_k
        if require_writable(q, k):
            raise ShapeError("got one tensor as q and k, which xPos scales in opposite ways, in place", "k.clone()")
        return q.copy_(rotated_q), k.copy_(rotated_k)

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo the rotation of keys. Values that are rotated keys then fade with the distance, too."""
        cos, sin = self._scaled_cos_sin(y, positions, "y", 1)
        return rotate_pairs(y, cos, -sin, self.layout)

    def _scaled_cos_sin(
        self, x: Tensor, positions: OptionalPositions, name: str, direction: int
    ) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of every token and pair, times the scale."""
        positions = require_heads(name, x, positions, self.head_dim)
        positions.require_single_axis("XPos")
        reach = self.reach(x.dtype)
        owner = f"XPos(scale_base={literal(self.scale_base)}, center={self.center}) in {dtype_name(x.dtype)}"
        remedy = "use a larger scale_base, a center in the middle of the context, or a wider dtype"
        positions.require_within(self.center - reach, self.center + reach, owner, remedy)
        cos, sin = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        steps = (positions.index - self.center).double() * direction
        scale = torch.exp(steps[..., None] * self.fading.on(x.device))
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (cos * scale).to(dtype), (sin * scale).to(dtype)

    def extra_repr(self) -> str:
        shape = f"head_dim={self.head_dim}, base={literal(self.base)}"
        fading = f"scale_base={literal(self.scale_base)}, gamma={literal(self.gamma)}"
        return f"{shape}, {fading}, center={self.center}, layout={self.layout!r}, angles={self.angles.mode!r}"
