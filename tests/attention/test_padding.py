"""Values at padding: no output and no gradient depends on them, with any backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from locant import KVCache, Positions, Shaw, attend
from locant.attention.inputs import AttentionInputs, zero_padding
from locant.attention.mask import AttentionMask
from locant.positions.documents import PADDING
from tests.attention.arrangements import (
    ARRANGEMENTS,
    BATCH,
    ENCODINGS,
    ONLY_A_MATRIX,
    Arrangement,
    Inputs,
    parameters_of,
    shaken,
)
from tests.tolerances import assert_close

ATTEND = importlib.import_module("locant.attention.attend")  # the module; its name in the package is the function
BACKENDS = ["sdpa", "tiled", "eager"]
PADDED_KEYS = Positions.from_mask(torch.tensor([[0] * 5 + [1] * 9, [0] * 14]))
PADDED: dict[str, Arrangement] = {
    **{name: ARRANGEMENTS[name] for name in ("packed", "left padding", "holes")},
    "window": Arrangement(ARRANGEMENTS["left padding"].positions, window=3, causal=False),
    "cross attention": Arrangement(Positions.arange(7), PADDED_KEYS, causal=False),
    "chunk": Arrangement(PADDED_KEYS.slice(3, 8), PADDED_KEYS),
}


def poisoned(x: Tensor, positions: Positions, poison: float) -> Tensor:
    padding = (positions.expand(BATCH).document == PADDING)[:, None, :, None]
    return x.detach().masked_fill(padding, poison).requires_grad_()


def given(inputs: Inputs, arrangement: Arrangement, poison: float) -> Inputs:
    k, v = (poisoned(x, arrangement.keys, poison) for x in (inputs.k, inputs.v))
    return Inputs(poisoned(inputs.q, arrangement.positions, poison), k, v)


FAST = ("none", "alibi, learned", "cope")


def agrees(arrangement: Arrangement, encoding_name: str, backend: str, poison: float, dtype: torch.dtype) -> None:
    encoding, inputs = shaken(encoding_name, dtype), Inputs.draw(arrangement, dtype)
    odd = given(inputs, arrangement, poison)
    y = odd.through(arrangement, encoding, backend)
    cotangent = torch.randn_like(y)
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected)
    leaves = {"q": odd.q, "k": odd.k, "v": odd.v, **parameters_of(encoding)}
    found = torch.autograd.grad(y, list(leaves.values()), cotangent, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        ours = torch.zeros_like(leaf) if gradient is None else gradient
        if dtype == torch.float64:
            assert_close(ours, gradients.get(name, torch.zeros_like(leaf)))
        assert bool(ours.isfinite().all())
    for gradient, where in zip(found, (arrangement.positions, arrangement.keys, arrangement.keys), strict=False):
        assert not gradient.transpose(1, 2)[where.expand(BATCH).document == PADDING].any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("encoding_name", "poison"),
    [
        *(pytest.param(name, float("nan"), marks=[] if name in FAST else [pytest.mark.slow]) for name in ENCODINGS),
        pytest.param("cope", float("-inf"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arrangement_name", PADDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients_are_those_of_numpy(
    backend: str, arrangement_name: str, encoding_name: str, poison: float
) -> None:
    agrees(PADDED[arrangement_name], encoding_name, backend, poison, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_narrow_numbers_too(backend: str, dtype: torch.dtype) -> None:
    agrees(PADDED["left padding"], "alibi, learned", backend, float("nan"), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_leave_padding_out(backend: str) -> None:
    where = Positions.packed([[140], [150]], length=290)
    assert AttentionMask(where).packed_documents() is not None
    agrees(Arrangement(where), "alibi, learned", backend, float("nan"), torch.float64)


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "arrangement_name", [name if name == "chunk" else pytest.param(name, marks=pytest.mark.slow) for name in PADDED]
)
@pytest.mark.usefixtures("uncompiled")
def test_flex(arrangement_name: str) -> None:
    """Forward, uncompiled: the tensors it hands over have no NaN."""
    arrangement, encoding = PADDED[arrangement_name], shaken("shaw", torch.float32)
    inputs = Inputs.draw(arrangement, torch.float32)
    with torch.no_grad():
        y = given(inputs, arrangement, float("nan")).through(arrangement, encoding, "flex")
    assert_close(y, inputs.expected(arrangement, encoding, torch.zeros_like(y))[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nor_does_a_cotangent_of_padding(backend: str) -> None:
    arrangement = PADDED["left padding"]
    inputs = Inputs.draw(arrangement)
    padding = (arrangement.positions.document == PADDING)[:, None, :, None]

    def gradients(poison: float) -> tuple[Tensor, ...]:
        y = inputs.through(arrangement, None, backend)
        return torch.autograd.grad(y, [inputs.q, inputs.k, inputs.v], torch.ones_like(y).masked_fill(padding, poison))

    for found, wanted in zip(gradients(float("nan")), gradients(0.0), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_weights_of_padding_are_zeros(dropout_p: float) -> None:
    arrangement = PADDED["left padding"]
    odd = given(Inputs.draw(arrangement), arrangement, float("nan"))
    y, weights = odd.through(arrangement, shaken("cope"), "eager", return_weights=True, dropout_p=dropout_p)
    padding = (arrangement.positions.document == PADDING)[:, None].expand(weights.shape[:3])
    assert not weights[padding].any()
    assert not weights.mT[padding].any()
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_the_places_of_a_cache_do_not_vouch_for_other_tensors(backend: str) -> None:
    cache, where = KVCache(), PADDED["left padding"].positions
    inputs = Inputs.draw(PADDED["left padding"])
    odd = given(inputs, PADDED["left padding"], float("nan"))
    cached = cache.append(odd.k.detach(), odd.v.detach(), where)[2]
    for places in (cached, cached.slice(0, cached.seq_len), Positions.cat([cached]), cached.to("cpu")):
        arrangement = Arrangement(places)
        y = odd.through(arrangement, None, backend)
        assert_close(y, inputs.expected(arrangement, None, torch.zeros_like(y))[0])
        for gradient in torch.autograd.grad(y.sum(), [odd.q, odd.k, odd.v]):
            assert bool(gradient.isfinite().all())
        assert not KVCache().append(odd.k.detach(), odd.k.detach(), places)[0].isnan().any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["one document", "short documents"])
def test_without_gradients_tiles_are_cleared_one_by_one(kind: str) -> None:
    """Tiles of one document have so many keys to a query that alone they would count as decoding."""
    real = torch.arange(90) >= torch.tensor([[1], [20]])
    where = Positions.from_mask(real) if kind == "one document" else Positions.packed([[5] * 17, [4] * 20], length=90)
    padding = (where.document == -1)[:, None, :, None]
    q, k, v = (torch.randn(2, 1, 90, 8) for _ in range(3))
    shaw = Shaw(8, 4)

    def outputs(fill: float) -> Tensor:
        with torch.no_grad():
            inputs = (x.masked_fill(padding, fill) for x in (q, k, v))
            return attend(*inputs, encoding=shaw, positions=where, causal=False, backend="tiled")

    clean, odd = outputs(0.0), outputs(float("nan"))
    assert torch.equal(clean, odd)
    assert bool(clean.isfinite().all())


STEP = Arrangement(Positions.after([2, 0], 1), Positions.from_mask(torch.tensor([[0] * 13 + [1] * 3, [0] * 15 + [1]])))


def handed_over(
    queries: int, keys: int, monkeypatch: pytest.MonkeyPatch, way: Callable[[Tensor], Any] = lambda x: x
) -> list[bool]:
    """Which of q, k and v reach the kernel as they are."""
    got: list[tuple[Tensor, ...]] = []

    def listening(inputs: AttentionInputs) -> Tensor:
        got.append((inputs.q, inputs.k, inputs.v))
        return inputs.q

    monkeypatch.setattr(ATTEND, "sdpa_attention", listening)
    x, document = torch.randn(2, 1, keys, 4), torch.zeros(2, keys, dtype=torch.int64)
    document[0, 0] = -1
    places = Positions.of(torch.arange(keys).expand(2, -1), document)
    q, k = x[:, :, :queries], way(x)
    attend(q, k, x, positions=places.slice(0, queries), k_positions=places, backend="sdpa")
    return [ours is theirs for ours, theirs in zip(got[0], (q, k, x), strict=True)]


@pytest.mark.parametrize(("queries", "keys", "copied"), [(1, 15, True), (1, 16, False), (2, 31, True), (2, 32, False)])
def test_few_queries_of_many_keys_do_not_copy_them(
    queries: int, keys: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handed_over(queries, keys, monkeypatch) == [False, not copied, not copied]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself
def test_but_they_do_where_something_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handed_over(1, 16, monkeypatch, lambda x: x.clone().requires_grad_()) == [False] * 3
    with torch.no_grad():
        assert handed_over(1, 16, monkeypatch, lambda x: x.clone().requires_grad_())[2]
    with forward_ad.dual_level():
        assert handed_over(1, 16, monkeypatch, lambda x: forward_ad.make_dual(x, x)) == [False] * 3


def backends_and_encodings() -> Iterator[Any]:
    for backend in (*BACKENDS, "auto", "flex"):
        for name in ENCODINGS:
            if backend != "flex" or name not in ONLY_A_MATRIX:
                marks = [pytest.mark.unchecked] if backend == "flex" else []
                yield pytest.param(backend, name, marks=marks if name in FAST else [*marks, pytest.mark.slow])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("backend", "encoding_name"), list(backends_and_encodings()))
def test_there_finite_numbers_at_padding_change_nothing(
    backend: str, encoding_name: str, request: pytest.FixtureRequest
) -> None:
    if backend == "flex":
        request.getfixturevalue("uncompiled")
    dtype = torch.float32 if backend == "flex" else torch.float64
    encoding, inputs = shaken(encoding_name, dtype), Inputs.draw(STEP, dtype)
    with torch.no_grad():
        y = given(inputs, STEP, 1e6).through(STEP, encoding, backend)
    assert_close(y, inputs.expected(STEP, encoding, torch.zeros_like(y))[0])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_and_with_a_gradient_nan_changes_nothing(backend: str) -> None:
    agrees(STEP, "alibi, learned", backend, float("nan"), torch.float64)


@pytest.mark.parametrize(
    "where", [Positions.arange(9), Positions.from_mask(torch.ones(2, 9)), Positions.packed([4, 5])]
)
def test_where_there_is_no_padding_nothing_is_copied(where: Positions) -> None:
    x = torch.randn(2, 1, 9, 4)
    assert zero_padding(where, x)[0] is x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.unchecked
def test_compiled_in_one_graph(backend: str) -> None:
    arrangement = PADDED["holes"]
    odd = given(Inputs.draw(arrangement), arrangement, float("nan"))
    expected = odd.through(arrangement, None, backend)
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        return attend(q, k, v, positions=positions, backend=backend)

    y = torch.compile(run, fullgraph=True, backend="aot_eager")(odd.q, odd.k, odd.v, arrangement.positions)
    assert_close(y, expected)
    for gradient in torch.autograd.grad(y, [odd.q, odd.k, odd.v], torch.randn_like(y)):
        assert bool(gradient.isfinite().all())
