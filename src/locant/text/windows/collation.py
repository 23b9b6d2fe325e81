"""`Batch`: what a window or a batch of windows holds, and how windows become a batch.

A data loader asks `Windows` for whole batches, and then wants to collate them. `collate` leaves them as they are.
Without it a `DataLoader` uses `torch.utils.data.default_collate`, which takes the first item of what it got and asks a
table what to do with things of that type. A batch answers as its own first item, and the table gets an entry for it
and one for `Positions`; so a plain ``DataLoader(windows, batch_size=32)`` works too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from locant.positions import Positions

__all__ = ["IGNORED_TARGET", "Batch", "collate", "whole"]

IGNORED_TARGET = -100
"""The target where there is none: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class Batch(TypedDict):
    """What a window or a batch of windows holds; a single window has no batch axis in `ids` and `targets`."""

    ids: Int[Tensor, "*batch length"]
    targets: Int[Tensor, "*batch length"]
    positions: Positions


class _WholeBatch(dict[str, object]):
    """A batch that is collated already, and says so where `default_collate` looks for its first item."""

    def __missing__(self, key: object) -> _WholeBatch:
        if key == 0:
            return self
        raise KeyError(key)


def whole(ids: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], positions: Positions) -> Batch:
    """A batch that every way of collating leaves as it is."""
    return cast(Batch, _WholeBatch(ids=ids, targets=targets, positions=positions))


def collate(batch: Batch | Sequence[Batch]) -> Batch:
    """A batch as it is, a list of windows stacked."""
    if isinstance(batch, dict):
        return cast(Batch, dict(batch))
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


def _as_it_is(batch: Any, *, collate_fn_map: Any = None) -> Batch:
    return collate(batch)


def _rows_together(batch: Any, *, collate_fn_map: Any = None) -> Positions:
    return _stacked(batch)


default_collate_fn_map[_WholeBatch] = _as_it_is
default_collate_fn_map[Positions] = _rows_together
