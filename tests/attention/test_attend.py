"""`attend` with every backend, against attention written out in NumPy with float64, forward and backward."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from locant import ALiBi, Positions, Rotary, ShapeError, T5Bias, attend
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
    read,
    shaken,
)
from tests.refusal import refuses
from tests.tolerances import assert_close

BACKENDS = ["sdpa", "tiled", "eager"]


def holds(arrangement: Arrangement, encoding_name: str, backend: str, kv_heads: int = KV_HEADS) -> None:
    Inputs.draw(arrangement, kv_heads=kv_heads).require_numpys(arrangement, shaken(encoding_name), backend)


FAST = {
    "packed", "chunk with a window", "behind caches of two lengths", "queries that see nothing", "keys all later",
}  # fmt: skip
LACKING_KEYS = {"keys out of reach", "fewer keys than queries"}
"""Of which keys between another and a query are missing: refused for encodings that need them."""
SIMPLE = {"none", "t5, both ways"}
WITH_A_MATRIX = {"packed window both ways", "chunk with a window"}


def combinations() -> list[object]:
    """Tiles meet everything; what goes through one matrix needs fewer pairs of an encoding and an arrangement."""
    found: list[object] = []
    for backend in BACKENDS:
        for arrangement in ARRANGEMENTS:
            for encoding in ENCODINGS:
                simple, values = encoding in SIMPLE, (arrangement, encoding, backend)
                if encoding == "cope" and arrangement in LACKING_KEYS:
                    continue
                if backend == "tiled":
                    fast = simple or arrangement in FAST
                    found.append(values if fast else pytest.param(*values, marks=pytest.mark.slow))
                elif encoding == "none" or arrangement in WITH_A_MATRIX:
                    found.append(values)
    return found


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("arrangement_name", "encoding_name", "backend"), combinations())
def test_outputs_and_all_gradients_are_those_of_numpy(arrangement_name: str, encoding_name: str, backend: str) -> None:
    holds(ARRANGEMENTS[arrangement_name], encoding_name, backend)


BY_TURNS = ["causal", "packed", "left padding", "chunk with a window"]
BIASES = ["none", "alibi", "t5", "fire"]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding_name", BIASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrower_dtypes_agree_as_far_as_they_can(backend: str, encoding_name: str, dtype: torch.dtype) -> None:
    """Each backend meets each arrangement with every dtype or two."""
    turn = BIASES.index(encoding_name) + dtype.itemsize + (dtype == torch.float16)
    arrangement, encoding = ARRANGEMENTS[BY_TURNS[turn % 4]], shaken(encoding_name, dtype)
    inputs = Inputs.draw(arrangement, dtype)
    y = inputs.through(arrangement, encoding, backend)
    assert y.dtype == dtype
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected)
    assert not y[arrangement.blind()].any()
    for name in ("q", "k", "v"):
        gradient = getattr(inputs, name).grad
        assert gradient.dtype == dtype
        scale = float(gradients[name].abs().max())  # sums of many terms: as near as the largest of them allows
        assert_close(gradient / scale, gradients[name] / scale, dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
@pytest.mark.parametrize("encoding_name", ["none", "t5", "shaw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_key_heads_in_groups(backend: str, encoding_name: str, kv_heads: int) -> None:
    holds(ARRANGEMENTS["chunk behind a cache"], encoding_name, backend, kv_heads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_scaled_before_the_bias_is_added(backend: str) -> None:
    arrangement, encoding = ARRANGEMENTS["packed"], shaken("t5")
    inputs = Inputs.draw(arrangement)
    y = inputs.through(arrangement, encoding, backend, scale=0.25)
    expected, _ = inputs.expected(arrangement, encoding, torch.zeros_like(y), 0.25)
    assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(("scale", "arrangement_name"), [(0.0, "causal"), (-0.25, "both ways"), (-0.25, "one query")])
def test_a_scale_may_be_zero_or_less(scale: float, arrangement_name: str, backend: str, dtype: torch.dtype) -> None:
    """Also where torch's kernels hide later tokens by minus infinity before they scale."""
    arrangement = ARRANGEMENTS[arrangement_name]
    drawn = Inputs.draw(arrangement, dtype, HEADS)
    v = drawn.v.detach()[..., :HEAD_DIM].requires_grad_()  # as the fused kernel has them
    inputs = dataclasses.replace(drawn, v=v)
    y = inputs.through(arrangement, None, backend, scale=scale)
    cotangent = torch.randn_like(y)
    expected, gradients = inputs.expected(arrangement, None, cotangent, scale)
    assert_close(y, expected)
    found = torch.autograd.grad(y, [inputs.q, inputs.k, inputs.v], cotangent)
    for name, gradient in zip("qkv", found, strict=True):
        if dtype in (torch.float64, torch.float32):
            assert_close(gradient, gradients[name])
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("shape", [(0, 6, 3), (2, 6, 0)])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_gives_nothing_out(backend: str, encoding_name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, HEAD_DIM, requires_grad=True)
    encoding = shaken(encoding_name, torch.float32)
    positions = read(encoding, Positions.arange(shape[2]), x)
    y = attend(x, x, x, encoding=encoding, positions=positions, backend=backend)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("arrangement_name", ["causal", "packed", "cross attention", "behind caches of two lengths"])
def test_weights_are_numpys_and_rows_sum_to_one(arrangement_name: str) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken("t5")
    inputs, seen = Inputs.draw(arrangement), arrangement.seen()
    y, weights = inputs.through(arrangement, encoding, "auto", return_weights=True)
    expected, _ = inputs.expected(arrangement, encoding, torch.zeros_like(y))
    assert_close(y, expected)
    bias = encoding.bias(inputs.q, inputs.k, arrangement.positions, arrangement.k_positions)
    arrays = [x.detach().numpy() for x in (inputs.q, inputs.k, inputs.v)]
    matrix = bias.detach().expand(BATCH, -1, -1, -1).numpy()
    assert_close(weights, torch.from_numpy(oracles.attention(*arrays, matrix, seen, HEAD_DIM**-0.5)[1]))
    sums = torch.from_numpy(seen.any(-1)).double()[:, None].expand(BATCH, HEADS, -1)
    assert_close(weights.sum(-1), sums)
    narrow = Inputs.draw(arrangement, torch.bfloat16)
    _, weights = narrow.through(arrangement, shaken("t5", torch.bfloat16), "eager", return_weights=True)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding_name", ["none", "alibi"])
def test_dropout_drops_that_share_and_scales_the_rest(encoding_name: str, backend: str) -> None:
    """With the identity as values the output is the weights, as dropped."""
    n, p = 64, 0.25
    q = torch.randn(2, 4, n, n)
    v = torch.eye(n).expand(2, 4, n, n)
    encoding = ALiBi(4) if encoding_name == "alibi" else None
    options = {"encoding": encoding, "positions": Positions.arange(n), "causal": False}
    plain = attend(q, q, v, backend=backend, **options)
    dropped = attend(q, q, v, backend=backend, dropout_p=p, **options)
    solid = plain > 1e-12  # beyond that, exp underflows and zero is not a sign of dropout
    kept = dropped != 0
    share = 1 - float(kept[solid].double().mean())
    sigma = (p * (1 - p) / int(solid.sum())) ** 0.5
    assert abs(share - p) < 5 * sigma
    assert_close(dropped[kept], plain[kept] / (1 - p))
    torch.manual_seed(7)
    first = attend(q, q, v, backend=backend, dropout_p=p, **options)
    torch.manual_seed(7)
    assert torch.equal(first, attend(q, q, v, backend=backend, dropout_p=p, **options))
    assert not torch.equal(first, dropped)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_turns_queries_and_keys_by_their_own_positions(layout: str) -> None:
    """Without it the same call is attention without positions."""
    q, k, v = torch.randn(1, 4, 3, 6), torch.randn(1, 2, 7, 6), torch.randn(1, 2, 7, 5)
    places, key_places = [9, 2, 4], [0, 8, 1, 6, 5, 3, 11]
    positions, k_positions = Positions.of([places]), Positions.of([key_places])
    turned = [
        oracles.rotate(x.double().numpy(), *oracles.angles(np.array(index), 6, 500.0), layout)
        for x, index in ((q, places), (k, key_places))
    ]
    seen = oracles.is_allowed(
        *(np.array([one]) for one in (places, [0] * 3, key_places, [0] * 7)), causal=True, window=None
    )
    nothing = np.zeros((1, 4, 3, 7))
    expected, _ = oracles.attention(*turned, v.double().numpy(), nothing, seen, 6**-0.5)
    rotary = Rotary(6, base=500.0, layout=layout)
    given = {"encoding": rotary, "positions": positions, "k_positions": k_positions}
    assert_close(attend(q, k, v, rotate=True, **given), torch.from_numpy(expected))
    assert torch.equal(attend(q, k, v, **given), attend(q, k, v, **given | {"encoding": None}))


def test_shapes_that_do_not_fit_are_refused() -> None:
    good = torch.zeros(2, 6, 5, 4)
    positions = Positions.arange(5)
    for q, k, v in [
        (good[0], good, good), (good, good[0], good), (good, good, good[0]),
        (good, good[:1], good[:1]), (good, good, good[:, :, :4]), (good, good, good[:, :3]),
        (good, torch.zeros(2, 6, 5, 3), good),
    ]:  # fmt: skip
        with refuses(ShapeError, f"q {tuple(q.shape)}", f"k {tuple(k.shape)}", f"v {tuple(v.shape)}"):
            attend(q, k, v, positions=positions)


@pytest.mark.parametrize("kv_heads", [0, 4, 12])
def test_heads_that_do_not_divide_are_refused(kv_heads: int) -> None:
    k = torch.zeros(2, kv_heads, 5, 4)
    with refuses(ShapeError, "6 query heads", f"{kv_heads} key heads"):
        attend(torch.zeros(2, 6, 5, 4), k, k, positions=Positions.arange(5))


def test_mixed_dtypes_and_devices_are_refused() -> None:
    x, positions = torch.zeros(2, 6, 5, 4), Positions.arange(5)
    for k, v in ((x.bfloat16(), x), (x, x.double())):
        with refuses(ShapeError, "of float32, ", "one dtype"):
            attend(x, k, v, positions=positions)
    with refuses(ShapeError, "meta", "cpu"):
        attend(x, x.to("meta"), x, positions=positions)
    with refuses(ShapeError, "meta", "cpu"):
        attend(x, x, x, positions=positions.to("meta"))


def test_positions_of_other_tokens_are_refused() -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(ShapeError, "1 x 4", "q has 2 x 5"):
        attend(x, x, x, positions=Positions.arange(4))
    with refuses(ShapeError, "1 x 6", "k has 2 x 5"):
        attend(x, x, x, positions=Positions.arange(5), k_positions=Positions.arange(6))
    with refuses(ShapeError, "3 x 5"):
        attend(x, x, x, positions=Positions.arange(5, batch=3))


def test_an_encoding_with_other_heads_is_refused() -> None:
    x = torch.zeros(2, 6, 5, 4)
    for encoding in (ALiBi(4), T5Bias(12)):
        with refuses(ShapeError, "(2, 6, 5, 4)", f"num_heads={encoding.num_heads}"):
            attend(x, x, x, encoding=encoding, positions=Positions.arange(5))
