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
from locant.text import IGNORED_TARGET, Windows
from tests.refusal import refuses
from tests.text.windows.definition import targets_of, window_places


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
        with refuses(InputError, "expected them to rise from 0 to 9"):
            Windows(np.arange(9), 4, mode="document", documents=np.array([0, 2**64 - 1, 9], dtype=np.uint64))

    def test_the_names_show_what_it_is(self) -> None:
        assert repr(Windows(np.arange(9), 4)) == "Windows(2 of length 4, stride 4, flat, over 9 tokens)"
