"""What a window or a batch of windows holds, and how windows become a batch.

A data loader fetches whole batches from `Windows`, which `collate` leaves as they are. A plain `DataLoader` uses
`torch.utils.data.default_collate`, which looks up the type of the first item in a table: a `Batch` is its own first
item and has an entry in that table, as `Positions` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from locant.positions import Positions

__all__ = ["IGNORED_TARGET", "Batch", "Pairs", "collate", "whole_batch"]

IGNORED_TARGET = -100
"""The target where there is none: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class Batch(TypedDict):
    """What a window or a batch of windows holds; a single window has no batch axis in `ids` and `targets`."""

    ids: Int[Tensor, "*batch length"]
    targets: Int[Tensor, "*batch length"]
    positions: Positions


class Pairs(Sequence[tuple[Tensor, Tensor]]):
    """A batch of windows as pairs of inputs and targets, which `default_collate` can stack and `collate` need not."""

    def __init__(self, batch: Batch) -> None:
        self.ids, self.targets = batch["ids"], batch["targets"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.ids[index], self.targets[index]


class _WholeBatch(dict[str, object]):
    """A batch that needs no collating: for `default_collate`, its first item is the batch itself."""

    def __missing__(self, key: object) -> _WholeBatch:
        if key == 0:
            return self
        raise KeyError(key)


def whole_batch(ids: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], positions: Positions) -> Batch:
    """A batch that every way of collating leaves as it is."""
    return cast(Batch, _WholeBatch(ids=ids, targets=targets, positions=positions))


def collate(batch: Any) -> Any:
    """A batch as it is; a list of windows stacked, dicts or pairs."""
    if isinstance(batch, dict):
        return dict(batch)
    if isinstance(batch, Pairs):
        return batch.ids, batch.targets
    if isinstance(batch[0], tuple):
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))
    return {
        "ids": torch.stack([item["ids"] for item in batch]),
        "targets": torch.stack([item["targets"] for item in batch]),
        "positions": _stacked([item["positions"] for item in batch]),
    }


def _stacked(rows: Sequence[Positions]) -> Positions:
    """One row where all are the same count from 0, else a row for each."""
    if all(row.start == 0 for row in rows):
        return rows[0]
    highs = [row.max_index for row in rows if row.max_index is not None]
    index, document = torch.cat([row.index for row in rows]), torch.cat([row.document for row in rows])
    return Positions(index, document, None, 0, max(highs) if len(highs) == len(rows) else None)


default_collate_fn_map[_WholeBatch] = lambda batch, collate_fn_map=None: collate(batch)
default_collate_fn_map[Positions] = lambda batch, collate_fn_map=None: _stacked(batch)
