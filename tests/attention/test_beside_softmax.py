"""Sinks, soft-capping and the log-sum-exp, in every backend that has them, against float64 and transformers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from locant import Cope, LocantError, PositionEncoding, Positions, RangeError, ShapeError, attend
from locant.attention.backends import flex
from locant.attention.choice import choose_backend
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from tests import oracles
from tests.attention.allocations import allocations_of
from tests.attention.arrangements import (
    ARRANGEMENTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Arrangement,
    Inputs,
    parameters_of,
    shaken,
)
from tests.refusal import refuses
from tests.tolerances import TENSOR_CORES, assert_close

BACKENDS = ["eager", "tiled", "auto"]
CAP = 0.7
SCALE = HEAD_DIM**-0.5


def sinks_drawn() -> Tensor:
    return torch.randn(HEADS, dtype=torch.float64, requires_grad=True)


def written_out(
    inputs: Inputs,
    arrangement: Arrangement,
    encoding: PositionEncoding | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, by operations that torch knows every derivative of."""
    q, k, v = (x.double() for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = None if encoding is None else encoding.bias(q, inputs.k.double(), arrangement.positions, arrangement.keys)
    exponentials = (scores if bias is None else scores + bias).exp() * torch.from_numpy(arrangement.seen())[:, None]
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    none = total == 0
    total = total.masked_fill(none, 1.0)  # or gradients would be NaN, which no derivative of the formula is
    return exponentials @ v / total, total.log().masked_fill(none, float("-inf"))[..., 0]


def holds(
    arrangement_name: str, encoding_name: str, backend: str, *, sinks: bool, softcap: float | None, of_lse: bool
) -> None:
    """Output, log-sum-exp and every gradient, for random cotangents on both."""
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(encoding_name)
    inputs, column = Inputs.draw(arrangement), sinks_drawn() if sinks else None
    y, lse = inputs.through(arrangement, encoding, backend, sinks=column, softcap=softcap, return_lse=True)
    expected, expected_lse = written_out(inputs, arrangement, encoding, column, softcap)
    assert_close(y, expected)
    assert_close(lse, expected_lse)
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **parameters_of(encoding)}
    if column is not None:
        leaves["sinks"] = column
    on_y, on_lse = torch.randn_like(y), torch.randn_like(lse) if of_lse else torch.zeros_like(lse)
    with_key = torch.isfinite(expected_lse)
    sums = [
        (output * on_y).sum() + (logarithm[with_key] * on_lse[with_key]).sum() if of_lse else (output * on_y).sum()
        for output, logarithm in ((y, lse), (expected, expected_lse))
    ]
    found, wanted = (torch.autograd.grad(each, list(leaves.values()), allow_unused=True) for each in sums)
    for name, gradient, truth in zip(leaves, found, wanted, strict=True):
        assert (gradient is None) == (truth is None), name
        if gradient is not None and truth is not None:
            assert_close(gradient, truth)


ALL = ["causal", "window", "packed", "left padding", "holes", "chunk with a window", "behind caches of two lengths",
       "one query", "queries that see nothing", "cross attention", "packed window both ways"]  # fmt: skip
FEW = ("packed", "chunk with a window", "left padding")
USUAL = ("none", "alibi, learned", "fire")
ENCODINGS = (*USUAL, "t5", "cope")


def combinations() -> list[object]:
    """One of them alone meets what differs by it, all at once meet everything."""
    alone = itertools.product(("lse", "sinks", "softcap"), FEW[:2], ("t5", "cope"), ("eager", "tiled"))
    found: list[object] = list(alone)
    for arrangement, encoding, backend in itertools.product(ALL, ENCODINGS, BACKENDS):
        usual = backend == "tiled" or (backend == "eager" and arrangement in FEW)
        values = ("all", arrangement, encoding, backend)
        found.append(values if usual and encoding in USUAL else pytest.param(*values, marks=pytest.mark.slow))
    return found


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("beside", "arrangement_name", "encoding_name", "backend"), combinations())
def test_outputs_logarithms_and_gradients_are_those_of_the_formula(
    beside: str, arrangement_name: str, encoding_name: str, backend: str
) -> None:
    holds(
        arrangement_name,
        encoding_name,
        backend,
        sinks=beside in ("sinks", "all"),
        softcap=CAP if beside in ("softcap", "all") else None,
        of_lse=beside in ("lse", "all"),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arrangement_name", ["nothing to see for anyone", "nothing but padding"])
def test_a_query_without_a_key_gets_zeros(arrangement_name: str, backend: str) -> None:
    """Minus infinity of no scores; of a sink alone, its logit."""
    arrangement, sinks = ARRANGEMENTS[arrangement_name], sinks_drawn()
    inputs = Inputs.draw(arrangement)
    blind = arrangement.blind()
    y, lse = inputs.through(arrangement, None, backend, return_lse=True)
    assert bool((lse[blind] == float("-inf")).all())
    beside, with_sink = inputs.through(arrangement, None, backend, sinks=sinks, return_lse=True)
    assert torch.equal(with_sink[blind], sinks[None, :, None].expand_as(lse)[blind])
    for x in (y, beside):
        assert bool((x[blind] == 0).all())
    (beside.sum() + with_sink.sum()).backward()
    for leaf in (inputs.q, inputs.k, inputs.v, sinks):
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_there_are_no_keys_at_all(backend: str) -> None:
    q, none, sinks = torch.randn(2, 6, 3, 4), torch.zeros(2, 6, 0, 4), torch.randn(6)
    options = {"positions": Positions.arange(3), "k_positions": Positions.arange(0), "backend": backend}
    y, lse = attend(q, none, none, return_lse=True, **options)
    assert not y.any()
    assert torch.equal(lse, torch.full((2, 6, 3), float("-inf")))
    if backend != "tiled":
        _, weights, lse = attend(q.half(), none.half(), none.half(), return_weights=True, return_lse=True, **options)
        assert (weights.shape, weights.dtype, lse.shape) == ((2, 6, 3, 0), torch.float32, (2, 6, 3))
    _, lse = attend(q, none, none, sinks=sinks, return_lse=True, **options)
    assert torch.equal(lse, sinks[None, :, None].expand(2, 6, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_without_a_width_have_scores(backend: str) -> None:
    q, v = torch.randn(2, 6, 3, 4), torch.zeros(2, 6, 3, 0)
    y, lse = attend(q, q, v, positions=Positions.arange(3), backend=backend, return_lse=True)
    assert y.shape == v.shape
    assert_close(lse, attend(q, q, q, positions=Positions.arange(3), return_lse=True)[1])


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    "arrangement_name",
    [
        "packed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunk with a window", "queries that see nothing")),
    ],
)
@pytest.mark.parametrize("encoding_name", ["none", "alibi"])  # learned tables: test_learned_tables.py
def test_flex_has_them_where_it_has_gradients(
    encoding_name: str, arrangement_name: str, uncompiled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is on CUDA; uncompiled, and with both refusals of a CPU put aside, the same functions run here."""
    monkeypatch.setattr(flex, "obstacle", lambda inputs: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    holds(arrangement_name, encoding_name, "flex", sinks=True, softcap=CAP, of_lse=True)
    assert [call["return_aux"].lse for call in uncompiled] == [True]


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_flex_has_soft_caps_compiled_on_a_cpu() -> None:
    arrangement, encoding = ARRANGEMENTS["packed"], shaken("alibi", torch.float32)
    inputs = Inputs.draw(arrangement, torch.float32)
    with torch.no_grad():
        y = inputs.through(arrangement, encoding, "flex", softcap=CAP)
        assert_close(y, written_out(inputs, arrangement, encoding, None, CAP)[0], torch.float32)


def test_who_cannot_says_so() -> None:
    for backend, options, words in [
        ("sdpa", {"return_lse": True}, ("log-sum-exp", "tiled")),
        ("sdpa", {"sinks": torch.zeros(2)}, ("sinks", "tiled")),
        ("sdpa", {"softcap": 30.0}, ("softcap", "tiled")),
        ("flex", {"return_lse": True}, ("on a CPU", "log-sum-exp", "tiled")),
        ("tiled", {"return_lse": True, "return_weights": True}, ("weights", "eager")),
    ]:
        with refuses(LocantError, f"backend={backend!r}", *words):
            attend(X, X, X, positions=WHERE, backend=backend, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("length", "options", "name", "reason"),
    [
        (9, {"softcap": 30.0}, "eager", "softcap"),
        (9, {"needs_lse": True}, "eager", "log-sum-exp"),
        (512, {"needs_lse": True}, "tiled", "one number per head"),
        (512, {"softcap": 30.0}, "tiled", "one number per head"),
        (512, {"softcap": 30.0, "return_weights": True}, "eager", "weights"),
        (512, {"softcap": 30.0, "encoding": Cope(16)}, "tiled", "a tile of queries"),
    ],
    ids=str,
)
def test_auto_takes_one_that_can_and_says_why(length: int, options: dict[str, Any], name: str, reason: str) -> None:
    x = torch.zeros(1, 4, length, 16)
    choice = choose_backend("auto", AttentionInputs(x, x, x, AttentionMask(Positions.arange(length)), **options))
    assert choice.name == name
    assert reason in choice.reason


def test_decoding_from_a_cache_copies_no_keys() -> None:
    """Sinks and log-sum-exp beside 16-bit keys, which plain operations would make float32 of."""
    q, k = torch.randn(1, 8, 1, 32, dtype=torch.bfloat16), torch.randn(1, 2, 4000, 32, dtype=torch.bfloat16)
    where = {"positions": Positions.after(3999, 1), "k_positions": Positions.arange(4000)}
    seen = allocations_of(lambda: attend(q, k, k, sinks=torch.zeros(8), **where))
    assert seen.peak < k.numel() * k.element_size()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_derivatives_of_sinks_in_every_mode() -> None:
    """Of the log-sum-exp by a sink: its share p, and then p (1 - p); in forward mode the same numbers."""
    x, where, sinks = torch.randn(1, 2, 5, 4).double(), Positions.arange(5), torch.randn(2).double()

    def logarithms(sinks: Tensor) -> Tensor:
        return attend(x, x, x, positions=where, sinks=sinks, softcap=CAP, return_lse=True)[1].sum()

    lse = attend(x, x, x, positions=where, sinks=sinks, softcap=CAP, return_lse=True)[1]
    share = (sinks[:, None] - lse[0]).exp()
    assert_close(torch.func.grad(logarithms)(sinks), share.sum(-1))
    assert_close(torch.func.hessian(logarithms)(sinks), (share * (1 - share)).sum(-1).diag())
    assert_close(torch.func.jvp(logarithms, (sinks,), (torch.ones_like(sinks),))[1], share.sum())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "fire"])
@pytest.mark.parametrize("backend", ["tiled", "eager"])
def test_in_narrower_dtypes_with_a_logarithm_in_float32(backend: str, encoding_name: str, dtype: torch.dtype) -> None:
    arrangement, encoding = ARRANGEMENTS["chunk with a window"], shaken(encoding_name, dtype)
    inputs, sinks = Inputs.draw(arrangement, dtype), sinks_drawn().detach().to(dtype).requires_grad_()
    leaves = (inputs.q, inputs.k, inputs.v, sinks)
    y, lse = inputs.through(arrangement, encoding, backend, sinks=sinks, softcap=CAP, return_lse=True)
    assert (y.dtype, lse.dtype) == (dtype, torch.float32)
    expected = written_out(inputs, arrangement, encoding, sinks, CAP)
    assert_close(y, expected[0])
    assert_close(lse, expected[1], dtype)
    cotangents = torch.randn_like(y), torch.randn_like(lse)
    truth = torch.autograd.grad(expected, leaves, [each.double() for each in cotangents])
    for found, wanted in zip(torch.autograd.grad((y, lse), leaves, cotangents), truth, strict=True):
        scale = wanted.double().abs().max()  # sums of many terms: as near as the largest of them allows
        assert_close(found.double() / scale, wanted.double() / scale, dtype)


def test_what_is_returned_and_in_which_order() -> None:
    x, where = torch.randn(1, 2, 5, 4), Positions.arange(5)
    y, weights, lse = attend(x, x, x, positions=where, return_weights=True, return_lse=True)
    assert torch.equal(y, attend(x, x, x, positions=where, backend="eager"))
    assert torch.equal(weights, attend(x, x, x, positions=where, return_weights=True)[1])
    assert torch.equal(lse, attend(x, x, x, positions=where, return_lse=True, backend="eager")[1])
    scores = (x @ x.mT / 2).double().numpy()
    assert_close(lse[..., -1], torch.from_numpy(np.log(np.exp(scores[..., -1, :]).sum(-1))), torch.float32)
    assert_close(weights.double()[..., -1, :], torch.from_numpy(oracles.softmax(scores[..., -1, :])), torch.float32)


X, WHERE = torch.randn(1, 2, 5, 16), Positions.arange(5)


@pytest.mark.parametrize("softcap", [0, -1.0, True, "50", float("nan"), float("inf"), torch.zeros(2)], ids=str)
def test_a_soft_cap_that_is_no_bound(softcap: object) -> None:
    with refuses(RangeError, "for softcap", "above 0", "softcap=None"):
        attend(X, X, X, positions=WHERE, softcap=softcap)  # type: ignore[call-overload]


def test_a_soft_cap_that_would_not_be_learned() -> None:
    with refuses(RangeError, "softcap", "gradient", "item"):
        attend(X, X, X, positions=WHERE, softcap=torch.tensor(3.0, requires_grad=True))  # type: ignore[call-overload]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        ([0.0, 0.0], ("list",)),
        (0.5, ("float",)),
        (torch.zeros(3), ("(3,)", "(2,)")),
        (torch.zeros(2, 1), ("(2, 1)", "(2,)")),
        (torch.zeros(2, dtype=torch.int64), ("int64", "float()")),
        (torch.zeros(2, device="meta"), ("meta", "sinks.to")),
    ],
    ids=str,
)
def test_sinks_that_are_no_logits_of_the_heads(sinks: object, words: tuple[str, ...]) -> None:
    with refuses(ShapeError, "sinks", *words):
        attend(X, X, X, positions=WHERE, sinks=sinks)  # type: ignore[call-overload]


def test_a_flag_is_true_or_false() -> None:
    with refuses(RangeError, "for return_lse", "True or False"):
        attend(X, X, X, positions=WHERE, return_lse=1)  # type: ignore[call-overload]


@pytest.mark.gpu
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "packed"])
@pytest.mark.parametrize("encoding_name", ["none", "alibi, learned", "t5", "fire"])
@pytest.mark.parametrize("backend", ["flex", "tiled", "auto"])
def test_on_a_gpu_they_are_those_of_float64(backend: str, encoding_name: str, kind: str, dtype: torch.dtype) -> None:
    length, encoding = 300, shaken(encoding_name, torch.float32)
    encoding = encoding if encoding is None else encoding.cuda()
    positions = Positions.packed([100, 200]) if kind == "packed" else Positions.arange(length)
    where = {"positions": positions.to("cuda"), "window": 50 if kind == "window" else None}
    shapes = [(2, HEADS, length, 32), (2, KV_HEADS, length, 32), (2, KV_HEADS, length, 32), (HEADS,)]
    leaves = [torch.randn(*shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, truth = (
        attend(*each[:3], sinks=each[3], softcap=CAP, return_lse=True, encoding=encoding, backend=name, **where)
        for each, name in ((leaves, backend), (wide, "eager"))
    )
    cotangents = [torch.randn_like(each) for each in found]
    parameters = list(parameters_of(encoding).values())
    ours = torch.autograd.grad(found, [*leaves, *parameters], cotangents)
    theirs = torch.autograd.grad(truth, [*wide, *parameters], [each.double() for each in cotangents])
    for a, b in zip((*found, *ours), (*truth, *theirs), strict=True):
        assert float((a.double() - b).abs().max()) <= TENSOR_CORES[dtype] * max(float(b.abs().max()), 1.0)
