"""`StaticKVCache`: memory of one shape, without a question to the device; what it holds is in `test_rewound`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locant import LocantError, Positions, RangeError, Rotary, ShapeError, attend
from locant.attention import PagedKVCache, StaticKVCache
from tests.refusal import refuses
from tests.tolerances import DECODED

HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 4, 2, 8, 12


def static(**options: object) -> StaticKVCache:
    return StaticKVCache(MAX_LEN, **{"batch": 2, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **options})


def tokens(n: int, heads: int = KV_HEADS, width: int = HEAD_DIM) -> Tensor:
    return torch.randn(2, heads, n, width)


def test_its_memory_stays_where_it_is() -> None:
    cache, places = static(value_dim=3), set()
    for n in (4, 1, 0, 7):
        keys, values, k_positions = cache.append(tokens(n), tokens(n, width=3), cache.next_positions(n))
        places.add((keys.data_ptr(), values.data_ptr(), k_positions.index.data_ptr(), k_positions.document.data_ptr()))
        assert (keys.shape, values.shape) == ((2, KV_HEADS, MAX_LEN, HEAD_DIM), (2, KV_HEADS, MAX_LEN, 3))
    cache.clear()
    assert len(cache) == 0
    assert not keys.any()
    assert bool((cache.positions.document == -1).all())
    assert cache.next_positions(2).index.tolist() == [[0, 1], [0, 1]]
    assert len(places) == 1


def test_a_device_is_asked_nothing() -> None:
    """Tensors on meta have no values: whoever looks for one stops here, as a CUDA graph's capture would."""
    cache = static(device="meta")
    x = torch.zeros(2, HEADS, 1, HEAD_DIM, device="meta")
    for _ in range(2):
        where = cache.next_positions()
        keys, values, k_positions = cache.append(x[:, :KV_HEADS], x[:, :KV_HEADS], where)
        y, lse = attend(x, keys, values, positions=where, k_positions=k_positions, return_lse=True, backend="eager")
    assert (y.device.type, lse.shape) == ("meta", (2, HEADS, 1))
    with pytest.raises(RuntimeError, match="meta"):
        len(cache)


def test_one_token_too_many() -> None:
    """Inside, at the edge, one past."""
    cache = static()
    for n in (11, 1):
        cache.append(tokens(n), tokens(n), cache.next_positions(n))
    with refuses(RangeError, "12 and 1 more", "max_len=12"):
        cache.append(tokens(1), tokens(1), Positions.arange(1))
    with refuses(RangeError, "max_len=12"):
        static(max_index=99).append(tokens(13), tokens(13), Positions.arange(13))


def test_positions_it_was_not_made_for() -> None:
    for last in (MAX_LEN - 1, MAX_LEN):
        where = Positions.after(last, 1)
        if last < MAX_LEN:
            static().append(tokens(1), tokens(1), where)
            continue
        with refuses(RangeError, "12", "max_index=11"):
            static().append(tokens(1), tokens(1), where)
        static(max_index=12).append(tokens(1), tokens(1), where)
    for where in (Positions.grid(1, 2), Positions.of([0, 0], order=[0, 1])):
        with refuses(LocantError, "order", "KVCache()"):
            static().append(tokens(2), tokens(2), where)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    ("kind", "sizes"), [(StaticKVCache, ("max_len", "batch")), (PagedKVCache, ("num_blocks", "block_size"))]
)
def test_sizes_of_nothing(kind: type[StaticKVCache | PagedKVCache], sizes: tuple[str, str], size: int) -> None:
    good = dict.fromkeys((*sizes, "kv_heads", "head_dim", "value_dim"), 2)
    for name in good:
        with refuses(RangeError, f"got {size} for {name}"):
            kind(**{**good, name: size})  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "new",
    [tokens(1).double(), tokens(1, 3), tokens(1, width=5), tokens(1)[:1]],
    ids=["dtype", "heads", "width", "batch"],
)
def test_tokens_of_another_kind(new: Tensor) -> None:
    with refuses(ShapeError, "keys", "the cache holds", "StaticKVCache"):
        static().append(new, new, Positions.arange(1))
    with refuses(LocantError, "gradient"):
        static().append(tokens(1).requires_grad_(), tokens(1), Positions.arange(1))


@pytest.mark.gpu
@pytest.mark.unchecked
def test_on_a_gpu_a_step_is_captured_and_replayed() -> None:
    """Every replay reads and writes where the capture did: new tokens come in through the same memory."""
    encoding, replayed, cache = Rotary(HEAD_DIM), static(device="cuda"), static(device="cuda")
    q, kv = (torch.zeros(2, heads, 1, HEAD_DIM, device="cuda") for heads in (HEADS, KV_HEADS))

    def decode(cache: StaticKVCache) -> Tensor:
        where, sinks = cache.next_positions(), torch.ones(HEADS, device="cuda")
        rotated, k = encoding.rotate(q, kv, where)
        keys, values, k_positions = cache.append(k, kv, where)
        return attend(rotated, keys, values, encoding=encoding, positions=where, k_positions=k_positions, sinks=sinks)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            decode(replayed)  # what is made once is made outside of the graph
        torch.cuda.synchronize()
        replayed.clear()
        with torch.cuda.graph(graph):
            y = decode(replayed)
        replayed.clear()  # capturing computes nothing, and this makes sure of it
        for _ in range(MAX_LEN):
            q.normal_()
            kv.normal_()
            graph.replay()
            torch.testing.assert_close(y, decode(cache), rtol=0, atol=DECODED)
    assert len(replayed) == len(cache) == MAX_LEN
