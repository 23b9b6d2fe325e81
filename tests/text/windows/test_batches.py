"""Batches of windows: the windows stacked, whoever puts them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, default_collate

import locant.text.windows
from locant import RangeError
from locant.errors import LocantError
from locant.positions import Positions
from locant.text import Windows
from locant.text.windows import BatchOfWindows
from tests.refusal import refuses
from tests.text.windows.definition import PAD

sizes = st.integers(1, 9)


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
        whole = windows.collate(batch)
        assert list(whole) == ["ids", "targets", "positions"]
        assert all(value is batch[name] for name, value in whole.items())
        assert windows.collate(whole) == whole
        stacked = windows.collate(items)
        assert torch.equal(stacked["ids"], batch["ids"])
        assert torch.equal(stacked["targets"], batch["targets"])
        assert stacked["positions"] == batch["positions"]

    def test_of_full_windows_has_one_row_of_positions_that_they_share(self) -> None:
        windows = Windows(np.arange(30), 4)
        assert windows.__getitems__([0])["positions"] is windows.__getitems__([1, 2])["positions"]
        assert windows.__getitems__([0, 1, 2])["positions"] == Positions.arange(4)
        assert windows.__getitems__([0, len(windows) - 1])["positions"].batch == 2

    def test_may_be_empty(self) -> None:
        assert Windows(np.arange(30), 4).__getitems__([])["ids"].shape == (0, 4)

    def test_is_one_read_of_the_array(self) -> None:
        """Batches are fetched whole: a data loader asks once per batch, never per window."""
        calls = []

        class Watched(Windows):
            def __getitems__(self, indices: list[int]) -> BatchOfWindows:
                calls.append(list(indices))
                return super().__getitems__(indices)

        windows = Watched(np.arange(41), 4)
        list(DataLoader(windows, batch_size=4, collate_fn=windows.collate))
        assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    @pytest.mark.parametrize(("workers", "told"), [(0, True), (0, False), (2, False)])
    def test_goes_through_a_data_loader_that_may_know_nothing_of_windows(self, workers: int, told: bool) -> None:
        windows = Windows(np.arange(50, dtype=np.uint16), 4)
        collate = windows.collate if told else None
        batches = list(DataLoader(windows, batch_size=5, collate_fn=collate, num_workers=workers))
        assert {type(batch) for batch in batches} == {dict}
        assert [tuple(batch["ids"].shape) for batch in batches] == [(5, 4), (5, 4), (3, 4)]
        assert all(isinstance(batch["positions"], Positions) for batch in batches)
        assert batches[0]["positions"].batch == 1
        targets = torch.cat([batch["targets"].flatten() for batch in batches])
        assert targets[targets != PAD].tolist() == list(range(1, 50))

    def test_is_a_dict_without_other_keys(self) -> None:
        windows = Windows(np.arange(9), 4)
        for batch in (windows.collate(windows.__getitems__([0])), next(iter(DataLoader(windows, 2))), windows[0]):
            assert type(batch) is dict
            assert list(batch) == ["ids", "targets", "positions"]

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
        """Put together by our collation, or by torch alone."""
        one, two = Windows(np.arange(9), 4), Windows(np.arange(100, 107), 4)
        for collate in (one.collate, None):
            subset = next(iter(DataLoader(Subset(one, [1, 0]), batch_size=2, collate_fn=collate)))
            assert subset["ids"][:, 0].tolist() == [4, 0]
            assert subset["positions"] == Positions.arange(4)
            both = next(iter(DataLoader(ConcatDataset([one, two]), batch_size=4, collate_fn=collate)))
            assert both["ids"][:, 0].tolist() == [0, 4, 100, 104]
            assert both["positions"].document[3].tolist() == [0, 0, -1, -1]

    def test_error_reaches_the_user_of_worker_processes_whole(self) -> None:
        windows = Windows(np.arange(30), 4)
        loader = DataLoader(windows, sampler=[99], batch_size=1, collate_fn=windows.collate, num_workers=1)
        with pytest.raises(LocantError, match="got window 99"):
            next(iter(loader))


IDS = np.arange(50, 93)


def both(**options: object) -> tuple[Windows, Windows]:
    """The same windows as pairs and as dicts."""
    return Windows(IDS, 4, as_tuple=True, **options), Windows(IDS, 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"stride": 1, "drop_last": True}, {"mode": "document", "documents": [0, 7, 43]}]
)
def test_a_window_is_a_pair(options: dict[str, object]) -> None:
    pairs, dicts = both(**options)
    assert len(pairs) == len(dicts)
    for (inputs, targets), window in zip(pairs, dicts, strict=True):
        assert torch.equal(inputs, window["ids"])
        assert torch.equal(targets, window["targets"])


def test_loaders_give_pairs_in_the_same_order() -> None:
    """Ours, and torch's with our collation or without, with workers or without."""
    pairs, dicts = (
        windows.loader(3, seed=5, num_workers=workers) for windows, workers in zip(both(), (2, 0), strict=True)
    )
    for (inputs, targets), batch in zip(pairs, dicts, strict=True):
        assert torch.equal(inputs, batch["ids"])
        assert torch.equal(targets, batch["targets"])
    assert pairs.state_dict() == dicts.state_dict()
    windows, wanted = both()
    for collate, workers in ((None, 0), (windows.collate, 0), (None, 1)):
        loader = DataLoader(windows, batch_size=3, num_workers=workers, drop_last=True, collate_fn=collate)
        for number, (inputs, targets) in enumerate(loader):
            batch = wanted.__getitems__(range(3 * number, 3 * number + 3))
            assert torch.equal(inputs, batch["ids"])
            assert torch.equal(targets, batch["targets"])
        assert number + 1 == len(wanted) // 3
        for dataset in (Subset(windows, [1, 0]), ConcatDataset([windows, windows])):
            inputs, targets = next(iter(DataLoader(dataset, batch_size=2, collate_fn=collate)))
            assert inputs.shape == targets.shape == (2, 4)


def test_the_whole_batch_is_not_copied() -> None:
    fetched = both()[0].__getitems__([0, 1])
    inputs, _ = both()[0].collate(fetched)
    assert inputs is fetched["ids"]


def test_packed_rows_keep_their_positions() -> None:
    with refuses(RangeError, "as_tuple", "positions"):
        Windows(IDS, 4, mode="packed", documents=[0, 43], as_tuple=True)
    with refuses(RangeError, "as_tuple"):
        Windows(IDS, 4, as_tuple=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"as_tuple": True},
        {"mode": "document", "documents": [0, 5, 11, 40, 90]},
        {"mode": "packed", "documents": [0, 5, 11, 40, 90]},
    ],
)
def test_a_function_of_ones_own_gets_the_windows_one_by_one(options: dict[str, Any]) -> None:
    """As from a dataset that reads them one by one, which is the oracle."""

    class OneByOne(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return windows[index]

        def __len__(self) -> int:
            return len(windows)

    windows = Windows(np.arange(90), 8, **options)
    for dataset in (windows, Subset(windows, range(len(windows)))):
        loaders = [DataLoader(each, 3, collate_fn=lambda items: items) for each in (dataset, OneByOne())]
        for items, wanted in zip(*loaders, strict=True):
            assert len(items) == len(wanted)
            for found in ([*items], items[:], [items[place] for place in range(len(items))], [*items[::-1]][::-1]):
                assert all(map(same, found, wanted))
            assert same(items[-1], wanted[-1])
            with pytest.raises(IndexError):
                items[len(items)]
    assert [same(*pair) for pair in zip(windows.__getitems__([1, 0]), [windows[1], windows[0]], strict=True)]
    both = DataLoader(StackDataset(windows, range(len(windows))), 2, collate_fn=lambda items: items)
    assert same(next(iter(both))[1][0], windows[1])


def same(one: Any, other: Any) -> bool:
    """Whether two windows hold the same, dicts or pairs."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(torch.equal, one, other))
    assert isinstance(one, dict)
    assert [*one] == [*other]
    assert torch.equal(one["positions"].index, other["positions"].index)
    assert torch.equal(one["positions"].document, other["positions"].document)
    assert one["positions"].max_index == other["positions"].max_index
    return torch.equal(one["ids"], other["ids"]) and torch.equal(one["targets"], other["targets"])


def test_what_a_function_changes_in_windows_is_not_lost_when_it_collates_them() -> None:
    def with_weight(items: Any) -> Any:
        for place, item in enumerate(items):
            item["weight"] = float(place)
        return default_collate(items)

    def renamed(items: Any) -> Any:
        for item in items:
            for name in ("ids", "targets", "positions"):
                item[f"my_{name}"] = item.pop(name)
        return default_collate(items)

    def masked(items: Any) -> Any:
        items[0]["targets"][:2] = PAD
        return windows.collate(items)

    def replaced(items: Any) -> Any:
        items[0]["ids"] = items[0]["ids"] + 1
        return windows.collate(items)

    windows = Windows(np.arange(90), 8, mode="packed", documents=[0, 5, 11, 40, 90])
    batch = windows.collate([windows[0], windows[1]])

    def first(function: Any) -> Any:
        return next(iter(DataLoader(windows, 2, collate_fn=function)))

    assert first(with_weight)["weight"].tolist() == [0.0, 1.0]
    assert first(with_weight)["positions"] == batch["positions"]
    assert [*first(renamed)] == ["my_ids", "my_targets", "my_positions"]
    assert torch.equal(first(renamed)["my_ids"], batch["ids"])
    assert first(masked)["targets"][0, :2].tolist() == [PAD, PAD]
    assert torch.equal(first(replaced)["ids"][0], batch["ids"][0] + 1)
    assert torch.equal(first(replaced)["ids"][1], batch["ids"][1])
