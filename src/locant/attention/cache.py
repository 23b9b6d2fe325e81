"""`KVCache` and `StaticKVCache`: the keys and values of tokens already read, and their positions.

`KVCache` returns as many keys as there are, so every step has another shape. `StaticKVCache` always returns keys,
values and positions whole; slots that nothing was written to are padding, which no query attends to. Where to write is
a number on the device. So a step has the same shapes and addresses as the one before, asks the device nothing, and can
be compiled as one graph, captured and replayed. The price is attention over all `max_len` slots, filled or not.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils import _pytree as pytree

from locant.arguments import whole
from locant.attention.inputs import zero_padding
from locant.attention.memory import (
    Cache,
    FixedCache,
    Keys,
    Length,
    NewKeys,
    NewValues,
    Values,
    as_bytes,
    following,
    lengths_of,
    new_memory,
    padded,
    require_rows,
)
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.checks import token_count
from locant.positions.documents import PADDING
from locant.positions.fields import Read
from locant.tensors import readable


class KVCache(Cache):
    """One layer's keys and values, for decoding. Keys go in rotated, so that no step rotates them again.

    It grows, and so does what every step returns. Compiled, four or five programs serve a prompt and every length after
    it, up to eight where the prompt is shorter than 16 tokens; `StaticKVCache` has one shape, for CUDA graphs.

    Padding is stored as zeros. Memory doubles as it fills, or is taken once where `max_len` is given. For inference
    only: what is stored has no gradient. `truncate` takes back what a draft guessed wrong, `reorder` follows beams.

    Args:
        max_len: the most tokens it may hold; default: no limit.

    >>> cache = KVCache()
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5))
    >>> keys.shape, k_positions, cache.next_positions()
    (torch.Size([1, 2, 5, 16]), Positions(1x5, 0..4), Positions(1x1, 5..5))
    """

    REMEDY = "one KVCache() per layer and batch, or cache.clear()"

    def __init__(self, max_len: int | None = None) -> None:
        self.max_len = None if max_len is None else whole("max_len", max_len, 1, remedy="max_len=None for no limit")
        self._length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions: Positions | None = None

    def __len__(self) -> int:
        """How many slots are filled, padding included."""
        return self._length

    @property
    def _pair(self) -> tuple[Tensor, ...]:
        return () if self._keys is None or self._values is None else (self._keys, self._values)

    @property
    def positions(self) -> Positions:
        """The positions of the cached tokens."""
        return Positions.arange(0) if self._positions is None else self._positions

    def append(self, k: NewKeys, v: NewValues, positions: Positions) -> tuple[Keys, Values, Positions]:
        """Store new keys and values; returns all so far, as views of the cache, and their positions."""
        self._require_tokens(k, v, positions)
        joined, length = self._joined(positions), self._length + k.shape[2]
        self._keys, self._values = self._grown(self._keys, k, length), self._grown(self._values, v, length)
        new_keys, new_values = zero_padding(positions, k.detach(), v.detach())
        self._keys[:, :, self._length : length] = new_keys
        self._values[:, :, self._length : length] = new_values
        self._positions, self._length = joined, length
        return self._keys[:, :, :length], self._values[:, :, :length], joined

    def next_positions(self, n: int = 1) -> Positions:
        """The `n` positions after the last real token of every row, in that token's document."""
        n, cached = token_count("n", n), self.positions
        if cached.start is not None:
            return Positions.after(cached.start + cached.seq_len, n, device=cached.device)
        if not cached.seq_len:
            cached.require_single_axis("KVCache.next_positions")
            return Positions.arange(n, batch=cached.batch, device=cached.device)
        return following(cached, n)

    def truncate(self, length: Length) -> None:
        """Forget all tokens after the first `length` slots, padding included: drafts that were not accepted.

        Where rows keep different numbers, one for each, the longest decides how many slots stay, and what other rows
        forget becomes padding after their last token; the host waits for these numbers. Later tokens are written over
        what `append` returned before.

        >>> cache, k = KVCache(), torch.randn(2, 1, 5, 16)
        >>> _ = cache.append(k, k, Positions.arange(5))
        >>> cache.truncate(torch.tensor([3, 4]))
        >>> cache.positions.document, cache.next_positions().index.tolist()
        (tensor([[ 0,  0,  0, -1],
                [ 0,  0,  0,  0]]), [[3], [4]])
        """
        if not self._pair or isinstance(length, int):
            longest = whole("length", length, 0, self._length, remedy="how many slots stay, as len(cache) counts them")
            self._length, self._positions = longest, self.positions.slice(0, longest) if longest else None
            return
        keys = self._pair[0]
        lengths = lengths_of(length, self._length, len(keys), keys.device)
        shortest, longest = (int(end) for end in lengths.aminmax())
        self.truncate(longest)
        if shortest < longest:
            behind = torch.arange(longest, device=lengths.device) >= lengths[:, None]
            cached = self.positions.expand(len(lengths))
            document = cached.document.masked_fill(behind, PADDING)
            self._positions = dataclasses.replace(cached, document_or_none=document, start=None)
            for store in self._pair:
                padded(store[:, :, :longest], behind)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order, of which some may come several times: beams. In new memory.

        >>> cache, k = KVCache(), torch.randn(2, 1, 5, 16)
        >>> keys, _, _ = cache.append(k, k, Positions.arange(5))
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> torch.equal(cache.append(k[[1, 1, 0], :, :0], k[[1, 1, 0], :, :0], Positions.arange(0))[0], keys[[1, 1, 0]])
        True
        """
        if not self._pair:
            raise LocantError("got rows to reorder in a cache without any", "cache.append(k, v, positions) first")
        keys, _ = self._pair
        require_rows(rows, len(keys), keys.device)
        filled, stores = slice(self._length), list[Tensor]()
        for store in self._pair:
            moved = _empty(store, len(rows), store.shape[2])
            as_bytes(moved)[:, :, filled] = as_bytes(store)[:, :, filled].index_select(0, rows)
            stores.append(moved)
        self._keys, self._values = stores
        if self.positions.batch > 1:
            self._positions = pytree.tree_map_only(Tensor, lambda x: x.index_select(0, rows), self.positions)

    def clear(self) -> None:
        """Forget everything, memory included."""
        self._length, self._keys, self._values, self._positions = 0, None, None, None

    def _joined(self, positions: Positions) -> Positions:
        """The positions of all tokens, in an order in which the new ones keep theirs, since queries have no other.

        Where an order begins at 0 again, as that of an image does, everything cached comes before it.
        """
        if self._positions is None:
            return positions
        joined = Positions.cat([self._positions, positions])
        if joined.order_or_none is None or not positions.seq_len:
            return joined
        moved = joined.order[:, self._length] - positions.order[:, 0]
        return dataclasses.replace(joined, order_or_none=joined.order - moved[:, None])

    def _grown(self, store: Tensor | None, new: Tensor, length: int) -> Tensor:
        """The cache grows here: `store` while `length` tokens fit, then memory for `max_len`, or for twice as many."""
        if self.max_len is not None and length > self.max_len:
            got = f"got {length} tokens for a cache of max_len={self.max_len}"
            raise RangeError(got, f"KVCache(max_len={length}), or cache.clear()")
        spare = 1 if self.max_len is None else 0  # a full store is another kind of tensor to a compiler
        if store is not None and length + spare <= store.shape[2]:
            return store
        capacity = length + spare if store is None else max(length + spare, 2 * store.shape[2])
        capacity = capacity if self.max_len is None else self.max_len
        grown = _empty(new, len(new), capacity)
        if store is not None:
            grown[:, :, : self._length] = store[:, :, : self._length]
        return grown


def _empty(like: Tensor, batch: int, capacity: int) -> Tensor:
    with torch.inference_mode(False):  # or it could not be written to outside of inference mode
        return like.new_empty(batch, like.shape[1], capacity, like.shape[3])


class StaticKVCache(FixedCache):
    """One layer's keys and values in memory that never moves. Keys go in rotated; padding is stored as zeros.

    What `append` returns is the memory itself, in which later tokens appear, and which `truncate` and `reorder` change.
    For inference only, and for positions of one axis whose order is their index; `KVCache` takes all others.

    Args:
        max_len: how many tokens of a row it holds, padding included.
        batch, kv_heads, head_dim: of the keys.
        value_dim: width of the values; default: `head_dim`.
        dtype: of both.
        device: where they are.
        max_index: no position is larger; default: ``max_len - 1``.
        encoding: what it reads of the hidden states of every key is kept, too: for those that read any (`HiddenBias`).

    >>> cache = StaticKVCache(8, batch=1, kv_heads=2, head_dim=16)
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5))
    >>> keys.shape, k_positions.document, cache.next_positions().index
    (torch.Size([1, 2, 8, 16]), tensor([[ 0,  0,  0,  0,  0, -1, -1, -1]]), tensor([[5]]))
    """

    REMEDY = "StaticKVCache(...) of the shape of these keys"

    def __init__(
        self,
        max_len: int,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        max_index: int | None = None,
        encoding: PositionEncoding | None = None,
    ) -> None:
        self.max_len = whole("max_len", max_len, 1, remedy="the number of tokens of the prompt and the answer")
        batch = whole("batch", batch, 1, remedy="the number of rows")
        super().__init__(
            (batch, self.max_len), 1, self.max_len - 1 if max_index is None else max_index, kv_heads=kv_heads,
            head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device, encoding=encoding,
        )  # fmt: skip
        self._length = new_memory((), torch.int64, device)

    def __len__(self) -> int:
        """How many slots are filled, padding included; waits for the device."""
        return int(self._length)

    @property
    def positions(self) -> Positions:
        """The positions of all slots."""
        return Positions(self._index, self._document, None, 0, self.max_index, read=Read(None, self._read))

    def append(self, k: NewKeys, v: NewValues, positions: Positions) -> tuple[Keys, Values, Positions]:
        """Store new keys and values; returns all slots and their positions, filled or not.

        More tokens than `max_len` are refused on a CPU. Elsewhere, and in compiled code, nobody counts on the host:
        there torch's kernel stops at the first slot out of bounds.
        """
        self._require_tokens(k, v, positions)
        if k.shape[2] > self.max_len or (readable(self._length) and len(self) + k.shape[2] > self.max_len):
            tokens = f"{len(self)} and {k.shape[2]} more" if readable(self._length) else str(k.shape[2])
            got = f"got {tokens} tokens for a cache of max_len={self.max_len}"
            raise RangeError(got, "a larger max_len, or clear()")
        slots = self._length + torch.arange(k.shape[2], device=k.device)
        for store, new in zip((self._keys, self._values), zero_padding(positions, k.detach(), v.detach()), strict=True):
            as_bytes(store).index_copy_(2, slots, as_bytes(new))
        rows = positions.expand(k.shape[0])
        self._index.index_copy_(1, slots, rows.index)
        self._document.index_copy_(1, slots, rows.document)
        if self._read is not None and rows.read.of_key is not None:
            self._read.index_copy_(1, slots, rows.read.of_key.detach())
        self._length.add_(k.shape[2])
        return self._keys, self._values, self.positions

    def next_positions(self, n: int = 1) -> Positions:
        """The `n` positions after the last real token of every row, in that token's document."""
        return dataclasses.replace(following(self.positions, token_count("n", n)), max_index=self.max_index)

    def truncate(self, length: Length) -> None:
        """Forget all tokens after the first `length` slots, padding included: drafts that were not accepted.

        Where rows keep different numbers, one for each, the longest decides where the next token goes, and what other
        rows forget is padding. In compiled code a tensor serves every length, where numbers are programs of their own.

        >>> cache, k = StaticKVCache(8, batch=2, kv_heads=1, head_dim=16), torch.randn(2, 1, 5, 16)
        >>> _ = cache.append(k, k, Positions.arange(5))
        >>> cache.truncate(torch.tensor([3, 4]))
        >>> len(cache), cache.next_positions().index.tolist()
        (4, [[3], [4]])
        """
        lengths = lengths_of(length, self._length, len(self._keys), self._keys.device)
        behind = torch.arange(self.max_len, device=lengths.device) >= lengths[:, None]
        for store in self._pair:
            padded(store, behind)
        self._document.masked_fill_(behind, PADDING)
        self._length.copy_(torch.minimum(self._length, lengths.amax()))

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Put these rows, of which some may come several times, in the places of all: beams. In the same memory."""
        require_rows(rows, len(self._keys), self._keys.device)
        if len(rows) != len(self._keys):
            got = f"got {len(rows)} rows for a cache of {len(self._keys)}, whose memory stays as it is"
            raise ShapeError(got, "as many, some of them several times; or KVCache(), which takes any number")
        for store in self._stores:
            store.copy_(store.index_select(0, rows))

    def clear(self) -> None:
        """Forget everything; the memory stays where it is."""
        for store in self._stores:
            store.zero_()
        self._length.zero_()
        self._document.fill_(PADDING)
