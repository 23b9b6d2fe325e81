"""`AttentionMask`: the keys that each query attends to, in every form that a backend needs. A call creates one mask.

The rule for one pair of tokens (padding, documents, causal, sliding window) is `locant.positions.documents.is_allowed`.
This file uses the cheapest equivalent form: no mask if everything is allowed, bounds of distances if the positions of
both sides count one by one, blocks of tokens for FlexAttention, and a matrix only if no other form works.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from locant.kernels.transforms import is_dispatch_mode_active
from locant.positions import Positions
from locant.positions.documents import PADDING
from locant.tensors import host_can_read

BLOCK = 128
"""Tokens in a block of queries or keys: FlexAttention's default."""
MIN_DOCUMENT_LENGTH = 128
"""The smallest average length of packed documents. For shorter documents, tiles of queries need fewer calls."""
FAR = 2**40
"""A number greater than every index and document number. The bounds of a block without tokens are FAR and -FAR."""


class Segment(NamedTuple):
    """Consecutive tokens of a row: one whole document, or padding."""

    length: int
    is_document: bool


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to.

    >>> AttentionMask(Positions.arange(3)).is_causal, AttentionMask(Positions.after(2, 1), Positions.arange(3)).is_full
    (True, True)
    >>> AttentionMask(Positions.packed([1, 2])).dense().allowed.int()
    tensor([[[[1, 0, 0],
              [0, 1, 0],
              [0, 1, 1]]]], dtype=torch.int32)
    """

    queries: Positions
    k_positions: Positions | None = None
    """The positions of the keys. ``None`` means the same tokens as the queries."""
    causal: bool = True
    window: int | None = None

    @property
    def keys(self) -> Positions:
        return self.queries if self.k_positions is None else self.k_positions

    @property
    def offset(self) -> int | None:
        """The first query's index minus the first key's index, if both sides are known to count one by one."""
        start, k_start = self.queries.start, self.keys.start
        return None if start is None or k_start is None else start - k_start

    @property
    def is_full(self) -> bool:
        """Return whether every query is known to attend to every key."""
        if self.offset is None or self.window is not None:
            return False
        if self.causal and self.offset < self.keys.seq_len - 1:  # noqa: SIM103  # symbolic comparisons are not bools
            return False
        return True

    @property
    def is_causal(self) -> bool:
        """Return whether the mask is known to be the lower triangle of a square, which fused kernels call causal."""
        return self.causal and self.window is None and self._is_square and not self.is_full

    @property
    def is_plain(self) -> bool:
        """Return whether fused kernels do not need a matrix for this mask. A single query counts as the last token."""
        if self.offset is None or self.window is not None:
            return False
        return not self.causal or self._is_square or self.queries.seq_len <= 1

    @property
    def _is_square(self) -> bool:
        if self.offset != 0 or self.queries.seq_len != self.keys.seq_len:  # noqa: SIM103  # as above
            return False
        return True

    @property
    def skips_tokens(self) -> bool:
        """Return whether a query is known to attend to a key while the query or a token between them is not a key.

        The result is ``False`` without a causal mask, because the keys may then belong to another sequence. The orders
        of a document's tokens are expected to count one by one. The result is known if both sides count one by one, and
        on a CPU outside of compiled graphs. Otherwise reading the positions would wait for the device, and the result
        is ``False``.
        """
        queries, keys, window = self.queries, self.k_positions, self.window
        if keys is None or not keys.seq_len or not self.causal:
            return False
        if queries.start is not None and keys.start is not None:
            end = keys.start + keys.seq_len
            first = max(queries.start, end)  # the first query that is not a key
            return first < queries.start + queries.seq_len and (window is None or first - end + 1 < window)
        if not (host_can_read(queries.index) and host_can_read(keys.index)):
            return False
        rows = max(queries.batch, keys.batch)
        query_ids, document = _token_ids(queries).expand(rows, -1), queries.document.expand(rows, -1)
        key_ids = _token_ids(keys).expand(rows, -1).sort(1).values
        run = F.pad((key_ids.diff(dim=1) > 1).cumsum(1), (1, 0))
        lowest = document * 2**32 - 2**31
        lowest = lowest if window is None else lowest.maximum(query_ids - window + 1)
        first = torch.searchsorted(key_ids, lowest.contiguous())
        last = torch.searchsorted(key_ids, query_ids, right=True) - 1
        attends = (first <= last) & (document != PADDING)
        first, last = first.clamp(max=keys.seq_len - 1), last.clamp(min=0)
        has_all_keys = (key_ids.gather(1, last) == query_ids) & (run.gather(1, first) == run.gather(1, last))
        return bool((attends & ~has_all_keys).any())

    def dense(self) -> Dense:
        """Return the mask as a matrix. The matrix is ``None`` if everything is allowed.

        `locant.positions.documents.is_allowed` hides padding, other documents and later keys. Queries without a key
        (padding) are marked and may attend to every key. So neither the softmax nor its gradient ever has a row of
        minus infinities.
        """
        if self.is_full:
            return Dense(None, None)
        if self.is_causal:
            square = torch.ones(self.queries.seq_len, self.keys.seq_len, dtype=torch.bool, device=self.queries.device)
            return Dense(square.tril_(), None)
        allowed = self.queries.mask(self.k_positions, causal=self.causal, window=self.window)
        blind = ~allowed.any(-1, keepdim=True)
        return Dense(allowed | blind, blind)

    def distance_bounds(self, offset: int) -> tuple[int, int]:
        return distance_bounds(offset, self.queries.seq_len, self.keys.seq_len, self.causal, self.window)

    def key_bounds(self) -> tuple[int, int]:
        """Return the start and the end of the range of key slots that the queries attend to. It has at least one slot.

        If both sides count one by one, this does not read the positions. Otherwise it reads them on a CPU. Elsewhere,
        and in a compiled graph, reading would wait for the device, and the result is all slots.
        """
        keys = self.keys.seq_len
        if self.offset is not None:
            first, last = self.distance_bounds(self.offset)
            low, high = keys - 1 - last, keys - 1 - first + self.queries.seq_len
        elif host_can_read(self.queries.index):
            allowed = self.queries.mask(self.keys, causal=self.causal, window=self.window)
            slots = allowed.any(0).any(1).flatten().nonzero()
            low, high = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
        else:
            return 0, keys
        low = min(max(low, 0), keys - 1)
        return low, max(min(high, keys), low + 1)

    def tile(self, start: int, stop: int) -> tuple[AttentionMask, slice]:
        """Return the mask of the queries ``start:stop`` and of their keys, and the slice of these keys."""
        rows = AttentionMask(self.queries.slice(start, stop), self.keys, self.causal, self.window)
        low, high = rows.key_bounds()
        return AttentionMask(rows.queries, self.keys.slice(low, high), self.causal, self.window), slice(low, high)

    def blocks(self) -> tuple[Bool[Tensor, "batch q_blocks k_blocks"], Bool[Tensor, "batch q_blocks k_blocks"]]:
        """Return the pairs of blocks that may contain an allowed pair of tokens, and the pairs with only allowed pairs.

        torch's `create_block_mask` evaluates the rule for every pair of tokens. This method compares the ranges of
        documents and orders of each pair of blocks. The first result contains all allowed pairs. FlexAttention applies
        the rule to the pairs of blocks that are only in the first result. n tokens need ``(n / 128) ** 2`` numbers, on
        the device of the positions.

        >>> some, every = AttentionMask(Positions.arange(256)).blocks()
        >>> some.int(), every.int()
        (tensor([[[1, 0],
                 [1, 1]]], dtype=torch.int32), tensor([[[0, 0],
                 [1, 0]]], dtype=torch.int32))
        """
        q = _BlockBounds(*(bound[:, :, None] for bound in _block_bounds(self.queries)))
        k = _BlockBounds(*(bound[:, None, :] for bound in _block_bounds(self.keys)))
        some = (q.low_document <= k.high_document) & (k.low_document <= q.high_document)
        every = q.whole & k.whole & (q.low_document == k.high_document) & (k.low_document == q.high_document)
        nearest, farthest = q.low_order - k.high_order, q.high_order - k.low_order
        if self.causal:
            some, every = some & (farthest >= 0), every & (nearest >= 0)
        if self.window is not None:
            some = some & (nearest < self.window) & (farthest > -self.window)
            every = every & (farthest < self.window) & (nearest > -self.window)
        return some, every

    def block_mask(self) -> object:
        """Return FlexAttention's `BlockMask`. It is created once for all layers and kept as long as its positions.

        If both sides count one by one, the `NUM_CACHED_MASKS` latest masks are kept, because each layer's cache creates
        its own positions. A compiled or captured graph does not keep masks, because later calls may have other
        positions in the same memory.
        """
        captures = self.queries.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or captures:
            return self._block_mask()
        if self.offset is not None and not is_dispatch_mode_active():
            sizes = (max(self.offset, 0), self.queries.seq_len, max(-self.offset, 0), self.keys.seq_len)
            return _range_block_mask(
                *sizes, self.causal, self.window, self.queries.device, torch.is_inference_mode_enabled()
            )
        versions = _versions(self.queries), _versions(self.keys)
        if None in versions:
            return self._block_mask()
        if self.queries not in BLOCK_MASKS:
            BLOCK_MASKS[self.queries] = WeakIdKeyDictionary()
        by_keys, options = BLOCK_MASKS[self.queries], (self.causal, self.window, torch.is_inference_mode_enabled())
        by_options: dict[tuple[object, ...], tuple[object, object]] = by_keys.get(self.keys, {})
        if options not in by_options or by_options[options][0] != versions:
            by_options[options] = versions, self._block_mask()
        by_keys[self.keys] = by_options
        return by_options[options][1]

    def _block_mask(self) -> object:
        from torch.nn.attention.flex_attention import BlockMask

        some, every = (pairs[:, None] for pairs in self.blocks())
        partly = some & ~every
        return BlockMask(
            (self.queries.seq_len, self.keys.seq_len),
            *(x for pairs in (partly, every, partly.mT, every.mT) for x in _block_lists(pairs)),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=self.queries.mask_mod(self.keys, causal=self.causal, window=self.window),
        )

    def packed_documents(self) -> list[list[Segment]] | None:
        """Return the documents and the padding of each row, in order, or a single row if all rows are the same.

        Return ``None`` if a document does not count one by one or is interrupted by another, if documents are short,
        if the keys are not the tokens of the queries, or if the positions cannot be read.

        >>> AttentionMask(Positions.packed([200, 300], length=500)).packed_documents()
        [[Segment(length=200, is_document=True), Segment(length=300, is_document=True)]]
        """
        positions = self.queries
        can_read = host_can_read(positions.index) and bool(positions.index.numel())
        if self.k_positions is not None or positions.order_or_none is not None or not can_read:
            return None
        index, document = positions.index, positions.document
        first = torch.ones_like(document, dtype=torch.bool)
        first[:, 1:] = document.diff() != 0
        counts_on = (index.diff() == 1) | first[:, 1:] | (document[:, 1:] == PADDING)
        if int(first.sum()) * MIN_DOCUMENT_LENGTH > document.numel() or not bool(counts_on.all()):
            return None
        rows_are_equal = bool((document == document[:1]).all())
        rows = [_segments(document[row], first[row]) for row in range(1 if rows_are_equal else positions.batch)]
        packed = [row for row in rows if row is not None]
        return packed if len(packed) == len(rows) and any(part.is_document for row in packed for part in row) else None


class Dense(NamedTuple):
    """An attention mask as a matrix. `allowed` is ``None`` if everything is allowed."""

    allowed: Bool[Tensor, "*#batch query key"] | None
    blind: Bool[Tensor, "batch 1 query 1"] | None
    """Queries without a key. In `allowed` they attend to every key, so that their output is zero and not NaN."""

    def hide(self, scores: Float[Tensor, "#batch heads query key"]) -> Float[Tensor, "batch heads query key"]:
        """Return scores, or a bias, with minus infinity for each pair that the mask does not allow."""
        return scores if self.allowed is None else scores.masked_fill(~self.allowed, float("-inf"))

    def blank(self, x: Float[Tensor, "batch heads query _"]) -> Float[Tensor, "batch heads query _"]:
        """Return outputs, or weights, with zeros for queries without a key."""
        return x if self.blind is None else x.masked_fill(self.blind, 0.0)

    def without_keys(self, lse: Float[Tensor, "batch heads query"]) -> Float[Tensor, "batch heads query"]:
        """Return log-sum-exps with minus infinity for queries without a key."""
        return lse if self.blind is None else lse.masked_fill(self.blind[..., 0], float("-inf"))


def distance_bounds(offset: int, queries: int, keys: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the first and the last allowed value of ``i - j + keys - 1``, for slots i and j of a query and a key.

    `offset` is `AttentionMask.offset`. `queries` and `keys` are numbers of tokens.
    """
    same = keys - 1 - offset  # the value for a query and a key with the same index
    first, last = 0, queries + keys - 2
    if window is not None:
        first, last = max(first, same - window + 1), min(last, same + window - 1)
    return max(first, same) if causal else first, last


NUM_CACHED_MASKS = 16
"""The number of block masks kept for tokens that count one by one. A mask for 131,072 tokens takes 12 MiB."""
BLOCK_MASKS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The block masks for all other positions, by queries, keys and options."""


@functools.lru_cache(maxsize=NUM_CACHED_MASKS)
def _range_block_mask(
    start: int, queries: int, k_start: int, keys: int, causal: bool, window: int | None, device: torch.device,
    inference: bool,
) -> object:  # fmt: skip
    """Return the block mask of tokens that count one by one. Masks of inference mode cannot be used outside of it."""
    positions = Positions.after(start, queries, device=device), Positions.after(k_start, keys, device=device)
    return AttentionMask(*positions, causal, window)._block_mask()  # pyright: ignore[reportPrivateUsage]


def _versions(positions: Positions) -> tuple[int, ...] | None:
    """Return the number of writes to each tensor, or ``None`` in inference mode, which does not count writes."""
    tensors = [x for x in (positions.index, positions.document_or_none, positions.order_or_none) if x is not None]
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)


class _BlockBounds(NamedTuple):
    """Bounds over the real tokens of each block, ``batch blocks``, and whether the block has no padding."""

    low_document: Tensor
    high_document: Tensor
    low_order: Tensor
    high_order: Tensor
    whole: Tensor


def _block_bounds(positions: Positions) -> _BlockBounds:
    padded = -positions.seq_len % BLOCK
    document = F.pad(positions.document, (0, padded), value=PADDING)
    order = F.pad(positions.order, (0, padded))
    real = document != PADDING

    def bounds(values: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.where(real, values, FAR), torch.where(real, values, -FAR)
        return low.unflatten(1, (-1, BLOCK)).amin(2), high.unflatten(1, (-1, BLOCK)).amax(2)

    return _BlockBounds(*bounds(document), *bounds(order), real.unflatten(1, (-1, BLOCK)).all(2))


def _block_lists(
    pairs: Bool[Tensor, "batch 1 q_blocks k_blocks"],
) -> tuple[Int[Tensor, "batch 1 q_blocks"], Int[Tensor, "batch 1 q_blocks k_blocks"]]:
    """Return the number of key blocks of each query block, and a permutation with these blocks first, in order."""
    blocks = pairs.int().sort(dim=-1, descending=True, stable=True)
    # Sum the sorted values. torch 2.13 would fuse a sum over `pairs` with the conversion into one kernel of a flat
    # shape, which it cannot split if lengths are symbolic (InductorError: CantSplit).
    return blocks.values.sum(-1, dtype=torch.int32), blocks.indices.to(torch.int32)


def _token_ids(positions: Positions) -> Int[Tensor, "batch seq"]:
    """Return a number for every token that combines its document and its order."""
    return (positions.document * 2**32 + positions.order).contiguous()


def _segments(document: Int[Tensor, " seq"], first: Bool[Tensor, " seq"]) -> list[Segment] | None:
    """Return the segments of one row, or ``None`` if another document interrupts a document."""
    starts = first.nonzero().flatten()
    numbers = document[starts].tolist()
    documents = [number for number in numbers if number != PADDING]
    if len(set(documents)) < len(documents):
        return None
    ends = [*starts.tolist(), len(document)]
    return [Segment(b - a, number != PADDING) for (a, b), number in zip(pairwise(ends), numbers, strict=True)]
