"""Pairs of a query and a key: distances, functions for FlexAttention, and products whose bits depend on the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions.documents import MaskMod, is_allowed

if TYPE_CHECKING:
    from locant.positions.positions import Positions

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


# ---------------------------------------------------------------------- by row and slot

SlotMod = Callable[[Tensor, Tensor], Tensor]
"""``(row, slot)`` to what is known of the token there."""


def mask_mod(queries: Positions, keys: Positions, causal: bool, window: int | None) -> MaskMod:
    """Which key each query may attend to, as a function of ``(batch, head, query, key)``."""
    q_document, k_document = _document_mod(queries), _document_mod(keys)
    q_order, k_order = _order_mod(queries), _order_mod(keys)
    one_row = queries.batch == 1

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch * 0 if one_row else batch  # FlexAttention asks about every row of its batch
        pair = (q_document(row, query), k_document(row, key))
        return is_allowed(*pair, q_order(row, query), k_order(row, key), causal, window)

    return allowed


def index_mod(positions: Positions) -> SlotMod:
    """The index of a token: arithmetic where slots count it.

    In 32 bits where no index is known to be negative, so that the difference of two fits: a kernel's slots have 32.
    """
    if positions.start is not None:
        start = positions.start
        first = torch.full((), start, dtype=torch.int32, device=positions.device) if start else None
        return lambda row, slot: slot if first is None else slot + first
    return _look_up(positions.index, positions.min_index is not None and positions.min_index >= 0)


def _order_mod(positions: Positions) -> SlotMod:
    return index_mod(positions) if positions.order_or_none is None else _look_up(positions.order_or_none, False)


def _document_mod(positions: Positions) -> SlotMod:
    if positions.document_or_none is None:
        return lambda row, slot: slot * 0
    return _look_up(positions.document_or_none, True)


def _look_up(numbers: Int[Tensor, "batch seq"], narrow: bool) -> SlotMod:
    numbers = numbers.to(torch.int32) if narrow else numbers
    return lambda row, slot: numbers[row, slot]
