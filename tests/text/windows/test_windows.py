"""Windows: every target once, nothing across documents."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant.errors import InputError, RangeError
from locant.positions import Positions
from locant.text import IGNORED_TARGET, Windows
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
