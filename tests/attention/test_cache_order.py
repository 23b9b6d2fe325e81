"""`KVCache` where tokens have an order of their own: images, then text; documents; what is known of what comes next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locant import KVCache, Positions, RangeError, attend
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM = 2, 4


def tokens(n: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, HEADS, n, HEAD_DIM)


def text(start: int, n: int, axes: int = 2) -> Positions:
    return Positions.of(torch.arange(start, start + n)[None, :, None].expand(1, n, axes))


def filled(positions: Positions) -> KVCache:
    cache, part = KVCache(), tokens(positions.seq_len, positions.batch)
    cache.append(part, part, positions)
    return cache


def test_text_behind_an_image_attends_as_in_one_piece() -> None:
    image, cache = Positions.grid(2, 3), KVCache()
    q, k, v = tokens(10), tokens(10), tokens(10)
    at_once = attend(q, k, v, positions=Positions.cat([image, text(3, 4)]))
    keys, values, k_positions = cache.append(k[:, :, :6], v[:, :, :6], image)
    steps = [attend(q[:, :, :6], keys, values, positions=image, k_positions=k_positions)]
    for slot in range(6, 10):
        where = text(slot - 3, 1)
        keys, values, k_positions = cache.append(k[:, :, slot : slot + 1], v[:, :, slot : slot + 1], where)
        part = q[:, :, slot : slot + 1]
        steps.append(attend(part, keys, values, positions=where, k_positions=k_positions))
    assert_close(torch.cat(steps, dim=2), at_once)


@pytest.mark.parametrize(
    ("cached", "new"),
    [
        (Positions.grid(2, 2), text(2, 3)),
        (Positions.grid(2, 2), Positions.grid(1, 2)),
        (Positions.of([0, 0, 1], order=[0, 1, 2]), Positions.arange(2)),
        (Positions.arange(3), Positions.of([3, 3], order=[0, 1])),
        (Positions.of([[0, 0], [1, 1]], order=[[0, 1], [1, 2]]), Positions.of([[2], [2]], order=[[2], [0]])),
    ],
    ids=["text", "image", "a new text", "image behind text", "one row of two"],
)
def test_whatever_order_begins_anew_comes_behind_all_that_is_cached(cached: Positions, new: Positions) -> None:
    cache = filled(cached)
    for _ in range(3):
        before = len(cache)
        part = tokens(new.seq_len, new.batch)
        _, _, k_positions = cache.append(part, part, new)
        seen = new.mask(k_positions)[:, 0]
        assert bool(seen[:, :, :before].all())
        assert torch.equal(seen[:, :, before:], new.mask()[:, 0])
    following = cache.next_positions() if new.axes == 1 else new.slice(0, 1)
    _, _, k_positions = cache.append(tokens(1, new.batch), tokens(1, new.batch), following)
    assert bool(following.mask(k_positions).all())


def test_an_order_that_goes_on_by_itself_is_taken_as_it_is() -> None:
    both = Positions.cat([Positions.grid(2, 2), text(2, 3)])
    cache = filled(both.slice(0, 4))
    _, _, k_positions = cache.append(tokens(3), tokens(3), both.slice(4, 7))
    assert k_positions == both


def test_nothing_new_moves_nothing() -> None:
    cache = filled(Positions.grid(2, 2))
    _, _, k_positions = cache.append(tokens(0), tokens(0), text(0, 0))
    assert k_positions == Positions.grid(2, 2)


def test_no_device_is_asked() -> None:
    part = torch.empty(1, HEADS, 4, HEAD_DIM, device="meta")
    cache = KVCache()
    for _ in range(2):
        cache.append(part, part, Positions.grid(2, 2).to("meta"))
    assert len(cache) == 8


@pytest.mark.parametrize("document", [-2, -100, 2**31])
def test_a_document_that_is_neither_one_nor_padding_is_refused(document: int) -> None:
    with refuses(RangeError, str(document), "-1"):
        Positions.of([0, 1, 2], [0, document, 0])


def test_a_document_number_that_could_not_be_read_is_still_a_document() -> None:
    """On an accelerator documents are not looked at when positions are made; the plain constructor never does."""
    index, document = torch.tensor([[0, 1, 2]]), torch.full((1, 3), -2)
    following = filled(Positions(index, document, min_index=0, max_index=2)).next_positions(2)
    assert following.index.tolist() == [[3, 4]]
    assert following.document.tolist() == [[-2, -2]]


@pytest.mark.parametrize(
    "cached",
    [
        Positions.from_mask(torch.tensor([[0, 1, 1, 1]])),
        Positions.packed([2, 2]),
        Positions.of([[7, 3]]),
        Positions.of([[-4, -3]]),
        Positions.from_mask(torch.zeros(1, 2)),
    ],
    ids=["padded", "packed", "backwards", "negative", "nothing"],
)
@pytest.mark.parametrize("n", [1, 5])
def test_the_bounds_of_what_comes_next_are_known_and_hold(n: int, cached: Positions) -> None:
    """Without them every layer of every step would ask the device; too narrow, tables would be read past their end."""
    following = filled(cached).next_positions(n)
    assert following.min_index <= int(following.index.min())
    assert int(following.index.max()) <= following.max_index


def test_the_bounds_are_known_where_values_cannot_be_read() -> None:
    cached, part = Positions.from_mask(torch.tensor([[0, 1, 1, 1]])).to("meta"), tokens(4).to("meta")
    cache = KVCache()
    cache.append(part, part, cached)
    following = cache.next_positions(2)
    assert (following.min_index, following.max_index) == (0, 4)


def test_a_change_of_mode_takes_no_more_room() -> None:
    cache = KVCache(max_len=8)
    with torch.inference_mode():
        cache.append(tokens(3), tokens(3), Positions.arange(3))
    keys, _, _ = cache.append(tokens(1), tokens(1), cache.next_positions())
    assert keys.untyped_storage().nbytes() == 8 * HEADS * HEAD_DIM * 4
    again, _, _ = cache.append(tokens(1), tokens(1), cache.next_positions())
    assert again.data_ptr() == keys.data_ptr()
