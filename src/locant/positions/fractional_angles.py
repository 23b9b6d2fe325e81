"""The angles of fractional positions, such as the centres of the cells of an image."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from locant.errors import LocantError
from locant.positions.angles import Angles
from locant.positions.frequencies import PRECISION

MAX_DENOMINATORS = 32
"""The number of angle tables to keep (images of different shapes). Each takes a few MiB."""


class FractionalAngles:
    """The angles for indices that count parts of a position. The index stays whole, and the frequencies are divided.

    Args:
        angles: the angles of whole positions.
        rounded: their frequencies in float32, as `transformers` computes them.
    """

    def __init__(self, angles: Angles, rounded: Float[Tensor, " pairs"]) -> None:
        self._angles, self._rounded = angles, rounded
        self._by_denominator: dict[int, Angles] = {}

    def get(self, denominator: int) -> Angles:
        """Return the angles for an index that is divided by `denominator`.

        Raises:
            LocantError: these angles are needed for the first time while a graph is compiled.
        """
        if denominator not in self._by_denominator:
            if torch.compiler.is_compiling():
                got = f"got positions in parts of 1/{denominator} for the first time in a graph"
                raise LocantError(got, "call encoding.cos_sin(positions) once before compiling")
            if len(self._by_denominator) >= MAX_DENOMINATORS:
                del self._by_denominator[next(iter(self._by_denominator))]
            self._by_denominator[denominator] = Angles(
                [PRECISION.divide(each, denominator) for each in self._angles.frequencies],
                self._angles.mode,
                rounded=self._rounded / denominator,
                attention_factor=self._angles.attention_factor,
            )
        return self._by_denominator[denominator]
