"""`rotate_and_append` of every cache has the bits of `rotate` and `append`, and changes nothing if it raises.

Two caches are driven through one program of prompts, steps, rewound drafts and beams. One rotates and appends in one
call, the other one after the other, which `test_rewound` holds against rows on their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from locant import (
    ALiBi,
    Fox,
    HeadNorm,
    KVCache,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
)
from locant.attention import PagedKVCache, StaticKVCache
from locant.kernels import native
from locant.positions import Pairs, Temperature
from locant.positions.encodings.pope import PoPE
from locant.positions.encodings.repo import RePo
from locant.positions.encodings.rope_plus_plus import RoPEPlusPlus
from locant.positions.encodings.rotary_by_head import RotaryByHead
from locant.positions.encodings.selective_rope import SelectiveRoPE
from locant.positions.scaling import DynamicNTK
from tests.attention.allocations import allocations_of
from tests.attention.driven import BLOCK, MAX_LEN, InBlocks, InSlots
from tests.positions.claims import shaken
from tests.refusal import refuses

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, D_MODEL = 3, 4, 2, 8, 5, 12
ENCODINGS: dict[str, Callable[[], PositionEncoding]] = {
    "half": lambda: Rotary(HEAD_DIM),
    "interleaved, partial": lambda: Rotary(HEAD_DIM, layout="interleaved", rotary_dim=6),
    "float32": lambda: Rotary(HEAD_DIM, angles="float32"),
    "temperature": lambda: Rotary(HEAD_DIM, temperature=Temperature(step=2)),
    "any pairs": lambda: Rotary(HEAD_DIM, pairs=Pairs(dims=((0, 3), (6, 1)))),
    "by head": lambda: RotaryByHead([Rotary(HEAD_DIM), Rotary(HEAD_DIM, base=7.0)]),
    "wider keys": lambda: PoPE(HEAD_DIM, KV_HEADS),
    "more queries": lambda: RoPEPlusPlus(Rotary(HEAD_DIM)),
    "read from hidden states": lambda: shaken(RePo(HEAD_DIM, KV_HEADS, D_MODEL)),
    "features of keys": lambda: Fox(HEADS, D_MODEL),
    "sums of features": lambda: shaken(SelectiveRoPE(HEAD_DIM, KV_HEADS, D_MODEL)),
    "no rotation": lambda: ALiBi(HEADS),
    "nothing": PositionEncoding,
}
NORMS: dict[str, Callable[[], HeadNorm | None]] = {
    "none": lambda: None,
    "each head": lambda: HeadNorm(torch.rand(HEAD_DIM), torch.rand(HEAD_DIM)),
    "1 + w": lambda: HeadNorm(torch.rand(HEAD_DIM), torch.rand(HEAD_DIM), eps=1e-3, plus_one=True),
    "all heads": lambda: HeadNorm(torch.rand(HEADS * HEAD_DIM), torch.rand(KV_HEADS * HEAD_DIM)),
}


def caches(name: str, dtype: torch.dtype, encoding: PositionEncoding, width: int) -> InSlots | InBlocks:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": width, "value_dim": HEAD_DIM, "dtype": dtype}
    match name:
        case "growing":
            return InSlots(KVCache())
        case "of a known length":
            return InSlots(KVCache(MAX_LEN))
        case "static":
            return InSlots(StaticKVCache(MAX_LEN, batch=BATCH, encoding=encoding, **sizes))
        case _:
            return InBlocks(PagedKVCache(50, block_size=BLOCK, encoding=encoding, **sizes), BATCH)


CACHES = ("growing", "of a known length", "static", "paged")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN (of any payload) and the sign of zero included."""
    if a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    first, second = (x.masked_fill(x.isnan(), 0).contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


def heads_of_one_projection(n: int, dtype: torch.dtype, is_fused: bool) -> tuple[Tensor, ...]:
    fused = torch.randn(BATCH, n, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype).unflatten(-1, (-1, HEAD_DIM))
    views = fused.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
    return views if is_fused else tuple(x.contiguous() for x in views)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, list[int] | None, list[int] | None]:
    """Which slots of new tokens are real, how many of them each row keeps, and an order of rows."""
    n = draw(st.integers(0, 5))
    real = draw(
        st.just(torch.ones(BATCH, n, dtype=torch.bool))
        | st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=BATCH, max_size=BATCH).map(
            lambda rows: torch.tensor(rows).view(BATCH, n)
        )
    )
    kept = [draw(st.integers(0, int(row.sum()))) for row in real] if draw(st.booleans()) else None
    order = draw(st.none() | st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    return real, kept, order


Program = list[tuple[Tensor, list[int] | None, list[int] | None]]


@torch.no_grad()
@given(
    program=st.lists(steps(), min_size=1, max_size=6),
    cache_name=st.sampled_from(CACHES),
    encoding_name=st.sampled_from([*ENCODINGS]),
    norm_name=st.sampled_from([*NORMS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    is_fused=st.booleans(),
    inplace=st.booleans(),
)
def test_every_program_has_the_bits_of_rotate_and_append(
    program: Program,
    cache_name: str,
    encoding_name: str,
    norm_name: str,
    dtype: torch.dtype,
    is_fused: bool,
    inplace: bool,
) -> None:
    encoding, norm = ENCODINGS[encoding_name](), NORMS[norm_name]()
    width = HEAD_DIM * (2 if encoding_name == "wider keys" else 1)
    ours, plain = (caches(cache_name, dtype, encoding, width) for _ in range(2))
    for real, kept, order in program:
        n = real.shape[1]
        q, k, v = heads_of_one_projection(n, dtype, is_fused)
        where = plain.following(n)
        if not real.all():
            for x in (q, k, v):
                x.masked_fill_(~real[:, None, :, None], torch.nan)
            where = dataclasses.replace(
                where.expand(BATCH), document_or_none=where.document.where(real, -1), start=None
            )
        past = plain.positions
        where = encoding.read(torch.randn(BATCH, n, D_MODEL), where, past if past.seq_len else None)
        rotated_q, rotated_k = apart(encoding, q, k, where, norm)
        expected = rotated_q, *plain.append(rotated_k, v, where)
        rows = ours.rows_for(where, BATCH)
        found = ours.cache.rotate_and_append(encoding, q, k, v, where, *rows, norm=norm, inplace=inplace)
        for name, one, other in zip(("queries", "keys", "values"), found, expected, strict=False):
            assert same_bits(one, other), name
        assert found[3] == expected[3]
        is_padding = found[3].expand(BATCH).document < 0
        assert not any(stored.transpose(1, 2)[is_padding].any() for stored in found[1:3])
        assert ours.positions == plain.positions
        for driven in (ours, plain):
            if kept is not None:
                driven.keep(kept)
            if order is not None and past.seq_len + n:
                driven.reorder(order)


def apart(
    encoding: PositionEncoding, q: Tensor, k: Tensor, where: Positions, norm: HeadNorm | None
) -> tuple[Tensor, Tensor]:
    """The three steps one after the other."""
    return encoding.rotate(*((q, k) if norm is None else norm.apply(q, k)), where)


@torch.no_grad()
@pytest.mark.skipif(not native.has("locant_norm_rotate"), reason="torch's loops need memory of their own")
def test_keys_are_written_into_the_cache_and_nowhere_else() -> None:
    """The only new memory of the size of heads is the memory of the rotated queries."""
    rotary, cache = Rotary(HEAD_DIM), KVCache(512)
    q, k, v = heads_of_one_projection(500, torch.float32, False)
    cache.append(k[:, :, :0], v[:, :, :0], Positions.arange(0))
    used = allocations_of(lambda: cache.rotate_and_append(rotary, q, k, v, Positions.arange(500)))
    assert used.largest == q.nbytes
    assert used.peak < q.nbytes + k.nbytes / 2
    cache.clear()
    cache.append(k[:, :, :0], v[:, :, :0], Positions.arange(0))
    used = allocations_of(lambda: cache.rotate_and_append(rotary, q, k, v, Positions.arange(500), inplace=True))
    assert used.peak < k.nbytes / 2


def contents(cache: KVCache | StaticKVCache | PagedKVCache) -> list[Any]:
    """Everything that a cache holds."""
    if isinstance(cache, KVCache):
        return [len(cache), *(x[:, :, : len(cache)].clone() for x in cache._keys_and_values), cache.positions]
    length = [len(cache)] if isinstance(cache, StaticKVCache) else []
    return [*length, *(store.clone() for store in cache._stores)]


def same_contents(a: list[Any], b: list[Any]) -> bool:
    return all(same_bits(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


N = 4
WRONG: dict[str, tuple[type[LocantError], dict[str, Any]]] = {
    "width of k": (ShapeError, {"k": torch.randn(BATCH, KV_HEADS, N, 6)}),
    "width of q": (ShapeError, {"q": torch.randn(BATCH, HEADS, N, 6)}),
    "rows of q": (ShapeError, {"q": torch.randn(BATCH + 1, HEADS, N, HEAD_DIM)}),
    "tokens of q": (ShapeError, {"q": torch.randn(BATCH, HEADS, N + 1, HEAD_DIM)}),
    "heads of k and v": (ShapeError, {name: torch.randn(BATCH, 4, N, HEAD_DIM) for name in "kv"}),
    "tokens of v": (ShapeError, {"v": torch.randn(BATCH, KV_HEADS, N + 1, HEAD_DIM)}),
    "width of v": (ShapeError, {"v": torch.randn(BATCH, KV_HEADS, N, HEAD_DIM + 1)}),
    "dtype of v": (ShapeError, {"v": torch.randn(BATCH, KV_HEADS, N, HEAD_DIM).double()}),
    "dtype of all": (
        ShapeError,
        {name: torch.randn(BATCH, heads, N, HEAD_DIM).double() for name, heads in zip("qkv", (4, 2, 2), strict=True)},
    ),
    "whole numbers": (ShapeError, {"k": torch.ones(BATCH, KV_HEADS, N, HEAD_DIM, dtype=torch.int64)}),
    "device of v": (ShapeError, {"v": torch.randn(BATCH, KV_HEADS, N, HEAD_DIM, device="meta")}),
    "number of positions": (ShapeError, {"positions": Positions.arange(N + 1)}),
    "axes": (ShapeError, {"positions": Positions.grid(2, 2)}),
    "position ids": (LocantError, {"positions": torch.arange(N)}),
    "scaling": (RangeError, {"positions": Positions.after(60, N)}),
    "norm": (ShapeError, {"norm": HeadNorm(torch.ones(7), torch.ones(7))}),
    "one tensor in place": (
        ShapeError,
        {"q": (one := torch.randn(BATCH, KV_HEADS, N, HEAD_DIM)), "k": one, "inplace": True},
    ),
    "repeated memory in place": (
        ShapeError,
        {"q": torch.randn(BATCH, 1, N, HEAD_DIM).expand(-1, 4, -1, -1), "inplace": True},
    ),
    "not a norm": (RangeError, {"norm": torch.nn.RMSNorm(HEAD_DIM)}),
    "not an encoding": (RangeError, {"rotary": torch.nn.Identity()}),
}


def call(driven: InSlots | InBlocks, **given: Any) -> Any:
    q, k, v = heads_of_one_projection(N, torch.float32, False)
    rotary = Rotary(HEAD_DIM, scaling=DynamicNTK(factor=2.0, original_max_seq_len=60))
    given = {"rotary": rotary, "q": q, "k": k, "v": v, "positions": driven.following(N), "norm": None, **given}
    rows, options = (
        driven.rows_for(Positions.arange(N), BATCH),
        {"norm": given.pop("norm"), "inplace": given.pop("inplace", False)},
    )
    return driven.cache.rotate_and_append(*given.values(), *rows, **options)


OF_ANOTHER_KIND = ("heads of k and v", "width of v", "dtype of all")
"""What only a cache that has tokens, or memory for them, can refuse."""


@torch.no_grad()
@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_leaves_the_cache_as_it_was(cache_name: str, wrong: str) -> None:
    kind, given = WRONG[wrong]
    driven = caches(cache_name, torch.float32, PositionEncoding(), HEAD_DIM)
    if wrong in OF_ANOTHER_KIND:
        call(driven)
    for _ in range(2):
        before = contents(driven.cache)
        with refuses(kind):
            call(driven, **given)
        assert same_contents(contents(driven.cache), before)
        if isinstance(driven, InBlocks):
            driven.cached = driven.before
        call(driven)


@torch.no_grad()
@pytest.mark.parametrize("cache_name", ["of a known length", "static"])
def test_one_token_too_many_is_refused_and_loses_nothing(cache_name: str) -> None:
    driven = caches(cache_name, torch.float32, PositionEncoding(), HEAD_DIM)
    for _ in range(MAX_LEN // N):
        call(driven)
    before = contents(driven.cache)
    with refuses(RangeError, f"max_len={MAX_LEN}"):
        call(driven)
    assert same_contents(contents(driven.cache), before)


@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("which", ["k", "v", "norm"])
def test_a_gradient_is_refused_rather_than_lost(cache_name: str, which: str) -> None:
    driven = caches(cache_name, torch.float32, PositionEncoding(), HEAD_DIM)
    weight = torch.ones(HEAD_DIM, requires_grad=True)
    wrong = HeadNorm(weight, weight) if which == "norm" else torch.randn(BATCH, KV_HEADS, N, HEAD_DIM).requires_grad_()
    before = contents(driven.cache)
    with refuses(LocantError, "gradient", "no_grad"):
        call(driven, **{which: wrong})
    assert same_contents(contents(driven.cache), before)


@torch.no_grad()
def test_positions_of_several_axes() -> None:
    rotary, image = Rotary(HEAD_DIM, sections=(1, 3)), Positions.grid(2, 2)
    q, k, v = heads_of_one_projection(N, torch.float32, True)
    found = KVCache().rotate_and_append(rotary, q, k, v, image)
    rotated_q, rotated_k = rotary.rotate(q, k, image)
    assert same_bits(found[0], rotated_q)
    assert same_bits(found[1], rotated_k)
    assert found[3] == image


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("norm_name", ["none", "each head"])
def test_a_compiled_step_is_one_graph(norm_name: str) -> None:
    torch._dynamo.reset()
    rotary, norm, counter = Rotary(HEAD_DIM), NORMS[norm_name](), CompileCounterWithBackend("aot_eager")
    sizes: dict[str, Any] = {"batch": BATCH, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    static, same = (StaticKVCache(MAX_LEN, **sizes) for _ in range(2))

    def step(cache: StaticKVCache, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cache.rotate_and_append(rotary, q, k, v, cache.next_positions(q.shape[2]), norm=norm)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(3):
        heads = heads_of_one_projection(1, torch.float32, False)
        for one, other in zip(compiled(static, *heads), step(same, *heads), strict=True):
            assert same_bits(one, other) if isinstance(one, Tensor) else one == other
    assert counter.frame_count == 1


def test_a_rotation_into_memory_is_seen_by_the_graph() -> None:
    """A gradient that needs keys which were overwritten since is refused by torch, as behind `append`."""
    cache, rotary = KVCache(MAX_LEN), Rotary(HEAD_DIM)
    q, k, v = heads_of_one_projection(N, torch.float32, False)
    with torch.no_grad():
        _, keys, _, _ = cache.rotate_and_append(rotary, q, k, v, Positions.arange(N))
    product = (q.requires_grad_()[:, :KV_HEADS] * keys).sum()
    with torch.no_grad():
        cache.truncate(0)
        cache.rotate_and_append(rotary, q, k, v, Positions.arange(N))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
