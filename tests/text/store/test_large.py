"""Stores that are larger than 32 bits can count, or have very many shards: sparse files, which take no room."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from locant.text.store import TokenStore, export_store, write_manifest
from tests.text.store.made import BYTES, LENGTHS, MADE_UP, MARKS, TOTAL, make_large
from tests.text.store.other_programs import megatron_reader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_large(tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize("mode", ["map", "read"])
def test_every_place_beyond_32_bits_is_the_right_one(folder: Path, mode: str) -> None:
    store = TokenStore(folder, mode=mode)
    assert len(store) == 2 * TOTAL > 2**33
    for place, mark in MARKS.items():
        assert store[place] == store[TOTAL + place] == store[place - TOTAL] == mark
    assert store[2**32 - 2 : 2**32 + 4].tolist() == [0, 4, 5, 0, 6, 0]
    assert store[TOTAL - 2 : TOTAL + 2].tolist() == [0, 7, 1, 0]
    assert store.documents.tolist() == np.cumsum([0, *LENGTHS, *LENGTHS]).tolist()


def test_megatron_finds_the_same_places(folder: Path) -> None:
    theirs = megatron_reader(folder / "shard-00000")
    assert theirs.sequence_lengths.tolist() == LENGTHS
    assert theirs[2].tolist() == TokenStore(folder)[2**32 - 2 : 2**32 + 3].tolist() == [0, 4, 5, 0, 6]
    assert theirs[5].tolist() == [0] * 8 + [7]


def test_opening_parses_no_source_of_very_many(tmp_path: Path) -> None:
    """Many small files make most of a manifest, which would take several times its size as objects."""
    piece = {"start": 0, "stop": 9, "sha256": MADE_UP}
    sources = [{"path": f"{number}.txt", "size": 9, "pieces": [piece]} for number in range(5_000)]
    write_manifest(tmp_path, shards=[], tokenizer=BYTES, end_of_text=None, sources=sources, options={})
    size = (tmp_path / "store.json").stat().st_size
    assert size > 500_000
    tracemalloc.start()
    store = TokenStore(tmp_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < size / 4
    assert peak < 1.5 * size
    assert store.manifest.sources == sources


def test_exporting_takes_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locant.text.store.formats.base.BLOCK", 10_000)
    peaks = []
    for tokens in (1_000_000, 3_000_000):
        np.zeros(tokens, dtype=np.uint16).tofile(tmp_path / "a.bin")
        store = TokenStore(tmp_path / "a.bin", format="nanogpt", tokenizer=BYTES)
        tracemalloc.start()
        export_store(store, tmp_path / str(tokens), to="nanogpt")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
