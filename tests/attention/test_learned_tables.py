"""Learned biases that are looked up by distance, through flex: gradients out of our kernels, whatever the positions.

FlexAttention has no backward on a CPU, so plain operations stand in for it, and Triton's interpreter for a GPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from locant import ALiBi, Deberta, PositionEncoding, Positions, Shaw, attend
from locant.attention.backends import flex
from locant.kernels import distance_gradient
from locant.kernels.distance_gradient import Biases, Pairs
from tests.attention.arrangements import ARRANGEMENTS, HEADS, Inputs, parameters_of, shaken
from tests.kernels.interpreted import interpreted
from tests.tolerances import assert_close

pytest.importorskip("triton", reason="there is no Triton for this platform")

LEARNED = ("alibi, learned", "t5", "kerple", "t5, both ways", "kerple, power")

PRODUCTS = ("shaw", "deberta", "inkling")
"""Of which tokens have a number for every row; the others are tables."""

FAST = [
    ("packed", "shaw"), ("behind caches of two lengths", "deberta"),
    ("window both ways", "t5, both ways"), ("packed", "kerple"), ("holes", "alibi, learned"),
    ("behind caches of two lengths", "t5"), ("chunk with a window", "kerple, power"),
]  # fmt: skip
SEVERAL_BLOCKS = [("behind caches of two lengths", "t5")]
"""More of them, of products too, are in the tests below."""

BOTH_WAYS = {"causal": False}
WITH_GAPS = Positions.of([i + i // 18 for i in range(40)])
"""In some pairs of blocks, but not in all, there is a gap."""


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Pairs]:
    """What the kernels were asked for, in blocks of 16 tokens, or of as many as the test is given."""
    kernels = interpreted("locant.kernels.distance_gradient.triton")
    asked: list[Pairs] = []

    def in_the_interpreter(*given: Any) -> Tensor:
        *tensors, of_query, of_key, row_of, queries, keys, some, first, low, high, offset, scale, softcap = given
        asked.append(Pairs(first, low, high, offset, queries, keys, some))
        found = kernels.gradients(*tensors, Biases(of_query, of_key, row_of), asked[-1], scale, softcap)
        return tuple(torch.empty(0) if x is None else x for x in found)

    monkeypatch.setattr(kernels, "BLOCKS", dict.fromkeys((2, 4), getattr(request, "param", 16)))
    monkeypatch.setattr(distance_gradient, "distance_gradient", in_the_interpreter)
    monkeypatch.setattr(flex, "obstacle", lambda inputs: None)
    monkeypatch.setattr(flex, "_pad_to_power_of_two", lambda inputs: inputs)
    monkeypatch.setattr(flex, "_run", plainly)
    return asked


def plainly(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, scale: float, return_aux: Any = None, **_: Any
) -> Any:
    """FlexAttention by its documentation."""
    dtype, q = q.dtype, q.float()
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    places = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = q @ k.mT * scale
    scores = scores if score_mod is None else score_mod(scores, *places)
    scores = scores.masked_fill(~block_mask.mask_mod(*places), float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    y = (scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v).to(dtype)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], float("-inf"))
    return y if return_aux is None else (y, type(return_aux)(lse=lse))


@pytest.mark.parametrize(
    ("arrangement_name", "name", "calls"),
    [(*each, 16 if each in SEVERAL_BLOCKS else 32) for each in FAST],
    indirect=["calls"],
)
def test_every_gradient_is_that_of_numpy(arrangement_name: str, name: str, calls: list[Pairs]) -> None:
    arrangement = ARRANGEMENTS[arrangement_name]
    require_that_of_numpy(arrangement_name, name)
    assert len(calls) == 1
    assert (calls[0].offset is None) == (arrangement.positions.start is None or arrangement.keys.start is None)


SLOW, SWEEP = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.sweep]


@pytest.mark.parametrize(
    ("arrangement_name", "name"),
    [
        pytest.param(*case, marks=SLOW if place % 2 == products else SWEEP)
        for products, names in enumerate((LEARNED, PRODUCTS))
        for place, case in enumerate(zip(ARRANGEMENTS, itertools.cycle(names), strict=False))
    ],
)
@pytest.mark.usefixtures("calls")
def test_every_arrangement_has_its_gradients(arrangement_name: str, name: str) -> None:
    """Every arrangement has those of a table or of products, in turn. The sweep has both.

    The kernels see numbers, and not where they come from.
    """
    require_that_of_numpy(arrangement_name, name)


def require_that_of_numpy(arrangement_name: str, name: str) -> None:
    arrangement, encoding = ARRANGEMENTS[arrangement_name], shaken(name, torch.float32)
    inputs = Inputs.draw(arrangement, torch.float32)
    y = inputs.through(arrangement, encoding, "flex")
    cotangent = torch.randn_like(y)
    expected, gradients = inputs.expected(arrangement, encoding, cotangent)
    assert_close(y, expected)
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **parameters_of(encoding)}
    terms = {} if name in PRODUCTS else inputs.terms_of_gradients(arrangement, encoding, cotangent)
    for leaf, found in zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent), strict=True):
        size = terms[leaf].clamp(min=1) if leaf in terms else 1
        assert_close(found / size, gradients[leaf] / size)


@pytest.mark.parametrize("calls", [64], indirect=True)
def test_documents_of_many_blocks_some_of_which_hold_no_pair(calls: list[Pairs]) -> None:
    where, encoding = Positions.packed([[128, 22], [140]], length=150), ALiBi(1, learned=True)
    q, k, v = (torch.randn(2, 1, 150, 4) for _ in range(3))
    y, cotangent = attend(q, k, v, encoding=encoding, positions=where, backend="flex"), torch.randn(2, 1, 150, 4)
    slopes = encoding.slopes.detach().double().requires_grad_()
    distance = where.index[:, None, :, None] - where.index[:, None, None]
    scores = q.double() @ k.double().mT / 2 - slopes[:, None, None] * distance.abs()
    weights = scores.masked_fill(~where.mask(), float("-inf")).softmax(-1).nan_to_num()
    (truth,) = torch.autograd.grad(weights @ v.double(), slopes, cotangent.double())
    assert_close(torch.autograd.grad(y, encoding.slopes, cotangent)[0], truth)
    assert calls[0].some.tolist() == [[[True, False], [False, True]], [[True, False], [True, True]]]


@pytest.mark.parametrize(
    ("make", "where", "options", "dtype"),
    [
        (lambda: Shaw(6, 18, max_later=0, key_term=True), Positions.arange(40), {}, torch.float32),
        (lambda: Deberta(2, 6, num_buckets=10, max_distance=30), WITH_GAPS, BOTH_WAYS, torch.float16),
        slow(lambda: Shaw(6, 9), Positions.packed([12, 28]), {"softcap": 2.0}, torch.float32),
        slow(lambda: Deberta(2, 6, num_buckets=None, max_distance=20), Positions.arange(40), BOTH_WAYS, torch.float32),
        slow(lambda: Deberta(2, 6, terms=["p2c"]), Positions.arange(40), BOTH_WAYS | {"window": 22}, torch.float32),
    ],
)
def test_products_with_rows_of_many_blocks(
    make: Callable[[], PositionEncoding], where: Positions, options: dict[str, Any], dtype: torch.dtype,
    calls: list[Pairs],
) -> None:  # fmt: skip
    """Equal to plain operations in float64; 40 tokens are three blocks.

    Some distances have a row of their own, others share one, up to all that are far.
    """
    encoding, options = make(), {"causal": True, "window": None, "softcap": None} | options
    encoding.to(dtype).load_state_dict({name: torch.randn_like(x) / 4 for name, x in encoding.state_dict().items()})
    q, k, v, onto_y = (torch.randn(1, heads, 40, 6).to(dtype).requires_grad_() for heads in (2, 1, 1, 2))
    onto_lse, leaves = torch.randn(1, 2, 40), [q, k, v, *encoding.parameters()]
    outputs = attend(q, k, v, encoding=encoding, positions=where, backend="flex", return_lse=True, **options)
    found = torch.autograd.grad(outputs, leaves, [onto_y, onto_lse])

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    plain = copy.deepcopy(encoding).double()
    scores = wide[0] @ wide[1].mT * 6**-0.5
    scores = scores if options["softcap"] is None else (scores / options["softcap"]).tanh() * options["softcap"]
    scores = scores + plain.bias(*wide[:2], where)
    allowed = where.mask(causal=options["causal"], window=options["window"])
    scores = scores.masked_fill(~allowed, float("-inf"))
    truth = [scores.softmax(-1) @ wide[2], scores.logsumexp(-1)]
    expected = torch.autograd.grad(truth, [*wide, *plain.parameters()], [onto_y.double(), onto_lse.double()])
    for ours, right in zip(found, expected, strict=True):
        size = right.abs().max().clamp(min=1)
        assert_close(ours / size, right / size)
    assert len(calls) == 1


@pytest.mark.parametrize("counted", [True, False])
def test_sinks_a_soft_cap_and_a_gradient_of_the_log_sum_exp(counted: bool, calls: list[Pairs]) -> None:
    encoding, heads, n = ALiBi(2, learned=True), 2, 40
    where = Positions.arange(n) if counted else Positions.packed([15, 25])
    q, k, v = (torch.randn(1, heads, n, 6, requires_grad=True) for _ in range(3))
    sinks = torch.randn(heads, requires_grad=True)
    onto_y, onto_lse = torch.randn(1, heads, n, 6), torch.randn(1, heads, n)

    y, lse = attend(
        q, k, v, encoding=encoding, positions=where, sinks=sinks, softcap=2.0, return_lse=True, backend="flex"
    )
    found = torch.autograd.grad([y, lse], [encoding.slopes, q, sinks], [onto_y, onto_lse])

    slopes, wide, column = (x.detach().double().requires_grad_() for x in (encoding.slopes, q, sinks))
    scores = (wide @ k.double().mT * 6**-0.5 / 2).tanh() * 2
    scores = scores - slopes[:, None, None] * (where.index[0, :, None] - where.index[0]).abs()
    scores = scores.masked_fill(~where.mask(), float("-inf"))
    scores = torch.cat([scores, column[None, :, None, None].expand(1, -1, n, 1)], dim=-1)
    outputs = [scores.softmax(-1)[..., :-1] @ v.double(), scores.logsumexp(-1)]
    truth = torch.autograd.grad(outputs, [slopes, wide, column], [onto_y.double(), onto_lse.double()])
    for ours, theirs in zip(found, truth, strict=True):
        assert_close(ours, theirs)
    assert len(calls) == 1


def test_what_is_not_learned_asks_for_nothing(calls: list[Pairs]) -> None:
    q, k, v = (torch.randn(1, HEADS, 5, 4, requires_grad=True) for _ in range(3))
    frozen = ALiBi(HEADS, learned=True).requires_grad_(False)
    for encoding in (None, ALiBi(HEADS), frozen):
        attend(q, k, v, encoding=encoding, positions=Positions.arange(5), backend="flex").sum().backward()
    assert calls == []
