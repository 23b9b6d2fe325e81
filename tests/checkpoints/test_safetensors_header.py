"""A header is believed when every byte of a file has its place, and refused otherwise; `safetensors` is the oracle."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from locant import InputError
from locant.checkpoints.safetensors_header import BITS, Header, read_header
from tests.refusal import refuses

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "a": torch.arange(5.0), "none": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
}  # fmt: skip
FILE = save(TENSORS, metadata={"format": "pt"})
ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


class File(BytesIO):
    """Bytes in memory with what else a file has."""

    name, mode = "some.safetensors", "rb"


def read(content: bytes) -> Header:
    return read_header(File(content), "some.safetensors")


def packed(header: object, data: bytes = b"", *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return struct.pack("<Q", len(text)) + text + data


def test_a_header_says_where_every_tensor_is() -> None:
    header = read(FILE)
    assert FILE.startswith(header.raw)
    assert {tensor.name for tensor in header.tensors} == set(TENSORS)
    for tensor in header.tensors:
        there = TENSORS[tensor.name]
        assert tensor.shape == tuple(there.shape)
        assert FILE[tensor.begin : tensor.end] == there.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert [tensor.begin for tensor in header.tensors] == sorted(tensor.begin for tensor in header.tensors)


def test_a_file_without_tensors_is_a_file() -> None:
    assert read(save({})).tensors == ()
    assert read(packed({})).tensors == ()


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format_is_known(dtype: str) -> None:
    size = 8 * BITS[dtype] // 8
    content = packed({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}, bytes(size))
    assert read(content).tensors[0].num_bytes == size
    with refuses(InputError, "'x' has"):
        read(packed({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, size + 1]}}, bytes(size + 1)))


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes, and no header"),
    "seven bytes": (b"1234567", "7 bytes, and no header"),
    "header longer than the file": (struct.pack("<Q", 100) + b"{}", "100 bytes, and the file has 10"),
    "header of 2^64 - 1 bytes": (b"\xff" * 8 + b"{}", "more than 100000000"),
    "header over the cap": (struct.pack("<Q", 100_000_001) + b"{}", "more than 100000000"),
    "not UTF-8": (packed(None, raw=b'{"\xff": 1}'), "not UTF-8"),
    "not JSON": (packed(None, raw=b"{nonsense}"), "not JSON"),
    "a list": (packed([1]), "not a JSON object"),
    "blanks before": (packed(None, raw=b" {}"), "not a JSON object"),
    "NaN": (packed(None, raw=b'{"x": NaN}'), "NaN, which is not JSON"),
    "deep": (packed(None, raw=b"[" * 100_000), "not JSON"),
    "a number of 5000 digits": (packed(None, raw=b'{"x": ' + b"9" * 5000 + b"}"), "not JSON"),
    "name twice": (
        packed(None, b"12345678", raw=b'{"x": %b, "x": %b}' % ((json.dumps(ONE).encode(),) * 2)), "'x' occurs twice"
    ),
    "key twice": (
        packed(None, b"12345678", raw=b'{"x": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        "'dtype' occurs twice",
    ),
    "metadata that is no map": (packed({"__metadata__": 3}), "metadata"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}}), "metadata"),
    "no offsets": (packed({"x": {"dtype": "F32", "shape": [2]}}), "'x' needs"),
    "one key more": (packed({"x": {**ONE, "more": 1}}, bytes(8)), "'x' needs"),
    "no entry": (packed({"x": 3}), "'x' needs"),
    "unknown dtype": (packed({"x": {**ONE, "dtype": "F33"}}, bytes(8)), "dtype 'F33'"),
    "dtype that is a list": (packed({"x": {**ONE, "dtype": ["F32"]}}, bytes(8)), "dtype ['F32']"),
    "negative shape": (packed({"x": {**ONE, "shape": [-2]}}, bytes(8)), "shape [-2]"),
    "boolean shape": (packed({"x": {**ONE, "shape": [True, 2]}}, bytes(8)), "shape [True, 2]"),
    "fractional shape": (packed({"x": {**ONE, "shape": [2.0]}}, bytes(8)), "shape [2.0]"),
    "shape that is a number": (packed({"x": {**ONE, "shape": 2}}, bytes(8)), "shape 2"),
    "three offsets": (packed({"x": {**ONE, "data_offsets": [0, 4, 8]}}, bytes(8)), "data_offsets [0, 4, 8]"),
    "offsets backwards": (packed({"x": {**ONE, "data_offsets": [8, 0]}}, bytes(8)), "-8 bytes"),
    "too few bytes for the shape": (packed({"x": {**ONE, "shape": [3]}}, bytes(8)), "8 bytes for F32 of shape [3]"),
    "a shape that overflows": (packed({"x": {**ONE, "shape": [2**62, 2**62]}}, bytes(8)), "too large for any file"),
    "offsets that overflow": (packed({"x": {**ONE, "data_offsets": [0, 2**64]}}, bytes(8)), "expected lists of sizes"),
    "a gap at the start": (packed({"x": {**ONE, "data_offsets": [4, 12]}}, bytes(12)), "'x' leaves a gap"),
    "a gap between": (
        packed({"x": ONE, "y": {**ONE, "data_offsets": [12, 20]}}, bytes(20)), "'y' leaves a gap before it"
    ),
    "an overlap": (packed({"x": ONE, "y": {**ONE, "data_offsets": [4, 12]}}, bytes(12)), "'y' overlaps"),
    "the same bytes twice": (packed({"x": ONE, "y": ONE}, bytes(8)), "'y' overlaps"),
    "bytes that are missing": (packed({"x": ONE}, bytes(7)), "tensors end at byte"),
    "bytes that belong to nothing": (packed({"x": ONE}, bytes(9)), "tensors end at byte"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_and_named(fault: str) -> None:
    content, words = FAULTS[fault]
    with refuses(InputError, "some.safetensors is no intact safetensors file", words):
        read(content)


def test_every_truncation_is_refused() -> None:
    for length in range(len(FILE)):
        with refuses(InputError, "some.safetensors"):
            read(FILE[:length])


def accepted(content: bytes) -> dict[str, torch.Tensor] | None:
    try:
        return load(content)
    except SafetensorError:
        return None


def require_no_more_trust_than_the_reference(content: bytes) -> None:
    try:
        header = read(content)
    except InputError:
        return
    theirs = accepted(content)
    assert theirs is not None, "we accept what safetensors refuses"
    assert {t.name: (t.shape, t.num_bytes) for t in header.tensors} == {
        name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in theirs.items()
    }


def test_every_single_bit_flip_is_refused_or_means_the_same_to_safetensors() -> None:
    size = 8 + struct.unpack("<Q", FILE[:8])[0]
    for place in range(size):
        for bit in range(8):
            flipped = bytearray(FILE)
            flipped[place] ^= 1 << bit
            require_no_more_trust_than_the_reference(bytes(flipped))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.sampled_from(["F32", "BF16", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=4,
)
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BF16", "U8"]), "shape": st.lists(st.integers(0, 3), max_size=2),
    "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2),
})  # fmt: skip


@given(st.dictionaries(st.sampled_from("xyz"), ENTRY | JSON, max_size=3), st.integers(0, 24))
def test_a_made_up_header_is_refused_or_means_the_same_to_safetensors(header: dict[str, Any], size: int) -> None:
    require_no_more_trust_than_the_reference(packed(header, bytes(size)))
