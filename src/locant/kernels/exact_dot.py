"""Dot products whose bits depend only on the two vectors, not on the shapes of the tensors that hold them.

A matrix product sums in an order that the library chooses by shape. So the products of a query differ in the last bits
between a cache and a prompt. Here each vector is first rounded to its own grid, which is as fine as float32 and coarse
enough that float64 holds every partial sum without rounding. Then the order of the sum does not matter, and every
implementation returns the same bits.

``native/exact.c`` rounds vectors while it reads them. So one query over a cache reads each key once and stores nothing.
With many vectors on both sides, it rounds each vector once and torch multiplies. With gradients, in compiled code and
without the library, plain operations do all of it.

Measured with one query over 8192 keys (8 heads of 64, float32, one thread), relative to the same product in float32:
1.1 to 1.4 times the time, and about 50 times by plain operations.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.kernels import native
from locant.kernels.transforms import is_plain_eager

FUNCTIONS = "locant_exact_products", "locant_exact_entries", "locant_round_to_grid"
MAX_FEW = 16
"""The largest number of vectors of a head for which reading all other vectors once is faster than a matrix product."""
MIN_MANY = 32
"""The number of vectors below which plain operations are as fast."""
MAX_WIDTH = 1_024
MAX_NUMBERS = 16_384
"""The largest number of elements in the few vectors of a head."""

pack_products = struct.Struct("=15q3Q").pack
pack_entries = struct.Struct("=15q4Q").pack
pack_rounding = struct.Struct("=11q2Q").pack
"""The structs of ``native/exact.c``."""


def exact_dot(
    a: Float[Tensor, "*#batch n dim"], b: Float[Tensor, "*#batch m dim"], dtype: torch.dtype
) -> Float[Tensor, "*batch n m"]:
    """Return the product of every row of `a` and every row of `b`, in float64. Its bits depend only on the two rows.

    Gradients pass the rounding unchanged.

    `dtype` is the dtype in which the caller needs the result. For float32 each entry moves by at most 2**-22 of the
    largest entry in its row (for 128 dimensions or fewer). For float64 there is no rounding, and the last bits may
    depend on the shapes.
    """
    if dtype == torch.float64:
        return a.double() @ b.double().transpose(-1, -2)
    if _uses_native(a, b) and (product := _native_products(a, b)) is not None:
        return product
    return round_to_grid(a) @ round_to_grid(b).transpose(-1, -2)


def exact_scores(
    q: Float[Tensor, "#batch heads query dim"], k: Float[Tensor, "batch kv_heads key dim"], dtype: torch.dtype
) -> Float[Tensor, "batch heads query key"]:
    """Return `exact_dot` of queries and keys. Several query heads may share a key head, which is not repeated."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return exact_dot(q, k, dtype)
    stacked = exact_dot(q.unflatten(1, (-1, groups)).flatten(2, 3), k, dtype)
    return stacked.unflatten(2, (groups, -1)).flatten(1, 2)


def exact_entries(
    x: Float[Tensor, "batch heads key dim"],
    rows: Float[Tensor, "*heads entries dim"],
    entries: Int[Tensor, "#batch query key"],
) -> Float[Tensor, "batch heads query key"] | None:
    """Return `exact_dot` of every key with the row of its entry for each query, or ``None``.

    It is ``None`` for many queries and without a native kernel. All heads may share the rows. The bits are those of
    `exact_dot` with all rows, for a caller that needs the result in float32. It costs one product for each pair instead
    of one for each key and row.
    """
    if not _uses_native(x, rows) or entries.shape[1] > MAX_FEW or (of_x := _rows(x)) is None:
        return None
    (batch, heads, keys, dim), queries = x.shape, entries.shape[1]
    rounded = round_to_grid(rows, width=-(-dim // 32) * 32).expand(heads, -1, -1)
    entries = entries.contiguous()
    out = x.new_empty(batch, heads, queries, keys, dtype=torch.float64)
    packed = pack_entries(
        native.threads(), native.DTYPES[x.dtype], batch, heads, queries, keys, dim, grid_bits(dim),
        *of_x.steps, rounded.stride(0), rounded.stride(1), entries.stride(0) if len(entries) > 1 else 0,
        entries.stride(1), x.data_ptr(), rounded.data_ptr(), entries.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.function(FUNCTIONS[1])(packed)
    return out


def grid_bits(dim: int) -> int:
    """Return the number of bits of the whole numbers on a grid, so that a sum of `dim` products fits into float64."""
    return (53 - max(dim - 1, 0).bit_length()) // 2  # float64 has 53


def round_to_grid(x: Float[Tensor, "*batch n dim"], width: int | None = None) -> Float[Tensor, "*batch n width"]:
    """Round each row to ``n * step``, with one step per row and whole numbers n of at most ``2**grid_bits(dim)``.

    With `width`, rows end with zeros.
    """
    if _uses_native(x) and (rounded := _native_rounding(x, width or x.shape[-1])) is not None:
        return rounded
    bits, exact = grid_bits(x.shape[-1]), x.double()
    if x.shape[-1]:
        largest = exact.detach().abs().amax(-1, keepdim=True)
        step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
        exact = exact + ((exact / step).round() * step - exact).detach()  # equals the rounded value: both lie on a grid
    return exact if width in (None, x.shape[-1]) else nn.functional.pad(exact, (0, width - x.shape[-1]))


def _uses_native(*tensors: Tensor) -> bool:
    if not (is_plain_eager() and native.has(FUNCTIONS[0])):
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.numel() for x in tensors)


class _Rows(NamedTuple):
    """Vectors with two leading dimensions, as the kernels read them."""

    x: Tensor
    steps: list[int]
    """In bytes, 0 along a dimension that is broadcast."""


def _rows(x: Tensor, leading: torch.Size | None = None) -> _Rows | None:
    """Return vectors whose memory a kernel can read, or ``None``."""
    if x.ndim > 4 or x.dtype not in native.DTYPES or x.shape[-1] > MAX_WIDTH or not native.is_in_rows(x):
        return None
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    x = x if leading is None else x.expand(*leading, -1, -1)
    return _Rows(x, [x.element_size() * step for step in x.stride()[:3]])


def _native_products(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the products if one side has few vectors, or ``None``."""
    if a.shape[-2] > b.shape[-2]:
        swapped = _native_products(b, a)
        return None if swapped is None else swapped.mT
    (few, dim), many = a.shape[-2:], b.shape[-2]
    if few > MAX_FEW or many < MIN_MANY or few * (dim + 32) > MAX_NUMBERS or b.dtype == torch.float64:
        return None
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    leading = torch.Size((1,) * (2 - len(batch)) + batch)
    if len(leading) > 2 or (of_a := _rows(a, leading)) is None or (of_b := _rows(b, leading)) is None:
        return None
    out = a.new_empty(*batch, few, many, dtype=torch.float64)
    packed = pack_products(
        native.threads(), native.DTYPES[a.dtype], native.DTYPES[b.dtype], *leading, few, many, dim, grid_bits(dim),
        *of_a.steps, *of_b.steps, of_a.x.data_ptr(), of_b.x.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.function(FUNCTIONS[0])(packed)
    return out


def _native_rounding(x: Tensor, width: int) -> Tensor | None:
    if (rows := _rows(x)) is None:
        return None
    out = x.new_empty(*x.shape[:-1], width, dtype=torch.float64)
    packed = pack_rounding(
        native.threads(), native.DTYPES[x.dtype], *rows.x.shape, width, grid_bits(x.shape[-1]), *rows.steps,
        rows.x.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    native.function(FUNCTIONS[2])(packed)
    return out
