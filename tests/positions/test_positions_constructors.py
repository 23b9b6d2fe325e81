"""`Positions`: every constructor, and parts of positions put together again, which the caller cannot move."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locant import KVCache, Learned, LocantError, Positions, Rotary, ShapeError, Sinusoidal, attend
from locant.embedding import InputEmbedding
from tests.refusal import refuses


def test_every_row_counts_from_zero_or_continues() -> None:
    positions = Positions.arange(5, batch=3)
    assert positions.index.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert positions.document.tolist() == [[0] * 5] * 3
    assert (positions.batch, positions.seq_len, positions.axes) == (3, 5, 1)
    assert (positions.min_index, positions.max_index) == (0, 4)
    behind = Positions.after(7, 3)
    assert (behind.index.tolist(), behind.min_index, behind.max_index) == ([[7, 8, 9]], 7, 9)


@pytest.mark.parametrize("lengths", [[3, 0, 11], (3, 0, 11), torch.tensor([3, 0, 11]), torch.tensor([3, 0, 11]).int()])
def test_after_a_length_per_row_goes_on_counting_row_by_row(lengths: object) -> None:
    positions = Positions.after(lengths, 2)
    assert positions.index.tolist() == [[3, 4], [0, 1], [11, 12]]
    assert positions.index.dtype == torch.int64
    assert (positions.min_index, positions.max_index) == (0, 12)
    assert Positions.after(lengths, 2, max_index=40).max_index == 40, "told instead of read"


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
    assert positions == Positions.from_mask(torch.tensor(mask).to(dtype)), "a row without a batch"


def test_packed_rows_are_filled_up_with_padding() -> None:
    positions = Positions.packed([[2, 1], [1], []], length=4)
    assert positions.document.tolist() == [[0, 0, 1, -1], [0, -1, -1, -1], [-1] * 4]
    assert positions.index.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0] * 4]
    assert Positions.packed([5, 0, 1, 3]).max_index == 4


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


def test_of_takes_any_integers() -> None:
    positions = Positions.of([[3, -2, 3]], document=[[0, 1, -1]])
    assert positions.index.tolist() == [[3, -2, 3]]
    assert positions.document.tolist() == [[0, 1, -1]]
    assert (positions.min_index, positions.max_index) == (-2, 3)
    assert Positions.of(torch.tensor([1, 2], dtype=torch.int16)).index.dtype == torch.int64
    several = Positions.of(torch.zeros(2, 3, 2, dtype=torch.long))
    assert (several.axes, several.order.tolist()) == (2, [[0, 1, 2]] * 2), "ordered by slot"


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


def text(start: int, n: int) -> Positions:
    """Text beside an image: its index on every axis."""
    return Positions.of(torch.arange(start, start + n)[None, :, None].expand(1, n, 3))


def test_an_image_between_two_texts_is_seen_by_the_text_after_it_only() -> None:
    image = Positions.of(Positions.grid(1, 2, 2).index + 3)
    joined = Positions.cat([text(0, 3), image, text(5, 2)])
    assert torch.equal(joined.order, torch.arange(9)[None])
    assert torch.equal(joined.mask()[0, 0], torch.ones(9, 9).tril().bool())


def test_an_order_that_already_continues_does_not_change() -> None:
    first = Positions.of([[7, 7]], order=[[0, 1]])
    rest = Positions.of([[7, 7]], order=[[2, 3]])
    assert torch.equal(Positions.cat([first, rest]).order, torch.arange(4)[None])


@pytest.mark.parametrize(
    "parts", [(Positions.arange(3), Positions.after(3, 2)), (Positions.arange(3), Positions.arange(2))]
)
def test_only_parts_that_chain_are_known_to_count(parts: tuple[Positions, Positions]) -> None:
    joined = Positions.cat(parts)
    chains = bool((joined.index.diff() == 1).all())
    assert (joined.start is not None) == chains


@pytest.mark.parametrize("first", [0, 2])
def test_a_slice_starts_where_its_first_token_stands(first: int) -> None:
    part = Positions.after(5, 6).slice(first, 6)
    assert part.start == int(part.index[0, 0]) == 5 + first


def test_writing_into_a_tensor_does_not_move_positions_made_of_it() -> None:
    ids, document = torch.tensor([[5, 6]]), torch.tensor([[0, 0]])
    positions = Positions.of(ids, document)
    ids += 70_000
    document -= 1
    assert positions == Positions.of([[5, 6]], [[0, 0]])
    array = np.array([[5, 6]])
    positions = Positions.of(array)
    array += 1
    assert positions == Positions.of([[5, 6]])


def test_a_cache_continues_past_a_byte_of_the_index() -> None:
    """The bound has to grow with the positions, or the byte that begins at 65 536 would be skipped."""
    cache, k = KVCache(), torch.zeros(1, 1, 1, 8)
    cache.append(k, k, Positions.of([[65_535]], [[0]]))
    following = cache.next_positions()
    assert following.max_index >= 65_536
    for mine, reference in zip(Rotary(8).cos_sin(following), Rotary(8).cos_sin(Positions.of([[65_536]])), strict=True):
        assert torch.equal(mine, reference)


def test_a_given_bound_says_nothing_about_negative_positions() -> None:
    bounded = Positions.of([[-70_000]], max_index=5)
    for mine, reference in zip(Rotary(8).cos_sin(bounded), Rotary(8).cos_sin(Positions.of([[-70_000]])), strict=True):
        assert torch.equal(mine, reference)


def test_position_ids_instead_of_positions_suggest_positions_of() -> None:
    ids, x = torch.arange(3)[None], torch.randn(1, 1, 3, 8)
    calls = [
        lambda: attend(x, x, x, positions=ids),
        lambda: Rotary(8).rotate(x, x, ids),
        lambda: Learned(8, 8).embed(x[0], ids),
        lambda: Sinusoidal(8).embed(x[0], ids),
        lambda: InputEmbedding(9, 8)(ids, ids),
    ]
    for call in calls:
        with refuses(LocantError, "Positions.of(position_ids)"):
            call()
