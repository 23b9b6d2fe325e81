"""RoPE++: Liu et al. 2025, https://arxiv.org/abs/2512.07525."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import short_repr
from locant.errors import LocantError, RangeError
from locant.positions.base import EncodingInfo, Keys, ModelShape, Output, PositionEncoding, Queries, build
from locant.positions.constant import Constant
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import OptionalPositions


class RoPEPlusPlus(PositionEncoding):
    r"""RoPE with a second head for each query head. Its scores are the imaginary part of the first head's product.

    .. math:: A_h(n, m) = \mathrm{Re} \sum_i q_i \bar{k}_i \, e^{i \theta_i (n - m)}, \qquad
        A_h'(n, m) = \mathrm{Im} \sum_i q_i \bar{k}_i \, e^{i \theta_i (n - m)}

    The second head equals the first head with queries that are rotated back by a quarter turn. So `rotate` returns
    twice the number of query heads, each head followed by its second head, for the same keys and values. Either the
    projection after attention has twice the number of inputs (the authors' RoPE++ EC), or the query projection has half
    the number of outputs (EH).

    Args:
        rotary: the rotation of tokens.

    Limits:
        A model has to be trained with it from the start. It cannot rotate in place.

    Tested against:
        The formula in NumPy's complex numbers, scores and gradients.

    >>> q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    >>> [x.shape for x in RoPEPlusPlus(Rotary(8)).rotate(q, k)]
    [torch.Size([1, 8, 5, 8]), torch.Size([1, 2, 5, 8])]
    """

    info = EncodingInfo(
        name="rope_plus_plus",
        aliases=("rope++",),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, the cost of rotary, for twice the number of query heads",
        cost_of_pairs="a second score and a second sum of values",
        extrapolation="poor beyond the trained length, as for rotary",
        used_by="its paper's models",
        paper="Liu 2025, arXiv 2512.07525",
    )

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        if not isinstance(rotary, Rotary):
            got = f"got {short_repr(rotary)} for rotary, expected a rotary encoding"
            raise RangeError(got, "RoPEPlusPlus(locant.Rotary(head_dim=64))")
        self.rotary = rotary
        self.head_dim = rotary.head_dim
        other, sign = torch.arange(rotary.head_dim, device="cpu"), torch.ones(rotary.head_dim, device="cpu")
        for first, second in rotary.pairs.dims:  # other dimensions have no imaginary part and do not change
            other[first], other[second], sign[second] = second, first, -1.0
        self._other, self._sign = Constant(other), Constant(sign)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> RoPEPlusPlus:
        """Build the encoding with plain RoPE."""
        return build(cls, {"rotary": Rotary(shape.head_dim)} | options)

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
    ) -> tuple[Float[Tensor, "batch twice query head_dim"], Keys]:
        """Return rotated queries with twice the number of heads, and rotated keys, in their own dtype."""
        if inplace:
            got = "got inplace=True for RoPE++, which doubles the number of query heads"
            raise LocantError(got, "rotate(q, k, positions)")
        rotated, keys = self.rotary.rotate(q, k, positions, k_positions)
        turned = rotated.index_select(-1, self._other.on(q.device)) * self._sign.on(q.device).to(q.dtype)
        return torch.stack([rotated, turned], dim=2).flatten(1, 2), keys

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo the rotation, for values that are the rotated keys."""
        return self.rotary.unrotate(y, positions)
