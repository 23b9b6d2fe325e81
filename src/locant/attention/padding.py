"""What stands at padding may be anything, NaN of memory that nobody wrote included: attention sees zeros there.

A weight of 0 hides a number, but neither NaN nor infinity, forward and in gradients alike. So queries, keys and values
are blanked before anything is made of them, and padding gets a gradient of exactly zero. That costs a copy of each, and
only where there are documents or padding. Whether there is any is not looked up: compiled code could not, and copies
with other strides have other last bits. For a single query the copy would cost ten times what its attention does: a
cache blanks what it stores, once.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from locant.positions import Positions
from locant.positions.where.documents import PADDING

__all__ = ["all_blanked", "blanked"]


def all_blanked(q: Tensor, k: Tensor, v: Tensor, positions: Positions, keys: Positions) -> tuple[Tensor, ...]:
    """Queries, keys and values with zeros at padding; those out of a cache have them already."""
    return (*blanked(positions, q), *((k, v) if keys.is_blank else blanked(keys, k, v)))


def blanked(
    positions: Positions, *tensors: Float[Tensor, "batch _ seq _"]
) -> tuple[Float[Tensor, "batch _ seq _"], ...]:
    """The tensors with zeros at padding, or themselves where there can be none.

    >>> import torch
    >>> where = Positions.of([0, 0, 1], document=[-1, 0, 0])
    >>> blanked(where, torch.full((1, 1, 3, 1), torch.nan))[0].flatten()
    tensor([0., nan, nan])
    """
    if positions.document_or_none is None:
        return tensors
    padding = (positions.document_or_none == PADDING)[:, None, :, None]
    return tuple(x.masked_fill(padding, 0.0) for x in tensors)
