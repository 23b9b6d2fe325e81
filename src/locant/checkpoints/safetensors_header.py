"""The header of a safetensors file, read and checked: a file of which some byte belongs to no tensor is refused.

A file is eight bytes with the length of the header, the header as JSON, and the tensors one after the other in the
order of their offsets, without a gap. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from locant.errors import InputError
from locant.files import FaultError, strict_json

__all__ = ["BITS", "Header", "TensorEntry", "read_header"]

BITS: Mapping[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of an element of each dtype."""

LENGTH = struct.Struct("<Q")
LARGEST = 100_000_000
"""Bytes of a header, as in the reference implementation."""
MAX_SIZE = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: its bytes lie from `begin` to `end`, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Header:
    """What stands before the tensors, byte for byte, and the tensors in the order of the file."""

    raw: bytes
    tensors: tuple[TensorEntry, ...]


def read_header(file: IO[bytes], name: str) -> Header:
    """Read and check the header of a file that is open at its start; errors are `InputError`s that name the file.

    Refused are: names that occur twice, dtypes that are not known, sizes that do not agree with shape and dtype,
    tensors that overlap or leave a gap, bytes that belong to no tensor, a header larger than 100 MB.
    """
    try:
        return _read(file)
    except FaultError as fault:
        raise InputError(f"{name} is no intact safetensors file: {fault}", "a fresh copy of the file") from None


def _read(file: IO[bytes]) -> Header:
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(LENGTH.size)
    if len(start) < LENGTH.size:
        raise FaultError(f"it has {size} bytes, and no header")
    (length,) = LENGTH.unpack(start)
    if length > LARGEST:
        raise FaultError(f"its header has a stated length of {length} bytes, more than {LARGEST}")
    if length > size - LENGTH.size:
        raise FaultError(f"its header has a stated length of {length} bytes, and the file has {size}")
    text = file.read(length)
    fields = strict_json(text, "its header")
    if not text.startswith(b"{"):
        raise FaultError("its header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FaultError("its metadata is not a map of texts")
    first = LENGTH.size + length
    tensors = sorted((_entry(key, value, first) for key, value in fields.items()), key=lambda t: (t.begin, t.end))
    _require_no_gap(tensors, first, size)
    return Header(raw=start + text, tensors=tuple(tensors))


def _entry(name: str, value: object, first: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise FaultError(f"{name!r} needs a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise FaultError(f"{name!r} has dtype {dtype!r}, which is not known")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise FaultError(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}, expected lists of sizes")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits > 8 * MAX_SIZE:
        raise FaultError(f"{name!r} has shape {shape!r}, too large for any file")
    if bits != 8 * (end - begin):
        raise FaultError(f"{name!r} has {end - begin} bytes for {dtype} of shape {shape!r}, which is {bits} bits")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=first + begin, end=first + end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_SIZE for value in values)


def _require_no_gap(tensors: list[TensorEntry], first: int, size: int) -> None:
    """Every byte belongs to one tensor."""
    reached = first
    for tensor in tensors:
        if tensor.begin != reached:
            what = "overlaps the tensor before it" if tensor.begin < reached else "leaves a gap before it"
            raise FaultError(f"{tensor.name!r} {what}")
        reached = tensor.end
    if reached != size:
        raise FaultError(f"its tensors end at byte {reached}, and the file at byte {size}")
