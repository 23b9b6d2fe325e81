"""The rows of a safetensors file in another order, written while it is read: one head in memory, and never a tensor.

Names, dtypes, shapes, offsets and metadata do not change, so the header is written as it was read, byte for byte. What
a byte means is not looked at either: a dtype that torch cannot read is moved like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from locant.checkpoints.layout import row_order
from locant.checkpoints.safetensors_header import Header, TensorEntry
from locant.errors import InputError
from locant.kernels.rotary import Layout
from locant.models.projections import HeadRows

__all__ = ["CHUNK", "write_reordered"]

CHUNK = 2**20
"""Bytes that are copied at once where nothing changes its place."""


def write_reordered(
    source: IO[bytes],
    target: IO[bytes],
    header: Header,
    moves: Mapping[str, Sequence[HeadRows]],
    to: Layout,
    progress: Callable[[int], None],
) -> None:
    """Write what `header` was read from to `target`, with the rows of the tensors in `moves` in the order of `to`.

    `progress` is given the number of bytes after each write.
    """
    target.write(header.raw)
    source.seek(len(header.raw))
    for tensor in header.tensors:
        heads = moves.get(tensor.name)
        for data in _copied(source, tensor.num_bytes) if heads is None else _moved(source, tensor, heads, to):
            target.write(data)
            progress(len(data))


def _copied(source: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        data = _exactly(source, min(num_bytes, CHUNK))
        num_bytes -= len(data)
        yield data


def _moved(source: IO[bytes], tensor: TensorEntry, heads: Sequence[HeadRows], to: Layout) -> Iterator[bytes]:
    """One head after the other; what is not rotated is copied."""
    rows = sum(part.rows for part in heads)
    size, rest = divmod(tensor.num_bytes, rows)
    if rest:
        raise InputError(f"got {tensor.name} of {tensor.dtype}, whose rows are no whole bytes", "a wider dtype")
    for part in heads:
        if not part.rotated:
            yield from _copied(source, part.rows * size)
            continue
        order = row_order(part, to)
        for _ in range(part.count):
            head = memoryview(_exactly(source, part.width * size))
            yield b"".join(head[row * size : (row + 1) * size] for row in order)


def _exactly(source: IO[bytes], num_bytes: int) -> bytes:
    data = source.read(num_bytes)
    if len(data) != num_bytes:
        raise InputError(
            f"{source.name} ended while it was read: {num_bytes - len(data)} bytes are missing",
            "a file that nobody writes to",
        )
    return data
