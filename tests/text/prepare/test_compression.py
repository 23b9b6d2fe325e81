"""How compressed files are read, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from locant.errors import InputError
from locant.text.prepare.byte_ranges import Tally, cut
from locant.text.prepare.readers import documents
from locant.text.prepare.sources import find_sources
from tests.text.prepare.corpus import texts

zstandard = pytest.importorskip("zstandard")  # an independent writer; pyarrow reads

GZIP = gzip.compress(b"one\n" * 50, mtime=0) + gzip.compress(b"two", mtime=0)

ZSTD = (
    zstandard.ZstdCompressor(write_checksum=True).compress(b"one\n" * 50)
    + b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame to skip
    + zstandard.ZstdCompressor().compress(b"two")
)

ENDS = {"gz": {len(gzip.compress(b"one\n" * 50, mtime=0))}, "zst": set[int]()}

ENDS["zst"] = {len(ZSTD) - len(zstandard.ZstdCompressor().compress(b"two")) - skipped for skipped in (0, 11)}


@pytest.mark.parametrize(("suffix", "data"), [("gz", GZIP), ("zst", ZSTD)])
class TestCompressed:
    def test_is_read_to_the_end_of_its_last_member(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        (tmp_path / f"a.txt.{suffix}").write_bytes(data)
        assert texts(tmp_path) == [b"one\n" * 50 + b"two"]
        (byte_range,) = cut(find_sources(tmp_path)[0], 5)
        tally = Tally()
        assert [*documents(byte_range, tally)]
        assert (tally.bytes, tally.sha256) == (len(data), hashlib.sha256(data).hexdigest())

    def test_that_breaks_off_anywhere_is_an_error(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        path = tmp_path / f"a.txt.{suffix}"
        for size in range(len(data)):
            path.write_bytes(data[:size])
            if size not in ENDS[suffix]:  # a file of one member less
                with pytest.raises(InputError, match=r"a\.txt\.\w+ is not a complete"):
                    texts(path)

    def test_that_is_followed_by_something_else_is_an_error(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(data + b"something else")
        with pytest.raises(InputError, match="is not a complete"):
            texts(path)

    def test_with_a_flipped_bit_is_an_error_or_the_same(self, tmp_path: Path, suffix: str, data: bytes) -> None:
        if suffix == "zst":  # its second frame has no checksum, as the tool writes by default from a program
            data = zstandard.ZstdCompressor(write_checksum=True).compress(b"one\n" * 50)
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(data)
        whole = texts(path)
        for bit in range(len(data) * 8):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            try:
                found = texts(path)
            except InputError:
                continue
            assert found == whole, bit
