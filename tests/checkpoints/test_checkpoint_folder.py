"""A header is believed when every byte of a file has its place, and refused otherwise."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from locant import InputError
from locant.checkpoints.checkpoint_folder import Header, read_header
from tests.refusal import refuses

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "a": torch.arange(5.0), "none": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
}  # fmt: skip
FILE = save(TENSORS, metadata={"format": "pt"})
ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.safetensors"


def read(path: Path, content: bytes) -> Header:
    path.write_bytes(content)
    return read_header(path)


def packed(header: object, data: bytes = b"", *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return struct.pack("<Q", len(text)) + text + data


def test_a_header_says_where_every_tensor_is(path: Path) -> None:
    header = read(path, FILE)
    assert FILE.startswith(header.raw)
    assert {tensor.name for tensor in header.tensors} == set(TENSORS)
    for tensor in header.tensors:
        there = TENSORS[tensor.name]
        assert tensor.shape == tuple(there.shape)
        assert FILE[tensor.begin : tensor.end] == there.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert [tensor.begin for tensor in header.tensors] == sorted(tensor.begin for tensor in header.tensors)


def test_a_file_without_tensors_is_a_file(path: Path) -> None:
    assert read(path, save({})).tensors == ()
    assert read(path, packed({})).tensors == ()


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F8_E4M3FNUZ", 8), ("BF16", 16), ("C64", 64)])
def test_dtypes_that_torch_may_not_have_are_read(path: Path, dtype: str, bits: int) -> None:
    content = packed({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}, bytes(bits))
    (entry,) = read(path, content).tensors
    assert (entry.dtype, entry.shape, entry.num_bytes) == (dtype, (8,), bits)


FAULTS: dict[str, bytes] = {  # a few: the library knows all of them
    "empty": b"",
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "not JSON": packed(None, raw=b"{nonsense}"),
    "a list": packed([1]),
    "metadata that is no map": packed({"__metadata__": 3}),
    "no offsets": packed({"x": {"dtype": "F32", "shape": [2]}}),
    "unknown dtype": packed({"x": {**ONE, "dtype": "F33"}}, bytes(8)),
    "too few bytes for the shape": packed({"x": {**ONE, "shape": [3]}}, bytes(8)),
    "a shape that overflows": packed({"x": {**ONE, "shape": [2**62, 2**62]}}, bytes(8)),
    "a gap between": packed({"x": ONE, "y": {**ONE, "data_offsets": [12, 20]}}, bytes(20)),
    "an overlap": packed({"x": ONE, "y": {**ONE, "data_offsets": [4, 12]}}, bytes(12)),
    "bytes that are missing": packed({"x": ONE}, bytes(7)),
    "bytes that belong to nothing": packed({"x": ONE}, bytes(9)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_and_named(path: Path, fault: str) -> None:
    with refuses(InputError, "some.safetensors is not an intact safetensors file"):
        read(path, FAULTS[fault])


def test_every_truncation_is_refused(path: Path) -> None:
    for length in range(len(FILE)):
        with refuses(InputError, "some.safetensors"):
            read(path, FILE[:length])
