"""`PagedKVCache`: rows in blocks of one pool attend as each would alone, whatever else the pool holds."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from locant import LocantError, Positions, RangeError, Rotary, ShapeError, attend
from locant.attention import PagedKVCache
from tests.refusal import refuses

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 4
TABLE = torch.tensor([[6, 1, 3], [0, 5, -1]])
ROTARY = Rotary(HEAD_DIM)


def pool(**options: object) -> PagedKVCache:
    return PagedKVCache(8, **{"block_size": BLOCK, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **options})


def tokens(n: int, batch: int = 2, heads: int = KV_HEADS) -> Tensor:
    return torch.randn(batch, heads, n, HEAD_DIM)


def written_over(cache: PagedKVCache) -> PagedKVCache:
    """A pool whose blocks other sequences have used and left."""
    everything = torch.arange(8)[None]
    cache.append(tokens(32, 1) * 9, tokens(32, 1) * 9, Positions.arange(32), everything, torch.tensor([0]))
    return cache


def step(
    cache: PagedKVCache, q: Tensor, kv: Tensor, where: Positions, table: Tensor, cached: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = ROTARY.rotate(q, kv, where)
    keys, values, k_positions = cache.append(k, kv, where, table, cached)
    y = attend(q, keys, values, encoding=ROTARY, positions=where, k_positions=k_positions)
    return y, keys, values


def test_a_common_prefix_is_stored_once() -> None:
    """Two rows that share their first block and go on in blocks of their own."""
    cache, kv = pool(), tokens(6, 1)
    cache.append(kv[:, :, :4], kv[:, :, :4], Positions.arange(4), torch.tensor([[2]]), torch.tensor([0]))
    table, cached, more = torch.tensor([[2, 4], [2, 7]]), torch.tensor([4, 4]), tokens(2)
    keys, _, k_positions = cache.append(more, more, Positions.after(4, 2), table, cached)
    for row in range(2):
        assert torch.equal(keys[row, :, :6], torch.cat([kv[0, :, :4], more[row]], dim=1))
    assert k_positions.document.tolist() == [[0] * 6 + [-1] * 2] * 2
    assert k_positions.index[:, :6].tolist() == [list(range(6))] * 2


@pytest.mark.unchecked
def test_all_steps_are_one_graph_compiled_once() -> None:
    torch._dynamo.reset()
    counter, compiled_cache, cache = CompileCounter(), written_over(pool()), pool()

    def decode(cache: PagedKVCache, q: Tensor, kv: Tensor, cached: Tensor) -> Tensor:
        where = Positions.after(cached, 1, max_index=cache.max_index)
        return step(cache, q, kv, where, TABLE, cached)[0]

    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    cached = torch.tensor([4, 0])
    with torch.no_grad():
        kv = tokens(4)
        for each in (compiled_cache, cache):
            each.append(kv, kv, Positions.arange(4), TABLE, torch.zeros(2, dtype=torch.int64))
        for _ in range(5):
            q, kv = tokens(1, heads=HEADS), tokens(1)
            assert torch.equal(compiled(compiled_cache, q, kv, cached), decode(cache, q, kv, cached))
            cached = cached + 1
    assert counter.frame_count == 1


def test_a_device_is_asked_nothing() -> None:
    """Tensors on meta have no values: whoever looks for one stops here, as a CUDA graph's capture would."""
    table, cached = (torch.zeros(shape, dtype=torch.int64, device="meta") for shape in ((2, 3), (2,)))
    cache, x = pool(device="meta"), torch.zeros(2, KV_HEADS, 1, HEAD_DIM, device="meta")
    where = Positions.after(cached, 1, max_index=cache.max_index)
    keys, values, k_positions = cache.append(x, x, where, table, cached)
    y = attend(x, keys, values, positions=where, k_positions=k_positions, backend="eager")
    assert (y.device.type, keys.shape) == ("meta", (2, KV_HEADS, 12, HEAD_DIM))


NONE = torch.zeros(2, dtype=torch.int64)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("table", "cached", "kind", "words"),
    [
        (TABLE.int(), NONE, ShapeError, ("table", "int64")),
        (TABLE, NONE.float(), ShapeError, ("cached", "int64")),
        (TABLE[:1], NONE, ShapeError, ("table", "(2, blocks)")),
        (TABLE, NONE[:1], ShapeError, ("cached", "(2,)")),
        (TABLE.tolist(), NONE, ShapeError, ("table", "list")),
        (TABLE + 2, NONE, RangeError, ("table with 8", "0 to 7")),
        (TABLE - 1, NONE, RangeError, ("table with -2", "-1")),
        (TABLE, NONE + 12, RangeError, ("13 tokens", "12 slots", "block")),
        (TABLE, NONE - 1, RangeError, ("from -1",)),
    ],
    ids=str,
)
def test_tables_that_do_not_fit(table: Tensor, cached: Tensor, kind: type[Exception], words: tuple[str, ...]) -> None:
    with refuses(kind, *words):  # type: ignore[type-var]
        pool().append(tokens(1), tokens(1), Positions.arange(1), table, cached)


def test_the_last_slot_of_a_table_is_one() -> None:
    pool().append(tokens(1), tokens(1), Positions.arange(1), torch.where(TABLE < 0, 2, TABLE), NONE + 11)


def test_tokens_and_positions_it_was_not_made_for() -> None:
    k = tokens(1)
    for new in (k.double(), tokens(1, heads=3), k[..., :5]):
        with refuses(ShapeError, "the cache holds", "PagedKVCache"):
            pool().append(new, new, Positions.arange(1), TABLE, NONE)
    with refuses(LocantError, "order", "KVCache()"):
        pool().append(k, k, Positions.of([0], order=[0]), TABLE, NONE)
    with refuses(RangeError, "32", "max_index=31"):
        pool().append(k, k, Positions.after(32, 1), TABLE, NONE)
    with refuses(LocantError, "gradient"):
        pool().append(k.requires_grad_(), k, Positions.arange(1), TABLE, NONE)


def test_a_block_hands_nothing_of_its_last_sequence_on() -> None:
    """A weight of 0 hides a finite number, but no NaN."""
    cache, table = pool(), torch.tensor([[0, 1, 2, 3, 4, 5]])
    broken = torch.full((1, KV_HEADS, 24, HEAD_DIM), torch.nan)
    cache.append(broken, broken, Positions.arange(24), table, torch.tensor([0]))
    keys, values, positions = cache.append(
        tokens(1, batch=1), tokens(1, batch=1), Positions.arange(1), table, torch.tensor([0])
    )
    y = attend(torch.randn(1, HEADS, 1, HEAD_DIM), keys, values, positions=Positions.arange(1), k_positions=positions)
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[6, 1, 6], [0, 5, -1]], ("block 6 twice in row 0", "free block")),
        ([[6, 1, 3], [0, 6, -1]], ("block 6", "new tokens of row 0", "another row", "free block")),
        ([[6, 1, 3], [5, 0, 1]], None),  # what is full already is only read
    ],
    ids=["twice in a row", "written and shared", "full and shared"],
)
def test_a_block_named_twice(table: list[list[int]], words: tuple[str, ...] | None) -> None:
    cached = torch.tensor([0, 3]) if words else torch.tensor([8, 3])
    with nullcontext() if words is None else refuses(RangeError, *words):
        pool().append(tokens(1), tokens(1), Positions.arange(1), torch.tensor(table), cached)


def test_a_row_without_a_block_for_its_tokens() -> None:
    with refuses(RangeError, "row 1", "free block"):
        pool().append(tokens(1), tokens(1), Positions.arange(1), TABLE, torch.tensor([0, 8]))
