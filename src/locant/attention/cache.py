"""`KVCache`: the keys and values of tokens already read, and their positions."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from locant.arguments import whole
from locant.attention.inputs import zero_padding
from locant.attention.memory import Cache, Length, as_bytes, following, lengths_of, padded, require_rows
from locant.errors import LocantError, RangeError
from locant.positions import Positions
from locant.positions.checks import token_count
from locant.positions.documents import PADDING

__all__ = ["KVCache"]


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

    def append(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        positions: Positions,
    ) -> tuple[Float[Tensor, "batch kv_heads key head_dim"], Float[Tensor, "batch kv_heads key value_dim"], Positions]:
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
        """Forget all tokens behind the first `length` slots, padding included: drafts that were not accepted.

        Where rows keep different numbers, one for each, the longest decides how many slots stay, and what other rows
        forget becomes padding behind their last token; the host waits for these numbers. Later tokens are written over
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
        self._keys, self._values = (self._of_rows(store, rows) for store in self._pair)
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
            raise RangeError(
                f"got {length} tokens for a cache of max_len={self.max_len}",
                f"KVCache(max_len={length}), or cache.clear()",
            )
        spare = 1 if self.max_len is None else 0  # a full store is another kind of tensor to a compiler
        if store is not None and length + spare <= store.shape[2]:
            return store
        capacity = length + spare if store is None else max(length + spare, 2 * store.shape[2])
        capacity = capacity if self.max_len is None else self.max_len
        grown = _empty(new, len(new), capacity)
        if store is not None:
            grown[:, :, : self._length] = store[:, :, : self._length]
        return grown

    def _of_rows(self, store: Tensor, rows: Tensor) -> Tensor:
        moved, filled = _empty(store, len(rows), store.shape[2]), slice(self._length)
        as_bytes(moved)[:, :, filled] = as_bytes(store)[:, :, filled].index_select(0, rows)
        return moved


def _empty(like: Tensor, batch: int, capacity: int) -> Tensor:
    with torch.inference_mode(False):  # or it could not be written to outside of inference mode
        return like.new_empty(batch, like.shape[1], capacity, like.shape[3])
