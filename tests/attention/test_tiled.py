"""`attend` without a matrix for the bias: every encoding, every arrangement, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant import ALiBi, KVCache, PositionEncoding, Positions, T5Bias, attend
from locant.attention.backends import tiled
from locant.kernels import distance_attention as kernel
from locant.positions.distance_bias import follows_distance
from tests import oracles
from tests.attention.arrangements import (
    ARRANGEMENTS,
    BATCH,
    ENCODINGS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Arrangement,
    Inputs,
    parameters_of,
    shaken,
)
from tests.tolerances import assert_close


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short sequence has several, and the last is cut short."""
    monkeypatch.setattr(kernel, "TILE", 5)
    monkeypatch.setattr(kernel, "NARROW_TILE", 3)
    monkeypatch.setattr(tiled, "TILE_BYTES", 0)
    monkeypatch.setattr(tiled, "FEWEST_ROWS", 4)


def holds(arrangement: Arrangement, encoding_name: str, backend: str, kv_heads: int = KV_HEADS) -> None:
    """Output and every gradient are NumPy's, for a random cotangent."""
    encoding = shaken(encoding_name)
    inputs = Inputs.draw(arrangement, kv_heads=kv_heads)
    y = inputs.through(arrangement, encoding, backend)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected)
    found = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **parameters_of(encoding)}
    for name, wanted in gradients.items():
        gradient = found[name].grad
        assert gradient is not None, f"no gradient for {name}"
        assert_close(gradient, wanted)


FAST = (
    "window",
    "packed",
    "chunk with a window",
    "behind caches of two lengths",
    "queries that see nothing",
    "keys all later",
)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize(
    "arrangement_name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ARRANGEMENTS],
)
def test_outputs_and_all_gradients_are_those_of_numpy(arrangement_name: str, encoding_name: str) -> None:
    holds(ARRANGEMENTS[arrangement_name], encoding_name, "tiled")


@pytest.mark.parametrize("encoding_name", ["kerple", "fire", "cope", "shaw", "deberta"])
@pytest.mark.parametrize("arrangement_name", ["causal", "packed window both ways", "chunk with a window"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_so_are_those_of_the_other_backends(backend: str, arrangement_name: str, encoding_name: str) -> None:
    holds(ARRANGEMENTS[arrangement_name], encoding_name, backend)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
@pytest.mark.parametrize("encoding_name", ["alibi", "t5", "shaw"])
def test_query_heads_share_key_heads_in_groups(encoding_name: str, kv_heads: int) -> None:
    holds(ARRANGEMENTS["chunk behind a cache"], encoding_name, "tiled", kv_heads)


@pytest.mark.parametrize(
    "length", [1, 63, *(pytest.param(length, marks=pytest.mark.slow) for length in (100, 255, 256, 257, 513))]
)
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5", "fire"])
@pytest.mark.parametrize("window", [None, 40])
def test_odd_lengths_and_the_edges_of_tiles(window: int | None, encoding_name: str, length: int) -> None:
    """In float32, at the true size of the tiles."""
    encoding = shaken(encoding_name, torch.float32)
    q = torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True)
    k = torch.randn(1, 1, length, HEAD_DIM, requires_grad=True)
    positions = Positions.arange(length)
    y = attend(q, k, k, encoding=encoding, positions=positions, window=window, backend="tiled")
    q_array, k_array = q.detach().double().numpy(), k.detach().double().numpy()
    bias = np.zeros((1, HEADS, length, length))
    if encoding is not None:
        bias = bias + encoding.bias(q, k, positions).detach().double().numpy()
    i, j = np.ogrid[:length, :length]
    seen = ((j <= i) & (True if window is None else i - j < window))[None]
    inputs = (q_array, k_array, k_array, bias, seen, HEAD_DIM**-0.5)
    assert_close(y, torch.from_numpy(oracles.attention(*inputs)[0]), torch.float32)
    cotangent = torch.randn_like(y) / length**0.5
    y.backward(cotangent)
    expected = oracles.attention_gradients(*inputs, cotangent.double().numpy())
    assert_close(q.grad, torch.from_numpy(expected.q), torch.float32)
    assert_close(k.grad, torch.from_numpy(expected.k + expected.v), torch.float32)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding_name", ["alibi", "t5", "fire"])
@pytest.mark.parametrize("arrangement_name", ["causal", "packed", "chunk with a window"])
def test_narrower_dtypes_agree_as_far_as_they_can(
    arrangement_name: str, encoding_name: str, dtype: torch.dtype
) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name, dtype)
    inputs = Inputs.draw(arrangement, dtype)
    y = inputs.through(arrangement, encoding, "tiled")
    assert y.dtype == dtype
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected)
    for name in ("q", "k", "v"):
        gradient = getattr(inputs, name).grad
        assert gradient.dtype == dtype
        scale = float(gradients[name].abs().max())  # sums of many terms: as near as the largest of them allows
        assert_close(gradient / scale, gradients[name] / scale, dtype)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_decoding_through_a_cache_is_one_shot(encoding_name: str, window: int | None, chunk: int) -> None:
    n, encoding = 11, shaken(encoding_name, torch.float32)
    q, k, v = torch.randn(2, HEADS, n, HEAD_DIM), torch.randn(2, 2, n, HEAD_DIM), torch.randn(2, 2, n, 5)
    whole = {"encoding": encoding, "window": window, "backend": "tiled"}
    with torch.no_grad():
        at_once = attend(q, k, v, positions=Positions.arange(n), **whole)
        cache, steps = KVCache(), []
        for first in range(0, n, chunk):
            part = slice(first, first + chunk)
            where = cache.next_positions(min(chunk, n - first))
            keys, values, k_positions = cache.append(k[:, :, part], v[:, :, part], where)
            steps.append(attend(q[:, :, part], keys, values, positions=where, k_positions=k_positions, **whole))
    assert_close(torch.cat(steps, dim=2), at_once)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_packed_and_padded_rows_are_each_document_alone(encoding_name: str) -> None:
    lengths, encoding = [5, 0, 1, 9], shaken(encoding_name)
    x = torch.randn(1, HEADS, 17, HEAD_DIM, dtype=torch.float64)
    x[:, :, 15:] = 1e30  # padding
    y = attend(x, x, x, encoding=encoding, positions=Positions.packed(lengths, length=17), backend="tiled")
    first = 0
    for n in lengths:
        part = x[:, :, first : first + n]
        alone = attend(part, part, part, encoding=encoding, positions=Positions.arange(n), backend="tiled")
        assert_close(y[:, :, first : first + n], alone)
        first += n
    assert not y[:, :, 15:].any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["none", "t5", "fire", "cope"])
@pytest.mark.parametrize("arrangement_name", ["holes", "queries that see nothing", "nothing to see for anyone"])
def test_what_sees_nothing_gives_zeros_and_no_gradient(arrangement_name: str, encoding_name: str) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name, torch.float32)
    inputs = Inputs.draw(arrangement, torch.float32)
    blind = ~torch.from_numpy(arrangement.seen()).any(2)[:, None].expand(BATCH, HEADS, -1)
    assert bool(blind.any())
    y = inputs.through(arrangement, encoding, "tiled")
    assert not y[blind].any()
    y.backward(torch.randn_like(y))
    assert inputs.q.grad is not None
    assert not inputs.q.grad[blind].any()
    parameters = [] if encoding is None else list(encoding.parameters())
    for leaf in (inputs.q, inputs.k, inputs.v, *parameters):
        assert leaf.grad is None or bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("shape", [(0, 6, 3), (2, 6, 0)])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_nothing_in_gives_nothing_out(encoding_name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, HEAD_DIM, requires_grad=True)
    encoding = shaken(encoding_name, torch.float32)
    y = attend(x, x, x, encoding=encoding, positions=Positions.arange(shape[2]), backend="tiled")
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None


# ---------------------------------------------------------------------- dropout, checkpoints, autocast, compiling


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["alibi", "fire"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(encoding_name: str) -> None:
    """The output is linear in v, whatever was dropped: its derivative at v is the output itself."""
    x = torch.randn(2, HEADS, 19, HEAD_DIM, dtype=torch.float64)
    v = torch.randn(2, HEADS, 19, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    options = {"encoding": shaken(encoding_name), "positions": Positions.arange(19), "backend": "tiled"}
    y = attend(x, x, v, dropout_p=0.4, **options)
    torch.rand(3)  # the generator has moved on when the tiles are computed again
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    assert_close((v.grad * v.detach()).sum(), (cotangent * y.detach()).sum())
    plain = attend(x, x, v, **options)
    assert not torch.allclose(plain, y)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["t5", "fire"])
def test_inside_an_activation_checkpoint(encoding_name: str) -> None:
    """Twice over, with one module used in both: every tile is computed up to three times."""
    encoding = shaken(encoding_name)
    x = torch.randn(1, HEADS, 19, HEAD_DIM, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return x + attend(x, x, x, encoding=encoding, positions=Positions.arange(19), backend="tiled")

    leaves = [x, *encoding.parameters()]
    cotangent = torch.randn_like(x)
    expected = torch.autograd.grad(layer(layer(x)), leaves, cotangent)
    twice = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
    for found, wanted in zip(torch.autograd.grad(twice, leaves, cotangent), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["alibi", "fire"])
def test_autocast_leaves_the_bias_its_precision(encoding_name: str) -> None:
    """Ten thousand steps away, bfloat16 no longer tells neighbours apart; forward and, computed again, backward."""
    encoding = shaken(encoding_name, torch.float32)
    x = torch.randn(1, HEADS, 19, HEAD_DIM).bfloat16().requires_grad_()
    where = {"positions": Positions.after(10_000, 19), "encoding": encoding, "backend": "tiled"}
    plain = attend(x, x, x, **where)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attend(x, x, x, **where)
    assert torch.equal(cast, plain)
    cotangent = torch.randn_like(plain)
    for found, wanted in zip(
        torch.autograd.grad(cast, [x, *encoding.parameters()], cotangent),
        torch.autograd.grad(plain, [x, *encoding.parameters()], cotangent),
        strict=True,
    ):
        assert torch.equal(found, wanted)


COMPILED = [("tiled", "window", "t5")]
COMPILED_SLOWLY = [
    ("sdpa", "packed", "t5"),
    ("sdpa", "window", "fire"),
    *(("tiled", "packed", name) for name in ("alibi", "fire")),
    ("tiled", "window", "none"),
    ("tiled", "causal", "fire"),
]


@pytest.mark.unchecked
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("backend", "arrangement_name", "encoding_name"),
    [*COMPILED, *(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED_SLOWLY)],
)
def test_compiles_as_one_graph(backend: str, arrangement_name: str, encoding_name: str) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name)
    inputs = Inputs.draw(arrangement)
    leaves = [inputs.q, inputs.k, inputs.v, *([] if encoding is None else encoding.parameters())]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Inputs(q, k, v).through(arrangement, encoding, backend)

    torch._dynamo.reset()  # what earlier tests compiled counts against the limit
    expected = run(*leaves[:3])
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves[:3])
    assert_close(y, expected)
    cotangent = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(each, leaves, cotangent, allow_unused=True) for each in (y, expected))
    for ours, truth in zip(found, wanted, strict=True):
        assert (ours is None) == (truth is None)
        if ours is not None:
            assert_close(ours, truth)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["t5", "fire", "cope"])
@pytest.mark.parametrize("arrangement_name", ["causal", "left padding", "queries that see nothing"])
def test_memory_that_holds_nan_changes_nothing(
    arrangement_name: str, encoding_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name)
    inputs = Inputs.draw(arrangement)

    def run() -> list[Tensor]:
        y = inputs.through(arrangement, encoding, "tiled")
        leaves = [inputs.q, inputs.k, inputs.v, *encoding.parameters()]
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
        return [y, *(gradient for gradient in gradients if gradient is not None)]

    clean = run()
    torch.use_deterministic_algorithms(True)  # with it, torch fills what it allocates with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert bool(torch.empty(3).isnan().all())
        poisoned = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


# ---------------------------------------------------------------------- who may be asked for a table


def test_a_bias_that_is_overridden_is_no_longer_believed_to_follow_from_distance() -> None:
    class Tilted(ALiBi):
        """Adds what depends on the key's place; nothing says so but the bias itself."""

        def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
            keys = positions if k_positions is None else k_positions
            return super().bias(q, k, positions, k_positions) + keys.index[:, None, None] % 3

    x, where = torch.randn(1, HEADS, 9, HEAD_DIM), Positions.arange(9)
    expected = attend(x, x, x, encoding=Tilted(HEADS), positions=where, backend="eager")
    assert_close(attend(x, x, x, encoding=Tilted(HEADS), positions=where, backend="tiled"), expected)
    assert not torch.allclose(attend(x, x, x, encoding=ALiBi(HEADS), positions=where, backend="eager"), expected)


@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_the_bias_of_equal_distances_is_equal_where_that_is_promised(encoding_name: str) -> None:
    """Bit for bit, wherever the two stand and whatever the tokens are; where it is not promised, it does not hold."""
    encoding = shaken(encoding_name, torch.float32)
    if encoding is None:
        return
    q, k = torch.randn(1, HEADS, 30, HEAD_DIM), torch.randn(1, HEADS, 30, HEAD_DIM)
    bias = encoding.bias(q, k, Positions.after(700, 30))
    far = encoding.bias(k, q, Positions.after(1_000_000, 30))
    along = all(
        bool((both.diagonal(step, 2, 3) == bias.diagonal(step, 2, 3)[..., :1]).all())
        for both in (bias, far)
        for step in range(-29, 30)
    )
    assert along == follows_distance(encoding)


def test_every_encoding_with_a_bias_is_asked() -> None:
    from locant.positions.registry import encodings

    biased = {kind for kind in encodings().values() if "bias" in kind.doors()}
    assert biased == {type(build()) for name, build in ENCODINGS.items() if name != "none"}
    assert isinstance(ENCODINGS["t5"](), PositionEncoding)
    assert isinstance(ENCODINGS["t5"](), T5Bias)
