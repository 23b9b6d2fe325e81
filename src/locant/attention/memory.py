"""What KV caches share: which tokens they take, what follows them, and memory that is taken once."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import MAX_INT32, shape_error, whole
from locant.errors import LocantError, RangeError, ShapeError
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import PADDING
from locant.positions.positions import require_positions
from locant.spelling import dtype_name
from locant.tensors import as_dtype, bounds, readable, require_tensor

Length = int | Int[Tensor, " batch"]
"""Of all rows, or of each."""
NewKeys = Float[Tensor, "batch kv_heads new head_dim"]
NewValues = Float[Tensor, "batch kv_heads new value_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Values = Float[Tensor, "batch kv_heads key value_dim"]


class Cache:
    """One layer's keys and values of tokens already read: the base of all caches.

    For inference only: what is stored has no gradient.
    """

    REMEDY: str
    """For keys and values of another kind than those stored."""

    @property
    def _pair(self) -> tuple[Tensor, ...]:
        """Where keys and values are stored; nothing before there are any."""
        raise NotImplementedError

    def _like(self, store: Tensor, new: Tensor) -> Tensor:
        """What is stored, in the shape in which new tokens come."""
        return store

    def _require_tokens(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        """Raise unless these are keys, values and positions of the same tokens, and of the kind that is stored."""
        for name, x in (("k", k), ("v", v)):
            require_tensor(name, x)
            if x.ndim != 4:
                raise shape_error(name, x, "(batch, kv_heads, new, head_dim)", f"{name}[None]")
        if k.dtype != v.dtype or not k.is_floating_point():
            got = f"got keys of {dtype_name(k.dtype)} and values of {dtype_name(v.dtype)}"
            raise ShapeError(f"{got}, expected one floating dtype", "v.to(k)")
        if k.shape[:3] != v.shape[:3]:
            got = f"got keys {tuple(k.shape)} and values {tuple(v.shape)}, expected the same tokens"
            raise ShapeError(got, "cache.append(k, v, positions) with k and v of the same layer and step")
        require_positions(positions)
        read = positions.read.of_key
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, v, read)):
            got = "got keys or values that require a gradient, the cache keeps none"
            raise LocantError(got, "with torch.no_grad():, or attend() without a cache")
        positions.require_fits(k.shape[0], k.shape[2], k.device, "k")
        for name, store, new in zip(("keys", "values"), self._pair, (k, v), strict=False):
            like = self._like(store, new)
            same = like.shape[:2] == new.shape[:2] and like.shape[3] == new.shape[3]
            if not same or like.dtype != new.dtype or like.device != new.device:
                held = f"the cache holds {tuple(like.shape)} {dtype_name(like.dtype)} on {like.device}"
                got = f"got {name} {tuple(new.shape)} {dtype_name(new.dtype)} on {new.device}"
                raise ShapeError(f"{got}, {held}", self.REMEDY)


class FixedCache(Cache):
    """Memory that is taken once: keys, values, positions and what was read, of `tokens` in two dimensions.

    These are rows and slots, or blocks and places; behind `heads_at` of them comes the dimension of heads.
    """

    def __init__(
        self, tokens: tuple[int, int], heads_at: int, max_index: int, *, kv_heads: int, head_dim: int,
        value_dim: int | None, dtype: torch.dtype | str, device: torch.device | str | None,
        encoding: PositionEncoding | None,
    ) -> None:  # fmt: skip
        kv_heads = whole("kv_heads", kv_heads, 1, remedy="the number of key heads")
        head_dim = whole("head_dim", head_dim, 1, remedy="the width of a key")
        value_dim = whole("value_dim", head_dim if value_dim is None else value_dim, 1, remedy="the width of a value")
        self.max_index = whole("max_index", max_index, 0, MAX_INT32, remedy="the largest position there will be")
        dtype = as_dtype(dtype) if isinstance(dtype, str) else dtype
        of_heads = (*tokens[:heads_at], kv_heads, *tokens[heads_at:])
        self._keys = new_memory((*of_heads, head_dim), dtype, device)
        self._values = new_memory((*of_heads, value_dim), dtype, device)
        self._index = new_memory(tokens, torch.int64, device)
        self._document = new_memory(tokens, torch.int64, device).fill_(PADDING)
        self._read = None if encoding is None else _memory_of_read(encoding, tokens, device)

    @property
    def _pair(self) -> tuple[Tensor, ...]:
        return self._keys, self._values

    @property
    def _stores(self) -> list[Tensor]:
        """All that is kept of tokens, in a dtype that torch can copy."""
        read = () if self._read is None else (self._read,)
        return [as_bytes(store) for store in (*self._pair, self._index, self._document, *read)]

    def _require_tokens(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        super()._require_tokens(k, v, positions)
        if positions.axes != 1 or positions.order_or_none is not None:
            got = f"got positions of {positions.axes} axes with an order of their own, expected one axis and none"
            raise LocantError(got, "KVCache(), which takes them")
        if positions.read.of_key is None and self._read is not None:
            raise LocantError("got positions of which no encoding has read", "encoding.read(x, positions)")
        if positions.read.of_key is not None and self._read is None:
            got = "got positions with what an encoding has read of hidden states"
            raise LocantError(got, "KVCache(), or encoding=encoding where the cache is made")
        if positions.max_index is not None and positions.max_index > self.max_index:
            got = f"got positions up to {positions.max_index} for a cache of max_index={self.max_index}"
            raise RangeError(got, f"max_index={positions.max_index}")


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Zeros that may be written to in and outside of inference mode, and that CUDA graphs need not copy."""
    with torch.inference_mode(mode=False):
        memory = torch.zeros(shape, dtype=dtype, device=device)
    if memory.device.type == "cuda":
        from torch._dynamo import mark_static_address  # takes a second, and only here is it needed

        mark_static_address(memory, guard=False)
    return memory


def _memory_of_read(
    encoding: PositionEncoding, tokens: tuple[int, int], device: torch.device | str | None
) -> Tensor | None:
    """Memory for what is read of so many keys, as one of them has it; ``None`` where nothing is."""
    with torch.no_grad():
        where = next(encoding.parameters(), torch.empty(0)).device
        one = torch.zeros(1, 1, getattr(encoding, "d_model", 1), device=where)
        read = encoding.read(one, Positions.arange(1, device=one.device)).read.of_key
    return None if read is None else new_memory((*tokens, *read.shape[2:]), read.dtype, device)


def as_bytes(x: Tensor) -> Tensor:
    """`x`, or the bytes of 8-bit floats, which torch can copy and no more."""
    return x if x.dtype.itemsize > 1 or not x.is_floating_point() else x.view(torch.uint8)


def padded(store: Tensor, padding: Tensor) -> None:
    """Zeros in all heads where there is padding."""
    as_bytes(store).masked_fill_(padding[:, None, :, None], 0)


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
    has_tokens, document = real.any(1, keepdim=True), cached.document.gather(1, last)
    if cached.axes == 1:
        index = cached.index.gather(1, last)
    else:
        index = torch.where(cached.document == document, cached.index.amax(2), -parts).amax(1, keepdim=True)
    index = torch.where(has_tokens, index, -parts) + steps * parts
    index = index if cached.axes == 1 else index[..., None].expand(-1, -1, cached.axes)
    order = None if cached.order_or_none is None else cached.order.amax(1, keepdim=True) + steps
    low = None if cached.min_index is None else min(cached.min_index, 0)
    high = None if cached.max_index is None else max(cached.max_index, -1) + n * parts
    following = Positions.of(index, order=order, max_index=high, denominator=parts)
    document = torch.where(has_tokens, document, 0).expand(-1, n)
    return dataclasses.replace(following, document_or_none=document, min_index=low)


def require_numbers(name: str, x: Any, count: int | None, device: torch.device) -> None:
    """Raise unless these are whole numbers where keys are: so many, or any number of them."""
    require_tensor(name, x)
    if x.dtype != torch.int64 or x.device != device:
        got = f"got {name} of {dtype_name(x.dtype)} on {x.device}, expected int64 on {device}"
        raise ShapeError(got, f"{name}.to({str(device)!r}, torch.int64)")
    if x.ndim != 1 or count not in (None, len(x)):
        expected = "one dimension" if count is None else f"({count},)"
        raise shape_error(name, x, expected, "one number for each row")


def require_rows(rows: Any, held: int, device: torch.device) -> None:
    """Raise unless these are numbers of rows that are here, as far as the host can read them."""
    require_numbers("rows", rows, None, device)
    low, high = bounds(rows)
    if low is not None and high is not None and len(rows) and not 0 <= low <= high < held:
        got = f"got rows with {low if low < 0 else high}, expected 0 to {held - 1}"
        raise RangeError(got, "torch.arange(batch) for all in their order")


def lengths_of(length: Any, held: int | Tensor, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
    """How many tokens of every row stay; raises where there are not so many, as far as the host can read."""
    if isinstance(length, Tensor):
        require_numbers("length", length, batch, device)
        lengths = length
    else:
        length = whole("length", length, 0, MAX_INT32, remedy="how many tokens stay")
        lengths = torch.full((batch,), length, device=device)
    if readable(lengths) and (isinstance(held, int) or readable(held)):
        outside = (lengths < 0) | (lengths > held)
        if bool(outside.any()):
            row = int(outside.nonzero()[0, 0])
            there = held if isinstance(held, int) else int(held.expand(batch)[row])
            raise RangeError(f"got length {int(lengths[row])} for row {row}, which has {there}", f"0 to {there}")
    return lengths
