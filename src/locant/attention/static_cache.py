"""`StaticKVCache`: a KV cache of one shape, for compiled decoding and CUDA graphs.

`KVCache` returns as many keys as there are, so every step has another shape. Here keys, values and positions are
always returned whole; slots that nothing was written to are padding, which no query attends to. Where to write is a
number on the device. So a step has the same shapes and addresses as the one before, asks the device nothing, and can be
compiled as one graph, captured and replayed. The price is attention over all `max_len` slots, filled or not.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import MAX_INT32, whole
from locant.attention.cache import following, require_alike, require_tokens
from locant.attention.inputs import zero_padding
from locant.errors import LocantError, RangeError
from locant.positions import PositionEncoding, Positions
from locant.positions.checks import token_count
from locant.positions.documents import PADDING
from locant.positions.hidden_bias import HiddenBias
from locant.tensors import readable

__all__ = ["StaticKVCache", "as_bytes", "new_memory", "require_index", "require_plain"]


class StaticKVCache:
    """One layer's keys and values in memory that never moves. Keys go in rotated; padding is stored as zeros.

    What `append` returns is the memory itself, in which later tokens appear. For inference only, and for positions of
    one axis whose order is their index; `KVCache` takes all others.

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
        kv_heads = whole("kv_heads", kv_heads, 1, remedy="the number of key heads")
        head_dim = whole("head_dim", head_dim, 1, remedy="the width of a key")
        value_dim = whole("value_dim", head_dim if value_dim is None else value_dim, 1, remedy="the width of a value")
        largest = self.max_len - 1 if max_index is None else max_index
        self.max_index = whole("max_index", largest, 0, MAX_INT32, remedy="the largest position there will be")
        heads = (batch, kv_heads, self.max_len)
        self._keys = new_memory((*heads, head_dim), dtype, device)
        self._values = new_memory((*heads, value_dim), dtype, device)
        self._index = new_memory((batch, self.max_len), torch.int64, device)
        self._document = new_memory((batch, self.max_len), torch.int64, device).fill_(PADDING)
        self._read = None if encoding is None else memory_of_read(encoding, batch, self.max_len, device)
        self._length = new_memory((), torch.int64, device)

    def __len__(self) -> int:
        """How many slots are filled, padding included; waits for the device."""
        return int(self._length)

    @property
    def positions(self) -> Positions:
        """The positions of all slots."""
        return Positions(self._index, self._document, None, 0, self.max_index, as_key=self._read)

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
        require_tokens(k, v, positions)
        for name, store, new in (("keys", self._keys, k), ("values", self._values, v)):
            require_alike(name, store, new, "StaticKVCache(...) of the shape of these keys")
        require_plain(positions, self._read is not None)
        require_index(positions, self.max_index)
        self._require_room(k.shape[2])
        slots = self._length + torch.arange(k.shape[2], device=k.device)
        for store, new in zip((self._keys, self._values), zero_padding(positions, k.detach(), v.detach()), strict=True):
            as_bytes(store).index_copy_(2, slots, as_bytes(new))
        rows = positions.expand(k.shape[0])
        self._index.index_copy_(1, slots, rows.index)
        self._document.index_copy_(1, slots, rows.document)
        if self._read is not None and rows.as_key is not None:
            self._read.index_copy_(1, slots, rows.as_key.detach())
        self._length.add_(k.shape[2])
        return self._keys, self._values, self.positions

    def next_positions(self, n: int = 1) -> Positions:
        """The `n` positions after the last real token of every row, in that token's document."""
        return dataclasses.replace(following(self.positions, token_count("n", n)), max_index=self.max_index)

    def clear(self) -> None:
        """Forget everything; the memory stays where it is."""
        for store in (self._keys, self._values, self._index, self._read, self._length):
            if store is not None:
                as_bytes(store).zero_()
        self._document.fill_(PADDING)

    def _require_room(self, more: int) -> None:
        if more > self.max_len or (readable(self._length) and int(self._length) + more > self.max_len):
            length = f"{int(self._length)} and {more} more" if readable(self._length) else str(more)
            raise RangeError(
                f"got {length} tokens for a cache of max_len={self.max_len}", "a larger max_len, or clear()"
            )


# ---------------------------------------------------------------------- also for blocks


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Zeros that may be written to in and outside of inference mode, and that CUDA graphs need not copy."""
    with torch.inference_mode(mode=False):
        memory = torch.zeros(shape, dtype=dtype, device=device)
    if memory.device.type == "cuda":
        from torch._dynamo import mark_static_address  # takes a second, and only here is it needed

        mark_static_address(memory, guard=False)
    return memory


def memory_of_read(
    encoding: PositionEncoding, batch: int, max_len: int, device: torch.device | str | None
) -> Tensor | None:
    """Memory for what is read of `max_len` keys, as one of them has it; ``None`` where nothing is."""
    if not isinstance(encoding, HiddenBias):
        return None
    with torch.no_grad():
        one = torch.zeros(1, 1, encoding.d_model, device=next(encoding.parameters()).device)
        read = encoding.read(one, Positions.arange(1, device=one.device)).as_key
    return None if read is None else new_memory((batch, max_len, *read.shape[2:]), read.dtype, device)


def as_bytes(x: Tensor) -> Tensor:
    """`x`, or the bytes of 8-bit floats, which torch can copy and no more."""
    return x if x.dtype.itemsize > 1 or not x.is_floating_point() else x.contiguous().view(torch.uint8)


def require_plain(positions: Positions, keeps_read: bool = False) -> None:
    """Raise where the order of the tokens is another than that of their index, or what was read of them has no room."""
    if positions.axes != 1 or positions.order_or_none is not None:
        raise LocantError(
            f"got positions of {positions.axes} axes with an order of their own, expected one axis and none",
            "KVCache(), which takes them",
        )
    if positions.as_key is None and keeps_read:
        raise LocantError("got positions of which no encoding has read", "encoding.read(x, positions)")
    if positions.as_key is not None and not keeps_read:
        got = "got positions with what an encoding has read of hidden states"
        raise LocantError(got, "KVCache(), or encoding=encoding where the cache is made")


def require_index(positions: Positions, limit: int) -> None:
    """Raise where a position is known to be larger than the cache was told."""
    if positions.max_index is not None and positions.max_index > limit:
        got = f"got positions up to {positions.max_index} for a cache of max_index={limit}"
        raise RangeError(got, f"max_index={positions.max_index}")
