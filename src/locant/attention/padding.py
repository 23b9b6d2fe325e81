"""What stands at padding may be anything, NaN of memory that nobody wrote included: attention sees zeros there.

A weight of 0 hides a number, but neither NaN nor infinity, forward and in gradients alike. So queries, keys and values
are blanked before anything is made of them, and padding gets a gradient of exactly zero. That costs a copy of each, and
only where there are documents or padding. Whether there is any is not looked up: compiled code could not, and copies
with other strides have other last bits.

Decoding is the exception: a copy of the keys of a cache would cost ten times what the attention of one query does. So
where there are 16 keys or more to a query, and nothing is differentiated, keys and values are taken as they
are. `KVCache` stores zeros at padding, so behind it nothing changes; a cache of one's own has to hold finite numbers
there, zeros say, whose scores are finite too.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from locant.attention.gradients import needs_gradient, sources
from locant.kernels.transforms import is_differentiated
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import PADDING

__all__ = ["FEWEST_KEYS", "all_blanked", "blanked"]

FEWEST_KEYS = 16
"""To a query: from here on this is decoding. With fewer, the copy costs a fraction of the attention."""


def all_blanked(
    q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding | None, positions: Positions, keys: Positions
) -> tuple[Tensor, ...]:
    """Queries, keys and values with zeros at padding; in decoding, keys and values as they are."""
    if keys.document_or_none is not None and not _is_decoding(q, k, v, encoding):  # asked last: it makes a guard
        k, v = blanked(keys, k, v)
    return (*blanked(positions, q), k, v)


def _is_decoding(q: Tensor, k: Tensor, v: Tensor, encoding: PositionEncoding | None) -> bool:
    """Told by shapes and by what wants a gradient, so that compiled code need not look at values."""
    if FEWEST_KEYS * q.shape[2] > k.shape[2]:
        return False
    wanted = torch.is_grad_enabled() and needs_gradient(q, k, v, encoding)
    return not wanted and not is_differentiated(*sources(q, k, v, encoding))


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
    return tuple(_filled(x, padding) for x in tensors)


def _filled(x: Tensor, padding: Tensor) -> Tensor:
    """With zeros where that is; torch fills nothing of 8 bits, of which all are 0 in a zero."""
    if x.dtype.itemsize > 1:
        return x.masked_fill(padding, 0.0)
    return x.view(torch.uint8).masked_fill(padding, 0).view(x.dtype)
