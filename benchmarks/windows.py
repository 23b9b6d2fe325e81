"""What do windows cost, beside a Python list with a tensor per window (the way most tutorials do it)?"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.timing import Row, measure
from locant import Windows

__all__ = ["rows"]

TOKENS, LENGTH, STRIDE, BATCH = 1_000_000, 256, 128, 32


def rows() -> list[Row]:
    """Building them, then reading them in batches."""
    ids = np.random.default_rng(0).integers(0, 50_257, TOKENS).astype(np.uint16)
    windows, listed = Windows(ids, LENGTH, stride=STRIDE), _list_of_windows(ids)
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[first : first + BATCH] for first in range(0, len(order) - BATCH, BATCH)]

    def from_list() -> None:
        for batch in batches:
            torch.stack([listed[i][0] for i in batch])
            torch.stack([listed[i][1] for i in batch])

    def from_views() -> None:
        for batch in batches:
            windows.__getitems__(batch)

    building = {
        "locant Windows": lambda: Windows(ids, LENGTH, stride=STRIDE),
        "list of tensors": lambda: _list_of_windows(ids),
    }
    reading = {"locant Windows": from_views, "list of tensors": from_list}
    question = f"windows of {LENGTH}, stride {STRIDE}, over {TOKENS} tokens"
    return [
        *measure(f"build {question}", building, rounds=5),
        *measure(f"read {question}, shuffled, batches of {BATCH}", reading, rounds=5),
    ]


def _list_of_windows(ids: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = ids.tolist()
    starts = range(0, len(tokens) - LENGTH, STRIDE)
    return [(torch.tensor(tokens[i : i + LENGTH]), torch.tensor(tokens[i + 1 : i + LENGTH + 1])) for i in starts]
