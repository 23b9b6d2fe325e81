"""`KVCache` and `StaticKVCache`: the keys, values and positions of the tokens already read.

`KVCache` returns only the keys that it has, so the shape changes in every step. `StaticKVCache` always returns keys,
values and positions of all slots. Empty slots are padding, which no query attends to. The number of the next slot is on
the device. So each step has the same shapes and addresses as the step before and does not wait for the device. It can
be compiled as one graph, captured and replayed. The cost is attention over all `max_len` slots, filled or not.
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
    NewQueries,
    NewSlots,
    NewValues,
    RotatedKeys,
    RotatedQueries,
    Values,
    as_bytes,
    new_memory,
    positions_after,
    require_encoding,
    zero_slots,
)
from locant.errors import LocantError, RangeError, ShapeError
from locant.kernels.norm_rotary import HeadNorm
from locant.positions import PositionEncoding, Positions
from locant.positions.base import changes_cached_keys
from locant.positions.cached_rows import check_lengths, require_rows
from locant.positions.checks import token_count
from locant.positions.documents import PADDING
from locant.positions.fields import TokenFeatures, join_fields
from locant.tensors import host_can_read


class KVCache(Cache):
    """One layer's keys and values, for decoding. Append rotated keys, so that no step rotates them again.

    The cache grows, and `append` returns more keys in every step. Compiled code needs four or five programs for a
    prompt and all lengths after it, or up to eight if the prompt is shorter than 16 tokens. For CUDA graphs use
    `StaticKVCache`, whose shape is fixed.

    Padding is stored as zeros. The memory doubles when it is full, or is allocated once if `max_len` is set. The cache
    is for inference only: stored keys and values have no gradient. `truncate` removes rejected draft tokens, and
    `reorder` selects beams.

    Args:
        max_len: the largest number of tokens. Default: no limit.
        encoding: an encoding whose later tokens change cached keys (`PaTH`). The cache changes them in place. Other
            encodings do not need it.

    >>> cache = KVCache()
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5))
    >>> keys.shape, k_positions, cache.next_positions()
    (torch.Size([1, 2, 5, 16]), Positions(1x5, 0..4), Positions(1x1, 5..5))
    """

    _REMEDY = "use one KVCache() per layer and batch, or call cache.clear()"

    def __init__(self, max_len: int | None = None, *, encoding: PositionEncoding | None = None) -> None:
        self.max_len = None if max_len is None else whole("max_len", max_len, 1, remedy="max_len=None for no limit")
        if encoding is not None:
            require_encoding("encoding", encoding, "pass the encoding of the model, or None")
        self._encoding = encoding if encoding is not None and changes_cached_keys(encoding) else None
        self._length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions: Positions | None = None

    def __len__(self) -> int:
        """Return the number of filled slots, padding included."""
        return self._length

    @property
    def _keys_and_values(self) -> tuple[Tensor, ...]:
        return () if self._keys is None or self._values is None else (self._keys, self._values)

    @property
    def positions(self) -> Positions:
        """The positions of the cached tokens."""
        return Positions.arange(0) if self._positions is None else self._positions

    def append(self, k: NewKeys, v: NewValues, positions: Positions) -> tuple[Keys, Values, Positions]:
        """Store new keys and values. Return all keys and values so far, as views of the cache, and their positions."""
        return self._commit(self._reserve(k, v, positions).filled_with(k, v), positions)

    def rotate_and_append(
        self,
        rotary: PositionEncoding,
        q: NewQueries,
        k: NewKeys,
        v: NewValues,
        positions: Positions,
        *,
        norm: HeadNorm | None = None,
        inplace: bool = False,
    ) -> tuple[RotatedQueries, RotatedKeys, Values, Positions]:
        """Rotate queries and keys and store the new tokens. Return the rotated queries, and what `append` returns.

        All numbers have the bits of ``q, k = rotary.rotate(q, k, positions, norm=norm)`` and ``append(k, v,
        positions)``. In code without gradients, `Rotary` writes the keys directly into the memory of the cache. If an
        argument is wrong, the cache does not change.

        Args:
            rotary: any encoding. Without a rotation (ALiBi), keys are stored after the norm.
            q, k, v: queries, keys and values of the new tokens, before the norm and the rotation.
            positions: the positions of the new tokens.
            norm: the norm of each head of queries and keys, if there is one (Qwen3, Gemma 3, Olmo 2).
            inplace: whether the rotated queries may overwrite `q`. For long prompts, new memory costs more than the
                rotation.

        >>> from locant import Rotary
        >>> q, k, v = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
        >>> q, k, v, k_positions = KVCache().rotate_and_append(Rotary(16), q, k, v, Positions.arange(5))
        >>> q.shape, k.shape, k_positions
        (torch.Size([1, 8, 5, 16]), torch.Size([1, 2, 5, 16]), Positions(1x5, 0..4))
        """
        return self._rotate_and_append(rotary, q, k, v, positions, norm, inplace)

    def _reserve(self, k: Tensor, v: Tensor, positions: Positions) -> NewSlots:
        self._require_tokens(k, v, positions)
        if self._encoding is not None and positions.read.of_key is None:
            raise LocantError("got positions without features of hidden states", "encoding.read(x, positions)")
        start, length = self._length, self._length + k.shape[2]
        all_positions = self._append_positions(positions)
        keys, values = self._grow(self._keys, k, length), self._grow(self._values, v, length)
        return NewSlots(keys[:, :, start:length], values[:, :, start:length], (keys, values), all_positions)

    def _commit(self, slots: NewSlots, positions: Positions) -> tuple[Tensor, Tensor, Positions]:
        slots.zero_padding(positions)
        (keys, values), all_positions = slots.stores, slots.all_positions
        if self._encoding is not None and (recent := positions.read.of_key) is not None:
            recent = recent.detach().expand(len(keys), -1, -1, -1)
            if self._length:
                settled = self._encoding.settle_keys(keys[:, :, : self._length], self.positions, positions)
                recent = recent if settled is None else torch.cat([settled, recent], dim=1)
            all_positions = dataclasses.replace(all_positions, read=TokenFeatures(recent=recent))
        self._keys, self._values, self._positions = keys, values, all_positions
        self._length += positions.seq_len
        return keys[:, :, : self._length], values[:, :, : self._length], all_positions

    def next_positions(self, n: int = 1) -> Positions:
        """Return the `n` positions after the last real token of every row, in that token's document."""
        n, cached = token_count("n", n), self.positions
        if cached.start is not None:
            return Positions.after(cached.start + cached.seq_len, n, device=cached.device)
        if not cached.seq_len:
            cached.require_single_axis("KVCache.next_positions")
            return Positions.arange(n, batch=cached.batch, device=cached.device)
        return positions_after(cached, n)

    def truncate(self, length: Length) -> None:
        """Remove all tokens after the first `length` slots, padding included, such as draft tokens that were rejected.

        `length` may be one number for each row. Then the longest row determines the number of slots, and removed tokens
        of other rows become padding after their last token. The host waits for these numbers. Later tokens overwrite
        the memory that `append` returned before.

        >>> cache, k = KVCache(), torch.randn(2, 1, 5, 16)
        >>> _ = cache.append(k, k, Positions.arange(5))
        >>> cache.truncate(torch.tensor([3, 4]))
        >>> cache.positions.document, cache.next_positions().index.tolist()
        (tensor([[ 0,  0,  0, -1],
                [ 0,  0,  0,  0]]), [[3], [4]])
        """
        if not self._keys_and_values or isinstance(length, int):
            longest = whole("length", length, 0, self._length, remedy="pass a number of slots from 0 to len(cache)")
            self._shorten(longest, None)
            return
        keys = self._keys_and_values[0]
        lengths = check_lengths(length, self._length, len(keys), keys.device)
        shortest, longest = (int(end) for end in lengths.aminmax())
        self._shorten(longest, lengths)
        if shortest < longest:
            removed = torch.arange(longest, device=lengths.device) >= lengths[:, None]
            recent, cached = self.positions.read.recent, self.positions.expand(len(lengths))
            document = cached.document.masked_fill(removed, PADDING)
            self._positions = dataclasses.replace(
                cached, document_or_none=document, start=None, read=cached.read._replace(recent=recent)
            )
            for store in self._keys_and_values:
                zero_slots(store[:, :, :longest], removed)

    def _shorten(self, longest: int, lengths: Int[Tensor, " batch"] | None) -> None:
        """Remove the slots after the `longest` row. `lengths` are the lengths of all rows, if they differ."""
        positions, recent = self.positions, self.positions.read.recent
        if recent is not None and self._encoding is not None and longest:
            first = self._length - recent.shape[1]
            ends = torch.full((len(recent),), longest, device=recent.device) if lengths is None else lengths
            recent = self._encoding.truncate_recent(positions, ends - first)
        shortened = positions.slice(0, longest) if longest else None
        if shortened is not None and recent is not None:
            shortened = dataclasses.replace(shortened, read=shortened.read._replace(recent=recent))
        self._length, self._positions = longest, shortened

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these rows, in this order, for beam search. Rows may be repeated. The result is in new memory.

        >>> cache, k = KVCache(), torch.randn(2, 1, 5, 16)
        >>> keys, _, _ = cache.append(k, k, Positions.arange(5))
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> torch.equal(cache.append(k[[1, 1, 0], :, :0], k[[1, 1, 0], :, :0], Positions.arange(0))[0], keys[[1, 1, 0]])
        True
        """
        if not self._keys_and_values:
            raise LocantError("got rows to reorder in an empty cache", "call cache.append(k, v, positions) first")
        keys, _ = self._keys_and_values
        require_rows(rows, len(keys), keys.device)
        filled, stores = slice(self._length), list[Tensor]()
        for store in self._keys_and_values:
            new_store = _empty(store, len(rows), store.shape[2])
            as_bytes(new_store)[:, :, filled] = as_bytes(store)[:, :, filled].index_select(0, rows)
            stores.append(new_store)
        self._keys, self._values = stores
        positions, recent = self.positions, self.positions.read.recent
        if positions.batch > 1:
            self._positions = pytree.tree_map_only(Tensor, lambda x: x.index_select(0, rows), positions)
            if recent is not None:
                read = TokenFeatures(recent=recent.index_select(0, rows))
                self._positions = dataclasses.replace(self.positions, read=read)

    def clear(self) -> None:
        """Remove all tokens and free the memory."""
        self._length, self._keys, self._values, self._positions = 0, None, None, None

    def _append_positions(self, positions: Positions) -> Positions:
        """Return the positions of all tokens. New tokens keep their order, because the queries use it.

        If the order of new tokens begins at 0 again, as for an image, the orders of all cached tokens become smaller.
        """
        if self._positions is None:
            return positions
        all_positions = Positions(**join_fields((self._positions, positions)))
        if all_positions.order_or_none is None or not positions.seq_len:
            return all_positions
        shift = all_positions.order[:, self._length] - positions.order[:, 0]
        return dataclasses.replace(all_positions, order_or_none=all_positions.order - shift[:, None])

    def _grow(self, store: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return `store` if `length` tokens fit into it. Otherwise return memory for `max_len` or twice as many."""
        if self.max_len is not None and length > self.max_len:
            got = f"got {length} tokens for a cache of max_len={self.max_len}"
            raise RangeError(got, f"KVCache(max_len={length}), or cache.clear()")
        spare = 1 if self.max_len is None else 0  # a full store would be compiled separately
        if store is not None and length + spare <= store.shape[2]:
            return store
        capacity = length + spare if store is None else max(length + spare, 2 * store.shape[2])
        capacity = capacity if self.max_len is None else self.max_len
        grown = _empty(new, len(new), capacity)
        if store is not None:
            grown[:, :, : self._length] = store[:, :, : self._length]
        return grown


def _empty(like: Tensor, batch: int, capacity: int) -> Tensor:
    with torch.inference_mode(False):  # else it would be read-only outside of inference mode
        return like.new_empty(batch, like.shape[1], capacity, like.shape[3])


class StaticKVCache(FixedCache):
    """One layer's keys and values in memory that never moves. Append rotated keys. Padding is stored as zeros.

    `append` returns the memory itself. Later tokens appear in it, and `truncate` and `reorder` change it. The cache is
    for inference only, and for positions with one axis whose order is their index. `KVCache` supports all positions.

    Args:
        max_len: the number of tokens in a row, padding included.
        batch, kv_heads, head_dim: the shape of the keys.
        value_dim: the width of the values. Default: `head_dim`.
        dtype: the dtype of keys and values.
        device: the device of keys and values.
        max_index: the largest position. Default: ``max_len - 1``.
        encoding: an encoding that reads hidden states (`HiddenBias`). The cache also stores the encoding's features of
            every key.

    >>> cache = StaticKVCache(8, batch=1, kv_heads=2, head_dim=16)
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5))
    >>> keys.shape, k_positions.document, cache.next_positions().index
    (torch.Size([1, 2, 8, 16]), tensor([[ 0,  0,  0,  0,  0, -1, -1, -1]]), tensor([[5]]))
    """

    _REMEDY = "create StaticKVCache(...) with the shape of these keys"

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
        self.max_len = whole("max_len", max_len, 1, remedy="pass the number of tokens of prompt and answer")
        batch = whole("batch", batch, 1, remedy="pass the number of rows")
        super().__init__(
            (batch, self.max_len), 1, self.max_len - 1 if max_index is None else max_index, kv_heads=kv_heads,
            head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=device, encoding=encoding,
        )  # fmt: skip
        self._length = new_memory((), torch.int64, device)

    def __len__(self) -> int:
        """Return the number of filled slots, padding included. This waits for the device."""
        return int(self._length)

    @property
    def positions(self) -> Positions:
        """The positions of all slots."""
        return Positions(self._index, self._document, None, 0, self.max_index, read=TokenFeatures(None, self._read))

    def append(self, k: NewKeys, v: NewValues, positions: Positions) -> tuple[Keys, Values, Positions]:
        """Store new keys and values. Return the keys, values and positions of all slots, filled or not.

        More tokens than `max_len` raise an error on a CPU. Elsewhere, and in compiled code, the host does not know the
        number of tokens. There torch's kernel stops at the first slot out of bounds.
        """
        slots = self._reserve(k, v, positions)
        if slots is not None:
            return self._commit(slots.filled_with(k, v), positions)
        next_slots = self._next_slots(k.shape[2])
        for store, new in zip(self._keys_and_values, zero_padding(positions, k.detach(), v.detach()), strict=True):
            as_bytes(store).index_copy_(2, next_slots, as_bytes(new))
        self._store_positions(positions)
        return self._keys, self._values, self.positions

    def rotate_and_append(
        self,
        rotary: PositionEncoding,
        q: NewQueries,
        k: NewKeys,
        v: NewValues,
        positions: Positions,
        *,
        norm: HeadNorm | None = None,
        inplace: bool = False,
    ) -> tuple[RotatedQueries, RotatedKeys, Values, Positions]:
        """Rotate queries and keys and store the new tokens, as `KVCache.rotate_and_append` does."""
        return self._rotate_and_append(rotary, q, k, v, positions, norm, inplace)

    def _reserve(self, k: Tensor, v: Tensor, positions: Positions) -> NewSlots | None:
        """Return the memory of the next slots, or ``None`` if the host does not know where it is."""
        self._require_tokens(k, v, positions)
        on_host = host_can_read(self._length)
        start, n = len(self) if on_host else 0, k.shape[2]
        if start + n > self.max_len:
            tokens = f"{start} and {n} more" if on_host else str(n)
            got = f"got {tokens} tokens for a cache of max_len={self.max_len}"
            raise RangeError(got, "use a larger max_len, or call clear()")
        if not on_host:
            return None
        keys, values = (store[:, :, start : start + n] for store in self._keys_and_values)
        return NewSlots(keys, values, (self._keys, self._values), self.positions)

    def _commit(self, slots: NewSlots, positions: Positions) -> tuple[Tensor, Tensor, Positions]:
        slots.zero_padding(positions)
        self._store_positions(positions)
        return *slots.stores, slots.all_positions

    def _store_positions(self, positions: Positions) -> None:
        rows, next_slots = positions.expand(len(self._keys)), self._next_slots(positions.seq_len)
        self._index.index_copy_(1, next_slots, rows.index)
        self._document.index_copy_(1, next_slots, rows.document)
        if self._read is not None and rows.read.of_key is not None:
            self._read.index_copy_(1, next_slots, rows.read.of_key.detach())
        self._length.add_(positions.seq_len)

    def _next_slots(self, n: int) -> Int[Tensor, " n"]:
        return self._length + torch.arange(n, device=self._length.device)

    def next_positions(self, n: int = 1) -> Positions:
        """Return the `n` positions after the last real token of every row, in that token's document."""
        return dataclasses.replace(positions_after(self.positions, token_count("n", n)), max_index=self.max_index)

    def truncate(self, length: Length) -> None:
        """Remove all tokens after the first `length` slots, padding included, such as draft tokens that were rejected.

        `length` may be one number for each row. Then the longest row determines the slot of the next token, and removed
        tokens of other rows become padding. In compiled code, pass a tensor, because each ``int`` would compile a new
        program.

        >>> cache, k = StaticKVCache(8, batch=2, kv_heads=1, head_dim=16), torch.randn(2, 1, 5, 16)
        >>> _ = cache.append(k, k, Positions.arange(5))
        >>> cache.truncate(torch.tensor([3, 4]))
        >>> len(cache), cache.next_positions().index.tolist()
        (4, [[3], [4]])
        """
        lengths = check_lengths(length, self._length, len(self._keys), self._keys.device)
        removed = torch.arange(self.max_len, device=lengths.device) >= lengths[:, None]
        for store in self._keys_and_values:
            zero_slots(store, removed)
        self._document.masked_fill_(removed, PADDING)
        self._length.copy_(torch.minimum(self._length, lengths.amax()))

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Replace all rows by these rows, in this order, for beam search. Rows may be repeated. The memory stays."""
        require_rows(rows, len(self._keys), self._keys.device)
        if len(rows) != len(self._keys):
            got = f"got {len(rows)} rows for a cache of {len(self._keys)}, whose size is fixed"
            raise ShapeError(got, "pass as many rows, repeat some of them, or use KVCache()")
        for store in self._stores:
            store.copy_(store.index_select(0, rows))

    def clear(self) -> None:
        """Remove all tokens. The memory stays allocated."""
        for store in self._stores:
            store.zero_()
        self._length.zero_()
        self._document.fill_(PADDING)
