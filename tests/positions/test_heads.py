"""Which heads are here: all of them, or a slice."""

from __future__ import annotations

from typing import Any

import pytest

from locant.positions.heads import Heads


class Uncomparable:
    """A range as the compiler of torch 2.9 has it: with a length and entries, and not to be compared."""

    def __init__(self, heads: range) -> None:
        self.heads, self.start, self.stop, self.step = heads, heads.start, heads.stop, heads.step

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, place: int) -> int:
        return self.heads[place]

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.unchecked  # what stands in the place of a range is none
@pytest.mark.parametrize("heads", [range(4), range(3, -1, -1), range(2), range(2, 4), range(0, 4, 2), range(0, 1, 5)])
def test_heads_are_counted_without_comparing_ranges(heads: range) -> None:
    """`torch.compile` of ALiBi, T5 and KERPLE ended in an error of the compiler with torch 2.9."""
    mine: Any = Uncomparable(heads)
    held = Heads(4, mine)
    assert [held.to_global(place) for place in range(len(heads))] == [*heads]
    assert [held.to_local(number) for number in heads] == [*range(len(heads))]
