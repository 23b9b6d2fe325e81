"""Joined positions: what comes later is later, and what the caller does to its tensors afterwards changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import KVCache, Learned, LocantError, Positions, Rotary, Sinusoidal, attend
from locant.embedding import InputEmbedding
from tests.refusal import refuses


def text(start: int, n: int) -> Positions:
    """Text beside an image: its index on every axis."""
    return Positions.of(torch.arange(start, start + n)[None, :, None].expand(1, n, 3))


def test_an_image_between_two_texts_is_seen_by_the_text_after_it_only() -> None:
    image = Positions.of(Positions.grid(1, 2, 2).index + 3)
    joined = Positions.cat([text(0, 3), image, text(5, 2)])
    assert torch.equal(joined.order, torch.arange(9)[None])
    assert torch.equal(joined.mask()[0, 0], torch.ones(9, 9).tril().bool())


def test_two_images_in_a_cache_are_one_after_the_other() -> None:
    cache, k = KVCache(), torch.zeros(1, 1, 4, 8)
    cache.append(k, k, Positions.grid(2, 2))
    _, _, where = cache.append(k, k, Positions.grid(2, 2))
    assert bool((where.order.diff() == 1).all())


def test_an_order_that_goes_on_by_itself_is_left_as_it_is() -> None:
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


def test_a_cache_goes_on_past_the_bytes_it_has_seen() -> None:
    """The bound has to grow with the positions, or the byte that begins at 65 536 would be skipped."""
    cache, k = KVCache(), torch.zeros(1, 1, 1, 8)
    cache.append(k, k, Positions.of([[65_535]], [[0]]))
    following = cache.next_positions()
    assert following.max_index is not None
    assert following.max_index >= 65_536
    for mine, reference in zip(Rotary(8).cos_sin(following), Rotary(8).cos_sin(Positions.of([[65_536]])), strict=True):
        assert torch.equal(mine, reference)


def test_a_given_bound_says_nothing_about_negative_positions() -> None:
    bounded = Positions.of([[-70_000]], max_index=5)
    for mine, reference in zip(Rotary(8).cos_sin(bounded), Rotary(8).cos_sin(Positions.of([[-70_000]])), strict=True):
        assert torch.equal(mine, reference)


def test_position_ids_in_place_of_positions_are_refused_with_the_way_to_make_them() -> None:
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
