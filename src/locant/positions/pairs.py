"""Pairs of a query and a key: how far apart they are, and products whose bits depend on the two alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.positions import Positions
from locant.positions.slot_functions import index_mod

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``(score, batch, head, query, key) -> score``."""

MAX_DISTANCE = 2**24
"""Encodings that list the bucket of every distance go no farther: 128 MiB, and seconds to make."""


def bias_dtype(q: Tensor) -> torch.dtype:
    """float32, or float64 where the queries are."""
    return torch.promote_types(q.dtype, torch.float32)


def distances(positions: Positions, keys: Positions) -> Int[Tensor, "batch query key"]:
    """Query index minus key index; positive where the key came earlier. Batch is 1 where all rows agree."""
    return positions.index[:, :, None] - keys.index[:, None, :]


def distance_mod(q: Tensor, positions: Positions, keys: Positions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same for one pair: ``(batch, query, key) -> query index minus key index``, all three broadcast."""
    q_index, k_index = (index_mod(each.expand(q.shape[0])) for each in (positions, keys))
    return lambda batch, query, key: q_index(batch, query) - k_index(batch, key)


def exact_dot(
    a: Float[Tensor, "*#batch n dim"], b: Float[Tensor, "*#batch m dim"], dtype: torch.dtype
) -> Float[Tensor, "*batch n m"]:
    """Every row of `a` times every row of `b`, in float64, with bits that depend on the two rows alone.

    A matrix product adds up in an order that the library chooses by shape, so one query against a cache and the same
    query in a prompt differ in the last bits. Here each vector is first put on a grid of its own: as fine as float32,
    and coarse enough that float64 holds every partial sum without rounding. Such sums have no order. Gradients pass
    the grid unchanged. Costs a float64 matrix product, and two passes over the vectors.

    `dtype` is what the result is for. For float32 each entry moves by at most 2**-22 of the largest one of its row (for
    128 dimensions or fewer). For float64 there is no grid, and the last bits may depend on the shapes.
    """
    if dtype == torch.float64:
        return a.double() @ b.double().transpose(-1, -2)
    bits = (53 - max(a.shape[-1] - 1, 0).bit_length()) // 2  # of the 53 of a float64
    return _on_grid(a, bits) @ _on_grid(b, bits).transpose(-1, -2)


def _on_grid(x: Float[Tensor, "*batch n dim"], bits: int) -> Float[Tensor, "*batch n dim"]:
    """Each row rounded to whole multiples of its step, at most ``2**bits`` of them in size."""
    exact = x.double()
    if not x.shape[-1]:
        return exact
    largest = exact.detach().abs().amax(-1, keepdim=True)
    step = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
    return exact + ((exact / step).round() * step - exact).detach()  # exactly the rounded value: both share its grid
