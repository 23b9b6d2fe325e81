"""`StaticKVCache`: a KV cache of one shape, for compiled decoding and CUDA graphs.

`KVCache` returns as many keys as there are, so every step has another shape. Here keys, values and positions are
always returned whole; slots that nothing was written to are padding, which no query attends to. Where to write is a
number on the device. So a step has the same shapes and addresses as the one before, asks the device nothing, and can be
compiled as one graph, captured and replayed. The price is attention over all `max_len` slots, filled or not.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import whole
from locant.attention.inputs import zero_padding
from locant.attention.memory import (
    FixedCache,
    Length,
    as_bytes,
    following,
    lengths_of,
    new_memory,
    padded,
    require_rows,
)
from locant.errors import RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.checks import token_count
from locant.positions.documents import PADDING
from locant.positions.fields import Read
from locant.tensors import readable

__all__ = ["StaticKVCache"]


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
        dtype: torch.dtype = torch.float32,
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

    def append(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new value_dim"],
        positions: Positions,
    ) -> tuple[Float[Tensor, "batch kv_heads key head_dim"], Float[Tensor, "batch kv_heads key value_dim"], Positions]:
        """Store new keys and values; returns all slots and their positions, filled or not.

        More tokens than `max_len` are refused on a CPU. Elsewhere, and in compiled code, nobody counts on the host:
        there torch's kernel stops at the first slot out of bounds.
        """
        self._require_tokens(k, v, positions)
        self._require_room(k.shape[2])
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
        """Forget all tokens behind the first `length` slots, padding included: drafts that were not accepted.

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

    def _require_room(self, more: int) -> None:
        if more > self.max_len or (readable(self._length) and int(self._length) + more > self.max_len):
            length = f"{int(self._length)} and {more} more" if readable(self._length) else str(more)
            raise RangeError(
                f"got {length} tokens for a cache of max_len={self.max_len}", "a larger max_len, or clear()"
            )
