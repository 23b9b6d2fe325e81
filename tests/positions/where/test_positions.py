"""`Positions`: every constructor, what follows from it, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from locant import PositionEncoding, Positions, RangeError, Rotary, ShapeError
from tests import oracles
from tests.refusal import refuses

# ---------------------------------------------------------------------- constructors


def test_arange_counts_every_row_from_zero() -> None:
    positions = Positions.arange(5, batch=3)
    assert positions.index.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert positions.document.tolist() == [[0] * 5] * 3
    assert (positions.batch, positions.seq_len, positions.axes) == (3, 5, 1)
    assert (positions.min_index, positions.max_index) == (0, 4)


def test_after_an_int_goes_on_counting() -> None:
    positions = Positions.after(7, 3)
    assert positions.index.tolist() == [[7, 8, 9]]
    assert (positions.min_index, positions.max_index) == (7, 9)


@pytest.mark.parametrize("lengths", [[3, 0, 11], (3, 0, 11), torch.tensor([3, 0, 11]), torch.tensor([3, 0, 11]).int()])
def test_after_a_length_per_row_goes_on_counting_row_by_row(lengths: object) -> None:
    positions = Positions.after(lengths, 2)
    assert positions.index.tolist() == [[3, 4], [0, 1], [11, 12]]
    assert positions.index.dtype == torch.int64
    assert (positions.min_index, positions.max_index) == (0, 12)


def test_after_can_be_told_the_largest_index_instead_of_reading_it() -> None:
    positions = Positions.after(torch.tensor([3, 11]), 2, max_index=40)
    assert positions.max_index == 40


MASKS = {
    "left": ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2], [-1, -1, 0, 0, 0]),
    "right": ([1, 1, 1, 0, 0], [0, 1, 2], [0, 0, 0, -1, -1]),
    "holes": ([0, 1, 0, 1, 1], [None, 0, None, 1, 2], [-1, 0, -1, 0, 0]),
    "nothing": ([0, 0, 0, 0, 0], [], [-1] * 5),
    "everything": ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4], [0] * 5),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_from_mask_counts_the_real_tokens(name: str, dtype: torch.dtype) -> None:
    mask, _, document = MASKS[name]
    positions = Positions.from_mask(torch.tensor([mask]).to(dtype))
    real = [i for i, m in enumerate(mask) if m]
    assert positions.index[0, real].tolist() == list(range(len(real)))
    assert positions.document[0].tolist() == document
    assert int(positions.index.min()) >= 0, "padding has to have a row in any table"
    assert positions.max_index == max(len(real) - 1, 0)


def test_from_mask_takes_one_row_without_a_batch() -> None:
    assert Positions.from_mask(torch.tensor([0, 1])) == Positions.from_mask(torch.tensor([[0, 1]]))


def test_packed_starts_every_document_at_zero_and_counts_empty_ones() -> None:
    positions = Positions.packed([5, 0, 1, 3])
    assert positions.index.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2]]
    assert positions.document.tolist() == [[0, 0, 0, 0, 0, 2, 3, 3, 3]]
    assert positions.max_index == 4


def test_packed_rows_are_filled_up_with_padding() -> None:
    positions = Positions.packed([[2, 1], [1], []], length=4)
    assert positions.document.tolist() == [[0, 0, 1, -1], [0, -1, -1, -1], [-1] * 4]
    assert positions.index.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0] * 4]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_packed_is_each_document_alone_one_after_another(lengths: list[int]) -> None:
    positions = Positions.packed(lengths)
    expected = [(p, d) for d, n in enumerate(lengths) for p in range(n)]
    assert list(zip(positions.index[0].tolist(), positions.document[0].tolist(), strict=True)) == expected


def test_grid_gives_every_token_its_coordinates_in_row_major_order() -> None:
    positions = Positions.grid(2, 3, 5)
    assert positions.index[0].tolist() == [list(place) for place in itertools.product(range(2), range(3), range(5))]
    assert (positions.axes, positions.seq_len, positions.max_index) == (3, 30, 4)
    assert positions.order.tolist() == [list(range(30))]


def test_grid_of_one_axis_is_a_line() -> None:
    assert Positions.grid(4).index.squeeze(-1).tolist() == [[0, 1, 2, 3]]


def test_of_takes_any_integers() -> None:
    positions = Positions.of([[3, -2, 3]], document=[[0, 1, -1]])
    assert positions.index.tolist() == [[3, -2, 3]]
    assert positions.document.tolist() == [[0, 1, -1]]
    assert (positions.min_index, positions.max_index) == (-2, 3)
    assert Positions.of(torch.tensor([1, 2], dtype=torch.int16)).index.dtype == torch.int64


def test_of_several_axes_is_ordered_by_slot() -> None:
    positions = Positions.of(torch.zeros(2, 3, 2, dtype=torch.long))
    assert (positions.axes, positions.order.tolist()) == (2, [[0, 1, 2]] * 2)


def test_cat_joins_along_the_sequence() -> None:
    joined = Positions.cat([Positions.after(2, 2), Positions.from_mask(torch.tensor([[0, 1], [1, 1]]))])
    assert joined.index.tolist() == [[2, 3, 0, 0], [2, 3, 0, 1]]
    assert joined.document.tolist() == [[0, 0, -1, 0], [0, 0, 0, 0]]
    assert (joined.min_index, joined.max_index) == (0, 3)


def test_cat_of_what_was_cut_is_the_whole() -> None:
    for whole in (Positions.arange(7), Positions.packed([3, 4]), Positions.grid(7), Positions.after([1, 5], 7)):
        assert Positions.cat([whole.slice(0, 2), whole.slice(2, 2), whole.slice(2, 7)]) == whole


def test_slice_and_select_keep_index_document_and_order() -> None:
    positions = Positions.of([4, 5, 6, 7, 8], document=[0, 0, 1, 1, 1], order=[9, 8, 7, 6, 5])
    part, chosen = positions.slice(1, 3), positions.select(torch.tensor([4, 0]))
    assert (part.index.tolist(), part.document.tolist(), part.order.tolist()) == ([[5, 6]], [[0, 1]], [[8, 7]])
    assert (chosen.index.tolist(), chosen.document.tolist(), chosen.order.tolist()) == ([[8, 4]], [[1, 0]], [[5, 9]])
    assert Positions.arange(5).slice(2, 4) == Positions.after(2, 2)
    assert Positions.arange(5).slice(3, 99) == Positions.after(3, 2)


def test_expand_repeats_one_row_without_copying() -> None:
    row = Positions.packed([2, 3])
    wide = row.expand(4)
    assert wide.document.shape == wide.index.shape == (4, 5)
    assert wide.index.data_ptr() == row.index.data_ptr()
    with refuses(ShapeError, "2 rows", "3"):
        Positions.arange(4, batch=2).expand(3)


def test_empty_sequences_are_sequences() -> None:
    empties = [Positions.arange(0), Positions.after(3, 0), Positions.after([3, 4], 0), Positions.packed([]),
               Positions.packed([0, 0]), Positions.from_mask(torch.zeros(2, 0)), Positions.grid(0, 3),
               Positions.of([[]]), Positions.arange(4).slice(2, 2)]  # fmt: skip
    for positions in empties:
        assert positions.seq_len == 0
        assert positions.mask().shape == (positions.batch, 1, 0, 0)
        assert positions.cu_seqlens().tolist() == [0]
        assert Positions.cat([positions, positions]).seq_len == 0


# ---------------------------------------------------------------------- sharding


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_both_ends_of_every_document(rank: int) -> None:
    """cu_seqlens [0, 4, 8] over two ranks: positions 0 and 3 of each document, not of the first one only."""
    positions = Positions.packed([4, 4])
    slots = positions.shard_slots(rank, 2)
    assert slots.tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]][rank]
    part = positions.shard(rank, 2)
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
    assert [Positions.arange(6).shard_slots(rank, 3, zigzag=False).tolist() for rank in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_padding_is_cut_like_a_document() -> None:
    """So that all ranks have as many slots."""
    positions = Positions.packed([4, 4], length=12)
    assert [positions.shard_slots(rank, 2).tolist() for rank in (0, 1)] == [[0, 3, 4, 7, 8, 11], [1, 2, 5, 6, 9, 10]]


def test_documents_that_do_not_divide_are_refused() -> None:
    with refuses(ShapeError, "6 tokens", "slot 4", "4 equal parts", "multiple of 4"):
        Positions.packed([4, 6]).shard(0, 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with refuses(RangeError, f"got {rank} for rank"):
        Positions.arange(4).shard(rank, 2)


def test_rows_that_would_be_cut_differently_are_refused() -> None:
    with refuses(ShapeError, "different slots"):
        Positions.packed([[4, 4], [8]]).shard(0, 2)


# ---------------------------------------------------------------------- who sees whom


@st.composite
def rows(draw: st.DrawFn, batch: int | None = None) -> Positions:
    """Anything that is not several-axed, with up to 6 slots."""
    batch = draw(st.integers(1, 3)) if batch is None else batch
    seq_len = draw(st.integers(0, 6))
    numbers = st.lists(st.lists(st.integers(-3, 4), min_size=seq_len, max_size=seq_len), min_size=batch, max_size=batch)
    index, document = draw(numbers), draw(numbers.map(lambda rows: [[max(d, -1) for d in row] for row in rows]))
    return Positions.of(
        torch.tensor(index).view(batch, seq_len).long(), torch.tensor(document).view(batch, seq_len).long()
    )


@settings(max_examples=150)
@given(st.data(), st.booleans(), st.none() | st.integers(1, 5))
def test_the_mask_is_the_rule_pair_by_pair(data: st.DataObject, causal: bool, window: int | None) -> None:
    queries = data.draw(rows())
    keys = data.draw(st.none() | rows(batch=queries.batch))
    other = queries if keys is None else keys
    rule = oracles.may_see(
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
    assert Positions.arange(5).mask(window=3)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
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
def test_the_block_mask_is_the_mask(window: int | None, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("torch counts the arguments of the rule, which the shape checks wrap")
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


# ---------------------------------------------------------------------- an object like any other


def everything() -> list[Positions]:
    return [Positions.arange(3), Positions.after([1, 2], 3), Positions.packed([1, 2]), Positions.grid(2, 2),
            Positions.from_mask(torch.tensor([[0, 1, 1]])), Positions.of([-4, 2], order=[1, 0])]  # fmt: skip


def test_a_round_trip_through_pytree_changes_nothing() -> None:
    for positions in everything():
        leaves, spec = pytree.tree_flatten(positions)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None)
        again = pytree.tree_unflatten(leaves, spec)
        assert again == positions
        for field in ("min_index", "max_index", "start"):
            assert getattr(again, field) == getattr(positions, field)


def test_positions_pass_through_checkpointing() -> None:
    q = torch.randn(1, 2, 5, 6, requires_grad=True)
    rotary, positions, cotangent = Rotary(6), Positions.packed([2, 3]), torch.randn(1, 2, 5, 6)
    plain = torch.autograd.grad(rotary.rotate(q, q, positions)[0], q, cotangent)[0]
    saved = torch.autograd.grad(
        checkpoint(lambda q, p: rotary.rotate(q, q, p)[0], q, positions, use_reentrant=False), q, cotangent
    )[0]
    assert torch.equal(plain, saved)


def test_equal_is_index_document_and_order() -> None:
    assert Positions.arange(3) == Positions.of([0, 1, 2]) == Positions.of([0, 1, 2], [0, 0, 0], order=[0, 1, 2])
    assert Positions.from_mask(torch.tensor([[1, 1]])) == Positions.arange(2)
    assert Positions.arange(3) != Positions.arange(3, batch=2)
    assert Positions.arange(3) != Positions.after(1, 3)
    assert Positions.packed([2, 1]) != Positions.of([0, 1, 0])
    assert Positions.of([0, 1]) != Positions.of([0, 1], order=[1, 0])
    assert Positions.arange(3) != "0..2"


def test_positions_are_not_a_dictionary_key() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Positions.arange(3))


@pytest.mark.parametrize("field", ["index", "document_or_none", "order_or_none", "max_index", "start"])
def test_positions_cannot_be_changed(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Positions.arange(3), field, None)


def test_showing_positions_says_where_they_are() -> None:
    assert repr(Positions.after(7, 2)) == "Positions(1x2, 7..8)"
    assert "with documents" in repr(Positions.packed([1, 2]))
    assert "2x2x2" in repr(Positions.of(torch.zeros(2, 2, 2, dtype=torch.long)))


@pytest.mark.parametrize("positions", everything(), ids=repr)
def test_bounds_known_on_the_host_hold(positions: Positions) -> None:
    for part in (
        positions,
        positions.slice(1, 2),
        positions.select(torch.tensor([1])),
        positions.expand(positions.batch),
    ):
        assert part.min_index is not None
        assert part.max_index is not None
        assert part.min_index <= int(part.index.min())
        assert int(part.index.max()) <= part.max_index


def test_moving_to_another_device_moves_everything() -> None:
    moved = Positions.of([1, 2], [0, 0], order=[0, 1]).to("meta")
    assert {moved.device.type, moved.document.device.type, moved.order.device.type} == {"meta"}
    assert moved.max_index == 2
    assert Positions.arange(2, device="meta").device.type == "meta"


# ---------------------------------------------------------------------- what is refused


def test_the_last_position_is_two_to_the_31_minus_one() -> None:
    assert Positions.after(2**31 - 2, 1).max_index == 2**31 - 2
    assert Positions.of([2**31 - 1, -(2**31) + 1]).max_index == 2**31 - 1


BEYOND = {
    "after": lambda: Positions.after(2**31 - 1, 2),
    "after, per row": lambda: Positions.after(torch.tensor([2**31]), 1),
    "of": lambda: Positions.of([2**31]),
    "of, negative": lambda: Positions.of([-(2**31)]),
    "of, bound given": lambda: Positions.of([1], max_index=2**31),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_position_beyond_the_last_is_refused(name: str) -> None:
    with refuses(RangeError, "2147483648", "2**31 - 1"):
        BEYOND[name]()


@pytest.mark.parametrize("index", [[0.5, 1.0], [1.0], [True, False], [1j]])
def test_an_index_that_is_no_integer_is_refused(index: list[object]) -> None:
    with refuses(ShapeError, "index", "dtype", "expected integers"):
        Positions.of(index)
    with refuses(ShapeError, "cache_len", "dtype"):
        Positions.after(torch.tensor(index), 1)


@pytest.mark.parametrize("n", [-1, 2.0, True, None])
def test_a_length_that_is_no_count_is_refused(n: object) -> None:
    for build in (Positions.arange, lambda n: Positions.after(3, n), lambda n: Positions.after([3], n),
                  lambda n: Positions.packed([2, n]), lambda n: Positions.grid(2, n)):  # fmt: skip
        with refuses(RangeError, repr(n), "0 or more"):
            build(n)


def test_a_negative_cache_is_refused() -> None:
    with refuses(RangeError, "got -1 for cache_len"):
        Positions.after(-1, 2)
    with refuses(RangeError, "-2", "cache_len"):
        Positions.after([3, -2], 2)


@pytest.mark.parametrize("shape", [(), (2, 2, 2, 2)])
def test_an_index_of_the_wrong_rank_is_refused(shape: tuple[int, ...]) -> None:
    with refuses(ShapeError, str(shape), "(batch, seq)"):
        Positions.of(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("name", ["document", "order"])
def test_rows_that_do_not_fit_the_index_are_refused(name: str) -> None:
    with refuses(ShapeError, name, "(1, 2)", "(1, 3)"):
        Positions.of([0, 1, 2], **{name: [0, 0]})


def test_a_cache_length_per_row_has_one_axis() -> None:
    with refuses(ShapeError, "cache_len", "(1, 2)"):
        Positions.after(torch.tensor([[1, 2]]), 2)


def test_documents_longer_than_their_row_are_refused() -> None:
    with refuses(ShapeError, "7 tokens", "row of 6"):
        Positions.packed([3, 4], length=6)


def test_lengths_and_rows_are_not_mixed() -> None:
    with refuses(ShapeError, "[3, [4]]"):
        Positions.packed([3, [4]])


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0, float("-inf"), float("nan")])
def test_an_additive_mask_is_refused(value: float) -> None:
    with refuses(RangeError, "other than 0 and 1", "additive"):
        Positions.from_mask(torch.tensor([[1.0, value]]))


def test_a_four_dimensional_mask_is_refused() -> None:
    with refuses(ShapeError, "(1, 1, 3, 3)"):
        Positions.from_mask(torch.ones(1, 1, 3, 3))


def test_a_grid_without_sizes_and_a_join_of_nothing_are_refused() -> None:
    with refuses(ShapeError, "grid"):
        Positions.grid()
    with refuses(ShapeError, "join"):
        Positions.cat([])
    with refuses(ShapeError, "[1, 2] axes"):
        Positions.cat([Positions.arange(2), Positions.grid(1, 2)])


@pytest.mark.parametrize("limit", [4, 5])
def test_the_check_of_a_table_names_the_first_position_outside(limit: int) -> None:
    """Inside, at the edge, one past; also where only the device knows."""
    for positions in (Positions.of([[0, 1], [5, 6]]), Positions.of([[0, 1], [5, 6]], max_index=100)):
        with refuses(RangeError, f"position {max(5, limit + 1)}", "(1, " + ("0" if limit == 4 else "1"), f"0..{limit}"):
            positions.require_within(0, limit, "a table", "another one")
        positions.require_within(0, 6, "a table", "another one")


@pytest.mark.parametrize("chosen", [Positions.arange(4), Positions.arange(3, batch=3)], ids=repr)
def test_positions_of_another_shape_are_refused(chosen: Positions) -> None:
    with refuses(ShapeError, "x has 2 x 3", f"{chosen.batch} x {chosen.seq_len}"):
        chosen.require_fits(2, 3, torch.device("cpu"), "x")
    with refuses(ShapeError, "on cpu", "meta"):
        Positions.arange(3).require_fits(2, 3, torch.device("meta"), "x")


def test_the_base_class_is_nope() -> None:
    encoding, positions = PositionEncoding(), Positions.packed([2, 3])
    x, q, k = torch.randn(1, 5, 7), torch.randn(1, 4, 5, 6), torch.randn(1, 2, 5, 6)
    assert encoding.embed(x, positions) is x
    turned_q, turned_k = encoding.rotate(q, k, positions)
    assert turned_q is q
    assert turned_k is k
    assert encoding.bias(q, k, positions) is None
    assert encoding.score_mod(q, k, positions) is None
    assert not list(encoding.parameters())


def test_unsigned_indices_do_not_wrap() -> None:
    assert Positions.of(np.array([1, 2**31 - 1], dtype=np.uint64)).index.tolist() == [[1, 2**31 - 1]]
    for large in (2**63, 2**64 - 5):
        with refuses(RangeError, "index", "2**63"):
            Positions.of(np.array([large], dtype=np.uint64))
