"""The rotation written down plainly; what every faster form has to agree with.

A pair (a, b) becomes (a cos - b sin, b cos + a sin): a positive angle rotates from the first towards the second. Which
two dimensions form a pair is the layout: ``"half"`` pairs i with i + rotary_dim / 2 (Llama, NeoX), ``"interleaved"``
pairs 2i with 2i + 1 (the paper, GPT-J). Dimensions from `rotary_dim` on are passed through untouched.

Arithmetic is float32 whatever the dtype of the input (float64 for float64), every product is rounded before the sum
is, and the result is rounded once to the dtype of the input: here bfloat16 and float16 are rounded.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

Layout = Literal["half", "interleaved"]


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


def rotate(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"] | None,
    positions: Int[Tensor, "#batch seq"] | Int[Tensor, "#batch seq axes"],
    tables: Tables,
    layout: Layout,
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Both rotated by the angles of their positions; by the negative ones with `inverse`."""
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
    """The cosine and sine of every token and pair, times the attention factor.

    With `tables.axis_of_pair`, the last dimension of `positions` is the axis.
    """
    per_pair = positions[..., None] if tables.axis_of_pair is None else positions[..., tables.axis_of_pair]
    if tables.in_two_floats():
        return _in_two_floats(per_pair, tables, dtype)
    if tables.exact():
        cos, sin = _row(tables, 0, per_pair)
        for level in range(1, tables.levels):
            cos_step, sin_step = _row(tables, level, per_pair)
            cos, sin = cos * cos_step - sin * sin_step, sin * cos_step + cos * sin_step
    else:
        angle = per_pair.to(torch.float32) * tables.table
        cos, sin = angle.cos(), angle.sin()
    if tables.attention_factor != 1:
        cos, sin = cos * tables.attention_factor, sin * tables.attention_factor
    return cos.to(dtype), sin.to(dtype)


def _row(tables: Tables, level: int, per_pair: Tensor) -> tuple[Tensor, ...]:
    if level == 0:
        byte = per_pair & 255
    elif torch.compiler.is_exporting():
        # ONNX shifts unsigned integers alone. A division is exact there only below 2^24, or of a single byte. OpenVINO
        # has numbers of 32 bits, so the sign is no bit of a mask.
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
"""A number as two of float32, 48 bits in the place of 53: it rounded, and what that leaves out.

What rounding leaves out of a sum or a product of float32 numbers is a float32 number itself, and can be computed:
Dekker 1971, https://doi.org/10.1007/BF01397083. Every addition and multiplication has to be rounded by itself.
"""

SPLITTER = 2.0**12 + 1


def two_floats(x: Float[Tensor, "*shape"]) -> TwoFloats:
    """A float64 number as two of float32.

    >>> [float(each) for each in two_floats(torch.tensor(1 + 2.0**-30, dtype=torch.float64))]
    [1.0, 9.313225746154785e-10]
    """
    high = x.float()
    return high, (x - high.double()).float()


def _in_two_floats(per_pair: Tensor, tables: Tables, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The product of complex numbers that `Tables` describes, of pairs of float32 numbers."""
    cos, sin = _row_in_two_floats(tables, 0, per_pair)
    for level in range(1, tables.levels):
        cos_step, sin_step = _row_in_two_floats(tables, level, per_pair)
        minus_sin = (-sin[0], -sin[1])
        cos, sin = (
            _plus(_times(cos, cos_step), _times(minus_sin, sin_step)),
            _plus(_times(sin, cos_step), _times(cos, sin_step)),
        )
    if tables.attention_factor != 1:
        wide = tables.attention_factor * (2.0**29 + 1)
        high = wide - (wide - tables.attention_factor)  # its first 24 bits, which are a float32 number
        factor = (cos[0].new_full((), high), cos[0].new_full((), tables.attention_factor - high))
        cos, sin = _times(cos, factor), _times(sin, factor)
    if dtype == torch.float32:
        return cos[0], sin[0]
    return cos[0].to(dtype) + cos[1].to(dtype), sin[0].to(dtype) + sin[1].to(dtype)


def _row_in_two_floats(tables: Tables, level: int, per_pair: Tensor) -> tuple[TwoFloats, TwoFloats]:
    cos, sin, cos_rest, sin_rest = _row(tables, level, per_pair)
    return (cos, cos_rest), (sin, sin_rest)


def _times(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """The product, off by some 2**-47 of it."""
    high = a[0] * b[0]
    return _settled(high, _left_out(a[0], b[0], high) + (a[0] * b[1] + a[1] * b[0]))


def _plus(a: TwoFloats, b: TwoFloats) -> TwoFloats:
    """The sum, off by some 2**-47 of the larger number."""
    (high, low), (small, smallest) = _sum(a[0], b[0]), _sum(a[1], b[1])
    high, low = _settled(high, low + small)
    return _settled(high, low + smallest)


def _sum(a: Tensor, b: Tensor) -> TwoFloats:
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _settled(high: Tensor, low: Tensor) -> TwoFloats:
    total = high + low
    return total, low - (total - high)


def _left_out(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """What rounding left out of a product."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Tensor) -> TwoFloats:
    """Two numbers of 12 bits, whose products are not rounded."""
    scaled = x * SPLITTER
    high = scaled - (scaled - x)
    return high, x - high
