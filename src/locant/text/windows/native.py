"""Reading slices of ids by ``native/gather.c``: where they lie in memory, and how it is told.

One call for a batch, on one thread unless the batch is large. What it refuses (a slice that is not one of the text, a
negative id) or cannot read (a store that maps nothing, an array with steps) is left to `tokens`, which names the fault.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, cast

import numpy as np
from jaxtyping import Int64, Integer

from locant.kernels import native

__all__ = ["Memory", "gather", "memory_of"]

FUNCTION = "locant_gather"

pack_text = struct.Struct("=6q").pack
"""``Text`` in C."""
pack_batch = struct.Struct("=9q").pack
"""``Batch`` in C."""

Starts = Int64[np.ndarray, " slices"]
Rows = Int64[np.ndarray, "slices length"]


class Memory:
    """Ids of shards in one array: token t of shard s is ``ids[t + shift[s]]``; `starts` has the end as well."""

    def __init__(
        self,
        ids: Integer[np.ndarray, " n"],
        starts: Int64[np.ndarray, " shards_plus_1"],
        shift: Int64[np.ndarray, " shards"],
    ) -> None:
        self._kept = ids, starts, shift  # as long as their addresses are used
        is_signed = ids.dtype.kind == "i"
        where = ids.ctypes.data, ids.itemsize, is_signed, len(shift), starts.ctypes.data, shift.ctypes.data
        self.packed = pack_text(*where)


def memory_of(
    ids: Integer[np.ndarray, " n"], starts: Int64[np.ndarray, " shards_plus_1"], shift: Int64[np.ndarray, " shards"]
) -> Memory | None:
    """Or ``None`` where C cannot read them."""
    plain = ids.flags.c_contiguous and ids.dtype.isnative and native.function(FUNCTION) is not None
    return Memory(ids, starts, shift) if plain else None


def gather(
    memory: Memory | None, starts: Starts, sizes: Starts | None, length: int, *, step: int = 1, pad_id: int = 0
) -> tuple[Rows, ...] | None:
    """Inputs and targets of slices that begin at ``step * starts``, or ``None`` where `tokens` has to read them.

    Where there are `sizes`, so many targets each: rows are filled up to `length` with `pad_id`, and with targets that
    are ignored; the index and the document of each slot come as well.
    """
    count = len(starts)
    if memory is None or not count:
        return None
    shape = count, length
    rows = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    where, given = (0, 0), None
    if sizes is not None:
        rows = *rows, np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        where, given = (address(rows[2]), address(rows[3])), sizes.tobytes()
    threads = native.threads()
    batch = pack_batch(threads, count, step, length, pad_id, address(rows[0]), address(rows[1]), *where)
    refused = native.function(FUNCTION)(memory.packed, batch, starts.tobytes(), given)
    return None if refused else rows


def address(array: np.ndarray) -> int:
    """Half as long as ``array.ctypes.data`` takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, array)))
