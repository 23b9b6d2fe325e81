"""`attend` without a matrix for the bias: every encoding, every arrangement, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from locant import DistanceBias, Positions, attend
from locant.attention.backends import tiled
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from locant.positions.offset_bias import HeadTable
from tests.attention.arrangements import (
    ARRANGEMENTS,
    ENCODINGS,
    HEAD_DIM,
    HEADS,
    Arrangement,
    Inputs,
    parameters_of,
    read,
    shaken,
)
from tests.tolerances import assert_close

BESIDE = {"return_lse": True}
"""With sinks."""
BESIDE_A_CAP = {**BESIDE, "softcap": 0.7}


@pytest.mark.parametrize(
    "length", [1, 63, *(pytest.param(length, marks=pytest.mark.slow) for length in (100, 255, 256, 257, 513))]
)
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "t5", "fire"])
@pytest.mark.parametrize("window", [None, 40])
def test_odd_lengths_and_the_edges_of_tiles(window: int | None, encoding_name: str, length: int) -> None:
    """In float32, at the true size of the tiles."""
    arrangement, encoding = Arrangement(Positions.arange(length), window=window), shaken(encoding_name, torch.float32)
    inputs = Inputs.draw(arrangement, torch.float32, kv_heads=1)
    y = inputs.through(arrangement, encoding, "tiled")
    cotangent = torch.randn_like(y) / length**0.5
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected, torch.float32)
    for name, found in zip("qkv", torch.autograd.grad(y, [inputs.q, inputs.k, inputs.v], cotangent), strict=True):
        assert_close(found, gradients[name], torch.float32)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("encoding_name", ["alibi", "fire"])
@pytest.mark.parametrize("beside", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(beside: bool, encoding_name: str) -> None:
    """The output is linear in v, whatever was dropped: its derivative at v is the output itself."""
    x, v = torch.randn(2, 2, HEADS, 19, HEAD_DIM, dtype=torch.float64)
    v.requires_grad_()
    options: dict[str, Any] = {"encoding": shaken(encoding_name), "positions": Positions.arange(19), "backend": "tiled"}
    options |= {"sinks": torch.randn(HEADS, dtype=torch.float64), "return_lse": True} if beside else {}
    outputs = [attend(x, x, v, dropout_p=p, **options) for p in (0.4, 0.0)]
    (y, lse), (plain, expected_lse) = outputs if beside else [(y, x) for y in outputs]
    torch.rand(3)  # the generator has moved on when the tiles are computed again
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    assert_close((v.grad * v.detach()).sum(), (cotangent * y.detach()).sum())
    assert not torch.allclose(plain, y)
    assert_close(lse, expected_lse)


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


COMPILED = [("tiled", "window", "t5", {}), ("tiled", "window", "t5", BESIDE), ("tiled", "window", "t5", BESIDE_A_CAP)]
COMPILED_SLOWLY = [
    ("sdpa", "packed", "t5", {}), ("sdpa", "window", "fire", {}), ("tiled", "packed", "alibi", {}),
    ("tiled", "window", "none", {}), ("tiled", "packed", "alibi", BESIDE_A_CAP), ("tiled", "causal", "fire", BESIDE),
    ("auto", "packed", "t5", BESIDE_A_CAP),
]  # fmt: skip
"""Every backend, arrangement and encoding, and everything beside the softmax."""
COMPILED_IN_THE_SWEEP = [("tiled", "packed", "fire", {}), ("tiled", "causal", "fire", {})]
"""Other pairs of them."""
SLOW, SWEEP = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.sweep]


@pytest.mark.unchecked
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("backend", "arrangement_name", "encoding_name", "beside"),
    [
        *COMPILED,
        *(pytest.param(*each, marks=SLOW) for each in COMPILED_SLOWLY),
        *(pytest.param(*each, marks=SWEEP) for each in COMPILED_IN_THE_SWEEP),
    ],
)
def test_compiles_as_one_graph(
    backend: str, arrangement_name: str, encoding_name: str, beside: dict[str, object]
) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name)
    inputs, sinks = Inputs.draw(arrangement), torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    leaves = [inputs.q, inputs.k, inputs.v, sinks, *parameters_of(encoding).values()]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        options = {**beside, "sinks": sinks} if beside else {}
        y = Inputs(q, k, v).through(arrangement, encoding, backend, **options)
        return y if isinstance(y, tuple) else (y,)

    torch._dynamo.reset()  # what earlier tests compiled counts against the limit
    expected, found = run(*leaves[:4]), torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves[:4])
    cotangents = [torch.randn_like(each) for each in expected]
    wanted, gradients = (torch.autograd.grad(y, leaves, cotangents, allow_unused=True) for y in (expected, found))
    for ours, truth in zip((*found, *gradients), (*expected, *wanted), strict=True):
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


@pytest.mark.parametrize("encoding_name", ENCODINGS)
def test_the_bias_of_equal_distances_is_equal_where_that_is_promised(encoding_name: str) -> None:
    """Bit for bit, wherever the two stand and whatever the tokens are; where it is not promised, it does not hold."""
    encoding = shaken(encoding_name, torch.float32)
    if encoding is None:
        return
    q, k = torch.randn(1, HEADS, 30, HEAD_DIM), torch.randn(1, HEADS, 30, HEAD_DIM)
    bias = encoding.bias(q, k, read(encoding, Positions.after(700, 30), q))
    far = encoding.bias(k, q, read(encoding, Positions.after(1_000_000, 30), k))
    along = all(
        bool((both.diagonal(step, 2, 3) == bias.diagonal(step, 2, 3)[..., :1]).all())
        for both in (bias, far)
        for step in range(-29, 30)
    )
    assert along == isinstance(encoding, DistanceBias | HeadTable)  # in one row, as here


@pytest.mark.parametrize(
    ("device", "keys", "rows"), [("cpu", 16384, 16), ("meta", 16384, 256), ("meta", 32768, 128), ("meta", 2**20, 16)]
)
def test_tiles_are_as_large_as_a_device_needs_and_its_memory_allows(device: str, keys: int, rows: int) -> None:
    q, k = torch.empty(1, 32, 1, 8, device=device), torch.empty(1, 1, 1, 8, device=device).expand(1, 32, keys, 8)
    where = Positions.after(keys - 1, 1, device=device), Positions.arange(keys, device=device)
    assert tiled._rows_per_tile(AttentionInputs(q, k, k, AttentionMask(*where))) == rows
