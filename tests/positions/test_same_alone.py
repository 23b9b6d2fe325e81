"""Every encoding gives each row, padded, packed, cached, chunked or sharded, bit for bit what the row gets alone."""

from __future__ import annotations

import pytest
import torch

from locant import ALiBi, PositionEncoding, Positions
from tests.positions.alone import (
    ARRANGEMENTS,
    ENCODINGS,
    HEAD_DIM,
    HEADS,
    CountsSlots,
    require_same_alone,
    three_rows,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_row_gets_what_it_gets_alone(name: str, arrangement: str, dtype: torch.dtype) -> None:
    require_same_alone(ENCODINGS[name]().to(dtype), arrangement, three_rows(dtype))


class SlotBias(ALiBi):
    """The twin: distances from the shape of the scores, queries and keys both from slot 0."""

    def bias(self, q, k, positions, k_positions=None):
        return super().bias(q, k, Positions.arange(q.shape[2]), Positions.arange(k.shape[2]))


WRONG = [(CountsSlots(HEAD_DIM), name) for name in ARRANGEMENTS if name != "padded right"]
# Inside a document whose tokens lie side by side distances are those of its slots, so there this twin is right.
WRONG += [(SlotBias(HEADS), name) for name in ("cached one by one", "chunked", "sharded zigzag over 4")]


@pytest.mark.parametrize(
    ("twin", "arrangement"), WRONG, ids=lambda part: part if isinstance(part, str) else type(part).__name__
)
def test_code_that_counts_slots_is_rejected(twin: PositionEncoding, arrangement: str) -> None:
    with pytest.raises(AssertionError, match="alone gets"):
        require_same_alone(twin, arrangement, three_rows(torch.float32))
