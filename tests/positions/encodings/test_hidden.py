"""Every bias that is made from hidden states, through attention and caches; FoX and Inkling against their formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import Fox, Inkling, KVCache, LocantError, Positions, ShapeError, attend
from locant.attention import StaticKVCache
from locant.attention.backends import blocks
from locant.lab import Decoder
from locant.positions.hidden_bias import HiddenBias
from locant.positions.registry import encodings
from tests.largest import Largest
from tests.positions import claims
from tests.positions.oracles_of_biases import fox, inkling, numerical_gradients
from tests.refusal import refuses
from tests.tolerances import assert_close

HEADS, D_MODEL, HEAD_DIM = 4, 10, 6


def made(name: str, heads: int = HEADS, dtype: torch.dtype = torch.float32, **options: Any) -> HiddenBias:
    name, _, plain = name.partition(", ")
    options |= {"weighted": False} if plain else {}
    options = {"d_rel": 3, "extent": 7, "floor": 5, "alpha": 0.5} | options if name == "inkling" else options
    encoding = encodings()[name](heads, D_MODEL, **options)
    return claims.shaken(encoding).to(dtype)  # type: ignore[return-value]


def oracle(encoding: HiddenBias, queries: list[int], keys: list[int]) -> Any:
    """From hidden states and parameters in their order, all in NumPy, to the bias of one row."""
    if isinstance(encoding, Inkling):
        return partial(inkling, queries, keys, floor=encoding.floor, alpha=float(encoding.alpha))
    return partial(fox, queries, keys)


NAMES = [name for name, kind in encodings().items() if issubclass(kind, HiddenBias)]
QUERIES = {"all": list(range(12)), "some": [9, 4, 11]}


def agrees_with_formula(encoding: HiddenBias, queries: list[int], formula: Callable[..., np.ndarray]) -> None:
    """The bias of these queries and 12 keys, by the hidden states and every parameter, with a random cotangent."""
    x = torch.randn(1, 12, D_MODEL, requires_grad=True)
    whole = encoding.read(x, Positions.arange(12))
    q, k = torch.zeros(1, 2, len(queries), 4), torch.zeros(1, 2, 12, 4)
    bias = encoding.bias(q, k, whole.select(torch.tensor(queries)), whole)
    arguments = {"x": x[0].detach(), **dict(encoding.named_parameters())}
    given = {each: value.detach().double().numpy() for each, value in arguments.items()}
    assert_close(bias[0].detach(), torch.from_numpy(formula(**given)))
    cotangent = torch.randn(bias.shape)
    ours = torch.autograd.grad(bias, [x, *encoding.parameters()], cotangent)
    truth = numerical_gradients(formula, given, cotangent[0].double().numpy())
    for each, gradient in zip(given, ours, strict=True):
        assert_close(gradient[0] if each == "x" else gradient, torch.from_numpy(truth[each]))


@pytest.mark.parametrize("name", ["fox", "inkling"])
@pytest.mark.parametrize("queries", QUERIES.values(), ids=QUERIES)
def test_values_and_gradients_are_those_of_the_formula(name: str, queries: list[int]) -> None:
    encoding = made(name, 2)
    agrees_with_formula(encoding, queries, oracle(encoding, queries, list(range(12))))


ARRANGEMENTS: dict[str, tuple[Positions, dict[str, Any]]] = {
    "causal": (Positions.arange(41), {}),
    "packed": (Positions.packed([[21, 1, 11], [9, 29]], length=38), {}),
    "window": (Positions.arange(41), {"window": 13}),
    "both ways": (Positions.arange(25), {"causal": False}),
    "soft cap": (Positions.arange(25), {"softcap": 2.0}),
}


@pytest.mark.parametrize("name", [*NAMES, "cable, without slopes"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_attention_in_blocks_is_that_with_the_matrix(
    name: str, arrangement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and every gradient, against float64 autograd through a matrix; in blocks and runs of a few tokens."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(blocks, "MAX_SCORES", 128)
    monkeypatch.setattr(blocks, "MAX_FAR_KEYS", 16)
    positions, options = ARRANGEMENTS[arrangement]
    encoding, n = made(name, dtype=torch.float64), positions.seq_len
    shapes = [(2, n, D_MODEL), (2, HEADS, n, HEAD_DIM), (2, 2, n, HEAD_DIM), (2, 2, n, HEAD_DIM + 1)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cotangent = torch.randn(2, HEADS, n, HEAD_DIM + 1, dtype=torch.float64)

    def through(backend: str) -> tuple[Tensor, ...]:
        x, q, k, v = leaves
        read = encoding.read(x, positions)
        q, k = encoding.rotate(q, k, read)
        y = attend(q, k, v, encoding=encoding, positions=read, backend=backend, **options)  # type: ignore[arg-type]
        return y.detach(), *torch.autograd.grad(y, [*leaves, *encoding.parameters()], cotangent)

    for ours, expected in zip(through("tiled"), through("eager"), strict=True):
        assert_close(ours, expected)


def test_trained_in_float32_as_in_float64() -> None:
    """300 tokens in blocks of their true size: the gradients of a model in float32, beside those in float64."""
    x, q, k, v, cotangent = (torch.randn(1, HEADS, 300, HEAD_DIM, dtype=torch.float64) for _ in range(5))
    hidden = x.transpose(1, 2).flatten(2)
    for name in NAMES:
        options = {"d_rel": 4, "extent": 200} if name == "inkling" else {}
        encoding = encodings()[name](HEADS, HEADS * HEAD_DIM, **options)
        found = []
        for dtype, backend in ((torch.float32, "tiled"), (torch.float64, "eager")):
            encoding = encoding.to(dtype)
            leaves = [each.to(dtype).requires_grad_() for each in (hidden, q, k, v)]
            positions = encoding.read(leaves[0], Positions.arange(300))
            y = attend(*leaves[1:], encoding=encoding, positions=positions, backend=backend)
            found.append((y, *torch.autograd.grad(y, [*leaves, *encoding.parameters()], cotangent.to(dtype))))
        for ours, expected in zip(*found, strict=True):
            size = float(expected.detach().abs().max())
            assert_close(ours.detach() / size, expected.detach().float() / size)


@pytest.mark.parametrize("name", NAMES)
def test_no_memory_is_used_per_pair(name: str) -> None:
    """Forward and backward of 1 024 tokens: no tensor beyond those of a few blocks, or of the tokens."""
    encoding = made(name, 1, extent=300) if name == "inkling" else made(name, 1)
    n, x = 1024, torch.randn(1, 1024, D_MODEL, requires_grad=True)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        positions = encoding.read(x, Positions.arange(n))
        attend(q, k, v, encoding=encoding, positions=positions).sum().backward()
    assert largest.numbers <= n * blocks.BLOCK * 2
    assert bool(x.grad.any())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", claims.DTYPES, ids=str)
def test_packed_is_alone(name: str, dtype: torch.dtype) -> None:
    encoding, lengths = made(name).to(dtype), [5, 1, 13]
    x = torch.randn(1, 22, D_MODEL, dtype=dtype)
    q = torch.zeros(1, HEADS, 22, HEAD_DIM, dtype=dtype)
    bias = encoding.bias(q, q, encoding.read(x, Positions.packed([lengths], length=22)))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        here = encoding.read(x[:, part], Positions.arange(length))
        assert torch.equal(bias[:, :, part, part], encoding.bias(q[:, :, part], q[:, :, part], here))
        start += length


def test_neighbours_far_down_a_row_differ_by_their_gate() -> None:
    """Where a float32 sum would hold steps of 1/64, the difference to the token before is the logarithm of its gate."""
    encoding, n = Fox(1, 2), 2**18
    x = torch.randn(1, n, 2)
    with torch.no_grad():
        read = encoding.read(x, Positions.arange(n))
        last = read.slice(n - 2, n)
        bias = encoding.bias(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), last)
        weight, offset = (each.double() for each in encoding.parameters())
        gate = torch.nn.functional.logsigmoid(weight @ x[0, -1].double() + offset)
    assert_close(bias[0, 0, 1, 0], gate[0].float())


def test_inkling_is_that_of_transformers() -> None:
    """Its attention with the weights of the module: output, and gradients by the hidden states and by the bias."""
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingAttention

    config = InklingTextConfig(
        hidden_size=D_MODEL, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6, d_rel=3,
        rel_extent=7, log_scaling_n_floor=5, log_scaling_alpha=0.5, layer_types=["hybrid"], mlp_layer_types=["dense"],
        attn_implementation="eager",
    )  # fmt: skip
    theirs = InklingAttention(config, 0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = Inkling(4, D_MODEL, d_rel=3, extent=7, floor=5, alpha=0.5).double()
    with torch.no_grad():
        ours.weight.copy_(theirs.r_proj.weight)
        ours.curves.copy_(theirs.rel_logits_proj.proj)
    x = torch.randn(2, 11, D_MODEL, dtype=torch.float64, requires_grad=True)
    hidden = torch.full((11, 11), float("-inf"), dtype=torch.float64).triu(1)
    expected, _ = theirs(x, hidden[None, None])

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, 6)).transpose(1, 2)

    positions = ours.read(x, Positions.arange(11))
    q, k = theirs.q_norm(heads(theirs.q_proj(x))), theirs.k_norm(heads(theirs.k_sconv(theirs.k_proj(x))))
    q, k = ours.rotate(q, k, positions)
    v = heads(theirs.v_sconv(theirs.v_proj(x)))
    y = attend(q, k, v, encoding=ours, positions=positions, scale=theirs.scaling, backend="tiled")
    y = theirs.o_proj(y.transpose(1, 2).flatten(2))
    assert_close(y, expected, torch.float32)  # it has queries and temperatures in float32
    cotangent = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, [x, theirs.r_proj.weight, theirs.rel_logits_proj.proj], cotangent)
    for mine, its in zip(torch.autograd.grad(y, [x, *ours.parameters()], cotangent), wanted, strict=True):
        assert_close(mine, its, torch.float32)


def test_it_runs_in_the_decoder_with_its_cache() -> None:
    model = Decoder(50, made("fox", 2), d_model=D_MODEL, num_heads=2, num_layers=2)
    tokens = torch.randint(0, 50, (1, 12))
    caches = [KVCache(), KVCache()]
    with torch.no_grad():
        expected = model(tokens)
        parts = [model(tokens[:, start : start + 4], caches=caches) for start in (0, 4, 8)]
    assert_close(torch.cat(parts, 1), expected)


def test_mistakes_are_named() -> None:
    fox, q = made("fox"), torch.zeros(1, HEADS, 3, HEAD_DIM)
    with refuses(LocantError, "positions = encoding.read(x, positions)", "without the features that Fox reads"):
        fox.bias(q, q, Positions.arange(3))
    with refuses(ShapeError, f"d_model={D_MODEL}", "x of shape"):
        fox.read(torch.zeros(1, 3, D_MODEL + 1), Positions.arange(3))
    with torch.no_grad():
        read = fox.read(torch.zeros(1, 3, D_MODEL), Positions.arange(3))
        cache = StaticKVCache(8, batch=1, kv_heads=HEADS, head_dim=HEAD_DIM)
        with refuses(LocantError, "encoding=encoding when creating the cache", "read from hidden states"):
            cache.append(q, q, read)
        cache = StaticKVCache(8, batch=1, kv_heads=HEADS, head_dim=HEAD_DIM, encoding=fox)
        with refuses(LocantError, "encoding.read(x, positions)", "without features of hidden states"):
            cache.append(q, q, Positions.arange(3))
    with refuses(LocantError, "with torch.no_grad()", "require a gradient"):
        KVCache().append(q, q, fox.read(torch.zeros(1, 3, D_MODEL), Positions.arange(3)))
