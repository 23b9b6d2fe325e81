"""xPos: rotation with a decay of length. Sun et al. 2022, https://arxiv.org/abs/2212.10554."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from locant.arguments import MAX_INT32, one_of, real, whole
from locant.errors import LocantError, Remedy, ShapeError
from locant.kernels.rotary import Layout, require_writable, rotate_pairs
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, Keys, Output, PositionEncoding, Queries, require_heads, standing
from locant.positions.constant import Constant
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.positions import Where

ROOM = {torch.float64: 900, torch.float32: 100, torch.bfloat16: 100, torch.float16: 8}
"""How many powers of two a query or key may be scaled by in either direction and stay a normal number of its dtype."""


class XPos(PositionEncoding):
    r"""Rotates pairs of q and k as `Rotary` does, and shrinks their product by ``zeta^(n - m)``: far tokens fade.

    .. math:: q_i \leftarrow q_i \, \zeta_i^{(n - c) / s}, \qquad k_i \leftarrow k_i \, \zeta_i^{-(m - c) / s}, \qquad
        \zeta_i = \frac{2 i / d + \gamma}{1 + \gamma}

    for pair i of a query at n and of a key at m, with `center` c and `scale_base` s: fast pairs fade most. `center`
    cancels where q and k meet, and is fixed, so cached keys stay valid. Each of the two factors grows with the distance
    from it, up to `reach` (with the defaults some 28 000 positions either way in float32 and bfloat16, 2 200 in
    float16); beyond, a `RangeError` is raised.

    Args:
        head_dim: dimensions per head, an even number.
        base: the frequencies fall from 1 towards 1 / base.
        scale_base: after this many positions the fastest pair has faded to ``gamma / (1 + gamma)``.
        gamma: how little the fastest pair keeps; larger is gentler.
        center: the position at which q and k keep their length.
        layout, angles: as in `Rotary`.

    Limits:
        For causal attention: a key after its query would be amplified.

    Tested against:
        rotary-embedding-torch, and cached decoding against one pass, which must agree.

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
        cost_of_tokens="as rotary, and head_dim / 2 exponentials",
        cost_of_pairs="nothing",
        extrapolation="better than rotary: the product of far tokens fades; made for windowed attention there",
        used_by="LeX, RetNet, TorchScale",
        paper="Sun 2022, arXiv 2212.10554",
    )

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        center: int = 0,
        layout: Layout = "half",
        angles: AngleMode = "exact",
    ) -> None:
        super().__init__()
        one_of("layout", layout, get_args(Layout), "the layout the weights were trained with")
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
        """The largest distance from `center`, in tokens, at which q and k are normal numbers of this dtype."""
        fastest = math.log1p(1 / self.gamma) / self.scale_base
        return int(ROOM.get(dtype, ROOM[torch.float16]) * math.log(2) / fastest)

    def rotate_one(self, x: Queries, positions: Where = None) -> Queries:
        """Always an error: queries and keys are scaled in opposite ways."""
        got = "got one tensor for XPos, which scales queries and keys in opposite ways"
        raise LocantError(got, "rotate(q, k, positions)")

    def rotate(
        self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Rotated and scaled queries and keys, in the dtype they came in; the arithmetic is float32 at least."""
        positions, keys = standing(self, q, k, positions, k_positions)
        rotated_q = rotate_pairs(q, *self._angles_of(q, positions, "q", 1), self.layout)
        rotated_k = rotate_pairs(k, *self._angles_of(k, keys, "k", -1), self.layout)
        if not inplace:
            return rotated_q, rotated_k
        if require_writable(q, k):
            raise ShapeError("got one tensor as q and k, which xPos scales in opposite ways, in place", "k.clone()")
        return q.copy_(rotated_q), k.copy_(rotated_k)

    def unrotate(self, y: Output, positions: Where = None) -> Output:
        """What `rotate` makes of a key, undone: where keys are values, theirs fade with the distance too."""
        cos, sin = self._angles_of(y, positions, "y", 1)
        return rotate_pairs(y, cos, -sin, self.layout)

    def _angles_of(self, x: Tensor, positions: Where, name: str, direction: int) -> tuple[Tensor, Tensor]:
        """The cosine and sine for every token and pair, times its scale."""
        positions = require_heads(name, x, positions, self.head_dim)
        positions.require_single_axis("XPos")
        reach = self.reach(x.dtype)
        owner = f"XPos(scale_base={self.scale_base:g}, center={self.center}) in {x.dtype}"
        remedy = "a larger scale_base, a center in the middle of the context, or a wider dtype"
        positions.require_within(self.center - reach, self.center + reach, owner, remedy)
        cos, sin = self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, torch.float64)
        steps = (positions.index - self.center).double() * direction
        scale = torch.exp(steps[..., None] * self.fading.on(x.device))
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (cos * scale).to(dtype), (sin * scale).to(dtype)

    def extra_repr(self) -> str:
        shape = f"head_dim={self.head_dim}, base={self.base:g}, scale_base={self.scale_base:g}, gamma={self.gamma:g}"
        return f"{shape}, center={self.center}, layout={self.layout!r}, angles={self.angles.mode!r}"
