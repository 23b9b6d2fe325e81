"""Windows over a `TokenStore` are those over its ids in one array, however many shards hold them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError, RangeError
from locant.text import Batch, Tokenizer, Windows
from locant.text.store import ShardWriter, TokenStore, write_manifest
from locant.text.windows.tokens import StoreTokens
from tests.refusal import refuses

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


@pytest.mark.parametrize("mode", ["flat", "document", "packed"])
@pytest.mark.parametrize("length", [1, 4, 16, 200])
def test_windows_of_a_store_are_those_of_its_ids(make: Make, mode: str, length: int) -> None:
    store = make(SHARDS)
    lengths = [length for shard in SHARDS for length in shard]
    documents = None if mode == "flat" else np.cumsum([0, *lengths])
    windows = Windows(store, length, mode=mode)  # type: ignore[arg-type]
    wanted = Windows(np.arange(110) % 256, length, mode=mode, documents=documents)  # type: ignore[arg-type]
    assert len(windows) == len(wanted)
    order = np.random.default_rng(0).permutation(len(windows))
    assert same(windows.__getitems__(order), wanted.__getitems__(order))
    assert all(same(windows[index], wanted[index]) for index in range(len(windows)))
    assert same(windows.__getitems__([]), wanted.__getitems__([]))


class Parts(TokenStore):
    """A store as far as reading needs one, without files."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts, self.dtype = parts, parts[0].dtype
        self.shard_starts = np.cumsum([0, *map(len, parts)])

    can_lie_side_by_side = True  # type: ignore[assignment]

    def side_by_side(self) -> tuple[np.ndarray, np.ndarray]:
        """With numbers between the shards that no token has."""
        gap = np.full(3, -7, dtype=self.dtype)
        begins = np.cumsum([0, *(len(part) + len(gap) for part in self.parts)])
        return np.concatenate([half for part in self.parts for half in (part, gap)]), begins

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def __getitem__(self, index: slice) -> np.ndarray:  # type: ignore[override]
        return np.concatenate(self.parts)[index]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum),
    starts=st.lists(st.integers(0, 10**6), max_size=9),
    width=st.integers(1, 20),
)
def test_slices_are_read_across_any_shards(sizes: list[int], starts: list[int], width: int) -> None:
    n = sum(sizes)
    ids = np.arange(n, dtype=np.int32) * 3
    parts = Parts(np.split(ids, np.cumsum(sizes)[:-1]))
    width = min(width, n)
    begins = np.array([start % (n - width + 1) for start in starts], dtype=np.int64)
    for parts.can_lie_side_by_side in (True, False):
        tokens = StoreTokens(parts)
        first = begins[begins < n]
        assert tokens.rows(first, 1)[:, 0].tolist() == ids[first].tolist()  # what it keeps of one width serves no other
        assert tokens.rows(begins, width).tolist() == [ids[begin : begin + width].tolist() for begin in begins]
        lengths = np.array([start % (width + 1) for start in starts], dtype=np.int64)
        wanted = [
            number for begin, length in zip(begins, lengths, strict=True) for number in ids[begin : begin + length]
        ]
        assert tokens.slices(begins, lengths).tolist() == wanted


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


def test_a_store_that_maps_nothing_is_read_all_the_same(make: Make) -> None:
    store = make(SHARDS)
    reading = TokenStore(store.path, mode="read")
    for mode in ("flat", "document", "packed"):
        one, other = Windows(store, 7, mode=mode), Windows(reading, 7, mode=mode)
        assert same(one.__getitems__(range(len(one))), other.__getitems__(range(len(one))))
        other.loader(2).load_state_dict(one.loader(2).state_dict())


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
