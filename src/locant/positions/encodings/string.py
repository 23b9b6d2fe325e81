"""STRING: a learned orthogonal matrix, then a rotation. Schenck et al. 2025, https://arxiv.org/abs/2502.02562."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.arguments import Real
from locant.kernels.rotary import Layout
from locant.positions.base import EncodingInfo, Output, require_heads
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import OptionalPositions
from locant.positions.same_rotation import SameRotationForQueriesAndKeys
from locant.spelling import literal


class StringRotary(SameRotationForQueriesAndKeys):
    r"""STRING: a learned orthogonal matrix, then a rotation, so that any planes can be rotated.

    .. math:: x' = R_n P x, \qquad P = (I - S)(I + S)^{-1}, \quad S = A - A^T

    Schenck et al. 2025, arXiv 2502.02562. P is orthogonal for every A (Cayley), so lengths do not change, and scores
    depend on distances alone. A starts at 0, which is plain RoPE. It costs one more product with a head_dim x head_dim
    matrix per head, and one inverse per call.

    Args:
        head_dim: dimensions per head.
        base, layout, sections: as in `Rotary`.

    Limits:
        A cache holds keys that were multiplied by P, so a change of P makes them wrong.

    Tested against:
        The formula in NumPy, forward and every gradient.

    >>> string = StringRotary(8)
    >>> torch.equal(string.matrix_of_planes(), torch.eye(8))
    True
    """

    info = EncodingInfo(
        name="string",
        aliases=("string_rotary",),
        kind="relative",
        parameters="head_dim x head_dim",
        cost_of_tokens="in every layer, head_dim x head_dim operations per head of q and k",
        cost_of_pairs="nothing",
        extrapolation="poor beyond the trained length, as for rotary",
        used_by="its paper's models",
        paper="Schenck 2025, arXiv 2502.02562",
    )

    def __init__(
        self, head_dim: int, *, base: Real = 10_000.0, layout: Layout = "half", sections: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.rotary = Rotary(head_dim, base=base, layout=layout, sections=sections)
        self.head_dim, self.num_axes = self.rotary.head_dim, self.rotary.num_axes
        self.weight = nn.Parameter(torch.empty(self.head_dim, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set A to 0, which is plain RoPE."""
        nn.init.zeros_(self.weight)

    def matrix_of_planes(self) -> Float[Tensor, "head_dim head_dim"]:
        """Return P, whose rows are the directions that are rotated in pairs, in float32 or wider."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        skew, eye = weight - weight.mT, torch.eye(self.head_dim, dtype=weight.dtype, device=weight.device)
        return torch.linalg.solve(eye + skew, eye - skew)

    def _rotate_tensor(self, name: str, x: Tensor, positions: OptionalPositions) -> Tensor:
        positions = require_heads(name, x, positions, self.head_dim, self.num_axes)
        return self.rotary.rotate_one(self._multiply(x, self.matrix_of_planes()), positions).to(x.dtype)

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo `rotate_one`."""
        positions = require_heads("y", y, positions, self.head_dim, self.num_axes)
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return self._multiply(self.rotary.unrotate(wide, positions), self.matrix_of_planes().mT).to(y.dtype)

    @staticmethod
    def _multiply(x: Tensor, planes: Tensor) -> Tensor:
        """Multiply in float64 and round once, so that bits do not depend on other tokens or on the order of sums."""
        return (x.double() @ planes.double().mT).to(torch.promote_types(x.dtype, planes.dtype))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={literal(self.rotary.base)}"
