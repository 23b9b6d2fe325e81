"""What windows are cut from: arrays, tensors, lists and mapped files, and no more read than asked for."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.kernels import native
from locant.text import Batch, Tokenizer, Windows
from locant.text.store import ShardWriter, TokenStore, write_manifest
from tests.refusal import refuses
from tests.text.windows.definition import PAD


class TestTheSource:
    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.uint32, np.int64, ">u2", ">i4"])
    def test_of_any_integers_is_widened_right(self, dtype: str) -> None:
        top = int(min(np.iinfo(dtype).max, 2**40))
        item = Windows(np.array([0, 1, top, top - 1], dtype=dtype), 3)[0]
        assert item["ids"].tolist() == [0, 1, top]
        assert item["targets"].tolist() == [1, top, top - 1]

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.uint16])
    def test_may_be_a_tensor(self, dtype: torch.dtype) -> None:
        assert Windows(torch.tensor([3, 200, 5], dtype=dtype), 2)[0]["targets"].tolist() == [200, 5]

    def test_is_not_copied(self) -> None:
        ids = np.zeros(1000, dtype=np.uint16)
        windows = Windows(ids, 10)
        ids[:] = 7
        assert windows[-2]["ids"].unique().tolist() == [7]

    @pytest.mark.parametrize(
        ("ids", "error"),
        [
            (np.zeros((2, 3), dtype=int), ShapeError), (np.array(5), ShapeError), (np.zeros(5), ShapeError),
            (torch.zeros(5), ShapeError), ([1.5, 2.5], ShapeError), (["a", "b"], ShapeError),
            ([True, False], ShapeError), ([[1, 2], [3]], ShapeError), ([2**70, 1], ShapeError), ("text", ShapeError),
            (None, ShapeError), ([], InputError), (np.zeros(0, dtype=np.uint16), InputError), ([7], InputError),
        ],
    )  # fmt: skip
    def test_that_is_none_is_refused(self, ids: object, error: type[LocantError]) -> None:
        with refuses(error, "got ", ", expected "):
            Windows(ids, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "ids",
        [
            torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bool),
            torch.zeros(5, dtype=torch.int64, device="meta"), torch.zeros(5, dtype=torch.int64).to_sparse(),
            np.zeros(5, dtype="timedelta64[s]"), np.ma.masked_equal(np.arange(5), 3), {1: 2}, {1, 2}, iter([1, 2]),
            b"abc", [None, 1], [-(2**63), 2**63],
        ],
    )  # fmt: skip
    def test_of_an_odd_kind_is_refused_with_a_reason(self, ids: object) -> None:
        with refuses(ShapeError, "got ids ", ", expected one axis of integers"):
            Windows(ids, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, ">i4"])
    @pytest.mark.parametrize("mode", ["flat", "document", "packed"])
    @pytest.mark.parametrize("is_native", [True, False])
    def test_with_a_negative_id_is_refused_when_it_is_read(
        self, dtype: str, mode: Any, is_native: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not is_native:
            monkeypatch.setattr(native, "function", lambda _: None)
        ids = np.array([1, 2, 3, 4, -5, 6], dtype=dtype)
        windows = Windows(ids, 2, mode=mode, documents=None if mode == "flat" else [0, 3, 6])
        assert windows[0]["ids"].tolist() == [1, 2]
        with refuses(RangeError, "got token id -5, expected 0 or more"):
            windows[1]

    def test_of_a_list_is_looked_through_at_once(self) -> None:
        with refuses(RangeError, "got token id -1"):
            Windows([3, -1, 5], 2)
        with refuses(RangeError, f"got token id {2**63 + 1}, expected less than 2**63"):
            Windows([2**63, 2**63 + 1], 2)

    def test_of_ids_that_no_int64_holds_is_refused_and_does_not_wrap(self) -> None:
        windows = Windows(np.array([1, 2, 2**63 - 1, 4, 2**63, 6], dtype=np.uint64), 2)
        assert windows[0]["targets"].tolist() == [2, 2**63 - 1]
        with refuses(RangeError, f"got token id {2**63}"):
            windows[1]


def resident_pages() -> int:
    """Of this process, with those of mapped files; 0 where the system does not say it."""
    facts = Path("/proc/self/statm")
    return int(facts.read_text().split()[1]) if facts.exists() else 0


class TestAMappedFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
        return tmp_path / "ids.bin"

    def test_is_opened_again_by_a_worker_and_not_sent(self, path: Path, tmp_path: Path) -> None:
        mapped = np.memmap(path, np.uint16, "r")
        np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint16))
        sources = {
            "whole": mapped,
            "part": mapped[100:900],
            "part of a part": mapped[50:][50:900],
            "as an array": np.asarray(mapped)[100:900],
            "behind a header": np.load(tmp_path / "ids.npy", mmap_mode="r")[100:900],
            "with an offset": np.memmap(path, np.uint16, "r", offset=200, shape=(800,)),
        }
        for name, source in sources.items():
            windows = Windows(source, 7)
            sent = ForkingPickler.dumps(windows)
            assert len(sent) < 1500, name
            again = ForkingPickler.loads(sent)
            assert len(again) == len(windows)
            assert torch.equal(again.__getitems__([0, -1])["ids"], windows.__getitems__([0, -1])["ids"]), name

    def test_is_sent_where_it_is_not_one_stretch_of_the_file(self, path: Path) -> None:
        mapped = np.memmap(path, np.uint16, "r")
        for name, ids in {"every second": mapped[::2], "backwards": mapped[::-1], "a copy": np.array(mapped)}.items():
            again = ForkingPickler.loads(ForkingPickler.dumps(Windows(ids, 3)))
            assert torch.equal(again[5]["ids"], Windows(ids, 3)[5]["ids"]), name

    def test_is_sent_where_it_was_changed_in_memory_only(self, path: Path) -> None:
        mapped = np.memmap(path, np.uint16, "c")
        mapped[0] = 4242
        assert ForkingPickler.loads(ForkingPickler.dumps(Windows(mapped, 3)))[0]["ids"][0] == 4242

    def test_of_more_than_2_to_the_32_tokens_is_not_loaded(self, tmp_path: Path) -> None:
        """A sparse file of 8.6 GB: neither copied, nor read into memory as the map of a file."""
        n, path = 2**32 + 11, tmp_path / "sparse.bin"
        with path.open("wb") as file:
            try:
                file.truncate(2 * n)
            except OSError as error:
                pytest.skip(f"this disk holds no sparse file: {error}")
            file.seek(2 * (n - 3))
            file.write(np.array([65535, 7, 9], dtype=np.uint16).tobytes())
        resident = resident_pages()
        tracemalloc.start()
        windows = Windows(np.memmap(path, np.uint16, "r"), 1024)
        again = ForkingPickler.loads(ForkingPickler.dumps(windows))
        last = again.__getitems__([0, len(again) // 2, -1])
        copied = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert copied < 1_000_000
        assert resident_pages() - resident < 50_000
        assert len(windows) == 2**22 + 1
        assert last["ids"][2].tolist()[:11] == [0] * 8 + [65535, 7, 0]
        assert last["targets"][2].tolist()[:12] == [0] * 7 + [65535, 7, 9, PAD, PAD]


Make = Callable[[list[list[int]]], TokenStore]
"""A store with one shard for each list, of documents of these lengths; its ids count up."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(shards: list[list[int]]) -> TokenStore:
        tokenizer, records, first = Tokenizer.bytes(), [], 0
        for number, lengths in enumerate(shards):
            with ShardWriter(tmp_path, number, tokenizer.vocab_size) as writer:
                writer.append(np.arange(first, first + sum(lengths)) % 256, np.array(lengths, dtype=np.int64))
                records.append(writer.close())
            first += sum(lengths)
        write_manifest(tmp_path, shards=records, tokenizer=tokenizer, end_of_text=None, sources=[], options={})
        return TokenStore(tmp_path)

    return made


def same(one: Batch, other: Batch) -> bool:
    return (
        torch.equal(one["ids"], other["ids"])
        and torch.equal(one["targets"], other["targets"])
        and one["positions"] == other["positions"]
    )


SHARDS = [[5, 0, 30, 1], [2], [1], [7, 9, 40, 3], [0], [12]]


@pytest.mark.parametrize("way", ["native", "mapped", "read"])
@pytest.mark.parametrize("mode", ["flat", "document", "packed"])
def test_windows_of_a_store_are_those_of_its_ids(
    make: Make, monkeypatch: pytest.MonkeyPatch, way: str, mode: Any
) -> None:
    store = TokenStore(make(SHARDS).path, mode="read" if way == "read" else "map")
    if way == "mapped":
        monkeypatch.setattr(native, "function", lambda _: None)
    documents = None if mode == "flat" else np.cumsum([0, *itertools.chain(*SHARDS)])
    for length in (1, 4, 16, 200):
        windows = Windows(store, length, mode=mode)
        wanted = Windows(np.arange(110) % 256, length, mode=mode, documents=documents)
        assert len(windows) == len(wanted)
        order = np.random.default_rng(0).permutation(len(windows))
        assert same(windows.__getitems__(order), wanted.__getitems__(order))
        assert all(same(windows[index], wanted[index]) for index in order[:20])
        assert same(windows.__getitems__([]), wanted.__getitems__([]))
        Windows(TokenStore(store.path), length, mode=mode).loader(2).load_state_dict(windows.loader(2).state_dict())


def test_shards_are_mapped_when_the_first_batch_is_read(make: Make) -> None:
    store = make([[50]] * 6)
    windows, early = Windows(TokenStore(store.path), 8), Windows(store, 8)
    wanted = early.__getitems__(range(len(early)))
    (store.path / "shard-00003.bin").unlink()
    with pytest.raises(InputError, match=r"shard-00003\.bin"):
        windows.__getitems__([7])
    assert same(early.__getitems__(range(len(early))), wanted), "what is mapped stays"


def test_all_windows_over_one_store_share_its_maps(make: Make) -> None:
    store = make([[50]] * 6)
    several = [Windows(store, length) for length in (4, 8, 16)]
    for windows in several:
        windows[0]
    assert maps_of(store) == 6
    kept = several.pop()
    del several, windows
    gc.collect()
    assert maps_of(store) == 6, "as long as anyone looks at them"
    assert same(kept[0], Windows(np.arange(300) % 256, 16)[0])
    del kept
    gc.collect()
    assert maps_of(store) == 0, "and no longer"
    assert same(Windows(store, 8)[5], Windows(np.arange(300) % 256, 8)[5])


def maps_of(store: TokenStore) -> int:
    return Path("/proc/self/maps").read_text().count(f"{store.path}/")


def test_a_store_is_opened_again_by_a_worker_and_not_sent(make: Make) -> None:
    windows = Windows(make([[4000, 3000], [2000]]), 16, mode="document")
    sent = ForkingPickler.dumps(windows)
    assert len(sent) < 3000
    assert same(ForkingPickler.loads(sent).__getitems__([3, -1]), windows.__getitems__([3, -1]))
    whole = [batch["ids"] for batch in windows.loader(32)]
    assert all(map(torch.equal, whole, [batch["ids"] for batch in windows.loader(32, num_workers=2)]))


def test_a_state_of_another_store_is_refused(make: Make, tmp_path: Path) -> None:
    state = Windows(make([[60], [50]]), 7).loader(2).state_dict()
    for file in tmp_path.iterdir():
        file.unlink()
    other = Windows(make([[60], [49, 1]]), 7).loader(2)
    with refuses(InputError, "got a state of windows"):
        other.load_state_dict(state)


def test_documents_may_be_others_than_those_of_the_store(make: Make) -> None:
    store = make([[60], [50]])
    windows = Windows(store, 100, mode="document", documents=[0, 50, 110])
    assert windows.__getitems__([0, 1])["positions"].max_index == 58
    with refuses(InputError, "got documents in flat mode"):
        Windows(store, 100, documents=[0, 110])


def test_a_store_without_two_tokens_is_refused(make: Make) -> None:
    with refuses(InputError, "got 1 tokens, expected 2 or more"):
        Windows(make([[0], [1]]), 4)


def test_a_negative_id_of_a_foreign_store_is_refused(tmp_path: Path) -> None:
    np.array([3, 4, -1, 5], dtype=np.int32).tofile(tmp_path / "ids.bin")
    windows = Windows(TokenStore(tmp_path / "ids.bin", format="nanogpt", dtype="int32"), 1)
    assert windows[0]["targets"].tolist() == [4]
    with refuses(RangeError, "got token id -1"):
        windows[1]
