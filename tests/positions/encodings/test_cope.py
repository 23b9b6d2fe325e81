"""CoPE against the paper's formula, and what its published code does not do: padding, packing, caches, any order."""

from __future__ import annotations

import pytest
import torch

from locant import Cope, Positions, RangeError, attend
from locant.attention import PagedKVCache
from tests.positions import claims
from tests.positions.oracles_of_biases import cope
from tests.refusal import refuses
from tests.tolerances import assert_close


def drawn(head_dim: int, max_positions: int = 4) -> Cope:
    encoding = claims.shaken(Cope(head_dim, max_positions), 1.0)
    assert isinstance(encoding, Cope)
    return encoding


@pytest.mark.parametrize(("max_positions", "kv_heads"), [(1, 1), (2, 2), (3, 1), (9, 2)])
def test_values_and_gradients_are_those_of_the_paper(max_positions: int, kv_heads: int) -> None:
    """Of one embedding, of fewer than tokens, and of so many that no count reaches the last."""
    encoding = drawn(3, max_positions)
    queries, keys = [2, 4], [0, 1, 2, 3, 4]
    claims.agrees_with_oracle(
        encoding, lambda q, k, weight: cope(q, k, queries, keys, weight, encoding.scale), {"weight": encoding.weight},
        torch.randn(2, 2, 2, 3), torch.randn(2, kv_heads, 5, 3), queries, keys, contextual=True,
    )  # fmt: skip


def test_gates_that_are_open_count_tokens() -> None:
    """Where every gate is one, the contextual position is the distance plus one, up to the last embedding."""
    encoding = Cope(2, 5)
    q = k = torch.full((1, 1, 8, 2), 100.0)
    steps = torch.arange(8)[:, None] - torch.arange(8)
    counts = encoding.counts(q, k, Positions.arange(8))[0, 0]
    assert torch.equal(counts, (steps + 1).clamp(min=0).double())
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(5.0)[:, None].expand(5, 2) / 200)
    assert_close(encoding.bias(q, k, Positions.arange(8))[0, 0].detach(), (steps + 1).clamp(0, 4).float())


def test_keys_in_any_order_give_the_same_bits() -> None:
    encoding = drawn(6)
    q, k = torch.randn(2, 4, 12, 6), torch.randn(2, 2, 12, 6)
    places = Positions.arange(12)
    whole, counts = encoding.bias(q, k, places), encoding.counts(q, k, places)
    assert torch.equal((counts * 2.0**30).frac(), torch.zeros_like(counts)), "a device may add them up as it likes"
    for _ in range(3):
        order = torch.randperm(12)
        assert torch.equal(encoding.bias(q, k[:, :, order], places, places.select(order)), whole[..., order])
        assert torch.equal(encoding.counts(q, k[:, :, order], places, places.select(order)), counts[..., order])
        # In slots that mean nothing, among keys of other documents, sums have other partial sums: the same bits.
        apart = torch.randn(2, 2, 30, 6)
        apart[:, :, 3:27:2] = k
        document = torch.ones(30, dtype=torch.long)
        document[3:27:2] = 0
        index = torch.randint(0, 12, (30,))
        index[3:27:2] = torch.arange(12)
        among = encoding.counts(q, apart, places, Positions.of(index, document))
        assert torch.equal(among[..., 3:27:2], counts)


@pytest.mark.parametrize("where", [Positions.arange(24), Positions.packed([10, 14]), Positions.of(list(range(24)))])
def test_attention_without_the_keys_in_between_is_refused(where: Positions) -> None:
    """A part of the keys for `merge`, keys with a hole, a query without its own: they were computed, and wrong."""
    encoding = drawn(8)
    q, k, v = torch.randn(3, 1, 2, 24, 8)
    holed = torch.cat([torch.arange(4), torch.arange(18, 24)])
    for slots in (torch.arange(12), holed, torch.arange(23)):
        with refuses(RangeError, "k_positions", "Cope", "all keys in one call"):
            attend(
                q, k[:, :, slots], v[:, :, slots], encoding=encoding, positions=where, k_positions=where.select(slots)
            )
    sparse = Positions.of([0, 7, 9], order=[0, 1, 2])  # tokens that count one by one, wherever they stand
    attend(q[:, :, :3], k[:, :, :3], v[:, :, :3], encoding=encoding, positions=sparse, k_positions=sparse)


def test_the_oldest_keys_may_be_missing() -> None:
    """A count goes from a key to the query, so what a sliding cache has dropped is in no count that is left."""
    encoding, where = drawn(6), Positions.arange(11)
    q, k, v = torch.randn(3, 2, 4, 11, 6)
    y, whole = attend(q, k, v, encoding=encoding, positions=where, window=5), encoding.bias(q, k, where)
    for p in (5, 7, 10):
        for first in range(p - 4):
            held, query, keys = slice(first, p + 1), where.slice(p, p + 1), where.slice(first, p + 1)
            options = {"encoding": encoding, "positions": query, "k_positions": keys, "window": 5}
            assert_close(attend(q[:, :, [p]], k[:, :, held], v[:, :, held], **options), y[:, :, [p]])
            assert torch.equal(encoding.bias(q[:, :, [p]], k[:, :, held], query, keys), whole[:, :, [p], held])


def test_pages_in_any_order_give_the_same_bits() -> None:
    """Slots behind the last token of a row, and what a block held before, open no gate."""
    encoding, cache = drawn(6), PagedKVCache(9, block_size=4, kv_heads=2, head_dim=6)
    q, k, v = torch.randn(2, 4, 11, 6), *torch.randn(2, 2, 2, 11, 6)
    table, real = torch.tensor([[7, 2, 5], [0, 8, 3]]), torch.tensor([11, 6])
    where = Positions.from_mask(torch.arange(11) < real[:, None])
    with torch.no_grad():
        keys, _, k_positions = cache.append(k, v, where, table, torch.zeros(2, dtype=torch.int64))
        paged = encoding.bias(q, keys, where, k_positions)
        for row, n in enumerate(real.tolist()):
            alone = encoding.bias(q[row : row + 1, :, :n], k[row : row + 1, :, :n], Positions.arange(n))
            assert torch.equal(paged[row : row + 1, :, :n, :n], alone)
        attend(q, keys, keys, encoding=encoding, positions=where, k_positions=k_positions)


def test_embeddings_begin_as_zeros_and_learn() -> None:
    encoding = Cope(4)
    q, k = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    bias = encoding.bias(q, k, Positions.arange(5))
    assert not bias.any()
    bias.backward(torch.randn_like(bias))
    assert bool(encoding.weight.grad[:2].any())


def test_a_query_that_is_not_a_number_leaves_the_other_rows_as_they_are() -> None:
    """Its own row is NaN, as with any bias, and no index is made of it: training that diverges is told as such."""
    encoding, where = drawn(8), Positions.arange(5)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    plain = encoding.bias(q, k, where)
    q[0, 1, 3] = torch.nan
    bias = encoding.bias(q, k, where)
    assert bias[0, 1, 3].isnan().all()
    others = torch.ones(1, 2, 5, dtype=torch.bool)
    others[0, 1, 3] = False
    assert torch.equal(bias[others], plain[others])
