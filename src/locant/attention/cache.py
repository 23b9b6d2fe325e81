"""`KVCache`: the keys and values of tokens already read, and their positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import shape_error, whole
from locant.attention.inputs import zero_padding
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import Positions
from locant.positions.checks import token_count
from locant.positions.documents import PADDING
from locant.positions.positions import require_positions
from locant.tensors import require_tensor

__all__ = ["KVCache", "following", "require_alike", "require_tokens"]


class KVCache:
    """One layer's keys and values, for decoding. Keys go in rotated, so that no step rotates them again.

    It grows, and so does what every step returns. Compiled, four or five programs serve a prompt and every length after
    it, up to eight where the prompt is shorter than 16 tokens; `StaticKVCache` has one shape, for CUDA graphs.

    Padding is stored as zeros. Memory doubles as it fills, or is taken once where `max_len` is given. For inference
    only: what is stored has no gradient.

    Args:
        max_len: the most tokens it may hold; default: no limit.

    >>> cache = KVCache()
    >>> k = v = torch.randn(1, 2, 5, 16)
    >>> keys, values, k_positions = cache.append(k, v, Positions.arange(5))
    >>> keys.shape, k_positions, cache.next_positions()
    (torch.Size([1, 2, 5, 16]), Positions(1x5, 0..4), Positions(1x1, 5..5))
    """

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
        require_tokens(k, v, positions)
        for name, store, new in (("keys", self._keys, k), ("values", self._values, v)):
            if store is not None:
                require_alike(name, store, new, "one KVCache() per layer and batch, or cache.clear()")
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
        with torch.inference_mode(False):  # or it could not be written to outside of inference mode
            grown = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
        if store is not None:
            grown[:, :, : self._length] = store[:, :, : self._length]
        return grown


# ---------------------------------------------------------------------- for every cache


def following(cached: Positions, n: int) -> Positions:
    """The `n` positions after the last real token of every row, in that token's document; without asking a device.

    Among images and videos, ``(time, row, column)``, text goes on behind the largest index of its document.
    """
    if cached.axes != 3:
        cached.require_single_axis("KVCache.next_positions")
    real = cached.document != PADDING
    slots = torch.arange(cached.seq_len, device=cached.device)
    last = torch.where(real, slots, 0).amax(1, keepdim=True)
    steps, parts = torch.arange(1, n + 1, device=cached.device), cached.denominator
    known, last_document = real.any(1, keepdim=True), cached.document.gather(1, last)
    if cached.axes == 1:
        index = cached.index.gather(1, last)
    else:
        index = torch.where(cached.document == last_document, cached.index.amax(2), -parts).amax(1, keepdim=True)
    document = torch.where(known, last_document, 0).expand(-1, n)
    order = None if cached.order_or_none is None else cached.order.amax(1, keepdim=True) + steps
    low = None if cached.min_index is None else min(cached.min_index, 0)
    high = None if cached.max_index is None else max(cached.max_index, -1) + n * parts
    index = torch.where(known, index, -parts) + steps * parts
    index = index if cached.axes == 1 else index[..., None].expand(-1, -1, cached.axes)
    following = Positions.of(index, order=order, max_index=high, denominator=parts)
    return dataclasses.replace(following, document_or_none=document, min_index=low)


def require_tokens(k: Any, v: Any, positions: Any) -> None:
    """Raise unless these are keys, values and positions of the same tokens, without a gradient."""
    for name, x in (("k", k), ("v", v)):
        require_tensor(name, x)
        if x.ndim != 4:
            raise shape_error(name, x, "(batch, kv_heads, new, head_dim)", f"{name}[None]")
    if k.dtype != v.dtype or not k.is_floating_point():
        raise ShapeError(f"got keys of {k.dtype} and values of {v.dtype}, expected one floating dtype", "v.to(k)")
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"got keys {tuple(k.shape)} and values {tuple(v.shape)}, expected the same tokens",
            "cache.append(k, v, positions) with k and v of the same layer and step",
        )
    require_positions(positions)
    kept = [k, v] if positions.as_key is None else [k, v, positions.as_key]
    if torch.is_grad_enabled() and any(x.requires_grad for x in kept):
        raise LocantError(
            "got keys or values that require a gradient, the cache keeps none",
            "with torch.no_grad():, or attend() without a cache",
        )
    positions.require_fits(k.shape[0], k.shape[2], k.device, "k")


def require_alike(name: str, store: Tensor, new: Tensor, remedy: str) -> None:
    """Raise unless `new` has the batch, heads, width, dtype and device of what is stored."""
    same = store.shape[:2] == new.shape[:2] and store.shape[3] == new.shape[3]
    if not same or store.dtype != new.dtype or store.device != new.device:
        raise ShapeError(
            f"got {name} {tuple(new.shape)} {new.dtype} on {new.device}, "
            f"the cache holds {tuple(store.shape)} {store.dtype} on {store.device}",
            remedy,
        )
