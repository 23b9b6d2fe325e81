"""`KVCache`: what it holds, how it grows, and the position of the next token."""

from __future__ import annotations

import itertools
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from locant import ALiBi, KVCache, LocantError, Positions, RangeError, Rotary, ShapeError, attend
from tests.refusal import refuses
from tests.tolerances import assert_close


def tokens(n: int, *, batch: int = 2, heads: int = 3, width: int = 5) -> Tensor:
    return torch.randn(batch, heads, n, width)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.none() | st.just(80))
def test_everything_appended_comes_back_in_order(chunks: list[int], max_len: int | None) -> None:
    cache, keys, values = KVCache(max_len), [], []
    for n in chunks:
        keys.append(tokens(n))
        values.append(tokens(n, width=7))
        stored = cache.append(keys[-1], values[-1], cache.next_positions(n))
        assert torch.equal(stored[0], torch.cat(keys, dim=2))
        assert torch.equal(stored[1], torch.cat(values, dim=2))
        assert stored[2] == Positions.arange(len(cache)) == cache.positions
        assert len(cache) == sum(k.shape[2] for k in keys)


def test_memory_is_taken_once_where_the_length_is_known() -> None:
    cache = KVCache(max_len=11)
    places = set()
    for n in (5, 1, 4, 1):
        keys, values, _ = cache.append(tokens(n), tokens(n), cache.next_positions(n))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) == 1


def test_memory_doubles_where_it_is_not() -> None:
    cache, places = KVCache(), []
    for _ in range(64):
        keys, _, _ = cache.append(tokens(1), tokens(1), cache.next_positions())
        places.append(keys.data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves == 6


def test_what_was_returned_is_neither_the_caller_s_nor_changed_by_later_tokens() -> None:
    cache, k = KVCache(max_len=9), tokens(4)
    keys, _, _ = cache.append(k, k, Positions.arange(4))
    before = keys.clone()
    k.zero_()
    cache.append(tokens(5), tokens(5), cache.next_positions(5))
    assert torch.equal(keys, before)


def test_one_token_too_many_is_refused_and_loses_nothing() -> None:
    """Inside, at the edge, one past."""
    cache = KVCache(max_len=5)
    cache.append(tokens(4), tokens(4), Positions.arange(4))
    with refuses(RangeError, "6 tokens", "max_len=5"):
        cache.append(tokens(2), tokens(2), cache.next_positions(2))
    assert len(cache) == 4
    assert cache.positions == Positions.arange(4)
    cache.append(tokens(1), tokens(1), cache.next_positions())
    assert len(cache) == 5
    with refuses(RangeError, "6 tokens", "max_len=5"):
        KVCache(max_len=5).append(tokens(6), tokens(6), Positions.arange(6))


def test_clear_forgets_everything() -> None:
    cache = KVCache()
    cache.append(tokens(4), tokens(4), Positions.arange(4))
    cache.clear()
    assert len(cache) == 0
    assert cache.positions == Positions.arange(0)
    assert cache.next_positions(2) == Positions.arange(2)
    cache.append(tokens(3, heads=1, width=2).bfloat16(), tokens(3, heads=1).bfloat16(), Positions.arange(3))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_numbers_of_8_bits_are_stored_as_they_are_and_padding_as_zeros(dtype: torch.dtype) -> None:
    k, where = tokens(4).transpose(0, 1).contiguous().transpose(0, 1), Positions.from_mask(torch.tensor([[0, 1, 1, 0]]))
    stored, _, _ = KVCache(max_len=9).append(k.to(dtype), k.to(dtype), where)
    assert stored.dtype == dtype
    expected = k.to(dtype).float() * torch.tensor([0.0, 1.0, 1.0, 0.0])[:, None]
    assert torch.equal(stored.float(), expected)


def filled(positions: Positions, batch: int = 2) -> KVCache:
    cache, n = KVCache(), positions.seq_len
    cache.append(tokens(n, batch=batch), tokens(n, batch=batch), positions)
    return cache


def test_the_next_positions_follow_the_last() -> None:
    assert filled(Positions.arange(5)).next_positions(3) == Positions.after(5, 3)
    assert filled(Positions.after(7, 2)).next_positions() == Positions.after(9, 1)
    assert filled(Positions.after([2, 6], 3)).next_positions(2).index.tolist() == [[5, 6], [9, 10]]


def test_the_bounds_of_the_next_positions_hold_for_a_row_without_tokens_which_begins_at_zero() -> None:
    padding = Positions.of(torch.tensor([[5, 6], [5, 6]]), torch.tensor([[0, 0], [-1, -1]]))
    following = filled(padding).next_positions(2)
    assert following.index.tolist() == [[7, 8], [0, 1]]
    assert (following.min_index or 0) <= 0
    assert (following.max_index or 8) >= 8


@pytest.mark.parametrize(
    "mask",
    [[[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]], [[0, 1, 0, 1], [1, 0, 1, 1]]],
    ids=["left", "right", "holes"],
)
def test_the_next_positions_of_padded_rows_follow_their_last_real_token(mask: list[list[int]]) -> None:
    real = [sum(row) for row in mask]
    cache = filled(Positions.from_mask(torch.tensor(mask)))
    following = cache.next_positions(2)
    assert following.index.tolist() == [[n, n + 1] for n in real]
    assert following.document.tolist() == [[0, 0], [0, 0]]
    _, _, k_positions = cache.append(tokens(2), tokens(2), following)
    seen = following.mask(k_positions)[:, 0]
    assert seen[:, 0].sum(-1).tolist() == [n + 1 for n in real]
    assert seen[:, 1].sum(-1).tolist() == [n + 2 for n in real]
    assert cache.next_positions().index.tolist() == [[n + 2] for n in real]


def test_the_next_token_belongs_to_the_last_document() -> None:
    cache = filled(Positions.packed([[3, 2], [1, 3]], length=7))
    following = cache.next_positions()
    assert following.index.tolist() == [[2], [3]]
    assert following.document.tolist() == [[1], [1]]
    cache = filled(Positions.packed([[3, 2], [4]]))
    assert (cache.next_positions().index.tolist(), cache.next_positions().document.tolist()) == ([[2], [4]], [[1], [0]])


def test_where_there_is_no_token_yet_it_starts_at_zero() -> None:
    following = filled(Positions.from_mask(torch.tensor([[0, 0, 0], [1, 1, 0]]))).next_positions(2)
    assert following.index.tolist() == [[0, 1], [2, 3]]
    following = filled(Positions.from_mask(torch.ones(2, 0))).next_positions(2)
    assert following.index.expand(2, 2).tolist() == [[0, 1], [0, 1]]


def test_the_next_token_sees_all_of_its_document_where_the_order_is_not_the_index() -> None:
    """Tokens that share an index (patches of an image, say) still come before the next one."""
    cache = filled(Positions.of([[0, 0, 0, 1]], order=[[0, 1, 2, 3]]))
    following = cache.next_positions(2)
    assert following.index.tolist() == [[2, 3]]
    _, _, k_positions = cache.append(tokens(2), tokens(2), following)
    assert following.mask(k_positions)[0, 0].tolist() == [[True] * 5 + [False], [True] * 6]


def test_several_axes_have_no_next_position() -> None:
    with refuses(ShapeError, "2 axes"):
        filled(Positions.grid(2, 2)).next_positions()


def test_one_row_of_positions_serves_the_batch_and_meets_rows_of_their_own() -> None:
    cache = filled(Positions.arange(3))
    _, _, k_positions = cache.append(tokens(1), tokens(1), Positions.of([[3], [7]]))
    assert k_positions.index.tolist() == [[0, 1, 2, 3], [0, 1, 2, 7]]


@pytest.mark.parametrize(
    "new",
    [tokens(1).bfloat16(), tokens(1, heads=4), tokens(1, width=6), tokens(1, batch=1), tokens(1).to("meta")],
    ids=["dtype", "heads", "width", "batch", "device"],
)
def test_tokens_of_another_kind_are_refused(new: Tensor) -> None:
    cache = filled(Positions.arange(4))
    positions = cache.next_positions().to(new.device)
    with refuses(ShapeError, "keys", str(tuple(new.shape)), "the cache holds"):
        cache.append(new, new, positions)
    assert len(cache) == 4
    if new.device.type == "cpu":
        with refuses(ShapeError, "values"):
            cache.append(tokens(1), new, positions)
    assert len(cache) == 4


def test_keys_and_values_of_different_tokens_are_refused() -> None:
    for v in (tokens(3), tokens(4, heads=1), tokens(4, batch=1)):
        with refuses(ShapeError, "(2, 3, 4, 5)", str(tuple(v.shape))):
            KVCache().append(tokens(4), v, Positions.arange(4))


def test_positions_of_other_tokens_are_refused() -> None:
    with refuses(ShapeError, "1 x 3", "k has 2 x 4"):
        KVCache().append(tokens(4), tokens(4), Positions.arange(3))


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_gradient_is_refused_rather_than_lost(which: str) -> None:
    k, v = tokens(2), tokens(2)
    (k if which == "k" else v).requires_grad_()
    with refuses(LocantError, "gradient", "no_grad"):
        KVCache().append(k, v, Positions.arange(2))
    with torch.no_grad():
        keys, values, _ = KVCache().append(k, v, Positions.arange(2))
    assert not keys.requires_grad
    assert not values.requires_grad


def test_what_is_no_keys_values_and_positions_is_refused() -> None:
    k, p = torch.randn(1, 2, 5, 8), Positions.arange(5)
    wrong: list[tuple[Any, Any, Any]] = [
        (k, k, torch.arange(5)), ([1], k, p), (k, [1], p), (k[0], k[0], p), (k, k.double(), p), (k.int(), k.int(), p),
    ]  # fmt: skip
    for one in wrong:
        cache = KVCache()
        with pytest.raises((LocantError, jaxtyping.TypeCheckError)):
            cache.append(*one)
        assert len(cache) == 0


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("encoding", "prompt", "max_len", "window", "most"),
    [
        (ALiBi(4), Positions.arange(20, batch=2), 64, None, 4),
        (ALiBi(4), Positions.from_mask(torch.arange(20).expand(2, 20) >= 4), None, None, 4),
        (Rotary(8), Positions.arange(7), None, 5, 5),
    ],
    ids=["of a known length", "padded", "window"],
)
def test_few_compiled_programs_serve_every_length(
    encoding: ALiBi | Rotary, prompt: Positions, max_len: int | None, window: int | None, most: int
) -> None:
    """A prompt, the first step, and all others: with room or not, and with fewer than 16 keys."""
    torch.compiler.reset()
    programs, positions = CompileCounter(), prompt

    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        q, k = encoding.rotate(q, k, positions)
        keys, values, k_positions = cache.append(k, v, positions)
        return attend(q, keys, values, encoding=encoding, positions=positions, k_positions=k_positions, window=window)

    compiled, (ours, theirs) = (
        torch.compile(step, fullgraph=True, backend=programs),
        (KVCache(max_len), KVCache(max_len)),
    )
    with torch.no_grad():
        for _ in range(28):
            q = torch.randn(2, 4, positions.seq_len, 8)
            k, v = torch.randn(2, 2, 2, positions.seq_len, 8)
            assert_close(compiled(ours, q, k, v, positions), step(theirs, q, k, v, positions))
            positions = ours.next_positions()
    assert len(ours) == prompt.seq_len + 27
    assert programs.frame_count <= most
