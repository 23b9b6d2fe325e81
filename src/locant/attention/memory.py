"""The common parts of KV caches: checks of new tokens, the positions after them, and memory that is allocated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import MAX_INT32, shape_error, short_repr, whole
from locant.attention.inputs import padding_or_none
from locant.errors import LocantError, RangeError, ShapeError
from locant.kernels.norm_rotary import HeadNorm
from locant.positions import PositionEncoding, Positions
from locant.positions.documents import PADDING
from locant.positions.positions import require_positions
from locant.spelling import dtype_name
from locant.tensors import as_dtype, require_tensor

Length = int | Int[Tensor, " batch"]
"""One length for all rows, or one for each row."""
NewQueries = Float[Tensor, "batch heads new head_dim"]
NewKeys = Float[Tensor, "batch kv_heads new head_dim"]
NewValues = Float[Tensor, "batch kv_heads new value_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Values = Float[Tensor, "batch kv_heads key value_dim"]
RotatedQueries = Float[Tensor, "batch rotated_heads new rotated_dim"]
RotatedKeys = Float[Tensor, "batch kv_heads key rotated_dim"]
"""Rotated queries may have more heads (RoPE++), and both may be wider (PoPE)."""


class NewSlots(NamedTuple):
    """Memory for new tokens, which a cache counts as its own only after `Cache._commit`."""

    keys: NewKeys
    values: NewValues
    stores: tuple[Tensor, Tensor]
    """The memory of all keys and of all values, which contains the new slots."""
    all_positions: Positions
    """The positions of all tokens, the new ones included."""

    def filled_with(self, k: Tensor, v: Tensor) -> NewSlots:
        """Copy keys and values into the slots."""
        self.keys.copy_(k.detach())
        self.values.copy_(v.detach())
        return self

    def zero_padding(self, positions: Positions) -> None:
        """Write zeros to the slots that are padding."""
        if (padding := padding_or_none(positions)) is not None:
            zero_slots(self.keys, padding)
            zero_slots(self.values, padding)


class Cache:
    """The base class of all caches: one layer's keys and values of the tokens already read.

    Caches are for inference only. Stored keys and values have no gradient.
    """

    _REMEDY: str
    """The remedy for new keys and values that do not fit the stored ones."""

    @property
    def _keys_and_values(self) -> tuple[Tensor, ...]:
        """The memory of keys and values, or an empty tuple before the first token."""
        raise NotImplementedError

    def _with_new_dimensions(self, store: Tensor, new: Tensor) -> Tensor:
        """Return stored keys or values with the dimensions of new keys or values."""
        return store

    def _require_tokens(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        """Raise unless these are keys, values and positions of the same tokens and fit the stored ones."""
        for name, x in (("k", k), ("v", v)):
            require_tensor(name, x)
            if x.ndim != 4:
                raise shape_error(name, x, "(batch, kv_heads, new, head_dim)", f"{name}[None]")
        if k.dtype != v.dtype or not k.is_floating_point():
            got = f"got keys of {dtype_name(k.dtype)} and values of {dtype_name(v.dtype)}"
            raise ShapeError(f"{got}, expected one floating dtype", "v.to(k)")
        if k.device != v.device:
            raise ShapeError(f"got keys on {k.device} and values on {v.device}, expected one device", "v.to(k)")
        if k.shape[:3] != v.shape[:3]:
            got = f"got keys {tuple(k.shape)} and values {tuple(v.shape)}, expected the same tokens"
            raise ShapeError(got, "cache.append(k, v, positions) with k and v of the same layer and step")
        require_positions(positions)
        read = positions.read.of_key
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, v, read)):
            got = "got keys or values that require a gradient, which the cache does not keep"
            raise LocantError(got, "use `with torch.no_grad():`, or call attend() without a cache")
        positions.require_fits(k.shape[0], k.shape[2], k.device, "k")
        for name, store, new in zip(("keys", "values"), self._keys_and_values, (k, v), strict=False):
            like = self._with_new_dimensions(store, new)
            (rows, heads, _, width), (new_rows, new_heads, _, new_width) = like.shape, new.shape
            same_shape = (rows, heads, width) == (new_rows, new_heads, new_width)
            if not same_shape or like.dtype != new.dtype or like.device != new.device:
                expected = f"the cache holds {tuple(like.shape)} {dtype_name(like.dtype)} on {like.device}"
                got = f"got {name} {tuple(new.shape)} {dtype_name(new.dtype)} on {new.device}"
                raise ShapeError(f"{got}, {expected}", self._REMEDY)

    def _rotate_and_append(
        self,
        rotary: PositionEncoding,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        norm: HeadNorm | None,
        inplace: bool,
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Positions]:
        """Rotate and append in one pass, if the encoding and the cache can, and otherwise one after the other.

        Everything is checked before the first write. `rows` are further arguments of `append`.
        """
        # `attend` also takes None, which here would hide a missing rotation.
        remedy = "pass an encoding, such as Rotary(head_dim), or PositionEncoding() for no rotation"
        require_encoding("rotary", rotary, remedy)
        require_positions(positions)
        rotate_into = rotary.rotation_into_memory(q, k, positions, norm, inplace=inplace)
        slots = None if rotate_into is None else self._reserve(k, v, positions)
        if rotate_into is None or slots is None:
            q, k = rotary.norm_and_rotate(q, k, positions, norm)
            return q, *self.append(k, v, positions, *rows)
        q = rotate_into(slots.keys, v.detach(), slots.values)
        return q, *self._commit(slots, positions)

    append: Callable[..., tuple[Tensor, Tensor, Positions]]

    def _reserve(self, k: Tensor, v: Tensor, positions: Positions) -> NewSlots | None:
        """Check new tokens and return memory for them, or ``None`` if the host does not know a slice for them."""
        return None

    def _commit(self, slots: NewSlots, positions: Positions) -> tuple[Tensor, Tensor, Positions]:
        """Add filled slots to the cache, and return what `append` returns."""
        raise NotImplementedError


class FixedCache(Cache):
    """A cache that allocates its memory for keys, values, positions and features once.

    `tokens` is the shape of the memory: rows and slots, or blocks and slots. The dimension of heads comes after the
    first `heads_at` of these dimensions.
    """

    def __init__(
        self, tokens: tuple[int, int], heads_at: int, max_index: int, *, kv_heads: int, head_dim: int,
        value_dim: int | None, dtype: torch.dtype | str, device: torch.device | str | None,
        encoding: PositionEncoding | None,
    ) -> None:  # fmt: skip
        kv_heads = whole("kv_heads", kv_heads, 1, remedy="pass the number of key heads")
        head_dim = whole("head_dim", head_dim, 1, remedy="pass the width of a key")
        value_dim = whole(
            "value_dim", head_dim if value_dim is None else value_dim, 1, remedy="pass the width of a value"
        )
        self.max_index = whole("max_index", max_index, 0, MAX_INT32, remedy="pass the largest position")
        dtype = as_dtype(dtype) if isinstance(dtype, str) else dtype
        shape = (*tokens[:heads_at], kv_heads, *tokens[heads_at:])
        self._keys = new_memory((*shape, head_dim), dtype, device)
        self._values = new_memory((*shape, value_dim), dtype, device)
        self._index = new_memory(tokens, torch.int64, device)
        self._document = new_memory(tokens, torch.int64, device).fill_(PADDING)
        if encoding is not None:
            require_encoding("encoding", encoding, "pass the encoding of the model, or None")
        self._read = None if encoding is None else _new_feature_memory(encoding, tokens, device)

    @property
    def _keys_and_values(self) -> tuple[Tensor, ...]:
        return self._keys, self._values

    @property
    def _stores(self) -> list[Tensor]:
        """All memory of tokens, in dtypes that torch can copy."""
        read = () if self._read is None else (self._read,)
        return [as_bytes(store) for store in (*self._keys_and_values, self._index, self._document, *read)]

    def _require_tokens(self, k: Tensor, v: Tensor, positions: Positions) -> None:
        super()._require_tokens(k, v, positions)
        if positions.axes != 1 or positions.order_or_none is not None:
            got = f"got positions with {positions.axes} axes and an explicit order, expected one axis and no order"
            raise LocantError(got, "use KVCache(), which supports them")
        if positions.read.of_key is None and self._read is not None:
            raise LocantError("got positions without features of hidden states", "encoding.read(x, positions)")
        if positions.read.of_key is not None and self._read is None:
            got = "got positions with features that an encoding has read from hidden states"
            raise LocantError(got, "use KVCache(), or pass encoding=encoding when creating the cache")
        if positions.max_index is not None and positions.max_index > self.max_index:
            got = f"got positions up to {positions.max_index} for a cache of max_index={self.max_index}"
            raise RangeError(got, f"max_index={positions.max_index}")


def require_encoding(name: str, value: Any, remedy: str) -> PositionEncoding:
    """Return an encoding. Raise `RangeError` for anything else."""
    if not isinstance(value, PositionEncoding):
        raise RangeError(f"got {short_repr(value)} for {name}, expected a PositionEncoding", remedy)
    return value


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return zeros that are writable in and outside of inference mode and that CUDA graphs do not need to copy."""
    with torch.inference_mode(mode=False):
        memory = torch.zeros(shape, dtype=dtype, device=device)
    if memory.device.type == "cuda":
        from torch._dynamo import mark_static_address  # this import takes a second

        mark_static_address(memory, guard=False)
    return memory


def _new_feature_memory(
    encoding: PositionEncoding, tokens: tuple[int, int], device: torch.device | str | None
) -> Tensor | None:
    """Return memory for the features that an encoding reads for each key, or ``None`` if it does not read any."""
    with torch.no_grad():
        one_token = next(encoding.parameters(), torch.empty(0)).new_zeros(1, 1, getattr(encoding, "d_model", 1))
        features = encoding.read(one_token, Positions.arange(1, device=one_token.device)).read.of_key
    return None if features is None else new_memory((*tokens, *features.shape[2:]), features.dtype, device)


def as_bytes(x: Tensor) -> Tensor:
    """Return `x`, or the bytes of 8-bit floats, because torch can only copy 8-bit floats."""
    return x if x.dtype.itemsize > 1 or not x.is_floating_point() else x.view(torch.uint8)


def zero_slots(store: Tensor, padding: Tensor) -> None:
    """Write zeros to all heads of slots that are padding."""
    as_bytes(store).masked_fill_(padding[:, None, :, None], 0)


def positions_after(cached: Positions, n: int) -> Positions:
    """Return the `n` positions after each row's last real token, in that token's document. Do not wait for the device.

    With images and videos, ``(time, row, column)``, text continues after the largest index of its document.
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
    positions = Positions.of(index, order=order, max_index=high, denominator=parts)
    document = torch.where(has_tokens, document, 0).expand(-1, n)
    return dataclasses.replace(positions, document_or_none=document, min_index=low)
