"""FlexAttention's block mask from a few numbers per block of tokens, cheap enough to make in every call.

torch's `create_block_mask` asks the rule about every pair of tokens. Here each block of 128 tokens says between which
documents and orders it lies, and pairs of blocks are compared: no pair is lost, and pairs in doubt are left to the rule
itself. For n tokens that is ``(n / 128) ** 2`` numbers, on the device of the positions, without a sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from locant.positions import Positions
from locant.positions.documents import PADDING

__all__ = ["BLOCK", "block_mask", "block_pairs"]

BLOCK = 128
"""Tokens of a block, queries and keys alike: FlexAttention's own default."""
FAR = 2**40
"""Beyond every index and document: what is not there lies between FAR and -FAR."""


class _Bounds(NamedTuple):
    """Of each block, ``batch blocks``: over its real tokens, and whether all its slots hold one."""

    low_document: Tensor
    high_document: Tensor
    low_order: Tensor
    high_order: Tensor
    whole: Tensor


def block_pairs(
    positions: Positions, keys: Positions, causal: bool, window: int | None
) -> tuple[Bool[Tensor, "batch q_blocks k_blocks"], Bool[Tensor, "batch q_blocks k_blocks"]]:
    """Which pairs of blocks may hold a visible pair of tokens, and in which every pair is visible.

    >>> some, every = block_pairs(Positions.arange(256), Positions.arange(256), causal=True, window=None)
    >>> some.int(), every.int()
    (tensor([[[1, 0],
             [1, 1]]], dtype=torch.int32), tensor([[[0, 0],
             [1, 0]]], dtype=torch.int32))
    """
    q = _Bounds(*(bound[:, :, None] for bound in _bounds(positions)))
    k = _Bounds(*(bound[:, None, :] for bound in _bounds(keys)))
    some = (q.low_document <= k.high_document) & (k.low_document <= q.high_document)
    every = q.whole & k.whole & (q.low_document == k.high_document) & (k.low_document == q.high_document)
    nearest, farthest = q.low_order - k.high_order, q.high_order - k.low_order
    if causal:
        some, every = some & (farthest >= 0), every & (nearest >= 0)
    if window is not None:
        some = some & (nearest < window) & (farthest > -window)
        every = every & (farthest < window) & (nearest > -window)
    return some, every


def block_mask(positions: Positions, keys: Positions, causal: bool, window: int | None) -> object:
    """The `BlockMask` of who may see whom."""
    from torch.nn.attention.flex_attention import BlockMask

    some, every = (pairs[:, None] for pairs in block_pairs(positions, keys, causal, window))
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=positions.mask_mod(keys, causal=causal, window=window),
        seq_lengths=(positions.seq_len, keys.seq_len),
    )


def _bounds(positions: Positions) -> _Bounds:
    padded = -positions.seq_len % BLOCK
    document = F.pad(positions.document, (0, padded), value=PADDING)
    order = F.pad(positions.order, (0, padded))
    real = document != PADDING

    def between(values: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.where(real, values, FAR), torch.where(real, values, -FAR)
        return low.unflatten(1, (-1, BLOCK)).amin(2), high.unflatten(1, (-1, BLOCK)).amax(2)

    return _Bounds(*between(document), *between(order), real.unflatten(1, (-1, BLOCK)).all(2))


def _listed(
    pairs: Bool[Tensor, "batch 1 q_blocks k_blocks"],
) -> tuple[Int[Tensor, "batch 1 q_blocks"], Int[Tensor, "batch 1 q_blocks k_blocks"]]:
    """How many key blocks belong to each block of queries, and which: those first, in order."""
    which = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), which.to(torch.int32)
