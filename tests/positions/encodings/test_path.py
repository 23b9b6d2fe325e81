"""PaTH against the product of matrices of every pair, and caches whose keys move against the whole row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from locant import InputError, KVCache, LocantError, Positions, ShapeError, StaticKVCache, attend, probe
from locant.kernels import householder
from locant.parallel import attend as attend_in_parallel
from locant.positions.encodings import path as module
from locant.positions.encodings.path import PaTH
from tests.largest import Largest
from tests.positions.oracles_of_biases import numerical_gradients
from tests.refusal import refuses
from tests.tolerances import assert_close

Array = np.ndarray
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, D_MODEL = 4, 2, 6, 7, 10


def built(dtype: torch.dtype = torch.float64, **options: Any) -> PaTH:
    encoding = PaTH(KV_HEADS, HEAD_DIM, D_MODEL, **{"rank": 5, **options}).to(dtype)
    torch.nn.init.normal_(encoding.offset)
    return encoding


def drawn(batch: int, n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Hidden states, queries, keys and values."""
    shapes = (n, D_MODEL), (HEADS, n, HEAD_DIM), (KV_HEADS, n, HEAD_DIM), (KV_HEADS, n, VALUE_DIM)
    return tuple(torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several levels, and keys that move often, in short rows."""
    monkeypatch.setattr(householder, "BLOCK", 4)
    monkeypatch.setattr(module, "SETTLE", 6)
    monkeypatch.setattr(module, "RECENT", 5)


def attention_of_the_paper(
    x: Array, q: Array, k: Array, v: Array, up: Array, strength: Array, offset: Array, kernel: Array, down: Array
) -> Array:
    """Yang et al. 2025, equations 1 and 3: one row, with a matrix for every token between a query and a key.

    Directions as in the authors' code: a low-rank projection, a causal convolution, SiLU, and a length of 1 but for
    1e-6 that is added to its square.
    """
    n, d = q.shape[1:]
    projected, u = x @ down.T @ up.T, np.zeros((len(x), len(up)))
    for t in range(n):
        for back in range(kernel.shape[1]):
            if t - back >= 0:
                u[t] += projected[t - back] * kernel[:, -1 - back]
    u = u / (1 + np.exp(-u))
    out = np.zeros((len(q), n, v.shape[-1]))
    for head, i in np.ndindex(len(q), n):
        own = head * len(k) // len(q)
        scores, product = np.zeros(i + 1), np.eye(d)
        for j in range(i, -1, -1):
            scores[j] = q[head, i] @ product @ k[own, j] / d**0.5
            w = u[j, own * d : (own + 1) * d]
            beta = 2 / (1 + np.exp(-(x[j] @ strength[own] + offset[own])))
            product = product @ (np.eye(d) - beta * np.outer(w, w) / (w @ w + 1e-6))
        weights = np.exp(scores - scores.max())
        out[head, i] = weights @ v[own, : i + 1] / weights.sum()
    return out


@pytest.mark.parametrize("block", [1, 2, 64])
def test_attention_and_gradients_are_those_of_the_product_of_matrices(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every input and every parameter, by differences, with a random cotangent."""
    monkeypatch.setattr(householder, "BLOCK", block)
    encoding, n = PaTH(1, 2, 3, rank=2).double(), 5
    torch.nn.init.normal_(encoding.offset)
    leaves = {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in {"x": (1, n, 3), "q": (1, 2, n, 2), "k": (1, 1, n, 2), "v": (1, 1, n, 3)}.items()
    }
    x, q, k, v = leaves.values()
    positions = encoding.read(x, Positions.arange(n))
    y = attend(*encoding.rotate(q, k, positions), v, encoding=encoding, positions=positions)
    arguments = {name: leaf[0] for name, leaf in leaves.items()} | dict(encoding.named_parameters())
    given = {name: value.detach().numpy() for name, value in arguments.items()}
    assert_close(y[0].detach(), torch.from_numpy(attention_of_the_paper(**given)))
    cotangent = torch.randn_like(y)
    ours = torch.autograd.grad(y, [*leaves.values(), *encoding.parameters()], cotangent)
    truth = numerical_gradients(attention_of_the_paper, given, cotangent[0].numpy())
    for name, gradient in zip(given, ours, strict=True):
        found = gradient[0] if name in leaves else gradient
        assert_close(found, torch.from_numpy(truth[name]), torch.float32)  # differences have nine digits


def scores_of(encoding: PaTH, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The products of one row, by a query that passes every token on its way back, without scale and mask."""
    read = encoding.read(x, Positions.arange(x.shape[1])).read.of_key
    assert read is not None
    groups, n = HEADS // KV_HEADS, x.shape[1]
    read = read.transpose(1, 2).repeat_interleave(groups, 1)
    w, beta = read[..., :HEAD_DIM], read[..., HEAD_DIM]
    k, rows = k.repeat_interleave(groups, 1), list[Tensor]()
    for i in range(n):
        passing, row = q[:, :, i], [torch.zeros_like(q[:, :, 0, 0])] * n
        for j in range(i, -1, -1):
            row[j] = (passing * k[:, :, j]).sum(-1)
            passing = passing - (beta[:, :, j] * (passing * w[:, :, j]).sum(-1))[..., None] * w[:, :, j]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 2)


def by_matrix(encoding: PaTH, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention of one row of one document through a matrix of scores."""
    n, window, cap = x.shape[1], options.get("window", x.shape[1]), options.get("softcap")
    scores = scores_of(encoding, x, q, k) * HEAD_DIM**-0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    distance = torch.arange(n)[:, None] - torch.arange(n)
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(-1, -1, n, 1)], -1)
    return scores.softmax(-1)[..., :n] @ v.repeat_interleave(HEADS // KV_HEADS, 1)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict, "window": lambda: {"window": 7}, "soft cap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": torch.randn(HEADS, dtype=torch.float64)}, "eager": lambda: {"backend": "eager"},
    "tiled": lambda: {"backend": "tiled"},
}  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", [1, 9, 31])
def test_blocks_are_the_matrix(options: Callable[[], dict[str, Any]], n: int) -> None:
    """Forward and every gradient, against float64 autograd through the passing query."""
    encoding, leaves, chosen = built(), drawn(1, n), options()
    sources = [*leaves, *encoding.parameters()]
    read = encoding.read(leaves[0], Positions.arange(n))
    ours = attend(*leaves[1:], encoding=encoding, positions=read, **chosen)
    expected = by_matrix(encoding, *leaves, **chosen)
    cotangent = torch.randn_like(expected)
    assert_close(ours, expected)
    found, truth = (
        torch.autograd.grad(y, sources, cotangent, allow_unused=True, materialize_grads=True) for y in (ours, expected)
    )
    for one, other in zip(found, truth, strict=True):
        assert_close(one, other)


def by_the_authors_blocks(q: Array, k: Array, w: Array, beta: Array, size: int) -> Array:
    """The scores of one head as the authors' reference computes them: a triangular inverse in each block of tokens.

    A query that leaves its block meets the moved keys of each earlier block, and then passes that block's matrix.
    """
    n, d = q.shape
    scores, moved_q, moved_k, passing = np.zeros((n, n)), q.copy(), k.copy(), dict[int, Array]()
    for start in range(0, n, size):
        own = slice(start, start + size)
        block_w, block_k = w[own], k[own]
        weighted = beta[own, None] * block_w
        inverse = np.linalg.inv(np.eye(len(block_w)) + np.tril(weighted @ block_w.T, -1))
        of_keys, of_rows = inverse @ np.tril(weighted @ block_k.T, -1), inverse @ weighted
        seen = np.tril(q[own] @ block_w.T)
        scores[own, own] = np.tril(q[own] @ block_k.T - seen @ of_keys)
        moved_q[own], moved_k[own] = q[own] - seen @ of_rows, block_k - of_keys.T @ block_w
        passing[start] = np.eye(d) - block_w.T @ of_rows
    for start in range(0, n, size):
        own, query = slice(start, start + size), moved_q[start : start + size]
        for earlier in range(start - size, -1, -size):
            scores[own, earlier : earlier + size] = query @ moved_k[earlier : earlier + size].T
            query = query @ passing[earlier]
    return scores


@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_scores_are_those_of_the_authors_reference() -> None:
    """150 tokens, whose matrices the paper multiplies in blocks of 64."""
    encoding, (x, q, k, _) = built(convolution=False, rank=None), drawn(1, 150)
    positions = encoding.read(x, Positions.arange(150))
    ours = encoding.pair_sets(q, k, k, positions, positions).products(150).tril()
    read = positions.read.of_key
    assert read is not None
    for head in range(HEADS):
        own = head * KV_HEADS // HEADS
        w, beta = read[0, :, own, :HEAD_DIM].numpy(), read[0, :, own, HEAD_DIM].numpy()
        expected = by_the_authors_blocks(q[0, head].numpy(), k[0, own].numpy(), w, beta, 64)
        assert_close(ours[0, head], torch.from_numpy(expected))


ROWS = {
    "packed": Positions.packed([13, 1, 16]),
    "right padding": Positions.packed([13, 9], length=30),
    "left padding": Positions.from_mask(torch.tensor([[0] * 11 + [1] * 19])),
    "holes": Positions.from_mask(torch.tensor([[1, 0, 1, 1, 0] * 6])),
    "no tokens": Positions.from_mask(torch.zeros(1, 30, dtype=torch.long)),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_document_in_a_row_is_the_document_alone(row: Positions, shuffled: bool) -> None:
    """Up to rounding, as its blocks begin elsewhere; anything may stand at padding, which has gradients of zero."""
    encoding, order = built(), torch.randperm(30) if shuffled else torch.arange(30)
    positions, leaves = row.select(order), drawn(1, 30)
    document, places = positions.document[0], positions.index[0]
    with torch.no_grad():
        for leaf in leaves[1:]:
            leaf[:, :, document < 0] = torch.nan
    read = encoding.read(leaves[0], positions)
    y, weights, lse = attend(*leaves[1:], encoding=encoding, positions=read, return_weights=True, return_lse=True)
    cotangent, expected = torch.randn_like(y), torch.zeros_like(y).requires_grad_()
    for number in document[document >= 0].unique():
        slots = (document == number).nonzero()[:, 0]
        slots = slots[places[slots].argsort()]
        part = [leaves[0][:, slots], *(leaf[:, :, slots] for leaf in leaves[1:])]
        expected = expected.index_copy(2, slots, by_matrix(encoding, *part))
    assert_close(y, expected)
    values = leaves[3].detach().nan_to_num().repeat_interleave(HEADS // KV_HEADS, 1)
    assert_close(weights @ values, expected.detach())
    assert torch.equal(lse == float("-inf"), (document < 0).expand_as(lse))
    found, truth = (
        torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True) for out in (y, expected)
    )
    for one, other in zip(found, truth, strict=True):
        assert_close(one, other)


def test_no_memory_is_used_per_pair() -> None:
    """Forward and backward of 2 048 tokens: no tensor beyond those of blocks, tiles, or of the tokens."""
    encoding, n = built(torch.float32), 2048
    x, q, k, v = drawn(1, n, torch.float32)
    with Largest() as largest:
        attend(q, k, v, encoding=encoding, positions=encoding.read(x, Positions.arange(n))).sum().backward()
    assert largest.numbers < HEADS * n * n / 2
    assert bool(x.grad is not None and x.grad.any())


def attention_of(encoding: PaTH, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, encoding=encoding, positions=encoding.read(x, Positions.arange(x.shape[1])))


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.usefixtures("small_blocks")
def test_attention_is_one_graph_for_each_number_of_blocks() -> None:
    """One token more or less in the last block needs no other graph."""
    torch.compiler.reset()
    encoding, counter = built(torch.float32), CompileCounter()
    compiled = torch.compile(attention_of, backend=counter, fullgraph=True)
    with torch.no_grad():
        for n, graphs in ((18, 1), (19, 1), (18, 1), (34, 2)):
            tensors = drawn(1, n, torch.float32)
            assert torch.equal(compiled(encoding, *tensors), attention_of(encoding, *tensors))
            assert counter.frame_count <= graphs + 1, "the second length may be compiled again, for a range of lengths"
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.usefixtures("small_blocks")
def test_a_compiled_training_step_has_the_same_gradients() -> None:
    torch.compiler.reset()
    encoding, tensors = built(), drawn(1, 18)
    leaves, cotangent = [*tensors, *encoding.parameters()], torch.randn(1, HEADS, 18, VALUE_DIM, dtype=torch.float64)
    compiled = torch.compile(attention_of, backend="aot_eager", fullgraph=True)
    found, expected = (
        torch.autograd.grad(step(encoding, *tensors), leaves, cotangent) for step in (compiled, attention_of)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    torch.compiler.reset()


CACHES: dict[str, Callable[[PaTH], KVCache | StaticKVCache]] = {
    "features of all": lambda encoding: KVCache(),
    "moved": lambda encoding: KVCache(encoding=encoding),
    "moved, of a known length": lambda encoding: KVCache(40, encoding=encoding),
    "static": lambda encoding: StaticKVCache(
        45, batch=2, kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dtype=torch.float64, encoding=encoding
    ),
}


def append(cache: Any, encoding: PaTH, tensors: tuple[Tensor, ...], positions: Positions) -> Tensor:
    x, q, k, v = tensors
    positions = encoding.read(x, positions, cache.positions if len(cache) else None)
    q, k, v, k_positions = cache.rotate_and_append(encoding, q, k, v, positions)
    return attend(q, k, v, encoding=encoding, positions=positions, k_positions=k_positions)


def tokens_of(tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tensors[0][:, start:stop], *(each[:, :, start:stop] for each in tensors[1:])


def one_of_each(tensors: tuple[Tensor, ...], numbers: list[int]) -> tuple[Tensor, ...]:
    """A token of each row."""
    rows = range(len(numbers))
    x, *others = tensors
    return x[rows, numbers][:, None], *(each[rows, :, numbers][:, :, None] for each in others)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("convolution", [True, False])
@pytest.mark.parametrize("cache_of", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_a_row_behind_a_cache_is_the_whole_row(cache_of: Callable[[PaTH], Any], convolution: bool) -> None:
    """A prompt, single tokens, and a chunk of many."""
    encoding, tensors = built(convolution=convolution), drawn(2, 40)
    expected = torch.cat([by_matrix(encoding, *(each[[row]] for each in tensors)) for row in range(2)])
    cache, ends = cache_of(encoding), [0, 7, *range(8, 22), 38, 39, 40]
    parts = [
        append(cache, encoding, tokens_of(tensors, *ends), Positions.after(ends[0], ends[1] - ends[0]))
        for ends in pairwise(ends)
    ]
    assert_close(torch.cat(parts, 2), expected)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache_of", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_rows_of_two_lengths_are_decoded_as_alone(cache_of: Callable[[PaTH], Any], side: str) -> None:
    encoding, tensors, lengths = built(), drawn(1, 40), [20, 6]
    expected = by_matrix(encoding, *tensors)[0]
    mask, slots = torch.zeros(2, 20), torch.zeros(2, 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        own = slice(20 - length, 20) if side == "left" else slice(length)
        mask[row, own], slots[row, own] = 1, torch.arange(length)

    def at(numbers: Tensor) -> tuple[Tensor, ...]:
        return tensors[0][0, numbers], *(each[0][:, numbers].transpose(0, 1) for each in tensors[1:])

    cache = cache_of(encoding)
    prompt = append(cache, encoding, at(slots), Positions.from_mask(mask))
    for row, length in enumerate(lengths):
        assert_close(prompt[row][:, mask[row] == 1], expected[:, :length])
    for step in range(20):
        numbers = torch.tensor([[length + step] for length in lengths])
        y = append(cache, encoding, at(numbers), cache.next_positions())
        for row, number in enumerate(numbers[:, 0]):
            assert_close(y[row, :, 0], expected[:, number])


@pytest.mark.usefixtures("small_blocks")
@torch.no_grad()
def test_rejected_drafts_and_left_beams_leave_no_trace() -> None:
    encoding, tensors, other = built(), drawn(2, 40), drawn(2, 40)
    expected = torch.cat([by_matrix(encoding, *(each[[row]] for each in tensors)) for row in range(2)])
    cache = KVCache(encoding=encoding)
    append(cache, encoding, tokens_of(tensors, 0, 18), Positions.arange(18))
    for start in range(18, 30):  # a token, and a draft of two others that is rejected
        append(cache, encoding, tokens_of(tensors, start, start + 1), Positions.after(start, 1))
        append(cache, encoding, tokens_of(other, start, start + 2), Positions.after(start + 1, 2))
        cache.truncate(start + 1)
    y = append(cache, encoding, tokens_of(tensors, 30, 34), Positions.after(30, 4))
    assert_close(y, expected[:, :, 30:34])
    cache.truncate(torch.tensor([32, 33]))  # each row keeps some
    numbers = [32, 33]
    for step in range(5):
        y = append(cache, encoding, one_of_each(tensors, [n + step for n in numbers]), cache.next_positions())
        for row, number in enumerate(numbers):
            assert_close(y[row, :, 0], expected[row, :, number + step])
    cache.reorder(torch.tensor([1, 1, 0]))
    picked = one_of_each(tuple(each[[1, 1, 0]] for each in tensors), [38, 38, 37])
    y = append(cache, encoding, picked, cache.next_positions())
    for row, (old, number) in enumerate([(1, 38), (1, 38), (0, 37)]):
        assert_close(y[row, :, 0], expected[old, :, number])


@pytest.mark.slow
@torch.no_grad()
def test_the_last_tokens_can_be_removed_and_no_others() -> None:
    """The sizes of the package: 30 tokens at least, because the convolution needs two more."""
    encoding, tensors = built(), drawn(1, 200)
    expected = by_matrix(encoding, *tensors)
    for number in (97, 130, 199):
        cache = KVCache(encoding=encoding)
        append(cache, encoding, tokens_of(tensors, 0, 60), Positions.arange(60))
        for at in range(60, number):
            append(cache, encoding, tokens_of(tensors, at, at + 1), Positions.after(at, 1))
        cache.truncate(number - 30)
        y = append(cache, encoding, tokens_of(tensors, number - 30, number), Positions.after(number - 30, 30))
        assert_close(y, expected[:, :, number - 30 : number])
    with refuses(LocantError, "cannot be undone", "cache.clear()", "KVCache() without encoding"):
        cache.truncate(50)
    assert len(cache) == 199, "a refusal changes nothing"
    cache.truncate(0)
    assert not len(cache)


@pytest.mark.slow
@torch.no_grad()
def test_a_bfloat16_cache_is_rounded_once_per_sixty_four_tokens() -> None:
    """300 decoded tokens: as near to float64 as the prompt in bfloat16."""
    encoding, tensors, n = built(torch.float32), drawn(1, 300, torch.float32), 300
    expected = by_matrix(encoding.double(), *(each.double() for each in tensors))
    encoding, narrow = encoding.bfloat16(), tuple(each.bfloat16() for each in tensors)
    prompt = attend(*narrow[1:], encoding=encoding, positions=encoding.read(narrow[0], Positions.arange(n)))
    cache = KVCache(encoding=encoding)
    decoded = [append(cache, encoding, tokens_of(narrow, at, at + 1), Positions.after(at, 1)) for at in range(n)]
    errors = [float((y.double() - expected).norm()) for y in (prompt, torch.cat(decoded, 2))]
    assert errors[1] < 2 * errors[0]


@torch.no_grad()
def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    encoding, (x, q, k, v) = built(), drawn(1, 12)
    read, plain = encoding.read(x, Positions.arange(12)), Positions.arange(12)
    for call in (lambda: encoding.rotate(q, k, plain), lambda: attend(q, k, v, encoding=encoding, positions=plain)):
        with refuses(LocantError, "without the features", "encoding.read(x, positions)"):
            call()
    with refuses(LocantError, "k_positions without the features"):
        attend(q, k, v, encoding=encoding, positions=read, k_positions=plain)
    with refuses(LocantError, "causal=False"):
        attend(q, k, v, encoding=encoding, positions=read, causal=False)
    with refuses(ShapeError, "num_heads=2", "num_heads=1"):
        attend(q[:, :3], k[:, :1], v[:, :1], encoding=encoding, positions=read)
    with refuses(LocantError, "not among the keys"):
        attend(q[:, :, :1], k, v, encoding=encoding, positions=Positions.of([3], document=[4]), k_positions=read)
    with refuses(LocantError, "backend='sdpa'", "several outputs to merge (PaTH)", "backend='tiled'"):
        attend(q, k, v, encoding=encoding, positions=read, backend="sdpa")
    with refuses(InputError, "PaTH(", "reads the hidden states", "positions alone"):
        probe(encoding)
    cache = KVCache(encoding=encoding)
    with refuses(LocantError, "without features"):
        cache.append(k, v, plain)
    cache.append(k, v, encoding.read(x, Positions.packed([7, 5])))
    later = encoding.read(x[:, :1], Positions.of([7], document=[0]), cache.positions)
    with refuses(LocantError, "other documents follow", "KVCache() without encoding"):
        cache.append(k[:, :, :1], v[:, :, :1], later)
    assert len(cache) == 12
    with refuses(LocantError, "other ranks hold"):
        _in_one_process(lambda: attend_in_parallel(q, k, v, encoding=encoding, positions=read, method="gather"))


def _in_one_process(call: Callable[[], object]) -> None:
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        call()
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def test_fewer_key_heads_than_matrices_are_repeated() -> None:
    encoding, (x, q, k, v) = built(), drawn(1, 12)
    read = encoding.read(x, Positions.arange(12))
    one = attend(q, k[:, :1], v[:, :1], encoding=encoding, positions=read)
    both = attend(q, k[:, [0, 0]], v[:, [0, 0]], encoding=encoding, positions=read)
    assert torch.equal(one, both)


def test_a_strength_of_zero_is_attention_without_positions() -> None:
    encoding, (x, q, k, v) = built(), drawn(1, 140)
    torch.nn.init.zeros_(encoding.strength)
    torch.nn.init.constant_(encoding.offset, -1e9)
    y = attend(q, k, v, encoding=encoding, positions=encoding.read(x, Positions.arange(140)))
    assert_close(y, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
