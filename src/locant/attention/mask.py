"""`AttentionMask`: which key each query attends to, made once per call, in every form that a backend wants.

The rule for one pair of tokens (padding, documents, causal, sliding window) is `locant.positions.documents.is_allowed`.
Here it takes the cheapest equivalent form: none at all where everything is allowed, bounds of distances where
both sides count one by one, blocks of tokens for FlexAttention, and a matrix only where nothing else will do.
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

from locant.kernels.transforms import is_watched
from locant.positions import Positions
from locant.positions.documents import PADDING
from locant.tensors import readable

BLOCK = 128
"""Tokens in a block, of queries and of keys: FlexAttention's default."""
SHORTEST = 128
"""Tokens of a packed document, on average: with shorter ones, tiles of queries are fewer calls."""
FAR = 2**40
"""Beyond every index and document: the bounds of a block without tokens are FAR and -FAR."""


class Segment(NamedTuple):
    """Neighbouring tokens of a row: one whole document, or padding."""

    length: int
    is_document: bool


@dataclass(frozen=True)
class AttentionMask:
    """Which key each query attends to.

    >>> AttentionMask(Positions.arange(3)).is_causal, AttentionMask(Positions.after(2, 1), Positions.arange(3)).is_full
    (True, True)
    >>> AttentionMask(Positions.packed([1, 2])).dense().allowed.int()
    tensor([[[[1, 0, 0],
              [0, 1, 0],
              [0, 1, 1]]]], dtype=torch.int32)
    """

    queries: Positions
    k_positions: Positions | None = None
    """``None``: the keys are those of the queries' tokens."""
    causal: bool = True
    window: int | None = None

    @property
    def keys(self) -> Positions:
        return self.queries if self.k_positions is None else self.k_positions

    @property
    def offset(self) -> int | None:
        """The index of the first query minus that of the first key, where both are known to count one by one."""
        return None if self.queries.start is None or self.keys.start is None else self.queries.start - self.keys.start

    @property
    def is_full(self) -> bool:
        """Whether every query is known to attend to every key."""
        if self.offset is None or self.window is not None:
            return False
        if self.causal and self.offset < self.keys.seq_len - 1:  # noqa: SIM103  # a compiler's comparison is no bool
            return False
        return True

    @property
    def is_causal(self) -> bool:
        """Whether it is known to be the lower triangle of a square, what fused kernels call causal."""
        return self.causal and self.window is None and self._is_square and not self.is_full

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels need no matrix for it; a single query is taken for the last token."""
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
        """Whether a query is known to attend to a key while some token between them, or itself, is not among the keys.

        Of a causal mask; without one, keys may be those of another sequence. Tokens of a document are expected to have
        orders that count one by one. Known where both sides do, and on a CPU; elsewhere, and in a compiled graph,
        asking would wait for the device.
        """
        queries, keys, window = self.queries, self.k_positions, self.window
        if keys is None or not keys.seq_len or not self.causal:
            return False
        if queries.start is not None and keys.start is not None:
            end = keys.start + keys.seq_len
            behind = max(queries.start, end)  # the first query that is not among the keys
            return behind < queries.start + queries.seq_len and (window is None or behind - end + 1 < window)
        if not (readable(queries.index) and readable(keys.index)):
            return False
        rows = max(queries.batch, keys.batch)
        own, document = _numbered(queries).expand(rows, -1), queries.document.expand(rows, -1)
        given = _numbered(keys).expand(rows, -1).sort(1).values
        stretch = F.pad((given.diff(dim=1) > 1).cumsum(1), (1, 0))
        lowest = document * 2**32 - 2**31
        lowest = lowest if window is None else lowest.maximum(own - window + 1)
        first, last = torch.searchsorted(given, lowest.contiguous()), torch.searchsorted(given, own, right=True) - 1
        attends = (first <= last) & (document != PADDING)
        first, last = first.clamp(max=keys.seq_len - 1), last.clamp(min=0)
        whole = (given.gather(1, last) == own) & (stretch.gather(1, first) == stretch.gather(1, last))
        return bool((attends & ~whole).any())

    def dense(self) -> Dense:
        """The mask as a matrix, where one is needed.

        Queries that attend to nothing (padding) are opened to every key and marked, so that neither the softmax nor
        its gradient ever meets a row of minus infinities.
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
        """The slots of the first key and after the last key that any of the queries attends to; at least one slot.

        Known beforehand where both sides count one by one. On a CPU the positions are looked through; elsewhere, and in
        a compiled graph, that would wait for the device, and the answer is all keys.
        """
        keys = self.keys.seq_len
        if self.offset is not None:
            first, last = self.distance_bounds(self.offset)
            low, high = keys - 1 - last, keys - 1 - first + self.queries.seq_len
        elif readable(self.queries.index):
            allowed = self.queries.mask(self.keys, causal=self.causal, window=self.window)
            slots = allowed.any(0).any(1).flatten().nonzero()
            low, high = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
        else:
            return 0, keys
        low = min(max(low, 0), keys - 1)
        return low, max(min(high, keys), low + 1)

    def tile(self, start: int, stop: int) -> tuple[AttentionMask, slice]:
        """The mask of the queries ``start:stop`` and of the keys that they attend to, and which keys those are."""
        rows = AttentionMask(self.queries.slice(start, stop), self.keys, self.causal, self.window)
        low, high = rows.key_bounds()
        return AttentionMask(rows.queries, self.keys.slice(low, high), self.causal, self.window), slice(low, high)

    def blocks(self) -> tuple[Bool[Tensor, "batch q_blocks k_blocks"], Bool[Tensor, "batch q_blocks k_blocks"]]:
        """Which pairs of blocks may hold an allowed pair of tokens, and in which every pair is allowed.

        torch's `create_block_mask` evaluates the rule for every pair of tokens. Here each block has the range of its
        documents and orders, and pairs of blocks are compared: no allowed pair is lost, and undecided blocks are
        left to the rule itself. For n tokens that is ``(n / 128) ** 2`` numbers, on the device of the positions.

        >>> some, every = AttentionMask(Positions.arange(256)).blocks()
        >>> some.int(), every.int()
        (tensor([[[1, 0],
                 [1, 1]]], dtype=torch.int32), tensor([[[0, 0],
                 [1, 0]]], dtype=torch.int32))
        """
        q = _Blocks(*(bound[:, :, None] for bound in _blocks(self.queries)))
        k = _Blocks(*(bound[:, None, :] for bound in _blocks(self.keys)))
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
        """FlexAttention's `BlockMask`, made once for all layers: kept as long as its positions are.

        Where both sides count one by one, some `RECENT` ones are kept: each layer's cache has positions of its own. Not
        in a graph, compiled or captured, whose calls may be given other positions in the same memory.
        """
        captures = self.queries.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or captures:
            return self._block_mask()
        if self.offset is not None and not is_watched():
            sizes = (max(self.offset, 0), self.queries.seq_len, max(-self.offset, 0), self.keys.seq_len)
            return _counting(*sizes, self.causal, self.window, self.queries.device, torch.is_inference_mode_enabled())
        versions = _versions(self.queries), _versions(self.keys)
        if None in versions:
            return self._block_mask()
        if self.queries not in BLOCK_MASKS:
            BLOCK_MASKS[self.queries] = WeakIdKeyDictionary()
        by_keys, kind = BLOCK_MASKS[self.queries], (self.causal, self.window, torch.is_inference_mode_enabled())
        by_kind: dict[tuple[object, ...], tuple[object, object]] = by_keys.get(self.keys, {})
        if kind not in by_kind or by_kind[kind][0] != versions:
            by_kind[kind] = versions, self._block_mask()
        by_keys[self.keys] = by_kind
        return by_kind[kind][1]

    def _block_mask(self) -> object:
        from torch.nn.attention.flex_attention import BlockMask

        some, every = (pairs[:, None] for pairs in self.blocks())
        partly = some & ~every
        return BlockMask(
            (self.queries.seq_len, self.keys.seq_len),
            *(x for pairs in (partly, every, partly.mT, every.mT) for x in _listed(pairs)),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=self.queries.mask_mod(self.keys, causal=self.causal, window=self.window),
        )

    def packed_documents(self) -> list[list[Segment]] | None:
        """The documents and the padding of each row, in their order; one row where all rows are the same.

        ``None`` where a document does not count one by one, or comes back after another; where documents are short;
        where the keys are not those of the queries' tokens; and where the positions cannot be read.

        >>> AttentionMask(Positions.packed([200, 300], length=500)).packed_documents()
        [[Segment(length=200, is_document=True), Segment(length=300, is_document=True)]]
        """
        where = self.queries
        readable_rows = readable(where.index) and bool(where.index.numel())
        if self.k_positions is not None or where.order_or_none is not None or not readable_rows:
            return None
        index, document = where.index, where.document
        first = torch.ones_like(document, dtype=torch.bool)
        first[:, 1:] = document.diff() != 0
        counts_on = (index.diff() == 1) | first[:, 1:] | (document[:, 1:] == PADDING)
        if int(first.sum()) * SHORTEST > document.numel() or not bool(counts_on.all()):
            return None
        alike = bool((document == document[:1]).all())
        rows = [_segments(document[row], first[row]) for row in range(1 if alike else where.batch)]
        whole = [row for row in rows if row is not None]
        return whole if len(whole) == len(rows) and any(part.is_document for row in whole for part in row) else None


class Dense(NamedTuple):
    """An attention mask as a matrix; ``None`` where everything is allowed."""

    allowed: Bool[Tensor, "*#batch query key"] | None
    blind: Bool[Tensor, "batch 1 query 1"] | None
    """Queries that attend to nothing, and are open to every key in `allowed`: their output is zero, not NaN."""

    def hide(self, scores: Float[Tensor, "#batch heads query key"]) -> Float[Tensor, "batch heads query key"]:
        """Scores, or a bias, with minus infinity where the mask does not allow a pair."""
        return scores if self.allowed is None else scores.masked_fill(~self.allowed, float("-inf"))

    def blank(self, x: Float[Tensor, "batch heads query _"]) -> Float[Tensor, "batch heads query _"]:
        """Outputs, or weights, with zeros for queries that attend to nothing."""
        return x if self.blind is None else x.masked_fill(self.blind, 0.0)

    def without_keys(self, lse: Float[Tensor, "batch heads query"]) -> Float[Tensor, "batch heads query"]:
        """Log-sum-exps with minus infinity for queries that attend to nothing."""
        return lse if self.blind is None else lse.masked_fill(self.blind[..., 0], float("-inf"))


def distance_bounds(offset: int, queries: int, keys: int, causal: bool, window: int | None) -> tuple[int, int]:
    """The first and the last value of ``i - j + keys - 1`` that is allowed, for the slots i and j of a query and a key.

    `offset` is that of `AttentionMask`; `queries` and `keys` are how many there are.
    """
    same = keys - 1 - offset  # the value for a query and a key of one index
    first, last = 0, queries + keys - 2
    if window is not None:
        first, last = max(first, same - window + 1), min(last, same + window - 1)
    return max(first, same) if causal else first, last


RECENT = 16
"""Block masks of tokens that count one by one, the most recent ones; a row of 131 072 has 12 MiB."""
BLOCK_MASKS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of other queries, and for each of their keys, by what else is asked for."""


@functools.lru_cache(maxsize=RECENT)
def _counting(
    start: int, queries: int, k_start: int, keys: int, causal: bool, window: int | None, device: torch.device,
    inference: bool,
) -> object:  # fmt: skip
    """`inference`: what is made in inference mode cannot be used outside of it."""
    where = Positions.after(start, queries, device=device), Positions.after(k_start, keys, device=device)
    return AttentionMask(*where, causal, window)._block_mask()  # pyright: ignore[reportPrivateUsage]


def _versions(positions: Positions) -> tuple[int, ...] | None:
    """How often their memory was written, as a static cache's is; ``None`` of inference mode, which does not count."""
    tensors = [x for x in (positions.index, positions.document_or_none, positions.order_or_none) if x is not None]
    return None if any(x.is_inference() for x in tensors) else tuple(x._version for x in tensors)


class _Blocks(NamedTuple):
    """Of each block, ``batch blocks``: bounds over its tokens that are no padding, and whether all are such."""

    low_document: Tensor
    high_document: Tensor
    low_order: Tensor
    high_order: Tensor
    whole: Tensor


def _blocks(positions: Positions) -> _Blocks:
    padded = -positions.seq_len % BLOCK
    document = F.pad(positions.document, (0, padded), value=PADDING)
    order = F.pad(positions.order, (0, padded))
    real = document != PADDING

    def between(values: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.where(real, values, FAR), torch.where(real, values, -FAR)
        return low.unflatten(1, (-1, BLOCK)).amin(2), high.unflatten(1, (-1, BLOCK)).amax(2)

    return _Blocks(*between(document), *between(order), real.unflatten(1, (-1, BLOCK)).all(2))


def _listed(
    pairs: Bool[Tensor, "batch 1 q_blocks k_blocks"],
) -> tuple[Int[Tensor, "batch 1 q_blocks"], Int[Tensor, "batch 1 q_blocks k_blocks"]]:
    """How many key blocks belong to each block of queries, and which: those first, in order."""
    listed = pairs.int().sort(dim=-1, descending=True, stable=True)
    # Of what is sorted: from `pairs` itself torch 2.13 makes one kernel with their conversion, of a flat shape that it
    # cannot split where lengths are symbols (InductorError: CantSplit).
    return listed.values.sum(-1, dtype=torch.int32), listed.indices.to(torch.int32)


def _numbered(positions: Positions) -> Int[Tensor, "batch seq"]:
    """One number for document and order of every token."""
    return (positions.document * 2**32 + positions.order).contiguous()


def _segments(document: Int[Tensor, " seq"], first: Bool[Tensor, " seq"]) -> list[Segment] | None:
    """Of one row; ``None`` where a document comes back after another."""
    starts = first.nonzero().flatten()
    numbers = document[starts].tolist()
    documents = [number for number in numbers if number != PADDING]
    if len(set(documents)) < len(documents):
        return None
    ends = [*starts.tolist(), len(document)]
    return [Segment(b - a, number != PADDING) for (a, b), number in zip(pairwise(ends), numbers, strict=True)]
