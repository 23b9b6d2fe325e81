"""Who sees whom: the mask, its blocks, the boundaries that varlen kernels take, and the shares of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locant import Positions, RangeError, ShapeError
from tests import oracles
from tests.refusal import refuses


@st.composite
def rows(draw: st.DrawFn, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and document of anything that is not several-axed, with up to 6 slots."""
    batch = draw(st.integers(1, 3)) if batch is None else batch
    seq_len = draw(st.integers(0, 6))
    numbers = st.lists(st.lists(st.integers(-3, 4), min_size=seq_len, max_size=seq_len), min_size=batch, max_size=batch)
    index, document = draw(numbers), draw(numbers.map(lambda rows: [[max(d, -1) for d in row] for row in rows]))
    return torch.tensor(index).view(batch, seq_len).long(), torch.tensor(document).view(batch, seq_len).long()


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.none() | st.integers(1, 5))
def test_the_mask_is_the_rule_pair_by_pair(data: st.DataObject, causal: bool, window: int | None) -> None:
    queries = Positions.of(*data.draw(rows()))
    drawn = data.draw(st.none() | rows(batch=queries.batch))
    keys = None if drawn is None else Positions.of(*drawn)
    other = queries if keys is None else keys
    rule = oracles.is_allowed(
        queries.index.numpy(), queries.document.numpy(), other.index.numpy(), other.document.numpy(),
        causal=causal, window=window,
    )  # fmt: skip
    mask = queries.mask(keys, causal=causal, window=window)
    assert mask.dtype == torch.bool
    assert mask.shape == (queries.batch, 1, queries.seq_len, other.seq_len)
    assert np.array_equal(mask[:, 0].numpy(), rule)


def test_one_row_of_positions_meets_a_batch_of_keys() -> None:
    keys = Positions.from_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    mask = Positions.after(2, 1).mask(keys)
    assert mask[:, 0, 0].tolist() == [[False, True, True], [True, True, True]]
    assert torch.equal(keys.mask(Positions.arange(3)), keys.mask(Positions.arange(3, batch=2)))


def test_order_decides_where_index_cannot() -> None:
    grid = Positions.grid(2, 2)
    assert grid.mask()[0, 0].tolist() == torch.ones(4, 4).tril().bool().tolist()
    same = Positions.of([7, 7, 7], order=[2, 0, 1])
    assert same.mask()[0, 0].tolist() == [[True, True, True], [False, True, False], [False, True, True]]


def test_a_window_of_three_sees_three_tokens() -> None:
    assert torch.equal(Positions.arange(5).mask(window=3)[0, 0], torch.ones(5, 5).tril().triu(-2).bool())
    assert Positions.arange(5).mask(window=1, causal=False)[0, 0].equal(torch.eye(5, dtype=torch.bool))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window: int) -> None:
    with refuses(RangeError, f"got {window} for window"):
        Positions.arange(3).mask(window=window)


def test_cu_seqlens_are_the_boundaries_of_documents_among_real_tokens() -> None:
    positions = Positions.packed([[5, 0, 1, 1], [2, 3]], length=9)
    cu = positions.cu_seqlens()
    assert cu.dtype == torch.int32
    assert cu.tolist() == [0, 5, 6, 7, 9, 12]
    assert Positions.arange(4, batch=2).cu_seqlens().tolist() == [0, 4, 8]
    assert Positions.from_mask(torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0]])).cu_seqlens().tolist() == [0, 1, 3]


def test_the_numbers_of_documents_need_not_rise() -> None:
    positions = Positions.of([0, 1, 0, 1, 0, 0, 1], document=[7, 7, 2, 2, 9, 0, 0])
    assert positions.cu_seqlens().tolist() == [0, 2, 4, 5, 7]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=3), st.integers(0, 2))
def test_cu_seqlens_say_how_long_each_document_is(lengths: list[list[int]], spare: int) -> None:
    width = max(sum(row) for row in lengths) + spare
    cu = Positions.packed(lengths, length=width).cu_seqlens()
    assert cu.diff().tolist() == [n for row in lengths for n in row if n]


def test_a_hole_in_a_document_does_not_end_it() -> None:
    """What the mask calls one document is one document for varlen kernels too, once padding is dropped."""
    positions = Positions.from_mask(torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]))
    assert bool(positions.mask()[0, 0, 4, 1]), "the mask sees over the hole"
    assert positions.cu_seqlens().tolist() == [0, 3, 8]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.unchecked  # torch counts the arguments of the rule
def test_the_block_mask_is_the_mask(window: int | None) -> None:
    queries = Positions.packed([[100, 57], [128, 1, 28]])
    keys = Positions.packed([[100, 57, 40], [128, 1, 28, 40]])
    block_mask = queries.block_mask(keys, window=window)
    mask = queries.mask(keys, window=window)
    batch, _, query, key = torch.meshgrid(*(torch.arange(n) for n in (2, 1, 157, 197)), indexing="ij")
    assert torch.equal(block_mask.mask_mod(batch, 0, query, key), mask)
    blocks = torch.nn.functional.pad(mask, (0, 256 - 197, 0, 256 - 157)).view(2, 1, 2, 128, 2, 128)
    expected = blocks.any(dim=5).any(dim=3)
    assert not bool(expected.all()), "every block is seen: nothing is shown"
    assert torch.equal(block_mask.to_dense().bool(), expected)


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
