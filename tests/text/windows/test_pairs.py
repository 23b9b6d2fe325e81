"""``as_tuple=True``: inputs and targets without a dict, through every way of making batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from locant import RangeError
from locant.text import Windows
from tests.refusal import refuses

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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_pairs_in_the_same_order(workers: int) -> None:
    pairs, dicts = (windows.loader(3, seed=5, num_workers=workers) for windows in both())
    for (inputs, targets), batch in zip(pairs, dicts, strict=True):
        assert torch.equal(inputs, batch["ids"])
        assert torch.equal(targets, batch["targets"])
    assert pairs.state_dict() == dicts.state_dict()


@pytest.mark.parametrize("collated", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_data_loader_gives_pairs(collated: bool, workers: int) -> None:
    pairs, dicts = both()
    collate = {"collate_fn": pairs.collate} if collated else {}
    loader = DataLoader(pairs, batch_size=3, num_workers=workers, drop_last=True, **collate)
    batches = list(loader)
    assert len(batches) == len(dicts) // 3
    for number, (inputs, targets) in enumerate(batches):
        wanted = dicts.__getitems__(range(3 * number, 3 * number + 3))
        assert torch.equal(inputs, wanted["ids"])
        assert torch.equal(targets, wanted["targets"])


def test_parts_of_datasets_give_pairs() -> None:
    pairs, _ = both()
    for dataset in (Subset(pairs, [1, 0]), ConcatDataset([pairs, pairs])):
        for collate in (None, pairs.collate):
            inputs, targets = next(iter(DataLoader(dataset, batch_size=2, collate_fn=collate)))
            assert inputs.shape == targets.shape == (2, 4)


def test_the_whole_batch_is_not_copied() -> None:
    fetched = both()[0].__getitems__([0, 1])
    inputs, _ = both()[0].collate(fetched)
    assert inputs is fetched.ids


def test_packed_rows_keep_their_positions() -> None:
    with refuses(RangeError, "as_tuple", "positions"):
        Windows(IDS, 4, mode="packed", documents=[0, 43], as_tuple=True)
    with refuses(RangeError, "as_tuple"):
        Windows(IDS, 4, as_tuple=1)  # type: ignore[arg-type]
