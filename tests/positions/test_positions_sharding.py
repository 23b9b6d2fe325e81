"""Positions shared out among ranks: every slot once, and as much work for each."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locant import Positions, RangeError, ShapeError
from tests.refusal import refuses


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_both_ends_of_every_document(rank: int) -> None:
    """Which slots these are: entry 79 of the known bugs."""
    positions = Positions.packed([4, 4])
    slots, part = positions.shard_slots(rank, 2), positions.shard(rank, 2)
    assert part.index.tolist() == [[[0, 3, 0, 3], [1, 2, 1, 2]][rank]]
    assert part.document.tolist() == [[0, 0, 1, 1]]
    assert part == positions.select(slots)


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 4), st.booleans())
def test_the_ranks_together_hold_every_slot_once_and_equally_many(shares: list[int], world: int, zigzag: bool) -> None:
    parts = 2 * world if zigzag else world
    positions = Positions.packed([share * parts for share in shares])
    slots = [positions.shard_slots(rank, world, zigzag) for rank in range(world)]
    assert sorted(itertools.chain.from_iterable(s.tolist() for s in slots)) == list(range(positions.seq_len))
    assert len({len(s) for s in slots}) == 1


@given(st.integers(1, 4), st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_causal_work(share: int, world: int) -> None:
    positions = Positions.arange(2 * world * share)
    seen = {int(positions.shard(rank, world).mask(positions).sum()) for rank in range(world)}
    assert len(seen) == 1
    if world > 1:
        plain = {int(positions.shard(rank, world, zigzag=False).mask(positions).sum()) for rank in range(world)}
        assert len(plain) > 1


def test_without_zigzag_ranks_get_contiguous_parts() -> None:
    slots = [Positions.arange(6).shard_slots(rank, 3, zigzag=False).tolist() for rank in range(3)]
    assert slots == [[0, 1], [2, 3], [4, 5]]


def test_padding_is_cut_like_a_document() -> None:
    """So that all ranks have as many slots."""
    positions = Positions.packed([4, 4], length=12)
    assert [positions.shard_slots(rank, 2).tolist() for rank in (0, 1)] == [[0, 3, 4, 7, 8, 11], [1, 2, 5, 6, 9, 10]]


def test_documents_that_do_not_divide_are_refused() -> None:
    with refuses(ShapeError, "6 tokens", "slot 4", "4 equal parts", "multiple of 4"):
        Positions.packed([4, 6]).shard(0, 2)


def test_rows_that_would_be_cut_differently_are_refused() -> None:
    with refuses(ShapeError, "different slots"):
        Positions.packed([[4, 4], [8]]).shard(0, 2)
    with refuses(RangeError, "got 2 for rank"):
        Positions.arange(4).shard(2, 2)
