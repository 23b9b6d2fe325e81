"""The plain reference of the rotation. All faster kernels must agree with it.

A pair (a, b) becomes (a cos - b sin, b cos + a sin). A positive angle rotates from the first towards the second. The
layout defines the pairs: ``"half"`` pairs i with i + rotary_dim / 2 (Llama, NeoX), ``"interleaved"`` pairs 2i with
2i + 1 (the paper, GPT-J). Dimensions after the first `rotary_dim` are not changed.

Arithmetic is in float32 for every dtype of the input (float64 for float64). Every product is rounded before it is
added. The result is rounded once to the dtype of the input, such as bfloat16 or float16.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

Layout = Literal["half", "interleaved"]


class Tables(NamedTuple):
    """The tables for each pair's cosine and sine, which are the same for every token and every layer.

    In exact mode an angle is a product of two to four complex numbers, one for each byte of the position::

        e^(i p f) = T[0, p & 255] * T[1, p >> 8 & 255] * T[2, p >> 16 & 255] * T[3, p >> 24 & 255]

    computed in float64, or with two float32 numbers each. The last byte is already signed (row 255 of level 3 is the
    row of -1), so that negative positions work with arithmetic shifts. In float32 mode an angle is
    ``float32(position) * frequency``, rounded to float32. Cosine and sine are computed from this float32 number.
    """

    table: Tensor
    """Exact mode: float64 ``[4, 256, pairs, 2]``, cosine and sine. For a device without float64: float32
    ``[4, 256, pairs, 4]``, cosine and sine, followed by their rounding errors. Float32 mode: float32 ``[pairs]``, the
    frequencies. The table is contiguous and on the device of q and k."""
    levels: int = 4
    """Exact mode: the number of bytes of a position that can differ from zero, 2 to 4. Kernels may skip the others."""
    attention_factor: float = 1.0
    """The factor on every cosine and sine (in float64 in exact mode, in float32 in float32 mode)."""
    axis_of_pair: Tensor | None = None
    """int64 ``[pairs]``: the axis of the positions that rotates each pair. Only for positions with several axes."""

    # These are methods and not properties, because the compiler of torch 2.9 does not support properties of named
    # tuples.

    def pairs(self) -> int:
        return self.table.shape[-2] if self.exact() else self.table.shape[-1]

    def exact(self) -> bool:
        return self.table.ndim == 4

    def in_two_floats(self) -> bool:
        return self.exact() and self.table.shape[-1] == 4


def rotate(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `q` and `k` rotated by the angles of their positions, or by the negative angles with `inverse`."""
    cos, sin = cos_sin(positions, tables, torch.promote_types(q.dtype, torch.float32))
    sin = -sin if inverse else sin
    return rotate_pairs(q, cos, sin, layout), None if k is None else rotate_pairs(k, cos, sin, layout)


def rotate_pairs(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "#batch seq pairs"],
    sin: Float[Tensor, "#batch seq pairs"],
    layout: Layout,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Rotate the first ``2 * pairs`` dimensions of every head.

    >>> rotate_pairs(torch.tensor([[[[1.0, 0.0]]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1), "half")
    tensor([[[[0., 1.]]]])
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rotated, rest = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    rotated = rotated.to(cos.dtype)
    if layout == "half":
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).reshape(rotated.shape)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def cos_sin(
    positions: Int[Tensor, "*tokens_and_axis"], tables: Tables, dtype: torch.dtype
) -> tuple[Float[Tensor, "*tokens pairs"], Float[Tensor, "*tokens pairs"]]:
    """Return the cosine and sine of every token and pair, times the attention factor.

    With `tables.axis_of_pair`, the last dimension of `positions` is the axis.
    """
    per_pair = positions.unsqueeze(-1) if tables.axis_of_pair is None else positions[..., tables.axis_of_pair]
    if tables.in_two_floats():
        return _in_two_floats(per_pair, tables, dtype)
    if tables.exact():
        cos, sin = _row(tables, 0, per_pair)
        for level in range(1, tables.levels):
            cos_step, sin_step = _row(tables, level, per_pair)
            cos, sin = cos * cos_step - sin * sin_step, sin * cos_step + cos * sin_step
    else:
        angle = per_pair * tables.table  # the product first rounds the position to float32
        cos, sin = angle.cos(), angle.sin()
    if tables.attention_factor != 1:
        cos, sin = cos * tables.attention_factor, sin * tables.attention_factor
    return (cos, sin) if cos.dtype == dtype else (cos.to(dtype), sin.to(dtype))


def _row(tables: Tables, level: int, per_pair: Tensor) -> tuple[Tensor, ...]:
    if level == 0:
        byte = per_pair & 255
    elif torch.compiler.is_exporting():
        # ONNX can only shift unsigned integers. Its division is exact only below 2^24, or for a single byte. OpenVINO
        # has 32-bit integers, so a mask cannot contain the sign bit.
        mask = 127 if level == 3 else 255
        byte = torch.div(per_pair & mask << 8 * level, 256**level, rounding_mode="floor")
        byte = byte + 128 * (per_pair < 0) if level == 3 else byte
    else:
        byte = (per_pair >> 8 * level) & 255
    rows = tables.table[level]
    if tables.axis_of_pair is None:
        row = rows[byte.squeeze(-1)]
    else:
        row = rows[byte, torch.arange(tables.pairs(), device=byte.device)]
    return row.unbind(-1)


# ---------------------------------------------------------------------- devices without float64

TwoFloats = tuple[Tensor, Tensor]
"""A number as two float32 numbers, the rounded number and the rounding error. It has 48 bits instead of 53.

The rounding error of a sum or a product of float32 numbers is itself a float32 number and can be computed (Dekker 1971,
https://doi.org/10.1007/BF01397083). Every addition and multiplication must be rounded separately.
"""

SPLITTER = 2.0**12 + 1


def two_floats(x: Float[Tensor, "*shape"]) -> TwoFloats:
    """Return a float64 number as two float32 numbers.

    >>> [float(each) for each in two_floats(torch.tensor(1 + 2.0**-30, dtype=torch.float64))]
    [1.0, 9.313225746154785e-10]
    """
    high = x.float()
    return high, (x - high.double()).float()


def _in_two_floats(per_pair: Tensor, tables: Tables, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the product of complex numbers that `Tables` defines, with two float32 numbers each."""
    cos, sin = _row_in_two_floats(tables, 0, per_pair)
    for level in range(1, tables.levels):
        cos_step, sin_step = _row_in_two_floats(tables, level, per_pair)
        minus_sin = (-sin[0], -sin[1])
        cos, sin = (
            _add(_multiply(cos, cos_step), _multiply(minus_sin, sin_step)),
            _add(_multiply(sin, cos_step), _multiply(cos, sin_step)),
        )
    if tables.attention_factor != 1:
        wide = tables.attention_factor * (2.0**29 + 1)
        high = wide - (wide - tables.attention_factor)  # the first 24 bits, which are a float32 number
        factor = (cos[0].new_full((), high), cos[0].new_full((), tables.attention_factor - high))
        cos, sin = _multiply(cos, factor), _multiply(sin, factor)
    if dtype == torch.float32:
        return cos[0], sin[0]
    return cos[0].to(dtype) + cos[1].to(dtype), sin[0].to(dtype) + sin[1].to(dtype)


def _row_in_two_floats(tables: Tables, level: int, per_pair: Tensor) -> tuple[TwoFloats, TwoFloats]:
    cos, sin, cos_rest, sin_rest = _row(tables, level, per_pair)
    return (cos, cos_rest), (sin, sin_rest)


def _multiply(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """Return the product, with a relative error of about 2**-47."""
    high = a[0] * b[0]
    return _normalize(high, _rounding_error(a[0], b[0], high) + (a[0] * b[1] + a[1] * b[0]))


def _add(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """Return the sum, with an error of about 2**-47 of the larger number."""
    (high, low), (small, smallest) = _exact_sum(a[0], b[0]), _exact_sum(a[1], b[1])
    high, low = _normalize(high, low + small)
    return _normalize(high, low + smallest)


def _exact_sum(a: Tensor, b: Tensor) -> TwoFloats:
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _normalize(high: Tensor, low: Tensor) -> TwoFloats:
    total = high + low
    return total, low - (total - high)


def _rounding_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """Return the rounding error of a product."""
    (a_high, a_low), (b_high, b_low) = _split_bits(a), _split_bits(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split_bits(x: Tensor) -> TwoFloats:
    """Split a number into two numbers of 12 bits, whose products are exact."""
    scaled = x * SPLITTER
    high = scaled - (scaled - x)
    return high, x - high
