"""Polar positions (PoPE): Gopalakrishnan et al. 2025, https://arxiv.org/abs/2509.10534."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, shape_error, whole
from locant.errors import LocantError, Remedy
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, Keys, PositionEncoding, Queries, require_heads, resolve_positions
from locant.positions.frequencies import check_base, check_width, inverse_frequencies
from locant.positions.positions import OptionalPositions, Positions
from locant.spelling import literal


class PoPE(PositionEncoding):
    r"""Separates content from position: content sets the length of every dimension, and only position sets its angle.

    .. math:: q_c \to \mathrm{softplus}(q_c) \, e^{i n \theta_c}, \qquad
        k_c \to \mathrm{softplus}(k_c) \, e^{i (m \theta_c + \delta_{h,c})}, \qquad \theta_c = \text{base}^{-c/d}

    A complex number needs two real numbers, so `rotate` returns queries and keys of twice the width, and the cache of
    keys is twice as wide. Queries are multiplied by the square root of 2, so that attention's default scale for the new
    width equals the scale for `head_dim`. The shift of each head and dimension, between -2 pi and 0, is learned.

    Args:
        head_dim: dimensions per head.
        num_heads: the number of key/value heads. The number of query heads is a multiple.
        base: the frequencies fall from 1 towards 1 / base, one for each dimension.
        angles: as in `Rotary`.

    Limits:
        It does not work with weights that were trained with `Rotary`. It cannot rotate in place.

    Tested against:
        The formula in NumPy, scores included, and gradients in float64.

    >>> q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    >>> [x.shape for x in PoPE(8, num_heads=2).rotate(q, k, Positions.arange(5))]
    [torch.Size([1, 4, 5, 16]), torch.Size([1, 2, 5, 16])]
    """

    info = EncodingInfo(
        name="pope",
        aliases=("polar",),
        kind="relative",
        parameters="num_heads x head_dim shifts",
        cost_of_tokens="in every layer, 6 head_dim operations per head of q and k, and cached keys of twice the width",
        cost_of_pairs="a product of twice the width",
        extrapolation="better than rotary: token content does not affect the angle",
        used_by="its paper's models",
        paper="Gopalakrishnan 2025, arXiv 2509.10534",
    )

    def __init__(self, head_dim: int, num_heads: int, *, base: Real = 10_000.0, angles: AngleMode = "exact") -> None:
        super().__init__()
        self.head_dim = check_width("head_dim", head_dim, 1, even=False, remedy=Remedy(head_dim=64))
        self.num_heads = whole("num_heads", num_heads, 1, MAX_WIDTH, remedy=Remedy(num_heads=8))
        self.base = check_base(base)
        self.angles = Angles(inverse_frequencies(2 * self.head_dim, self.base), angles)
        self.shift = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the shift to zero, so that the score of two tokens is largest at distance 0."""
        nn.init.zeros_(self.shift)

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "batch heads query twice"], Float[Tensor, "batch kv_heads key twice"]]:
        """Return queries and keys of twice the width in their own dtype, with arithmetic in float32 or wider."""
        if inplace:
            got = "got inplace=True for PoPE, whose queries and keys have twice the width"
            raise LocantError(got, "rotate(q, k, positions)")
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        polar_q = self._polar("q", q, positions, None) * math.sqrt(2)
        return polar_q.to(q.dtype), self._polar("k", k, keys, self.shift).to(k.dtype)

    def _polar(self, name: str, x: Tensor, positions: Positions, shift: Tensor | None) -> Tensor:
        """Return lengths times cosines, then lengths times sines."""
        require_heads(name, x, positions, self.head_dim)
        positions.require_single_axis("PoPE")
        if x.shape[1] % self.num_heads or (shift is not None and x.shape[1] != self.num_heads):
            raise shape_error(name, x, f"{self.num_heads} heads", f"num_heads={x.shape[1]}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (
            each[:, None]
            for each in self.angles.cos_sin(positions.index, positions.max_index, positions.min_index, dtype)
        )
        if shift is not None:
            turn = shift.to(dtype).clamp(-2 * math.pi, 0)[:, None]
            cos, sin = cos * turn.cos() - sin * turn.sin(), sin * turn.cos() + cos * turn.sin()
        length = F.softplus(x.double()).to(dtype)  # in float32 its bits depend on the memory layout
        return torch.cat([length * cos, length * sin], dim=-1)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_heads={self.num_heads}, base={literal(self.base)}"
        return f"{sizes}, angles={self.angles.mode!r}"
