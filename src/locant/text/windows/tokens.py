"""Read token ids from an array or a store, with the same two methods and without a loop over tokens.

`rows` reads slices of one width, and `slices` reads slices of any sizes, one after the other. In an array this is one
fancy index. The shards of a store are mapped side by side into one array with gaps.

``native/gather.c`` is faster. One call reads a batch, on one thread unless the batch is large. It rejects slices
outside the text and negative ids, and it cannot read stores that are not mapped, or arrays with strides. In these cases
the methods of this module are used, and their errors name the fault.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int, Int64, Integer
from torch import Tensor

from locant.errors import InputError, RangeError, ShapeError
from locant.kernels import native
from locant.spelling import dtype_name
from locant.text.store import TokenStore

FUNCTION = "locant_gather"

pack_text = struct.Struct("=6q").pack
"""Pack the struct ``Text`` of C."""
pack_batch = struct.Struct("=9q").pack
"""Pack the struct ``Batch`` of C."""

SAMPLED = 1024  # ids that represent an array in its fingerprint
INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
)

Ids = Integer[np.ndarray, " ids"]
Rows = Integer[np.ndarray, "rows width"]
Places = Int[np.ndarray, " places"]
Starts = Int64[np.ndarray, " slices"]


class Memory(NamedTuple):
    """Ids for C: the struct ``Text``, and the arrays to which it points."""

    packed: bytes
    arrays: tuple[np.ndarray, ...]


def memory_of(
    ids: Integer[np.ndarray, " n"], starts: Int64[np.ndarray, " shards_plus_1"], shift: Int64[np.ndarray, " shards"]
) -> Memory | None:
    """Describe shards in one array for C, or return ``None`` if C cannot read it.

    Token t of shard s is ``ids[t + shift[s]]``.
    """
    if not (ids.flags.c_contiguous and ids.dtype.isnative and native.function(FUNCTION) is not None):
        return None
    is_signed = ids.dtype.kind == "i"
    fields = ids.ctypes.data, ids.itemsize, is_signed, len(shift), starts.ctypes.data, shift.ctypes.data
    return Memory(pack_text(*fields), (ids, starts, shift))


def gather(
    memory: Memory | None, starts: Starts, sizes: Starts | None, length: int, *, step: int = 1, pad_id: int = 0
) -> tuple[Int64[np.ndarray, "slices length"], ...] | None:
    """Return inputs and targets of slices that begin at ``step * starts``, or ``None`` if C cannot read them.

    `sizes` are the numbers of targets of the slices. With `sizes`, rows are padded to `length` with `pad_id` and
    ignored targets, and the index and the document of each slot are returned, too.
    """
    count = len(starts)
    if memory is None or not count:
        return None
    shape = count, length
    rows = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    slots, packed_sizes = (0, 0), None
    if sizes is not None:
        rows = *rows, np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        slots, packed_sizes = (address(rows[2]), address(rows[3])), sizes.tobytes()
    threads = native.threads()
    batch = pack_batch(threads, count, step, length, pad_id, address(rows[0]), address(rows[1]), *slots)
    has_failed = native.function(FUNCTION)(memory.packed, batch, starts.tobytes(), packed_sizes)
    return None if has_failed else rows


def address(array: np.ndarray) -> int:
    """Return the address of an array, in half the time of ``array.ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, array)))


class ArrayTokens:
    """The ids of one array, which may be memory-mapped."""

    def __init__(self, ids: Integer[np.ndarray, " n"]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """A hash of a sample of the ids, which is cheap to compute."""
        places = np.linspace(0, len(self.ids) - 1, min(SAMPLED, len(self.ids))).astype(np.int64)
        return hashlib.blake2b(self.ids[places].astype("<i8").tobytes(), digest_size=16).hexdigest()

    @cached_property
    def memory(self) -> Memory | None:
        """The ids for the native kernel, or ``None`` if it cannot read them."""
        return memory_of(self.ids, np.array([0, len(self.ids)]), np.array([0]))

    def rows(self, starts: Places, width: int) -> Rows:
        """Return the `width` ids that begin at each start. All of them must exist."""
        return np.lib.stride_tricks.sliding_window_view(self.ids, width)[starts]

    def slices(self, starts: Places, sizes: Places) -> Ids:
        """Return the ids of all slices, one after the other."""
        return self.ids[places(starts, sizes)]

    def __getstate__(self) -> dict[str, object]:
        file = _file_behind(self.ids)
        return {"file": file, "ids": None if file else self.ids}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(np.asarray(np.memmap(*state["file"])) if state["file"] else state["ids"])


class StoreTokens:
    """The ids of a store. Its shards are mapped side by side if possible. Otherwise each slice is read separately."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._starts = np.asarray(store.shard_starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def fingerprint(self) -> str:
        return self._store.fingerprint

    @cached_property
    def _mapped(self) -> tuple[Ids, Int64[np.ndarray, " shards"]]:
        """All shards in one array, and the shift of each shard's tokens from the store to this array."""
        ids, begins = self._store.side_by_side()
        return ids[begins[0] :], (begins - begins[0] - self._starts)[:-1]

    @cached_property
    def memory(self) -> Memory | None:
        """The ids for the native kernel, or ``None`` if it cannot read them. This maps all shards."""
        if not self._store.can_lie_side_by_side:
            return None
        ids, shift = self._mapped
        return memory_of(ids, self._starts, shift)

    def rows(self, starts: Places, width: int) -> Rows:
        return self.slices(starts, np.full(len(starts), width)).reshape(len(starts), width)

    def slices(self, starts: Places, sizes: Places) -> Ids:
        if not self._store.can_lie_side_by_side:
            each = zip(starts.tolist(), sizes.tolist(), strict=True)
            parts = [self._store[start : start + size] for start, size in each]
            return np.concatenate([np.zeros(0, dtype=self._store.dtype), *parts])
        ids, shift = self._mapped
        first, last = (
            self._starts.searchsorted(tokens, "right") - 1 for tokens in (starts, starts + np.maximum(sizes - 1, 0))
        )
        num_parts = last - first + 1  # of each slice, which is cut at the ends of shards
        shard = places(first, num_parts)
        begins = np.maximum(np.repeat(starts, num_parts), self._starts[shard])
        ends = np.minimum(np.repeat(starts + sizes, num_parts), self._starts[shard + 1])
        return ids[places(begins + shift[shard], ends - begins)]

    def __getstate__(self) -> dict[str, object]:
        return {"store": self._store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"])


Tokens = ArrayTokens | StoreTokens


def tokens_of(source: Any) -> Tokens:
    """Return the tokens of a store, an array, a tensor or a list. It must have at least two tokens."""
    if isinstance(source, TokenStore):
        tokens = StoreTokens(source)
    else:
        tokens = ArrayTokens(to_one_axis("ids", source))
        if isinstance(source, (list, tuple)):
            require_ids(tokens.ids)  # it is in memory; arrays that may be on disk are checked when they are read
    if len(tokens) < 2:
        raise InputError(f"got {len(tokens)} tokens, expected 2 or more: an input and its target", "use a longer text")
    return tokens


def to_one_axis(name: str, values: Any) -> Integer[np.ndarray, " n"]:
    """Return an array with one axis of integers. It shares the memory of arrays and of tensors on the host."""
    remedy = "pass the array that Tokenizer.encode returns" if name == "ids" else "pass a list of offsets"
    if isinstance(values, Tensor):
        if values.dtype not in INTEGERS or values.layout != torch.strided or values.is_meta:
            kind = f"{dtype_name(values.dtype)} tensor on {values.device}, {values.layout}"
            raise ShapeError(f"got {name} as a {kind}, expected one axis of integers", remedy)
        values = values.detach().cpu().numpy()
    if "numpy.ma" in sys.modules and isinstance(values, np.ma.MaskedArray):  # this does not import the module
        raise ShapeError(f"got {name} as a masked array, expected one axis of integers", "values.compressed()")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise ShapeError(f"got {name} of uneven shape, expected one axis of integers", remedy) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        cause = f"got {name} of shape {array.shape} and dtype {array.dtype}, expected one axis of integers"
        raise ShapeError(cause, remedy)
    return array if array.size else array.astype(np.int64)


def places(starts: Places, sizes: Places) -> Int[np.ndarray, " total"]:
    """Return the range ``start, ..., start + size - 1`` for each start and size, one range after the other."""
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))


def require_ids(ids: Integer[np.ndarray, "*shape"]) -> Integer[np.ndarray, "*shape"]:
    """Raise `RangeError` if an id is negative, or would be negative as int64.

    Ids are not read if their dtype makes this impossible.
    """
    if not ids.size:
        return ids
    if ids.dtype.kind == "i" and ids.min() < 0:
        raise RangeError(f"got token id {ids.min()}, expected 0 or more", "find them with `ids < 0`")
    if ids.dtype.kind == "u" and ids.dtype.itemsize == 8 and ids.max() >= 2**63:
        raise RangeError(f"got token id {ids.max()}, expected less than 2**63", "pass ids as a tokenizer returns them")
    return ids


def _file_behind(array: np.ndarray) -> tuple[Any, ...] | None:
    """Return the arguments of `np.memmap` that open this array in another process, or ``None``.

    The array must be one contiguous slice of a file on disk.
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c" or not array.flags.c_contiguous:
        return None
    return str(root.filename), array.dtype, "r", root.offset + array.ctypes.data - root.ctypes.data, array.shape
