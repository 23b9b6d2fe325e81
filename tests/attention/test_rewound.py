"""`truncate` and `reorder`: rows that took drafts back, and beams, have the keys and the bias of rows that never did.

Every cache is driven through the same steps: a prompt of rows of several lengths, drafts of which each row keeps some,
beams that are left and doubled. What each row holds is then compared with its tokens on their own, from scratch: keys,
values, positions and bias bit for bit, outputs up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from locant import (
    ALiBi,
    Cope,
    Fox,
    Inkling,
    KVCache,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    attend,
)
from locant.attention import PagedKVCache, StaticKVCache
from locant.positions.encodings.cable import Cable
from locant.positions.encodings.path import PaTH
from locant.positions.encodings.repo import RePo
from locant.positions.encodings.selective_rope import SelectiveRoPE
from tests.attention.driven import BLOCK, MAX_LEN, InBlocks, InSlots
from tests.positions.claims import shaken
from tests.refusal import refuses
from tests.tolerances import DECODED

HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 4, 2, 8, 12
NOTHING = -1
"""In the place of a token's number: padding."""
ENCODINGS: dict[str, Callable[[], PositionEncoding]] = {
    "rotary": lambda: Rotary(HEAD_DIM),
    "alibi": lambda: ALiBi(HEADS),
    "cope": lambda: shaken(Cope(HEAD_DIM, 6), 1.0),
    "fox": lambda: Fox(HEADS, D_MODEL),
    "inkling": lambda: shaken(Inkling(HEADS, D_MODEL, d_rel=3, extent=9, floor=5)),
    "cable": lambda: shaken(Cable(HEADS, D_MODEL)),
    "repo": lambda: shaken(RePo(HEAD_DIM, KV_HEADS, D_MODEL)),
    "selective_rope": lambda: shaken(SelectiveRoPE(HEAD_DIM, KV_HEADS, D_MODEL, gate=True)),
    "path": lambda: shaken(PaTH(KV_HEADS, HEAD_DIM, D_MODEL, rank=5)),
}
X, Q = torch.randn(99, D_MODEL), torch.randn(99, HEADS, HEAD_DIM)
K, V = torch.randn(2, 99, KV_HEADS, HEAD_DIM)
"""Of every token that there is, by its number; the last one is what stands at padding."""
for drawn in (Q, K, V):
    drawn[..., -1, :, :] = torch.nan


def of_tokens(drawn: Tensor, numbers: Tensor) -> Tensor:
    return drawn[numbers].transpose(1, 2)


Driven = InSlots | InBlocks
SIZES: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
CACHES: dict[str, Callable[[PositionEncoding | None], Driven]] = {
    "growing": lambda encoding: InSlots(KVCache()),
    "growing, of a known length": lambda encoding: InSlots(KVCache(MAX_LEN)),
    "static": lambda encoding: InSlots(StaticKVCache(MAX_LEN, batch=3, encoding=encoding, **SIZES)),
    "paged": lambda encoding: InBlocks(PagedKVCache(50, block_size=BLOCK, encoding=encoding, **SIZES), 3),
}


def step(driven: Driven, encoding: PositionEncoding, numbers: Tensor, where: Positions) -> Tensor:
    """The outputs of new tokens, which are then in the cache."""
    past = driven.positions
    where = encoding.read(X[numbers], where, past if past.seq_len else None)
    q, k = encoding.rotate(of_tokens(Q, numbers), of_tokens(K, numbers), where)
    keys, values, k_positions = driven.append(k, of_tokens(V, numbers), where)
    return attend(q, keys, values, encoding=encoding, positions=where, k_positions=k_positions)


def require_alone(driven: Driven, encoding: PositionEncoding, rows: list[list[int]]) -> None:
    """Raise unless every row, with one more token, is what its tokens are by themselves."""
    numbers = torch.tensor([[90 + row] for row in range(len(rows))])
    where = driven.following(1)
    read = encoding.read(X[numbers], where, driven.positions)
    q, k = encoding.rotate(of_tokens(Q, numbers), of_tokens(K, numbers), read)
    keys, values, k_positions = driven.append(k, of_tokens(V, numbers), read)
    y = attend(q, keys, values, encoding=encoding, positions=read, k_positions=k_positions)
    bias = encoding.bias(q, keys, read, k_positions)
    for row, history in enumerate(rows):
        mine = torch.tensor([[*history, 90 + row]])
        n = mine.shape[1]
        whole = encoding.read(X[mine], Positions.arange(n))
        one_q, one_k = encoding.rotate(of_tokens(Q, mine), of_tokens(K, mine), whole)
        real = k_positions.document.expand(len(rows), -1)[row] >= 0
        assert torch.equal(k_positions.expand(len(rows)).index[row, real], torch.arange(n)), f"row {row}: positions"
        assert torch.equal(keys[row, :, real], one_k[0]), f"row {row}: keys"
        assert torch.equal(values[row, :, real], of_tokens(V, mine)[0]), f"row {row}: values"
        for stored in (keys, values):
            assert not stored[row, :, ~real].any(), f"row {row}: padding is not zeros"
        if bias is not None:
            expected = encoding.bias(one_q, one_k, whole)
            wide = bias.expand(len(rows), -1, -1, -1)
            assert torch.equal(wide[row, :, 0, real], expected[0, :, -1]), f"row {row}: bias"
        alone = attend(one_q, one_k, of_tokens(V, mine), encoding=encoding, positions=whole)
        torch.testing.assert_close(y[row, :, -1], alone[0, :, -1], rtol=0, atol=DECODED)


LEFT_PADDED, WITH_HOLES = ([2, 3, 4, 5], [4, 5], [3, 4, 5]), ([0, 2, 3, 5], [0, 1], [1, 4, 5])
"""Which of six slots hold a row's tokens."""


def prompted(driven: Driven, encoding: PositionEncoding, slots: tuple[list[int], ...]) -> list[list[int]]:
    rows, padded = [[0, 1, 2, 3], [4, 5], [6, 7, 8]], torch.full((3, 6), NOTHING)
    for row, numbers, places in zip(padded, rows, slots, strict=True):
        row[places] = torch.tensor(numbers)
    step(driven, encoding, padded, Positions.from_mask(padded != NOTHING))
    return rows


def drafted(driven: Driven, encoding: PositionEncoding, rows: list[list[int]], accepted: list[int]) -> None:
    """Three tokens to every row, of which it keeps some; the cached keys of the others must leave no trace."""
    first = 10 + 3 * sum(map(len, rows)) % 60
    numbers = torch.arange(first, first + 3 * len(rows)).view(len(rows), 3)
    step(driven, encoding, numbers, driven.following(3))
    driven.keep(accepted)
    for row, (history, count) in enumerate(zip(rows, accepted, strict=True)):
        history += numbers[row, :count].tolist()


Steps = list[tuple[list[int] | None, list[int]]]
DRAFTS: Steps = [(None, [2, 0, 3]), (None, [0, 0, 0]), (None, [3, 1, 2]), (None, [1, 1, 1])]
BEAMS: Steps = [([0, 0, 1], [3, 2, 3]), ([2, 1, 1], [1, 3, 2]), ([1, 1, 1], [3, 3, 3]), ([2, 0, 1], [0, 1, 3])]
MORE_ROWS_AND_FEWER: Steps = [([0, 0, 1, 2, 2], [1, 2, 3, 0, 1]), ([3, 1], [1, 2])]


@torch.no_grad()
@pytest.mark.parametrize(
    ("cache_name", "encoding_name", "steps"),
    [
        *itertools.product(("growing", "static", "paged"), ENCODINGS, (DRAFTS, BEAMS)),
        *itertools.product(("growing, of a known length",), ("rotary", "alibi"), (DRAFTS, BEAMS)),
        ("growing", "rotary", MORE_ROWS_AND_FEWER),
    ],
)
def test_rows_that_took_drafts_back_and_beams_are_rows_of_their_own(
    cache_name: str, encoding_name: str, steps: Steps
) -> None:
    """Behind a padded prompt, each step puts rows in an order, and says how many of three drafts each keeps."""
    encoding = ENCODINGS[encoding_name]()
    driven = CACHES[cache_name](encoding)
    rows = prompted(driven, encoding, LEFT_PADDED if steps is DRAFTS else WITH_HOLES)
    for order, accepted in steps:
        if order is not None:
            driven.reorder(order)
            rows = [list(rows[row]) for row in order]
        drafted(driven, encoding, rows, accepted)
    require_alone(driven, encoding, rows)


@pytest.mark.parametrize("one_row", [True, False])
def test_one_length_for_all_rows_leaves_no_padding(one_row: bool) -> None:
    for length in (3, torch.tensor([3, 3])):
        cache, k = KVCache(), torch.randn(2, 1, 5, 4)
        cache.append(k, k, Positions.arange(5, batch=1 if one_row else 2))
        cache.truncate(length)
        assert len(cache) == 3
        assert cache.positions == Positions.arange(3, batch=1 if one_row else 2)
        assert cache.positions.start == 0, "plain positions stay plain, for which there are kernels"
        assert cache.next_positions(2) == Positions.after(3, 2)
        cache.truncate(0)
        keys, _, positions = cache.append(k[:, :, :1] + 1, k[:, :, :1], Positions.arange(1))
        assert torch.equal(keys, k[:, :, :1] + 1)
        assert positions == Positions.arange(1)


def test_an_order_of_its_own_is_taken_back_too() -> None:
    """A draft behind an image: what comes next follows what is left."""
    cache, k = KVCache(), torch.randn(1, 1, 6, 4)
    cache.append(k, k, Positions.grid(2, 3))
    text = Positions.of([[[3, 3], [4, 4]]])
    cache.append(k[:, :, :2], k[:, :, :2], text)
    cache.truncate(7)
    _, _, once = cache.append(k[:, :, :1], k[:, :, :1], text.slice(1, 2))
    straight = KVCache()
    straight.append(k, k, Positions.grid(2, 3))
    straight.append(k[:, :, :1], k[:, :, :1], text.slice(0, 1))
    _, _, expected = straight.append(k[:, :, :1], k[:, :, :1], text.slice(1, 2))
    assert once == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cache_name", CACHES)
def test_narrow_numbers_are_cut_and_moved(cache_name: str, dtype: torch.dtype) -> None:
    k = torch.randn(3, KV_HEADS, 5, HEAD_DIM).to(dtype)
    caches: dict[str, Driven] = {
        "growing": InSlots(KVCache()),
        "growing, of a known length": InSlots(KVCache(6)),
        "static": InSlots(StaticKVCache(6, batch=3, dtype=dtype, **SIZES)),
        "paged": InBlocks(PagedKVCache(9, block_size=BLOCK, dtype=dtype, **SIZES), 3),
    }
    driven = caches[cache_name]
    driven.append(k, k, Positions.arange(5))
    driven.keep([4, 2, 0])
    driven.reorder([1, 0, 1])
    one = k[:, :, :1]
    keys, values, positions = driven.append(one, one, driven.following(1))
    for row, (source, kept) in enumerate(((1, 2), (0, 4), (1, 2))):
        expected = torch.cat([k[source, :, :kept].float(), one[row].float()], dim=1)
        real = positions.document[row] >= 0
        for found in (keys.float(), values.float()):
            assert torch.equal(found[row, :, real], expected)
            assert not found[row, :, ~real].any()


@pytest.mark.parametrize("cache_name", CACHES)
def test_modes_may_change_in_between(cache_name: str) -> None:
    k, driven = torch.randn(3, KV_HEADS, 2, HEAD_DIM), CACHES[cache_name](None)
    for _ in range(2):
        with torch.inference_mode():
            driven.append(k, k, driven.following(2))
            driven.keep([1, 2, 1])
        driven.reorder([2, 0, 1])
        driven.append(k, k, driven.following(2))
        driven.keep([0, 1, 1])
        with torch.inference_mode():
            driven.reorder([1, 1, 0])


@pytest.mark.unchecked
@pytest.mark.parametrize("encoding_name", ["rotary", "alibi"])
def test_drafting_is_one_graph_compiled_once(encoding_name: str) -> None:
    torch._dynamo.reset()
    encoding, counter = ENCODINGS[encoding_name](), CompileCounterWithBackend("aot_eager")
    static, same = (StaticKVCache(MAX_LEN, batch=3, **SIZES) for _ in range(2))

    def draft(cache: StaticKVCache, numbers: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        y = step(InSlotsUncounted(cache), encoding, numbers, cache.next_positions(3))
        cache.truncate(lengths)
        cache.reorder(rows)
        return y

    compiled = torch.compile(draft, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (2, 3, 5):
            given = torch.randint(90, (3, 3)), torch.tensor([length, length + 1, 0]), torch.randperm(3)
            assert torch.equal(compiled(static, *given), draft(same, *given))
    assert static.positions == same.positions
    assert len(static) == len(same)
    assert counter.frame_count == 1


class InSlotsUncounted(InSlots):
    """Which asks for no length, as a graph cannot."""

    def append(self, k: Tensor, v: Tensor, where: Positions) -> Any:
        return self.cache.append(k, v, where)


def test_memory_stays_and_a_device_is_asked_nothing() -> None:
    cache = StaticKVCache(MAX_LEN, batch=2, device="meta", **SIZES)
    paged = PagedKVCache(9, block_size=BLOCK, device="meta", **SIZES)
    numbers = torch.zeros(2, dtype=torch.int64, device="meta")
    cache.truncate(numbers)
    cache.truncate(3)
    cache.reorder(numbers)
    table, cached = paged.truncate(numbers, torch.zeros(2, 3, dtype=torch.int64, device="meta"), numbers)
    table, cached = paged.reorder(numbers, table, cached, numbers)
    assert (table.shape, cached.shape) == ((2, 3), (2,))
    here = StaticKVCache(MAX_LEN, batch=2, **SIZES)
    k = torch.randn(2, KV_HEADS, 4, HEAD_DIM)
    keys, _, positions = here.append(k, k, Positions.arange(4))
    here.truncate(torch.tensor([1, 3]))
    here.reorder(torch.tensor([1, 1]))
    again, _, later = here.append(k[:, :, :1], k[:, :, :1], here.next_positions())
    assert again.data_ptr() == keys.data_ptr()
    assert later.document.data_ptr() == positions.document.data_ptr()


def test_the_beam_with_the_most_tokens_keeps_a_block_and_full_ones_are_shared() -> None:
    cache = PagedKVCache(9, block_size=4, **SIZES)
    table, free = torch.tensor([[7, 2], [1, -1]]), torch.tensor([5, 6, 8])
    table, cached = cache.reorder(torch.tensor([0, 0, 1]), table, torch.tensor([6, 4]), free)
    assert (table.tolist(), cached.tolist()) == ([[7, 2], [7, 6], [1, -1]], [6, 6, 4])
    fewer, few = cache.truncate(torch.tensor([5, 6, 4]), torch.tensor([[7, 2], [7, 2], [1, -1]]), cached)
    table, _ = cache.reorder(torch.arange(3), fewer, few, free)
    assert table.tolist() == [[7, 5], [7, 2], [1, -1]], "its next token would be written over what row 1 has there"
    into_shared, few = cache.truncate(torch.tensor([3, 6, 4]), table, torch.tensor([5, 6, 4]))
    k = torch.randn(3, KV_HEADS, 1, HEAD_DIM)
    with refuses(RangeError, "block 7", "reorder(torch.arange(len(table))"):
        cache.append(k, k, Positions.after(few, 1), torch.tensor([[7, -1], [7, 2], [1, 3]]), few)
    table, few = cache.reorder(torch.arange(3), into_shared, few, free)
    assert table.tolist() == [[5, -1], [7, 2], [1, -1]]


def test_rows_without_a_block_hold_padding() -> None:
    """A server's empty seats: no block yet, and nothing to write; torch's IndexError said so much about it."""
    cache, k = PagedKVCache(4, block_size=4, **SIZES), torch.randn(2, KV_HEADS, 3, HEAD_DIM)
    nothing, none = Positions.of([[0, 0, 0]], document=[[-1, -1, -1]]), torch.zeros(2, dtype=torch.int64)
    for table in (torch.full((2, 1), -1), torch.zeros(2, 0, dtype=torch.int64)):
        keys, _, positions = cache.append(k, k, nothing, table, none)
        assert not keys.any()
        assert bool((positions.document == -1).all())
        y = attend(k, keys, keys, positions=nothing, k_positions=positions)
        assert not y.any()
        table, cached = cache.truncate(0, table, none)
        table, cached = cache.reorder(torch.tensor([1, 0, 0]), table, cached, torch.tensor([0, 1, 2]))
        assert table.shape[0] == len(cached) == 3
        with refuses(RangeError, "1 tokens" if not table.shape[1] else "row 0", "block"):
            cache.append(k[:, :, :1], k[:, :, :1], Positions.arange(1), table[:2], none)


@pytest.mark.unchecked
def test_lengths_and_rows_that_are_not_there() -> None:
    k = torch.randn(2, KV_HEADS, 4, HEAD_DIM)
    growing, static = KVCache(), StaticKVCache(MAX_LEN, batch=2, **SIZES)
    for cache in (growing, static):
        cache.append(k, k, Positions.arange(4))
        for length in (5, -1):
            with refuses(RangeError, "length", str(length)):
                cache.truncate(length)
        with refuses(RangeError, "length 5 for row 1, which has 4"):
            cache.truncate(torch.tensor([4, 5]))
        for wrong in (torch.tensor([1, 2, 3]), torch.tensor(2), torch.tensor([1.0, 2.0])):
            with refuses(ShapeError, "length"):
                cache.truncate(wrong)
        for rows, word in ((torch.tensor([0, 2]), "rows with 2"), (torch.tensor([-1, 0]), "rows with -1")):
            with refuses(RangeError, word, "0 to 1"):
                cache.reorder(rows)
        for wrong in (torch.tensor([[0, 1]]), torch.tensor([0, 1]).int(), [0, 1]):
            with refuses(ShapeError, "rows"):
                cache.reorder(wrong)  # type: ignore[arg-type]
        assert len(cache) == 4
    with refuses(ShapeError, "3 rows for a cache of 2", "KVCache()"):
        static.reorder(torch.tensor([0, 0, 1]))
    with refuses(LocantError, "append"):
        KVCache().reorder(torch.tensor([0]))
    with refuses(RangeError, "length"):
        KVCache().truncate(1)
    KVCache().truncate(0)


@pytest.mark.unchecked
def test_blocks_that_are_not_free() -> None:
    cache, table, cached = PagedKVCache(9, block_size=4, **SIZES), torch.tensor([[7, 2], [1, 4]]), torch.tensor([6, 8])
    beams = torch.tensor([0, 0, 0])
    for free, block in (([0, 2, 3], 2), ([0, 3, 3], 3), ([0, 9, 3], 9), ([0, -1, 3], -1)):
        with refuses(RangeError, f"block {block} in free"):
            cache.reorder(beams, table, cached, torch.tensor(free))
    cache.reorder(beams, table, cached, torch.tensor([-1, 5, 3]))
    with refuses(ShapeError, "free", "(3,)"):
        cache.reorder(beams, table, cached, torch.tensor([5]))
    with refuses(RangeError, "length 7 for row 0, which has 6"):
        cache.truncate(7, table, cached)
    with refuses(ShapeError, "table"):
        cache.truncate(1, table.int(), cached)
    with refuses(RangeError, "rows with 2"):
        cache.reorder(torch.tensor([2]), table, cached, torch.tensor([5]))
