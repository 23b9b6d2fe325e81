"""What two published models do to pairs of dimensions, and is no rotation: each member has an angle of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.errors import RangeError
from locant.positions.constant import Constant
from locant.positions.encodings.rotary import Rotary, RotatedAlike
from locant.positions.positions import Positions


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
        self.head_dim = first.head_dim
        of_second = torch.zeros(self.head_dim, dtype=torch.bool, device="cpu")
        of_second[[b for _, b in first.pairs.dims]] = True
        self._of_second = Constant(of_second)

    def _rotated(self, name: str, x: Tensor, positions: Positions) -> Tensor:
        first, second = self.first.rotate_one(x, positions), self.second.rotate_one(x, positions)
        return torch.where(self._of_second.on(x.device), second, first)

    def stretch(self, positions: Positions) -> tuple[float, float]:
        """By what factors these positions change the length of a pair: the smallest, and the largest."""
        (cos, sin), (other_cos, other_sin) = (
            one.cos_sin(positions, torch.float64) for one in (self.first, self.second)
        )
        apart = float((sin * other_cos - cos * other_sin).abs().max()) if positions.seq_len else 0.0
        return (1 - apart) ** 0.5, (1 + apart) ** 0.5

    def _call_of(self, door: str) -> str:
        return super()._call_of(door) + ", or encoding.rotate_one(x, positions) for one tensor"
