"""`TokenStore`: files that read as one array."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import pickle
import resource
import shutil
import tracemalloc
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant import InputError, LocantError, RangeError
from locant.text.store import FileRecord, ShardRecord, TokenStore, write_manifest
from locant.text.store import store as store_module
from locant.text.store.store import FAILED, map_side_by_side
from tests.refusal import refuses
from tests.text.store.made import BYTES, SHARDS, TOKENS, make, write_shard

PLACES = st.none() | st.integers(-len(TOKENS) - 3, len(TOKENS) + 3)
STEPS = st.none() | st.integers(-4, 4).filter(bool)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    folder = tmp_path_factory.mktemp("store")
    make(folder)
    return [TokenStore(folder), TokenStore(folder, mode="read")]


@given(start=PLACES, stop=PLACES, step=STEPS)
def test_every_slice_is_that_of_one_array(
    stores: list[TokenStore], start: int | None, stop: int | None, step: int | None
) -> None:
    for store in stores:
        got = store[start:stop:step]
        assert got.dtype == np.uint16
        assert got.tolist() == TOKENS[start:stop:step].tolist()


STEPPED = [slice(None, None, 10**6), slice(2**25 + 5, 17, -(10**6)), slice(9, 10**6, 7), slice(-1, None, -(2**70))]


@pytest.mark.parametrize("mode", ["map", "read"])
def test_a_slice_with_steps_costs_what_it_touches(tmp_path: Path, mode: str) -> None:
    """Four shards of 32 MB each that are holes but for a few ids, and some more are asked for."""
    size = 2**24
    folder, wanted = tmp_path / "store", np.zeros(4 * size, dtype=np.uint16)
    wanted[[0, 10**6, 2**25 + 5, 2**25 + 5 - 10**6, 9 + 7 * 11, -1]] = range(1, 7)
    sparse_store(folder, wanted.reshape(4, size))
    store = TokenStore(folder, mode=mode)
    for places in STEPPED:
        tracemalloc.start()
        got = store[places]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(got, wanted[places])
        assert peak < 3 * got.nbytes + 2**18, "what lies between is not copied"


def sparse_store(folder: Path, shards: np.ndarray) -> None:
    """A store whose hashes are made up, and whose zeros take no room."""
    folder.mkdir()
    idx = write_shard(folder, 0, [[]]).idx
    records = []
    for number, ids in enumerate(shards):
        with (folder / f"shard-{number:05d}.bin").open("wb") as file:
            file.truncate(ids.nbytes)
            for place in np.flatnonzero(ids).tolist():
                file.seek(place * ids.itemsize)
                file.write(ids[place].tobytes())
        (folder / f"shard-{number:05d}.idx").write_bytes(bytes(idx.size))
        record = FileRecord(size=ids.nbytes, sha256="0" * 64)
        records.append(ShardRecord(tokens=len(ids), documents=1, bin=record, idx=idx))
    write_manifest(folder, shards=records, tokenizer=BYTES, end_of_text=None, sources=[], options={})


def test_every_place_is_that_of_one_array(stores: list[TokenStore]) -> None:
    for store in stores:
        assert len(store) == len(TOKENS)
        assert [store[i] for i in range(-len(TOKENS), len(TOKENS))] == [*TOKENS.tolist(), *TOKENS.tolist()]
        assert list(store) == TOKENS.tolist()
        assert type(store[np.int64(2)]) is int
        for outside in (len(TOKENS), -len(TOKENS) - 1):
            with refuses(RangeError, str(outside), "13 tokens"):
                store[outside]


def test_it_is_an_array_for_numpy_and_torch(stores: list[TokenStore]) -> None:
    for store in stores:
        assert np.array_equal(np.asarray(store), TOKENS)
        assert np.asarray(store, dtype=np.int64).dtype == np.int64
        assert torch.tensor(np.asarray(store, dtype=np.int64)).tolist() == TOKENS.tolist()


def test_documents_are_those_that_were_written(stores: list[TokenStore]) -> None:
    lengths = [len(document) for shard in SHARDS for document in shard]
    for store in stores:
        assert store.documents.dtype == np.int64
        assert store.documents.tolist() == [0, *np.cumsum(lengths).tolist()]
        assert store.documents is store.documents
        with pytest.raises(ValueError, match="read-only"):
            store.documents[0] = 1


def test_shards_are_the_arrays_behind_it(stores: list[TokenStore]) -> None:
    store, read = stores
    assert store.shard_starts.tolist() == [0, 4, 4, 10, 10, 13]
    assert [shard.tolist() for shard in store.shards] == [list(chain.from_iterable(shard)) for shard in SHARDS]
    assert store.shards[-1].tolist() == [9, 9, 255]
    assert [shard.tolist() for shard in store.shards[3:]] == [[], [9, 9, 255]]
    with pytest.raises(IndexError):
        store.shards[5]
    with refuses(InputError, "mode 'read'"):
        read.shards[0]


def test_a_slice_of_one_shard_is_a_view_that_cannot_be_written_to(stores: list[TokenStore]) -> None:
    whole = stores[0].shards[2]
    assert np.shares_memory(stores[0][4:10], whole)
    with pytest.raises(ValueError, match="read-only"):
        stores[0][5:9][0] = 1
    assert not np.shares_memory(stores[0][3:9], whole)


def test_a_slice_outlives_its_store_and_its_file(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    slices = [store[5:9] for _ in range(3)]
    shutil.rmtree(tmp_path / "store")
    del store
    gc.collect()
    assert [part.tolist() for part in slices] == [TOKENS[5:9].tolist()] * 3


@pytest.mark.parametrize("mode", ["map", "read"])
def test_more_shards_than_file_descriptors(tmp_path: Path, mode: str) -> None:
    make(tmp_path / "store", [[[k % 250]] for k in range(40)])
    store = TokenStore(tmp_path / "store", mode=mode)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, used + 10), hard))
    try:
        kept = list(store.shards) if mode == "map" else []
        assert store[:].tolist() == [k % 250 for k in range(40)]
        store.verify()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == (40 if mode == "map" else 0)


def test_what_it_knows(tmp_path: Path) -> None:
    source = {"path": "a.txt", "size": 3}
    store = make(tmp_path / "store", end_of_text=256, sources=[source], options={"separator": None})
    assert (store.dtype, store.vocab_size, store.end_of_text) == (np.dtype("<u2"), 257, 256)
    assert store.tokenizer.fingerprint == BYTES.fingerprint
    assert (store.path / "tokenizer.json").read_text("utf-8") == BYTES.to_json()
    assert (store.manifest.sources, store.manifest.options) == ([source], {"separator": None})
    assert make(tmp_path / "other").end_of_text is None
    said = json.loads((store.path / "store.json").read_text())
    assert (said["tokens"], said["documents"], said["complete"]) == (13, 8, True)
    assert (said["end_of_text"], said["end_of_text_appended"]) == (256, True)


def test_a_store_without_shards(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [])
    store.verify()
    assert (len(store), store[:].tolist(), store.documents.tolist(), list(store)) == (0, [], [0], [])


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "store")
    monkeypatch.chdir(tmp_path / "store")
    with refuses(InputError, "got '' as a store, expected a path"):
        TokenStore("")
    assert len(TokenStore(".")) == len(TOKENS)


def test_sources_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "store", sources=[{"path": "a.txt"}])
    monkeypatch.chdir(tmp_path)
    store = TokenStore("store")
    monkeypatch.chdir(tmp_path / "store")
    assert store.manifest.sources == [{"path": "a.txt"}]


def test_equality_is_that_of_the_manifests(tmp_path: Path) -> None:
    first, same = make(tmp_path / "a"), make(tmp_path / "b")
    other, sources = make(tmp_path / "c", [[[1]]]), make(tmp_path / "d", sources=[{"path": "x"}])
    assert first == same
    assert hash(first) == hash(same)
    assert first != other
    assert first != sources
    assert first != TOKENS.tolist()
    assert first.fingerprint == same.fingerprint == sources.fingerprint
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint != make(tmp_path / "e", end_of_text=256).fingerprint


@pytest.mark.parametrize("mode", ["map", "read"])
def test_it_is_pickled_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    make(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    store = TokenStore("store", mode=mode)
    assert store[:].tolist() == TOKENS.tolist()
    data = pickle.dumps(store)
    assert len(data) < 1000
    monkeypatch.chdir("/")
    again = pickle.loads(data)  # noqa: S301  # our own
    assert (again, again.mode) == (store, mode)
    assert again[:].tolist() == store[:].tolist() == TOKENS.tolist()
    shutil.rmtree(tmp_path / "store")
    make(tmp_path / "store", [[[1, 2]]])
    with refuses(InputError, "was rewritten"):
        pickle.loads(data)  # noqa: S301


def test_a_store_that_is_not_finished_is_none(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [[1]])
    with refuses(InputError, "no finished store", "store.json", "locant prepare"):
        TokenStore(tmp_path)
    for path in (tmp_path / "nowhere", tmp_path / "shard-00000.bin"):
        with refuses(InputError, str(path), "not a folder"):
            TokenStore(path)


def test_a_finished_store_is_not_written_over(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    before = (store.path / "store.json").read_bytes()
    with refuses(InputError, "finished store"):
        write_shard(store.path, 0, [[1]])
    with refuses(InputError, "another finished store"):
        write_manifest(store.path, shards=[], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    assert (store.path / "store.json").read_bytes() == before
    store.verify()


def test_the_same_manifest_may_be_written_again(tmp_path: Path) -> None:
    records = [write_shard(tmp_path, 0, [[1]])]
    for _ in range(2):
        write_manifest(tmp_path, shards=records, tokenizer=BYTES, end_of_text=None, sources=[], options={})
    assert TokenStore(tmp_path)[:].tolist() == [1]


def test_a_manifest_is_not_written_for_shards_that_are_not_there(tmp_path: Path) -> None:
    record = write_shard(tmp_path, 0, [[1]])
    with refuses(InputError, "shard-00001.bin"):
        write_manifest(tmp_path, shards=[record, record], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    (tmp_path / "shard-00000.idx").write_bytes(b"")
    with refuses(InputError, "shard-00000.idx", "0 bytes"):
        write_manifest(tmp_path, shards=[record], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    with refuses(RangeError, "257", "end_of_text"):
        write_manifest(tmp_path, shards=[], tokenizer=BYTES, end_of_text=257, sources=[], options={})
    assert not (tmp_path / "store.json").exists()


def test_no_manifest_is_written_that_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    file = FileRecord(size=2, sha256="0" * 64)
    shards = [ShardRecord(tokens=2, documents=1, bin=file, idx=file)]
    for change, words in (
        ({"options": {"a": float("nan")}}, "not JSON"),
        ({"options": {"a": Path("/")}}, "not JSON"),
        ({"options": {"a": deep}}, "not JSON"),
        ({"options": {"1": 0, 1: 0}}, "occurs twice"),
        ({"shards": shards}, "do not fit"),
        ({"sources": [1]}, "sources"),
    ):
        parts = {"shards": [], "tokenizer": BYTES, "end_of_text": None, "sources": [], "options": {}, **change}
        with refuses(InputError, words):
            write_manifest(tmp_path, **parts)
    monkeypatch.setattr("locant.text.store.formats.locant.MAX_MANIFEST_BYTES", 100)
    with refuses(InputError, "more than 100"):
        write_manifest(tmp_path, shards=[], tokenizer=BYTES, end_of_text=None, sources=[], options={})
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_maps_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux allows 65 530 maps; beyond that, its error, and not an address that is none."""
    store = make(tmp_path / "store")
    refusing = SimpleNamespace(mmap=lambda *_: (ctypes.set_errno(errno.ENOMEM), FAILED)[1], munmap=None)
    monkeypatch.setattr(store_module, "_LIBC", refusing)
    with refuses(InputError, "shard-00000.bin", os.strerror(errno.ENOMEM), "mode='read'"):
        store[0]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mode": "mmap"}, RangeError, ["'mmap'", "'map'"]),
        ({"mode": np.array(["map", "a"])}, RangeError, ["mode", "'map'"]),
        ({"format": "parquet"}, RangeError, ["'parquet'", "nanogpt"]),
        ({"format": []}, RangeError, ["store format []", "nanogpt"]),
        ({"dtype": "uint16"}, InputError, ["dtype"]),
        ({"tokenizer": BYTES}, InputError, ["tokenizer"]),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, options: dict[str, object], kind: type[LocantError], words: list[str]
) -> None:
    make(tmp_path / "store")
    with refuses(kind, *words):
        TokenStore(tmp_path / "store", **options)


@pytest.mark.parametrize("tokens", [[0], [1], [0, 0], [5, 0, 2048, 2049, 2047, 0, 1, 6000]])
def test_shards_lie_side_by_side_in_one_array(tmp_path: Path, tokens: list[int]) -> None:
    shards = [np.arange(count, dtype=np.uint16) + number for number, count in enumerate(tokens)]
    paths = []
    for number, shard in enumerate(shards):
        paths.append(str(tmp_path / f"{number}.bin"))
        shard.tofile(paths[-1])
    array, begins = map_side_by_side(paths, np.dtype("<u2"), tokens)
    assert not array.flags.writeable
    assert len(begins) == len(tokens) + 1
    for shard, begin in zip(shards, begins.tolist(), strict=False):
        assert array[begin : begin + len(shard)].tolist() == shard.tolist()


def test_what_cannot_be_mapped_side_by_side_leaves_no_map(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    np.zeros(5000, dtype=np.uint16).tofile(paths[0])
    with refuses(InputError, "b.bin", "No such file"):
        map_side_by_side(paths, np.dtype("<u2"), [5000, 7])
    np.zeros(6, dtype=np.uint16).tofile(paths[1])
    with refuses(InputError, "b.bin has 12 bytes, expected 14"):
        map_side_by_side(paths, np.dtype("<u2"), [5000, 7])
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
