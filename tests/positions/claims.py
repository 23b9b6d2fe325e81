"""What every encoding has to hold, stated once and asked of each: see the tests of the encodings one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from locant import ALiBi, PositionEncoding, Positions, RangeError, ShapeError
from tests.positions import all_methods, alone
from tests.positions.oracles_of_biases import numerical_gradients
from tests.refusal import refuses
from tests.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]
Build = Callable[[int, int], PositionEncoding]
"""From a number of heads and their width."""


def shaken(encoding: PositionEncoding, size: float = 0.3) -> PositionEncoding:
    """With parameters that are no longer what they start with, so that nothing is hidden by a zero."""
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return encoding


def zeros(heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Queries and keys for a bias that does not look at them."""
    return torch.zeros(1, heads, queries, 4), torch.zeros(1, heads, keys, 4)


def agrees_with_itself_alone(build: Build, dtype: torch.dtype) -> None:
    """Padded left and right, packed, cached, chunked, sharded: the bits of the row alone.

    Where a bias `needs_all_keys`, only the arrangements in which no key between another and the query is missing.
    """
    encoding = shaken(build(alone.HEADS, alone.HEAD_DIM)).to(dtype)
    tokens = alone.three_rows(dtype)
    with torch.no_grad():
        expected = alone.expected_of(encoding, tokens)
        for arrangement in alone.ARRANGEMENTS.values():
            asked = [pair for pair in arrangement() if not encoding.needs_all_keys or complete(*pair)]
            for queries, keys in asked:
                alone.check(encoding, queries, keys, tokens, expected)

    keys_as_ranks_send_them(encoding, tokens)


def complete(queries: alone.Side, keys: alone.Side) -> bool:
    """Whether the keys of every row reach from its first token to the last query."""
    return all(
        len(b.places) > int(a.places.max()) and int(b.places.min()) == 0
        for a in queries.pieces
        for b in keys.pieces
        if a.batch == b.batch and a.row == b.row
    )


def keys_as_ranks_send_them(encoding: PositionEncoding, tokens: alone.Tokens) -> None:
    """A rank's queries against all keys, in the order in which four zigzag ranks hold them."""
    q, k = tokens.q[2], tokens.k[2]
    whole = Positions.arange(q.shape[2])
    expected = encoding.bias(q, k, whole)
    slots = [whole.shard_slots(rank, 4) for rank in range(4)]
    order = torch.cat(slots)
    for mine in slots:
        bias = encoding.bias(q[:, :, mine], k[:, :, order], whole.select(mine), whole.select(order))
        assert (bias is None) == (expected is None)
        assert bias is None or torch.equal(bias, expected[:, :, mine][:, :, :, order])


def agrees_with_oracle(
    encoding: PositionEncoding,
    oracle: Callable[..., np.ndarray],
    parameters: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    contextual: bool,
) -> None:
    """Forward, also where no gradients are needed, and every gradient, against float64 and numerical derivatives.

    The oracle takes `parameters` by name and, with `contextual`, q and k.
    """
    q, k = q.clone().requires_grad_(contextual), k.clone().requires_grad_(contextual)
    places = Positions.of(list(queries)), Positions.of(list(keys))
    bias = encoding.bias(q, k, *places)
    with torch.no_grad():  # what is shared by heads is then computed once
        without_gradients = encoding.bias(q, k, *places)
    assert bias is not None
    assert without_gradients is not None
    leaves = {**({"q": q, "k": k} if contextual else {}), **parameters}
    arguments = {name: leaf.detach().double().numpy() for name, leaf in leaves.items()}
    expected = oracle(**arguments)
    expected = expected if contextual else expected[None]
    assert bias.shape == expected.shape
    for each in (bias.detach(), without_gradients):
        assert_close(each, torch.from_numpy(expected))
    cotangent = torch.randn(bias.shape)
    ours = torch.autograd.grad(bias, list(leaves.values()), cotangent, allow_unused=True)
    truth = numerical_gradients(oracle, arguments, cotangent.double().numpy().reshape(oracle(**arguments).shape))
    for name, gradient in zip(leaves, ours, strict=True):
        if gradient is None:
            assert not truth[name].any(), f"no gradient for {name}"
        else:
            assert_close(gradient, torch.from_numpy(truth[name]))


def passes_gradcheck(encoding: PositionEncoding, heads: int, head_dim: int, *, shake: float = 0.3) -> None:
    """In float64, by q, k and every parameter, for queries behind a cache."""
    encoding = shaken(encoding, shake).double()
    q = torch.randn(1, heads, 2, head_dim, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 3, head_dim, dtype=torch.float64, requires_grad=True)
    positions, k_positions = Positions.after(1, 2), Positions.arange(3)

    def bias(q: Tensor, k: Tensor, *parameters: Tensor) -> Tensor:  # the encoding's own, which are changed in place
        rotated = encoding.rotate(q, k, positions, k_positions)
        out = encoding.bias(*rotated, positions, k_positions)
        return torch.cat([t.flatten() for t in rotated]) if out is None else out

    assert torch.autograd.gradcheck(bias, (q, k, *encoding.parameters()))


def score_mod_is_bias(build: Build) -> None:
    """Asked for all pairs at once and one at a time, with padding, packing, a cache, and rows of different places."""
    heads, kv_heads, head_dim = 4, 2, 6
    encoding = shaken(build(heads, head_dim))
    places = [
        (Positions.arange(7), None),
        (Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])), None),
        (Positions.packed([[3, 1, 4], [8]]), None),
        (Positions.after([5, 9], 2), Positions.of(torch.stack([torch.arange(7), torch.arange(4, 11)]))),
        (Positions.after(11, 1), Positions.arange(12)),
        (Positions.arange(0), Positions.arange(3)),
    ]
    for positions, k_positions in places:
        keys = positions if k_positions is None else k_positions
        q, k = torch.randn(2, heads, positions.seq_len, head_dim), torch.randn(2, kv_heads, keys.seq_len, head_dim)
        with torch.no_grad():
            bias = encoding.bias(q, k, positions, k_positions)
            mod = encoding.score_mod(q, k, positions, k_positions)
            if mod is None and not bias.numel():
                continue
            assert mod is not None
            shape = (2, heads, positions.seq_len, keys.seq_len)
            slots = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
            scores = torch.randn(shape)
            assert torch.equal(mod(torch.zeros(shape), *slots), bias.expand(shape))
            assert torch.equal(mod(scores, *slots), scores + bias)
            if positions.seq_len == 1:
                one = mod(torch.tensor(0.0), *(torch.tensor(i) for i in (1, 3, 0, 9)))
                assert torch.equal(one, bias.expand(shape)[1, 3, 0, 9])


def compiles_at_most_twice(build: Build) -> None:
    """One graph, and at most two compilations over all lengths behind caches of all lengths; the same bits.

    `tests/known_bugs/test_compilation.py` compiles every encoding elsewhere too, among its slow tests.
    """
    torch._dynamo.reset()
    counter, place = CompileCounter(), all_methods.PLACES["behind a cache"]
    subject = all_methods.AllMethods(shaken(build(all_methods.HEADS, all_methods.HEAD_DIM)))
    compiled = torch.compile(subject, fullgraph=True, backend=counter)
    with torch.no_grad():
        for n in all_methods.LENGTHS:
            x, q, k = all_methods.tokens(n)
            all_methods.require_same(compiled(x, q, k, place(n)), subject(x, q, k, place(n)))
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


def handles_every_size(build: Build) -> None:
    """No query, no key, no row, one of each: the shape that was asked for, and gradients of zero where nothing is."""
    heads, head_dim = 2, 4
    encoding = shaken(build(heads, head_dim))
    for batch in (0, 1, 2):
        for queries, keys in ((0, 0), (0, 3), (3, 0), (1, 1), (1, 3), (3, 1)):
            q = torch.randn(batch, heads, queries, head_dim, requires_grad=True)
            k = torch.randn(batch, 1, keys, head_dim, requires_grad=True)
            places = Positions.arange(queries), Positions.arange(keys)
            rotated_q, rotated_k = encoding.rotate(q, k, *places)
            assert (rotated_q.shape, rotated_k.shape) == (q.shape, k.shape)
            bias = encoding.bias(q, k, *places)
            if bias is None:
                continue
            assert bias.expand(batch, heads, queries, keys).isfinite().all()
            if bias.requires_grad and not bias.numel():
                gradients = torch.autograd.grad(bias.sum(), list(encoding.parameters()), allow_unused=True)
                assert all(g is None or not g.any() for g in gradients)


def has_no_state_but_parameters(build: Build) -> None:
    """No buffer; float32 arithmetic in a model of halves; built on the meta device and filled, the same as here."""
    heads, head_dim = 4, 6
    encoding = build(heads, head_dim)
    assert not list(encoding.buffers())
    q, k = torch.randn(1, heads, 40, head_dim), torch.randn(1, heads, 40, head_dim)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(encoding).to(dtype)
        bias = half.bias(q.to(dtype), k.to(dtype), Positions.arange(40))
        if bias is not None:
            assert bias.dtype == torch.float32
            exact = copy.deepcopy(half).float().bias(q.to(dtype).float(), k.to(dtype).float(), Positions.arange(40))
            assert torch.equal(bias, exact), "the values of half a number, but float32 arithmetic"
    with torch.device("meta"):
        elsewhere = build(heads, head_dim)
    elsewhere.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in elsewhere.parameters():
            parameter.fill_(float("nan"))
    for module in (elsewhere, encoding):
        torch.manual_seed(3)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, a), b in zip(encoding.named_parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = (module.bias(q, k, Positions.arange(40)) for module in (encoding, elsewhere))
    assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def ranks_make_the_whole(
    build: Callable[[int, int, slice | None], PositionEncoding], *, same_bits: bool = True
) -> None:
    """Built with one seed on each rank, for its own heads: side by side the biases of one process."""
    heads, head_dim = 6, 4
    q, k = torch.randn(2, heads, 5, head_dim), torch.randn(2, heads, 9, head_dim)
    places = Positions.after(4, 5), Positions.arange(9)
    for world in (1, 2, 3, 6):
        biases, mods, share = [], [], heads // world
        for rank in range(world):
            torch.manual_seed(7)
            part = slice(rank * share, (rank + 1) * share)
            encoding = build(heads, head_dim, part)
            assert f"slice({part.start}, {part.stop})" in repr(encoding) or world == 1
            mine = q[:, part], k[:, part]
            bias, mod = encoding.bias(*mine, *places), encoding.score_mod(*mine, *places)
            assert bias is not None
            shape = (2, share, 5, 9)
            slots = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
            biases.append(bias.expand(shape))
            mods.append(biases[-1] if mod is None else mod(torch.zeros(shape), *slots))
        torch.manual_seed(7)
        expected = build(heads, head_dim, None).bias(q, k, *places)
        compare = torch.equal if same_bits else torch.allclose
        assert compare(torch.cat(biases, 1), expected.expand(2, heads, 5, 9)), f"{world} ranks have the heads of others"
        assert compare(torch.cat(mods, 1), expected.expand(2, heads, 5, 9))
        if world > 1:
            assert not torch.equal(biases[0], biases[1]), "every rank has the first heads"
    torch.manual_seed(7)
    every_other = build(heads, head_dim, slice(1, 6, 2)).bias(q[:, 1::2], k[:, 1::2], *places)
    assert compare(every_other, expected[:, 1::2])
    for wrong in (slice(6, 8), slice(4, 7), slice(2, 2)):
        with refuses(RangeError, "head_slice", "6 heads"):
            build(heads, head_dim, wrong)
    with refuses(ShapeError, "head_slice=slice(0, 2)"):
        build(heads, head_dim, slice(0, 2)).bias(q, k, *places)


FAR = 131_072


def alibi_row(num_heads: int, dtype: torch.dtype) -> Tensor:
    """The biases of one query and 131 072 keys, the nearest first."""
    q = torch.zeros(1, num_heads, 1, 1, dtype=dtype)
    k = torch.zeros(1, 1, FAR, 1, dtype=dtype)
    return ALiBi(num_heads).to(dtype).bias(q, k, Positions.after(FAR - 1, 1), Positions.arange(FAR))[0, :, 0].flip(-1)


def all_differ(biases: Tensor) -> None:
    """Raises unless each bias is smaller than the one before: all of them differ, and in the right order."""
    steps = biases.diff(dim=-1)
    same = (steps >= 0).sum(-1)
    assert not same.any(), f"head {int(same.argmax())} has {FAR - int(same.max())} biases for {FAR} distances"
