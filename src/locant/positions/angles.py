"""The cosine and sine of position times frequency, exact at every position.

The usual code multiplies a float32 position by a float32 frequency. At position one million the cosine is then off
by 0.03. In bfloat16 it is off from the start. Here a position is split into four bytes, with a table for each byte::

    e^(i p f) = T0[p & 255] * T1[p >> 8 & 255] * T2[p >> 16 & 255] * T3[p >> 24 & 255]

The tables hold float64 values whose angles were reduced in 96-bit fixed point, so the only error is the rounding of the
float32 result (3e-8). The last byte is signed. Bytes known to be zero are skipped, because T[0] is exactly 1. If a
device has no float64, each number is the sum of two float32 numbers. In a measurement, one of four million results then
had a different last bit.

Cost: 16 KiB of tables per pair, computed in a few milliseconds, once for all layers with the same frequencies. At a
position below 65,536 an angle takes two row look-ups and four products. Elsewhere it takes up to four look-ups and
twelve products. No cost grows with the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from typing import Literal, get_args
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import Real, one_of
from locant.kernels.rotary.reference import Tables, cos_sin, two_floats
from locant.kernels.transforms import is_dispatch_mode_active
from locant.positions.constant import Constant
from locant.positions.frequencies import PRECISION, TWO_PI
from locant.tensors import has_float64

AngleMode = Literal["exact", "float32"]


class Angles:
    """The angles of a set of frequencies.

    Args:
        frequencies: radians per position, one per pair.
        mode: ``"exact"``, or ``"float32"``, which rounds position and frequency to float32 and multiplies them. The
            result equals `transformers` bit for bit, except for models with `torch.polar` (DeepSeek-V2, Llama 4).
        rounded: the frequencies with the rounding of a reference implementation, for the float32 mode.
        attention_factor: a factor on every cosine and sine.

    >>> cos, sin = Angles([Decimal(1)]).cos_sin(torch.tensor([0, 1_000_000]), 2**20)
    >>> cos.flatten()
    tensor([1.0000, 0.9368])
    """

    def __init__(
        self,
        frequencies: Sequence[Decimal],
        mode: AngleMode = "exact",
        *,
        rounded: Float[Tensor, " pairs"] | None = None,
        attention_factor: Real = 1.0,
    ) -> None:
        one_of("angles", mode, get_args(AngleMode), "angles='exact'")
        self.mode: AngleMode = mode
        self.attention_factor = attention_factor
        self.frequencies = tuple(frequencies)
        if mode == "exact":
            self._table = _exact_table(self.frequencies)
        else:
            nearest = torch.tensor([*map(float, self.frequencies)], dtype=torch.float32, device="cpu")
            self._table = Constant(nearest if rounded is None else rounded)

    @property
    def inv_freq(self) -> Float[Tensor, " pairs"]:
        """The frequencies in float64, on the CPU."""
        return torch.tensor([*map(float, self.frequencies)], dtype=torch.float64, device="cpu")

    def cos_sin(
        self,
        index: Int[Tensor, "*tokens"],
        max_index: int | None = None,
        min_index: int | None = 0,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Float[Tensor, "*tokens pairs"], Float[Tensor, "*tokens pairs"]]:
        """Return the cosine and sine of every index times every frequency. The bounds of the index only save work."""
        return cos_sin(index, self.tables(index.device, max_index, min_index), dtype)

    def tables(
        self,
        device: torch.device,
        max_index: int | None = None,
        min_index: int | None = 0,
        axis_of_pair: Int[Tensor, " pairs"] | None = None,
    ) -> Tables:
        """Return the tables from which kernels compute angles, for positions within these bounds."""
        levels = _num_bytes(min_index, max_index)
        table = self._table if self.mode == "float32" or has_float64(device) else self._in_two_floats
        return Tables(table.on(device), levels, self.attention_factor, axis_of_pair)

    @cached_property
    def _in_two_floats(self) -> Constant:
        """The tables as pairs of float32 numbers: the rounded value and the remainder."""
        return Constant(torch.cat(two_floats(self._table.on(torch.device("cpu"))), dim=-1))


def _num_bytes(min_index: int | None, max_index: int | None) -> int:
    """Return the number of bytes of the index that can differ from zero.

    It is at least two, so that compiled code has few variants.
    """
    if min_index is None or max_index is None or min_index < 0 or torch.compiler.is_exporting():
        return 4  # an exported program works for every length
    return 2 if max_index < 2**16 else 3 if max_index < 2**24 else 4


_TABLES: WeakValueDictionary[tuple[Decimal, ...], Constant] = WeakValueDictionary()


def _exact_table(frequencies: tuple[Decimal, ...]) -> Constant:
    """Return the tables of these frequencies. Layers share them, except under modes that intercept tensors."""
    if is_dispatch_mode_active():
        return Constant(_byte_tables(frequencies))
    table = _TABLES.get(frequencies)
    if table is None:
        with torch.inference_mode(mode=False):  # training cannot use inference tensors
            table = _TABLES.setdefault(frequencies, Constant(_byte_tables(frequencies)))  # another thread may be first
    return table


def _byte_tables(frequencies: Sequence[Decimal]) -> Float[Tensor, "4 256 pairs 2"]:
    """Return e^(i n f) for n = byte * 256**level, in float64. The bytes of the last level are signed."""
    byte = torch.arange(256, device="cpu")
    signed = torch.where(byte < 128, byte, byte - 256)
    steps = torch.stack([byte, byte << 8, byte << 16, signed << 24])
    angle = _rotations(steps, frequencies) * (2 * math.pi)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def _rotations(steps: Int[Tensor, "*shape"], frequencies: Sequence[Decimal]) -> Float[Tensor, "*shape pairs"]:
    """Return ``steps * frequency`` as a fraction of a rotation, reduced to -1/2 .. 1/2.

    The fraction of a rotation per step is stored in three limbs of 32 bits. int64 products overflow by whole rotations
    only, so the reduction is exact.
    """
    per_step = [PRECISION.divide(frequency, TWO_PI) for frequency in frequencies]
    fixed = [int(PRECISION.multiply(each, 2**96).to_integral_value(context=PRECISION)) for each in per_step]
    limbs = [[each >> shift & 2**32 - 1 for each in fixed] for shift in (64, 32, 0)]
    high, middle, low = torch.tensor(limbs, dtype=torch.int64, device="cpu")
    n = steps[..., None]
    phase = (n * high << 32) + n * middle + (n * low >> 32)
    return phase.double() * 2.0**-64
