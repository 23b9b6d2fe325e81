"""What an angle is made from: the tables of `locant.positions.angles`, as kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Tables"]


class Tables(NamedTuple):
    """From where each pair's cosine and sine come; the same for every token and every layer.

    In exact mode an angle is a product of two to four complex numbers, one for each byte of the position::

        e^(i p f) = T[0, p & 255] * T[1, p >> 8 & 255] * T[2, p >> 16 & 255] * T[3, p >> 24 & 255]

    formed in float64, or in two float32 numbers each. The last byte is signed already (row 255 of level 3 is that of
    -1), so that negative positions work when they are shifted arithmetically. In float32 mode an angle is
    ``float32(position) * frequency``, rounded to float32, and its cosine and sine are those of that float32 number.
    """

    table: Tensor
    """Exact: float64 ``[4, 256, pairs, 2]``, cosine and sine side by side; where a device has no float64, float32
    ``[4, 256, pairs, 4]``, both again and what rounding left out of them. Float32 mode: float32 ``[pairs]``, the
    frequencies. Contiguous, on the device of q and k."""
    levels: int = 4
    """Exact: how many bytes of a position can differ from zero, 1 to 4; the levels from there on may be skipped."""
    attention_factor: float = 1.0
    """A factor on every cosine and sine (in float64 in exact mode, in float32 in float32 mode)."""
    axis_of_pair: Tensor | None = None
    """int64 ``[pairs]``: which axis of the positions rotates each pair; only for positions with several axes."""

    # Not properties: of a named tuple's, the compiler of torch 2.9 knows nothing.

    def pairs(self) -> int:
        return self.table.shape[-2] if self.exact() else self.table.shape[-1]

    def exact(self) -> bool:
        return self.table.ndim == 4

    def in_two_floats(self) -> bool:
        return self.exact() and self.table.shape[-1] == 4
