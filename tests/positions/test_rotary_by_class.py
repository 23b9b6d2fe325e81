"""Rotations by class of pair: attention is that of a matrix of distances, written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from locant import (
    DualChunk,
    KVCache,
    LocantError,
    Positions,
    RangeError,
    ReRoPE,
    Rotary,
    SelfExtend,
    ShapeError,
    attend,
)
from locant.attention.backends import dense
from locant.positions import RotaryByClass, Temperature, randomized
from locant.positions.rotary_by_class import products
from locant.positions.scaling import YaRN
from tests.largest import Largest
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 8, 40

ENCODINGS: dict[str, RotaryByClass] = {
    "self-extend": SelfExtend(Rotary(WIDTH), group=4, neighbours=6),
    "self-extend, odd": SelfExtend(Rotary(WIDTH, layout="interleaved"), group=3, neighbours=7),
    "rerope": ReRoPE(Rotary(WIDTH), window=5),
    "dual chunk": DualChunk(Rotary(WIDTH), chunk_size=9, local_size=3),
    "dual chunk, whole": DualChunk(Rotary(WIDTH), chunk_size=8, local_size=0),
}
ROWS = {
    "alone": Positions.arange(LENGTH),
    "packed": Positions.packed([13, 1, 26]),
    "padded left": Positions.from_mask(torch.tensor([[0] * 5 + [1] * 35])),
}


def distances(encoding: RotaryByClass, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """As the papers have them, for every pair."""
    if isinstance(encoding, SelfExtend):
        window, group = encoding.neighbours, encoding.group
        return np.where(i - j < window, i - j, i // group - j // group + window - window // group)
    if isinstance(encoding, ReRoPE):
        return np.minimum(i - j, encoding.window)
    largest, size = encoding.chunk_size, encoding.chunk_size - encoding.local_size
    before = np.where(i // size == j // size + 1, np.minimum(i % size + size, largest), min(2 * size - 1, largest))
    return np.where(i // size == j // size, i % size, before) - j % size


def written_out(encoding: RotaryByClass, q: Tensor, k: Tensor, v: Tensor, where: Positions) -> Tensor:
    """Attention of one row in float64, every score rotated by the distance of its pair."""
    index, document = where.index[0].numpy(), where.document[0].numpy()
    apart = torch.from_numpy(distances(encoding, index[:, None], index[None])).double()
    angle = apart[..., None] * 10_000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    if encoding.rotary.layout == "interleaved":
        q, k = (torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) for x in (q, k))
    q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (q, k))
    scores = torch.einsum("bhip,bhjp,ijp->bhij", q.conj(), k, torch.polar(torch.ones_like(angle), -angle)).real
    seen = (document[:, None] == document) & (document >= 0) & (index[:, None] >= index)
    return (scores / np.sqrt(WIDTH)).masked_fill(~torch.from_numpy(seen), -torch.inf).softmax(-1).nan_to_num() @ v


def tokens(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


@pytest.mark.parametrize("name", ENCODINGS)
def test_attention_is_that_of_a_matrix_of_distances_forward_and_by_every_gradient(name: str) -> None:
    encoding = ENCODINGS[name]
    for where, backend in zip(ROWS.values(), ("tiled", "eager", "tiled"), strict=True):
        leaves = [x.requires_grad_() for x in tokens()]
        q, k, v = leaves
        y = attend(*encoding.rotate(q, k, where), v, encoding=encoding, positions=where, backend=backend)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        expected = written_out(encoding, *wide, where)
        cotangent = torch.randn_like(y)
        assert_close(y.detach(), expected.detach(), torch.float32)
        ours = torch.autograd.grad(y, leaves, cotangent)
        for mine, theirs in zip(ours, torch.autograd.grad(expected, wide, cotangent.double()), strict=True):
            assert_close(mine, theirs, torch.float32)


@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_a_cache_works_token_by_token_and_after_padding(name: str) -> None:
    encoding = ENCODINGS[name]
    q, k, v = tokens()
    for row in ("alone", "padded left"):
        where, cache, outputs = ROWS[row], KVCache(), []
        expected = attend(q, k, v, encoding=encoding, positions=where)
        for first, last in [(0, 17), (17, 34), *((slot, slot + 1) for slot in range(34, LENGTH))]:
            new, at = slice(first, last), where.slice(first, last)
            keys, values, k_positions = cache.append(k[:, :, new], v[:, :, new], at)
            outputs.append(attend(q[:, :, new], keys, values, encoding=encoding, positions=at, k_positions=k_positions))
        assert_close(torch.cat(outputs, dim=2), expected)


@pytest.mark.parametrize("name", ENCODINGS)
def test_softmax_options_apply_to_all_classes_together(name: str) -> None:
    """Sinks, a soft cap, weights and the log-sum-exp, against one softmax over the matrix of products."""
    encoding, where = ENCODINGS[name], ROWS["packed"]
    q, k, v = tokens()
    sinks = torch.randn(HEADS)
    y, weights, lse = attend(
        q, k, v, encoding=encoding, positions=where, sinks=sinks, softcap=2.0, return_weights=True, return_lse=True
    )
    scores = 2.0 * (products(encoding.pair_classes(where), q, k) * WIDTH**-0.5 / 2.0).tanh()
    scores = scores.masked_fill(~where.mask(), -torch.inf)
    total = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, LENGTH, 1)], dim=-1).logsumexp(-1)
    expected = (scores - total[..., None]).exp()
    assert_close(lse, total)
    assert_close(weights, expected)
    assert_close(y, expected @ v.repeat_interleave(HEADS // KV_HEADS, dim=1))


def test_a_short_row_equals_its_rotary_encoding_with_temperature_and_factor() -> None:
    scaling = YaRN(factor=4.0, original_max_seq_len=16)
    rotary = Rotary(WIDTH, scaling=scaling, temperature=Temperature(step=3, weight=0.5))
    where, (q, k, v) = Positions.arange(6), tokens(6)
    expected = attend(*rotary.rotate(q, k, where), v, positions=where)
    for encoding in (SelfExtend(rotary, 4, 6), ReRoPE(rotary, 6), DualChunk(rotary, 8, 2)):
        rotated = encoding.rotate(q, k, where)
        assert_close(attend(*rotated, v, encoding=encoding, positions=where), expected)


def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 048 tokens; `eager` alone holds one, and the largest tensor here has a tile's scores."""
    monkeypatch.setattr(dense, "eager_attention", None)
    where, q = Positions.arange(2048), torch.randn(1, 1, 2048, WIDTH)
    for encoding in (SelfExtend(Rotary(WIDTH), 8, 256), DualChunk(Rotary(WIDTH), 384, 64)):
        with torch.no_grad(), Largest() as largest:
            attend(q, q, q, encoding=encoding, positions=where)
        assert largest.numbers <= 2048 * 512


@pytest.mark.unchecked
@pytest.mark.slow
@pytest.mark.parametrize("name", ["self-extend", "rerope", "dual chunk"])
def test_two_graphs_serve_short_rows_and_long_ones_backward_included(name: str) -> None:
    """With the bits of what is not compiled; dual chunks are then masked instead of cut, and summed otherwise."""
    torch.compiler.reset()
    encoding, counter = ENCODINGS[name], CompileCounter()

    def attended(q: Tensor, k: Tensor, v: Tensor, where: Positions) -> Tensor:
        return attend(*encoding.rotate(q, k, where), v, encoding=encoding, positions=where)

    compiled = torch.compile(attended, backend=counter, fullgraph=True)
    for length in (9, 40, 3, 5, 6, 7, 8, 17, 33):
        leaves, where = [x.requires_grad_() for x in tokens(length)], Positions.arange(length)
        ours, expected = compiled(*leaves, where), attended(*leaves, where)
        cotangent = torch.randn_like(expected)
        results = zip(
            (ours, *torch.autograd.grad(ours, leaves, cotangent)),
            (expected, *torch.autograd.grad(expected, leaves, cotangent)),
            strict=True,
        )
        for mine, theirs in results:
            if name == "dual chunk":
                assert_close(mine.detach(), theirs.detach())
            else:
                assert torch.equal(mine, theirs)
    assert counter.frame_count <= 2
    torch.compiler.reset()


def test_rows_that_are_not_causal_and_in_order_raise_an_error() -> None:
    encoding, where, (q, k, v) = ENCODINGS["rerope"], Positions.arange(LENGTH), tokens()
    with refuses(LocantError, "window=5", "ReRoPE", "encoding.rotary"):
        attend(q, k, v, encoding=encoding, positions=where, window=5)
    with refuses(LocantError, "causal=False", "encoding.rotary"):
        attend(q, k, v, encoding=encoding, positions=where, causal=False)
    with refuses(ShapeError, "order", "Positions.packed"):
        attend(q, k, v, encoding=encoding, positions=randomized(LENGTH, 100))
    with refuses(RangeError, "rotary", "ReRoPE(locant.Rotary"):
        ReRoPE(64)  # type: ignore[arg-type]
    with refuses(RangeError, "local_size", "local_size=256"):
        DualChunk(Rotary(WIDTH), 8, 8)
