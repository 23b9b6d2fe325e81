"""Blocks that may see one another, against the rule for every pair of tokens."""

from __future__ import annotations

import pickle
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from locant import Positions
from locant.attention import mask as module
from locant.attention.mask import AttentionMask
from locant.positions.distances import index_mod

CASES = {
    "one block": (Positions.arange(100), None),
    "one token": (Positions.arange(1), None),
    "an exact number of blocks": (Positions.arange(384), None),
    "one token more": (Positions.arange(385), None),
    "chunk behind a cache": (Positions.after(300, 150), Positions.arange(450)),
    "packed": (Positions.packed([[200, 0, 1, 70, 129], [400]]), None),
    "left padding": (Positions.from_mask(torch.arange(300).expand(2, -1) >= torch.tensor([[140], [3]])), None),
    "nothing but padding": (Positions.from_mask(torch.arange(300).expand(2, -1) >= torch.tensor([[300], [3]])), None),
    "backwards": (Positions.of(list(range(299, -1, -1))), None),
    "a grid": (Positions.grid(15, 20), None),
    "negative": (Positions.of(list(range(-200, 100))), None),
}


def blocks_of(mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which blocks of a mask of all tokens hold anything, and which hold everything."""
    more = [-mask.shape[2] % size, -mask.shape[1] % size]
    tiles = F.pad(mask, (0, more[0], 0, more[1])).unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return tiles.any(4).any(2), tiles.all(4).all(2)


def require_blocks(mask: AttentionMask, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The blocks of the mask, and those of the rule for every pair, which they may not fall short of."""
    some, every = mask.blocks()
    visible = mask.queries.mask(mask.keys, causal=mask.causal, window=mask.window)[:, 0]
    holds_some, holds_all = blocks_of(visible, size)
    assert bool((some | ~holds_some).all()), "a block with a visible pair is skipped"
    assert bool((holds_all | ~every).all()), "a block with a hidden pair counts as full"
    return some, every, holds_some, holds_all


@pytest.mark.parametrize("window", [None, 1, 60, 200])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case_name", CASES)
def test_no_visible_pair_is_lost_and_no_hidden_one_let_in(case_name: str, causal: bool, window: int | None) -> None:
    positions, k_positions = CASES[case_name]
    keys = positions if k_positions is None else k_positions
    some, every, holds_some, holds_all = require_blocks(AttentionMask(positions, keys, causal, window), module.BLOCK)
    assert bool((some | ~every).all())
    if positions.start is not None and keys.start is not None:
        assert torch.equal(some, holds_some), "a block is visited for nothing"
        assert torch.equal(every, holds_all), "a block is looked at pair by pair for nothing"


def skips(mask: AttentionMask) -> bool:
    """Token by token: is there a key that a query attends to, and a place between them, or the query's, without one?"""
    queries, keys = mask.queries, mask.keys
    rows = max(queries.batch, keys.batch)
    queries, keys = queries.expand(rows), keys.expand(rows)
    tokens = [
        set(zip(document, order, strict=True))
        for document, order in zip(keys.document.tolist(), keys.order.tolist(), strict=True)
    ]
    return any(
        (int(queries.document[row, query]), place) not in tokens[row]
        for row, _, query, key in queries.mask(keys, window=mask.window).nonzero().tolist()
        for place in range(int(keys.order[row, key]), int(queries.order[row, query]) + 1)
    )


@settings(max_examples=80)
@given(st.data())
def test_missing_keys_are_noticed(data: st.DataObject) -> None:
    window = data.draw(st.none() | st.integers(1, 4), "window")
    numbers = [Positions.after(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))) for _ in range(2)]
    rows = data.draw(st.integers(1, 2), "rows")
    anywhere = [
        Positions.of(
            data.draw(st.lists(st.lists(st.integers(-2, 4), min_size=n, max_size=n), min_size=rows, max_size=rows)),
            data.draw(st.lists(st.lists(st.integers(-1, 1), min_size=n, max_size=n), min_size=rows, max_size=rows)),
        )
        for n in (data.draw(st.integers(1, 3), "queries"), data.draw(st.integers(1, 7), "keys"))
    ]
    for queries, keys in (numbers, anywhere, (numbers[0], Positions.of(numbers[1].index))):
        mask = AttentionMask(queries, keys, window=window)
        assert mask.skips_tokens == skips(mask)


def test_keys_may_be_missing_where_the_mask_says_nothing_of_an_order() -> None:
    shard = Positions.arange(8).shard(0, 2)
    assert AttentionMask(shard, shard).skips_tokens
    assert not AttentionMask(shard).skips_tokens, "these tokens are the whole row"
    assert not AttentionMask(Positions.after(9, 2), Positions.arange(4), causal=False).skips_tokens, "another sequence"


@given(st.data())
def test_any_documents_and_orders(data: st.DataObject) -> None:
    sides = []
    for _ in range(2):
        n = data.draw(st.integers(1, 13))
        row = st.lists(st.integers(-3, 12), min_size=n, max_size=n)
        documents = st.lists(st.integers(-1, 2), min_size=n, max_size=n)
        sides.append(Positions.of(data.draw(row), data.draw(documents)))
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 3]))
    with mock.patch.object(module, "BLOCK", 4):
        require_blocks(AttentionMask(*sides, causal, window), 4)


@pytest.mark.parametrize("case_name", CASES)
def test_the_block_mask_lists_those_blocks(case_name: str) -> None:
    positions, k_positions = CASES[case_name]
    keys = positions if k_positions is None else k_positions
    mask = AttentionMask(positions, keys)
    made, (some, every) = mask.block_mask(), mask.blocks()
    assert made.seq_lengths == (positions.seq_len, keys.seq_len)
    assert torch.equal(made.to_dense().bool()[:, 0], some | every)
    listed = torch.zeros_like(every)
    for b, i in torch.cartesian_prod(torch.arange(every.shape[0]), torch.arange(every.shape[1])).tolist():
        listed[b, i, made.full_kv_indices[b, 0, i, : made.full_kv_num_blocks[b, 0, i]].long()] = True
    assert torch.equal(listed, every)
    assert torch.equal(made.kv_num_blocks[:, 0].long(), (some & ~every).sum(-1)), "a full block is looked at twice"


@pytest.mark.parametrize("case_name", ["an exact number of blocks", "packed", "left padding"])
@pytest.mark.unchecked  # torch counts the arguments of the rule
def test_it_says_what_torchs_own_says_or_more(case_name: str) -> None:
    positions, _ = CASES[case_name]
    torchs = positions.block_mask().to_dense().bool()
    ours = AttentionMask(positions).block_mask().to_dense().bool()
    assert bool((ours | ~torchs).all())
    if positions.start is not None:
        assert torch.equal(ours, torchs)


def made(positions: Positions, k_positions: Positions | None = None, **options: object) -> object:
    return AttentionMask(positions, k_positions, **options).block_mask()


def test_the_block_mask_is_made_once_for_the_positions_of_all_layers() -> None:
    packed, keys = Positions.packed([200, 100]), Positions.from_mask(torch.tensor([[0, 1] * 150]))
    assert made(packed) is made(packed)
    assert made(packed, keys) is made(packed, keys)
    kinds = [made(packed), made(packed, keys), made(packed, window=3), made(packed, causal=False), made(keys)]
    assert len({id(each) for each in kinds}) == len(kinds)
    with torch.inference_mode():
        assert made(packed) is not kinds[0], "training could not use what inference mode has made"


def test_where_both_sides_count_equal_positions_share_one_block_mask() -> None:
    both = Positions.after(299, 1), Positions.arange(300)
    assert made(*both) is made(Positions.after(299, 1), Positions.arange(300))
    assert made(Positions.after(7, 300)) is made(Positions.arange(300, batch=2))
    assert made(Positions.after(298, 1), Positions.arange(300)) is not made(
        Positions.after(299, 1), Positions.arange(300)
    )


def test_a_block_mask_goes_with_its_positions_and_is_no_part_of_them() -> None:
    packed = Positions.packed([200, 100])
    mask = weakref.ref(made(packed))
    assert pickle.loads(pickle.dumps(packed)) == packed  # noqa: S301  # what is read was written in this line
    assert mask() is not None
    del packed
    assert mask() is None, "kept without a garbage collection having to find a cycle"


def test_positions_that_were_written_in_place_have_another() -> None:
    index = torch.zeros(1, 300, dtype=torch.int64)
    positions = Positions(index, min_index=0, max_index=299)
    before = made(positions)
    index[:, 150:] = 7
    assert made(positions) is not before
    assert torch.equal(made(positions).to_dense(), AttentionMask(positions)._block_mask().to_dense())
    with torch.inference_mode():
        unversioned = Positions(torch.zeros(1, 300, dtype=torch.int64), min_index=0, max_index=299)
        assert made(unversioned) is not made(unversioned)


def test_a_compiled_graph_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Positions.packed([200, 100])
    before = made(packed)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert made(packed) is not before


def test_kernels_count_in_32_bits_where_no_index_is_negative() -> None:
    zero, one = (torch.tensor(n, dtype=torch.int32) for n in (0, 1))
    for positions in (Positions.packed([2, 3]), Positions.arange(5), Positions.after(3, 5)):
        assert index_mod(positions)(zero, one).dtype == torch.int32
        assert int(index_mod(positions)(zero, one)) == int(positions.index[0, 1])
    far = Positions.of([-(2**31) + 1, 2**31 - 1])
    assert int(index_mod(far)(zero, one) - index_mod(far)(zero, zero)) == 2**32 - 2
    assert bool(far.mask_mod()(zero, zero, one, zero))
    assert not bool(far.mask_mod(window=5)(zero, zero, one, zero))
