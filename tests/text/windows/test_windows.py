"""Windows: every target once, nothing across documents, and no more read than asked for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset

import locant.text.windows
from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.positions import Positions
from locant.text import IGNORED_TARGET, Batch, Tokenizer, Windows
from tests.refusal import refuses
from tests.text.windows.definition import window_places

PAD = -100


def expected(documents: list[int], length: int, stride: int) -> list[list[int]]:
    return [[target for _, target in window] for window in window_places(documents, length, stride)]


def targets_of(windows: Windows) -> list[list[int]]:
    return [[slot for slot in item["targets"].tolist() if slot != PAD] for item in windows]


def every_target_once(windows: list[list[int]], n: int) -> bool:
    return Counter(slot for row in windows for slot in row) == Counter(range(1, n))


sizes = st.integers(1, 9)


class TestEveryTarget:
    @pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
    def test_is_seen_exactly_once_at_stride_length(self, length: int) -> None:
        for n in range(2, 3 * length + 3):
            windows = Windows(np.arange(n), length)
            assert every_target_once(targets_of(windows), n), f"n={n}"

    @pytest.mark.parametrize("length", [2, 5, 8])
    def test_a_count_that_rounds_down_would_lose_the_last(self, length: int) -> None:
        """The usual ``(n - 1) // length`` windows: the check above must reject them."""
        rejected = []
        for n in range(length + 1, 3 * length + 3):
            usual = [list(range(i * length + 1, (i + 1) * length + 1)) for i in range((n - 1) // length)]
            rejected += [] if every_target_once(usual, n) else [n]
        assert rejected == [n for n in range(length + 1, 3 * length + 3) if (n - 1) % length]

    @given(n=st.integers(2, 40), length=sizes, stride=sizes)
    def test_stands_where_the_definition_puts_it(self, n: int, length: int, stride: int) -> None:
        windows = Windows(np.arange(n), length, stride)
        assert targets_of(windows) == expected([0, n], length, stride)
        assert len(windows) == len(expected([0, n], length, stride))

    @given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), length=sizes, stride=sizes)
    def test_of_a_document_stays_in_its_document(self, lengths: list[int], length: int, stride: int) -> None:
        documents = [0, *np.cumsum(lengths).tolist()]
        wanted = expected(documents, length, stride)
        if not wanted:
            with pytest.raises(InputError):
                Windows(np.arange(documents[-1]), length, stride, "document", documents=documents)
            return
        windows = Windows(np.arange(documents[-1]), length, stride, "document", documents=documents)
        assert targets_of(windows) == wanted
        if stride == length:
            first_of_each = set(documents[:-1])
            seen = Counter(slot for row in targets_of(windows) for slot in row)
            assert seen == Counter(slot for slot in range(documents[-1]) if slot not in first_of_each)

    @given(n=st.integers(2, 40), length=sizes, stride=sizes)
    def test_follows_its_input(self, n: int, length: int, stride: int) -> None:
        for item in Windows(torch.arange(n) * 7, length, stride):
            real = item["targets"] != PAD
            assert torch.equal(item["targets"][real], item["ids"][real] + 7)

    @given(n=st.integers(2, 40), length=sizes, stride=sizes)
    def test_without_what_would_be_filled_up(self, n: int, length: int, stride: int) -> None:
        full = [row for row in expected([0, n], length, stride) if len(row) == length]
        if not full:
            with pytest.raises(
                InputError, match=f"got a longest document of {n} tokens, expected {length + 1} or more"
            ):
                Windows(np.arange(n), length, stride, drop_last=True)
            return
        assert targets_of(Windows(np.arange(n), length, stride, drop_last=True)) == full


class TestAWindow:
    def test_is_a_dict_of_ids_targets_and_positions(self) -> None:
        item = Windows([5, 6, 7, 8, 9], 4)[0]
        assert set(item) == {"ids", "targets", "positions"}
        assert item["ids"].tolist() == [5, 6, 7, 8]
        assert item["targets"].tolist() == [6, 7, 8, 9]
        assert item["ids"].dtype == item["targets"].dtype == torch.int64
        assert item["positions"] == Positions.arange(4)
        assert item["positions"].start == 0

    def test_that_is_not_full_says_so_three_times(self) -> None:
        item = Windows([5, 6, 7], 4, pad_id=9)[0]
        assert item["ids"].tolist() == [5, 6, 9, 9]
        assert item["targets"].tolist() == [6, 7, PAD, PAD]
        assert item["positions"] == Positions.from_mask(torch.tensor([[1, 1, 0, 0]]))
        assert item["positions"].document.tolist() == [[0, 0, -1, -1]]

    def test_has_the_loss_of_its_real_targets_only(self) -> None:
        item = Windows([0, 1, 2], 5)[0]
        logits = torch.randn(5, 3)
        loss = torch.nn.functional.cross_entropy(logits, item["targets"])
        assert loss == torch.nn.functional.cross_entropy(logits[:2], torch.tensor([1, 2]))
        assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_TARGET

    def test_counts_from_0_in_document_mode_too(self) -> None:
        windows = Windows(np.arange(12), 3, mode="document", documents=[0, 5, 12])
        assert [item["positions"].index.tolist()[0][0] for item in windows] == [0] * len(windows)
        assert windows[1]["positions"].document.tolist() == [[0, -1, -1]]

    def test_does_not_share_memory_with_the_text_or_between_inputs_and_targets(self) -> None:
        ids = np.arange(9)
        item = Windows(ids, 4)[0]
        item["ids"].fill_(77)
        assert item["targets"].tolist() == [1, 2, 3, 4]
        item["targets"].fill_(88)
        assert ids.tolist() == list(range(9))

    def test_is_contiguous_so_that_losses_can_be_viewed_flat(self) -> None:
        batch = Windows(np.arange(90), 4).__getitems__([0, 3])
        assert batch["ids"].view(-1).shape == batch["targets"].view(-1).shape == (8,)

    @given(n=st.integers(2, 30), length=sizes, index=st.integers(-40, 40))
    def test_is_found_like_an_item_of_a_list(self, n: int, length: int, index: int) -> None:
        windows = Windows(np.arange(n), length)
        wanted = expected([0, n], length, length)
        if -len(wanted) <= index < len(wanted):
            assert windows[index]["ids"][0] == wanted[index][0] - 1
        else:
            with pytest.raises(IndexError):
                windows[index]
            with pytest.raises(RangeError, match=f"got window {index}, expected one of {len(wanted)}"):
                windows[index]

    def test_takes_numpy_numbers_and_no_floats(self) -> None:
        windows = Windows(np.arange(9), 2)
        assert windows[np.int64(1)]["ids"].tolist() == [2, 3]
        with pytest.raises(TypeError):
            windows[1.0]  # type: ignore[index]


class TestABatch:
    @given(
        n=st.integers(2, 40), length=sizes, stride=sizes, choice=st.lists(st.integers(0, 1000), min_size=1, max_size=6)
    )
    def test_is_its_windows_stacked(self, n: int, length: int, stride: int, choice: list[int]) -> None:
        windows = Windows(np.arange(n, dtype=np.uint16), length, stride)
        indices = [number % len(windows) for number in choice]
        batch = windows.__getitems__(indices)
        items = [windows[index] for index in indices]
        assert torch.equal(batch["ids"], torch.stack([item["ids"] for item in items]))
        assert torch.equal(batch["targets"], torch.stack([item["targets"] for item in items]))
        rows = batch["positions"].expand(len(indices))
        for row, item in enumerate(items):
            assert torch.equal(rows.index[row], item["positions"].index[0])
            assert torch.equal(rows.document[row], item["positions"].document[0])
        assert windows.collate(batch) == batch
        stacked = windows.collate(items)
        assert torch.equal(stacked["ids"], batch["ids"])
        assert torch.equal(stacked["targets"], batch["targets"])
        assert stacked["positions"] == batch["positions"]

    def test_of_full_windows_has_one_row_of_positions(self) -> None:
        windows = Windows(np.arange(30), 4)
        assert windows.__getitems__([0, 1, 2])["positions"] == Positions.arange(4)
        assert windows.__getitems__([0, len(windows) - 1])["positions"].batch == 2

    def test_may_be_empty(self) -> None:
        assert Windows(np.arange(30), 4).__getitems__([])["ids"].shape == (0, 4)

    def test_is_one_read_of_the_array(self) -> None:
        """Batches are fetched whole: a data loader asks once per batch, never per window."""
        calls = []

        class Watched(Windows):
            def __getitems__(self, indices: list[int]) -> Batch:
                calls.append(list(indices))
                return super().__getitems__(indices)

        windows = Watched(np.arange(41), 4)
        list(DataLoader(windows, batch_size=4, collate_fn=windows.collate))
        assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_goes_through_a_data_loader(self, workers: int) -> None:
        windows = Windows(np.arange(50, dtype=np.uint16), 4)
        loader = DataLoader(windows, batch_size=5, collate_fn=windows.collate, num_workers=workers)
        batches = list(loader)
        assert [tuple(batch["ids"].shape) for batch in batches] == [(5, 4), (5, 4), (3, 4)]
        assert all(isinstance(batch["positions"], Positions) for batch in batches)
        assert batches[0]["positions"].batch == 1
        targets = torch.cat([batch["targets"].flatten() for batch in batches])
        assert targets[targets != PAD].tolist() == list(range(1, 50))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_goes_through_a_data_loader_that_knows_nothing_of_windows(self, workers: int) -> None:
        windows = Windows(np.arange(50, dtype=np.uint16), 4)
        told = list(DataLoader(windows, batch_size=5, collate_fn=windows.collate))
        plain = list(DataLoader(windows, batch_size=5, num_workers=workers))
        assert len(told) == len(plain) == 3
        for one, other in zip(told, plain, strict=True):
            assert type(other) is dict
            assert torch.equal(one["ids"], other["ids"])
            assert torch.equal(one["targets"], other["targets"])
            assert one["positions"] == other["positions"]
        both = next(iter(DataLoader(ConcatDataset([windows, windows]), batch_size=30)))
        assert both["ids"].shape == (26, 4)
        assert both["positions"].document[12].tolist() == [0, -1, -1, -1]
        full = next(iter(DataLoader(ConcatDataset([windows, windows]), batch_size=2)))
        assert full["positions"] == Positions.arange(4)

    def test_is_a_dict_without_other_keys(self) -> None:
        batch = Windows(np.arange(9), 4).__getitems__([0])
        assert list(batch) == ["ids", "targets", "positions"]
        with pytest.raises(KeyError, match="labels"):
            batch["labels"]  # type: ignore[typeddict-item]

    def test_has_positions_that_other_batches_share_only_while_they_are_full(self) -> None:
        windows = Windows(np.arange(30), 4)
        assert windows.__getitems__([0])["positions"] is windows.__getitems__([1, 2])["positions"]

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.uint8)])
    def test_may_be_asked_for_with_any_integers(self, kind: type) -> None:
        assert Windows(np.arange(30), 4).__getitems__(kind([3, 1]))["ids"][:, 0].tolist() == [12, 4]

    def test_is_not_made_of_what_is_no_index(self) -> None:
        windows = Windows(np.arange(30), 4)
        odd = locant.text.windows.windows._IndexTypeError
        assert issubclass(odd, TypeError)
        for indices in ([1.0], ["a"], [None], [[0, 1]], [slice(2)], np.zeros(2), torch.zeros(2)):
            with refuses(odd, "for a window, expected an integer"):
                windows.__getitems__(indices)  # type: ignore[arg-type]
        with refuses(odd, "got slice(0, 2, None) for a window"):
            windows[0:2]  # type: ignore[index]
        with refuses(locant.text.windows.windows._WindowError, f"got window {2**70}, expected one of 8"):
            windows.__getitems__([2**70])

    def test_may_come_from_a_subset_or_from_several_texts(self) -> None:
        one, two = Windows(np.arange(9), 4), Windows(np.arange(100, 107), 4)
        subset = next(iter(DataLoader(Subset(one, [1, 0]), batch_size=2, collate_fn=one.collate)))
        assert subset["ids"][:, 0].tolist() == [4, 0]
        both = next(iter(DataLoader(ConcatDataset([one, two]), batch_size=4, collate_fn=one.collate)))
        assert both["ids"][:, 0].tolist() == [0, 4, 100, 104]
        assert both["positions"].document[3].tolist() == [0, 0, -1, -1]

    def test_with_an_index_out_of_range_names_it(self) -> None:
        with pytest.raises(RangeError, match=r"got window 8, expected one of 8; try: 0\.\.7"):
            Windows(np.arange(30), 4).__getitems__([0, 8])

    def test_error_reaches_the_user_of_worker_processes_whole(self) -> None:
        windows = Windows(np.arange(30), 4)
        loader = DataLoader(windows, sampler=[99], batch_size=1, collate_fn=windows.collate, num_workers=1)
        with pytest.raises(LocantError, match="got window 99"):
            next(iter(loader))


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

    def test_may_be_what_a_tokenizer_returns(self) -> None:
        assert bytes(Windows(Tokenizer.bytes().encode("abc"), 2)[0]["targets"].tolist()) == b"bc"

    def test_is_not_copied(self) -> None:
        ids = np.zeros(1000, dtype=np.uint16)
        windows = Windows(ids, 10)
        ids[:] = 7
        assert windows[-2]["ids"].unique().tolist() == [7]

    def test_may_be_strided_reversed_or_read_only(self) -> None:
        ids = np.arange(20)
        ids.flags.writeable = False
        assert Windows(ids[::-2], 3)[0]["ids"].tolist() == [19, 17, 15]

    @pytest.mark.parametrize(
        ("ids", "error"),
        [
            (np.zeros((2, 3), dtype=int), ShapeError),
            (np.array(5), ShapeError),
            (np.zeros(5), ShapeError),
            (torch.zeros(5), ShapeError),
            ([1.5, 2.5], ShapeError),
            (["a", "b"], ShapeError),
            ([True, False], ShapeError),
            ([[1, 2], [3]], ShapeError),
            ([2**70, 1], ShapeError),
            ("text", ShapeError),
            (None, ShapeError),
            ([], InputError),
            (np.zeros(0, dtype=np.uint16), InputError),
            ([7], InputError),
        ],
    )
    def test_that_is_none_is_refused(self, ids: object, error: type[LocantError]) -> None:
        with refuses(error, "got ", ", expected "):
            Windows(ids, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "ids",
        [
            torch.zeros(5, dtype=torch.bfloat16),
            torch.zeros(5, dtype=torch.bool),
            torch.zeros(5, dtype=torch.int64, device="meta"),
            torch.zeros(5, dtype=torch.int64).to_sparse(),
            np.zeros(5, dtype="timedelta64[s]"),
            np.ma.masked_equal(np.arange(5), 3),
            {1: 2},
            {1, 2},
            iter([1, 2]),
            b"abc",
            [None, 1],
            [-(2**63), 2**63],
        ],
    )
    def test_of_an_odd_kind_is_refused_with_a_reason(self, ids: object) -> None:
        with refuses(ShapeError, "got ids ", ", expected one axis of integers"):
            Windows(ids, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, ">i4"])
    @pytest.mark.parametrize("mode", ["flat", "document", "packed"])
    def test_with_a_negative_id_is_refused_when_it_is_read(self, dtype: str, mode: str) -> None:
        ids = np.array([1, 2, 3, 4, -5, 6], dtype=dtype)
        windows = Windows(ids, 2, mode=mode, documents=None if mode == "flat" else [0, 3, 6])  # type: ignore[arg-type]
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

    def test_shorter_than_one_window_gives_one(self) -> None:
        for n in range(2, 11):
            assert len(Windows(np.arange(n), 10)) == 1
        with pytest.raises(InputError, match="got 1 tokens, expected 2 or more: an input and its target"):
            Windows(np.arange(1), 10)


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
        """A sparse file of 8.6 GB, in a process that may not hold a tenth of it."""
        pytest.importorskip("resource")
        n, path = 2**32 + 11, tmp_path / "sparse.bin"
        with path.open("wb") as file:
            try:
                file.truncate(2 * n)
            except OSError as error:
                pytest.skip(f"this disk holds no sparse file: {error}")
            file.seek(2 * (n - 3))
            file.write(np.array([65535, 7, 9], dtype=np.uint16).tobytes())
        code = f"""
import pickle, resource
import numpy as np
from locant.text import Windows
windows = Windows(np.memmap({str(path)!r}, np.uint16, "r"), 1024)
again = pickle.loads(pickle.dumps(windows))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
last = again.__getitems__([0, len(again) // 2, -1])
print(len(windows), last["ids"][2].tolist()[:11], last["targets"][2].tolist()[:12])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200_000)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        ids, targets = [0] * 8 + [65535, 7, 0], [0] * 7 + [65535, 7, 9, PAD, PAD]
        assert done.stdout.splitlines() == [f"{2**22 + 1} {ids} {targets}", "True"]

    @pytest.mark.slow
    def test_goes_to_spawned_workers(self, path: Path) -> None:
        windows = Windows(np.memmap(path, np.uint16, "r"), 100)
        loader = DataLoader(
            windows, batch_size=4, collate_fn=windows.collate, num_workers=2, multiprocessing_context="spawn"
        )
        targets = torch.cat([batch["targets"].flatten() for batch in loader])
        assert targets[targets != PAD].tolist() == list(range(1, 1000))


class TestWhatIsAskedFor:
    def test_an_unknown_mode_is_named(self) -> None:
        with refuses(InputError, "got mode='documents', expected 'flat', 'document' or 'packed'"):
            Windows(np.arange(9), 4, mode="documents")  # type: ignore[arg-type]

    def test_document_mode_needs_documents_and_flat_mode_refuses_them(self) -> None:
        with pytest.raises(InputError, match="without documents"):
            Windows(np.arange(9), 4, mode="document")
        with pytest.raises(InputError, match=r"flat mode.*try: mode='document'"):
            Windows(np.arange(9), 4, documents=[0, 9])

    @pytest.mark.parametrize(
        ("documents", "kind"),
        [
            *((offsets, InputError) for offsets in ([], [0], [9], [0, 8], [1, 9], [0, 5, 4, 9], [0, 10], [-1, 9])),
            *((offsets, ShapeError) for offsets in ([[0, 9]], [0.0, 9.0])),
        ],
    )
    def test_documents_that_do_not_fit_are_refused(self, documents: list[int], kind: type[LocantError]) -> None:
        with refuses(kind, "got ", "expected"):
            Windows(np.arange(9), 4, mode="document", documents=documents)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: np.array(x, dtype=np.uint32)])
    def test_documents_may_be_any_integers(self, kind: type) -> None:
        windows = Windows(np.arange(9), 4, mode="document", documents=kind([0, 4, 4, 9]))
        assert targets_of(windows) == [[1, 2, 3], [5, 6, 7, 8]]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("length", 0),
            ("length", -1),
            ("length", 2.0),
            ("length", True),
            ("length", None),
            ("stride", 0),
            ("stride", 1.5),
            ("pad_id", -1),
            ("pad_id", None),
        ],
    )
    def test_a_number_that_is_none_is_named(self, name: str, value: object) -> None:
        options = {"length": 4, name: value}
        with refuses(RangeError, f"got {value!r} for {name}, expected an integer of "):
            Windows(np.arange(9), **options)  # type: ignore[arg-type]

    def test_numbers_that_no_text_has_are_refused_before_memory_is_asked_for(self) -> None:
        for name, value in (("length", 2**31), ("length", 2**70), ("stride", 2**70), ("pad_id", 2**63)):
            with refuses(RangeError, f"got {value} for {name}, expected at most"):
                Windows(np.arange(9), **{"length": 4, name: value})  # type: ignore[arg-type]
        assert len(Windows(np.arange(9), 2**31 - 1, 2**62)) == 1

    def test_documents_beyond_int64_do_not_wrap(self) -> None:
        with refuses(InputError, "expected them to rise from 0 to 9"):
            Windows(np.arange(9), 4, mode="document", documents=np.array([0, 2**64 - 1, 9], dtype=np.uint64))

    def test_the_names_show_what_it_is(self) -> None:
        assert repr(Windows(np.arange(9), 4)) == "Windows(2 of length 4, stride 4, flat, over 9 tokens)"
        assert "_WindowError" not in locant.text.windows.__all__

    def test_the_corpora_lose_no_target(self, corpora: Path) -> None:
        data = (corpora / "the-verdict.txt").read_bytes()
        windows = Windows(Tokenizer.bytes().encode(data), 256)
        targets = torch.cat([item["targets"] for item in windows])
        assert bytes(targets[targets != PAD].tolist()) == data[1:]
