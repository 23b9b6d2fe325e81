"""Windows: every target once, nothing across documents."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.positions import Positions
from locant.text import IGNORED_TARGET, Batch, Windows
from locant.text.windows import layouts
from locant.text.windows.layouts import best_fit
from tests.refusal import refuses
from tests.text.windows.definition import best_fit_fills, pieces, targets_of, window_places


def expected(documents: list[int], length: int, stride: int) -> list[list[int]]:
    return [[target for _, target in window] for window in window_places(documents, length, stride)]


sizes = st.integers(1, 9)


class TestEveryTarget:
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

    def test_has_the_loss_of_its_real_targets_only(self) -> None:
        item = Windows([0, 1, 2], 5)[0]
        logits = torch.randn(5, 3)
        loss = torch.nn.functional.cross_entropy(logits, item["targets"])
        assert loss == torch.nn.functional.cross_entropy(logits[:2], torch.tensor([1, 2]))
        assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_TARGET

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


class TestWhatIsAskedFor:
    def test_an_unknown_mode_is_named(self) -> None:
        with refuses(RangeError, "'documents'", "mode='document'"):
            Windows(np.arange(9), 4, mode="documents")  # type: ignore[arg-type]
        for mode in (np.array(["flat", "a"]), ["flat"], None):
            with refuses(RangeError, "for mode", "'packed'"):
                Windows(np.arange(9), 4, mode=mode)  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", ["no", None, 1, np.array([True, True])])
    def test_a_truth_value_is_one(self, value: object) -> None:
        with refuses(RangeError, "drop_last", "True or False"):
            Windows(np.arange(9), 4, drop_last=value)  # type: ignore[arg-type]

    def test_document_mode_needs_documents_and_flat_mode_refuses_them(self) -> None:
        with pytest.raises(InputError, match="without documents"):
            Windows(np.arange(9), 4, mode="document")
        with pytest.raises(InputError, match=r"flat mode.*try: pass mode='document'"):
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
            ("length", 0), ("length", -1), ("length", 2.0), ("length", True), ("length", None), ("stride", 0),
            ("stride", 1.5), ("pad_id", -1), ("pad_id", None),
        ],
    )  # fmt: skip
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
        with refuses(InputError, "expected increasing offsets from 0 to 9"):
            Windows(np.arange(9), 4, mode="document", documents=np.array([0, 2**64 - 1, 9], dtype=np.uint64))

    def test_the_names_show_what_it_is(self) -> None:
        assert repr(Windows(np.arange(9), 4)) == "Windows(2 of length 4, stride 4, flat, over 9 tokens)"


FILLER = 10**6

documents_of = st.lists(st.integers(0, 14), min_size=1, max_size=30)
lengths_of = st.integers(1, 9)


def offsets(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def packed(lengths: list[int], length: int) -> Windows:
    """Over places instead of ids, so that every input says where it came from."""
    n = sum(lengths)
    return Windows(np.arange(n), length, mode="packed", documents=offsets(lengths), pad_id=FILLER)


def pieces_of_row(batch: Batch, row: int) -> list[list[tuple[int, int]]]:
    """The inputs and targets of a row, by the document ids of its positions."""
    document = batch["positions"].document[row].tolist()
    slots = list(zip(document, batch["ids"][row].tolist(), batch["targets"][row].tolist(), strict=True))
    numbers = sorted(set(document) - {-1})
    assert numbers == list(range(len(numbers)))
    assert document == [number for number in numbers for _ in range(document.count(number))] + [-1] * document.count(-1)
    return [[(place, target) for number, place, target in slots if number == wanted] for wanted in numbers]


def everything(windows: Windows) -> Batch:
    return windows.__getitems__(range(len(windows)))


@given(lengths=documents_of, length=lengths_of)
def test_rows_hold_each_piece_of_the_definition_once(lengths: list[int], length: int) -> None:
    wanted = pieces(offsets(lengths), length)
    if not wanted:
        with pytest.raises(InputError, match="expected 2 or more"):
            packed(lengths, length)
        return
    batch = everything(packed(lengths, length))
    rows = [pieces_of_row(batch, row) for row in range(len(batch["ids"]))]
    assert sorted(piece for row in rows for piece in row) == wanted
    firsts = [row[0][0] for row in rows]
    assert firsts == sorted(firsts), "rows stand in the order of their first pieces"
    assert all(row == sorted(row) for row in rows), "and the pieces of a row in that of the text"


@given(lengths=documents_of, length=lengths_of)
def test_every_piece_counts_from_0_and_the_rest_is_padding(lengths: list[int], length: int) -> None:
    if not pieces(offsets(lengths), length):
        return
    batch = everything(packed(lengths, length))
    rows = [pieces_of_row(batch, row) for row in range(len(batch["ids"]))]
    assert batch["positions"] == Positions.packed([[len(piece) for piece in row] for row in rows], length=length)
    assert batch["positions"].max_index == max(len(piece) for row in rows for piece in row) - 1
    padding = batch["positions"].document == -1
    assert torch.equal(batch["targets"] == -100, padding)
    assert torch.equal(batch["ids"] == FILLER, padding)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=80), capacity=st.integers(30, 40))
def test_rows_are_as_full_as_best_fit_makes_them(sizes: list[int], capacity: int) -> None:
    row = best_fit(np.array(sizes), capacity)
    fills = np.bincount(row, weights=sizes).astype(int).tolist()
    assert sorted(fills) == best_fit_fills(sizes, capacity)
    firsts = [row.tolist().index(number) for number in range(len(fills))]
    assert firsts == sorted(firsts)


def test_sizes_beyond_16_bits_are_packed_as_well() -> None:
    sizes = np.random.default_rng(0).integers(1, 2**18, 300)
    fills = np.bincount(best_fit(sizes, 2**18), weights=sizes).astype(int).tolist()
    assert sorted(fills) == best_fit_fills(sizes.tolist(), 2**18)


@given(lengths=documents_of, length=lengths_of)
def test_blocks_change_which_rows_there_are_and_nothing_else(lengths: list[int], length: int) -> None:
    wanted = pieces(offsets(lengths), length)
    if not wanted:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "BLOCK", 4)
        batch = everything(packed(lengths, length))
    found = [piece for row in range(len(batch["ids"])) for piece in pieces_of_row(batch, row)]
    assert sorted(found) == wanted
    in_blocks = [best_fit_fills([len(p) for p in wanted[i : i + 4]], length) for i in range(0, len(wanted), 4)]
    assert len(batch["ids"]) == sum(map(len, in_blocks))


@given(lengths=documents_of, length=lengths_of, choice=st.lists(st.integers(0, 1000), max_size=5))
def test_a_batch_is_its_rows_stacked(lengths: list[int], length: int, choice: list[int]) -> None:
    if not pieces(offsets(lengths), length):
        return
    windows = packed(lengths, length)
    indices = [number % len(windows) for number in choice]
    batch = windows.__getitems__(indices)
    assert batch["ids"].shape == batch["targets"].shape == (len(indices), length)
    if indices:
        stacked = windows.collate([windows[index] for index in indices])
        assert torch.equal(stacked["ids"], batch["ids"])
        assert torch.equal(stacked["targets"], batch["targets"])
        assert stacked["positions"].expand(len(indices)) == batch["positions"]


def test_fill_is_the_share_of_slots_that_hold_a_target() -> None:
    windows = packed([3, 4, 1, 0, 9], 8)
    assert windows.fill == float((everything(windows)["targets"] != -100).double().mean())
    for mode in ("flat", "document"):
        for stride in (1, 3, 4, 7):
            other = Windows(np.arange(23), 4, stride, mode, documents=[0, 2, 9, 23] if mode == "document" else None)
            assert other.fill == float((everything(other)["targets"] != -100).double().mean()), (mode, stride)


def test_what_makes_no_sense_for_rows_is_refused() -> None:
    ids, documents = np.arange(9), [0, 4, 9]
    with refuses(InputError, "got stride=2 for packed rows", "mode='document'"):
        Windows(ids, 4, 2, "packed", documents=documents)
    with refuses(InputError, "got drop_last for packed rows"):
        Windows(ids, 4, mode="packed", documents=documents, drop_last=True)
    with refuses(InputError, "got mode='packed' without documents"):
        Windows(ids, 4, mode="packed")
    assert Windows(ids, 4, 4, "packed", documents=documents).stride == 4
