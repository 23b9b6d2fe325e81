"""Damaged stores: every missing or changed byte is found by opening or verifying, with an error of ours."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from locant import InputError
from locant.text.store import TokenStore
from tests.refusal import refuses
from tests.text.store.made import FILES, TOKENS, holding, is_found, mutated

INDEX = FILES[3]


def places(name: str, content: bytes) -> range:
    """Every one; the tokenizer, which only its hash protects, is as long as everything else: `slow` does the rest."""
    return range(0, len(content), 5 if name == "tokenizer.json" else 1)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for size in places(name, content):
        with holding(folder / name, content[:size]), refuses(InputError):
            TokenStore(folder)  # opening is enough
    with holding(folder / name, content + b"\n"), refuses(InputError):
        TokenStore(folder)


def flipped(content: bytes, place: int, mask: int) -> bytes:
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


@pytest.mark.parametrize("name", FILES)
def test_every_changed_byte_is_found(folder: Path, name: str) -> None:
    """One bit of each byte, each bit in turn."""
    content = (folder / name).read_bytes()
    for place in places(name, content):
        with holding(folder / name, flipped(content, place, 1 << place % 8)):
            assert is_found(folder)


MUCH = [pytest.param(name, 2_000, marks=pytest.mark.slow) for name in (FILES[0], FILES[3])]


@pytest.mark.parametrize(("name", "count"), [*((name, 100) for name in FILES), *MUCH])
def test_random_damage_is_found(folder: Path, name: str, count: int) -> None:
    rng, content = random.Random(name), (folder / name).read_bytes()
    for _ in range(count):
        damaged = mutated(content, rng)
        with holding(folder / name, damaged):
            assert is_found(folder) is (damaged != content)


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    before = (folder / "store.json").read_bytes()
    try:
        os.truncate(folder / "store.json", 2**40)
        with refuses(InputError, str(2**40)):
            TokenStore(folder)
    finally:
        (folder / "store.json").write_bytes(before)


@pytest.mark.parametrize("name", [*FILES, "shard-00001.bin"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str) -> None:
    """A pipe would block the reader for ever."""
    kept = folder / "kept"
    (folder / name).rename(kept)
    try:
        with refuses(InputError, name if name != "store.json" else "no finished store"):
            TokenStore(folder)
        for make_it in (os.mkfifo, os.mkdir):
            make_it(folder / name)
            try:
                with refuses(InputError, name):
                    TokenStore(folder)
            finally:
                (folder / name).unlink() if make_it is os.mkfifo else (folder / name).rmdir()
    finally:
        kept.rename(folder / name)


@pytest.mark.parametrize("mode", ["map", "read"])
def test_a_file_that_shrinks_after_the_store_was_opened(folder: Path, mode: str) -> None:
    store = TokenStore(folder, mode=mode)
    with holding(folder / "shard-00002.bin", b"\0\0"), refuses(InputError, "shard-00002.bin"):
        store[4:10]
    with holding(folder / INDEX, b"\0\0"), refuses(InputError, INDEX):
        _ = store.documents
    with holding(folder / "tokenizer.json", b"{}"), refuses(InputError, "tokenizer.json"):
        _ = store.tokenizer
    assert store[:].tolist() == TOKENS.tolist()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_disk_that_fails_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = TokenStore(folder, mode="read")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with refuses(InputError, "shard-00000.bin", os.strerror(errno.EIO)):
        store[0:3]


def test_reads_may_be_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than it was asked for, down to one byte."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, views, at: preadv(handle, [views[0][:1]], at))
    assert TokenStore(folder, mode="read")[:].tolist() == TOKENS.tolist()
