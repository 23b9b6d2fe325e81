"""Dot products whose bits depend on the two vectors alone.

A matrix product adds up in an order that the library chooses by shape: one query against a cache and the same query in
a prompt differ in the last bits, and so would every bias made of them. Here each vector is first put on a grid of its
own, a power of two small enough to keep about as much of it as float32 arithmetic does, and large enough that float64
holds every partial sum without rounding. Sums without rounding have no order.

Cost: a float64 matrix product, and two passes over the vectors. Gradients pass the grid unchanged.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["exact_dot"]

SIGNIFICAND = 53
"""Bits of a float64."""


def exact_dot(
    a: Float[Tensor, "*#batch n dim"], b: Float[Tensor, "*#batch m dim"], dtype: torch.dtype
) -> Float[Tensor, "*batch n m"]:
    """Every row of `a` times every row of `b`, in float64.

    Args:
        a, b: rows of vectors, of any dtype.
        dtype: what the result is for. For float32 the vectors are put on grids: each entry moves by at most
            2**-22 of the largest one of its row (for 128 dimensions or fewer). For float64 nothing is rounded before
            the product, and its last bits may depend on the shapes.

    >>> q = torch.randn(40, 64)
    >>> torch.equal(exact_dot(q, q, torch.float32)[:1], exact_dot(q[:1], q, torch.float32))
    True
    """
    if dtype == torch.float64:
        return a.double() @ b.double().transpose(-1, -2)
    bits = (SIGNIFICAND - max(a.shape[-1] - 1, 0).bit_length()) // 2
    return _on_grid(a, bits) @ _on_grid(b, bits).transpose(-1, -2)


def _on_grid(x: Float[Tensor, "*batch n dim"], bits: int) -> Float[Tensor, "*batch n dim"]:
    """Each row rounded to whole multiples of its step, at most ``2**bits`` of them in size."""
    exact = x.double()
    if not x.shape[-1]:
        return exact
    largest = exact.detach().abs().amax(-1, keepdim=True)
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
    return exact + ((exact / step).round() * step - exact).detach()  # exactly the rounded value: both share its grid
