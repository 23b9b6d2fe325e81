"""`InputEmbedding` under `torch.func` and in forward mode, compiled and not, as its formula would have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from locant import InputEmbedding, Learned
from tests.tolerances import assert_close

VOCAB, WIDTH, LENGTH = 11, 6, 5
Weights = dict[str, Tensor]
How = Callable[[Callable[..., Any]], Callable[..., Any]]


def by_formula(weights: Weights, ids: Tensor) -> Tensor:
    """GPT-2's input with segments and a norm, in operations of torch alone."""
    rows = weights["token.weight"][ids] + weights["encoding.weight"][:LENGTH] + weights["segment.weight"][0]
    return F.layer_norm(rows, (WIDTH,), weights["norm.weight"], weights["norm.bias"])


@pytest.fixture
def embedding() -> InputEmbedding:
    return InputEmbedding(VOCAB, WIDTH, encoding=Learned(9, WIDTH), num_segments=2, norm="layer_norm")


def weights_of(embedding: InputEmbedding) -> Weights:
    return {name: torch.randn_like(weight) for name, weight in embedding.named_parameters()}


def as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


HOW = pytest.mark.parametrize(
    "how", [as_given, pytest.param(compiled, marks=[pytest.mark.unchecked, pytest.mark.slow])]
)


@HOW
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself
def test_in_forward_mode(embedding: InputEmbedding, how: How) -> None:
    weights, tangents = weights_of(embedding), weights_of(embedding)
    ids = torch.randint(VOCAB, (2, LENGTH))

    def use(weights: Weights) -> Tensor:
        return functional_call(embedding, weights, (ids,))

    expected = jvp(lambda w: by_formula(w, ids), (weights,), (tangents,))[1]
    assert_close(how(lambda w, t: jvp(use, (w,), (t,))[1])(weights, tangents), expected)
    function = how(use)
    assert_close(function(weights), by_formula(weights, ids))
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(weights[name], tangents[name]) for name in weights}
        tangent = forward_ad.unpack_dual(function(duals)).tangent
        assert_close(tangent, expected)
    torch._dynamo.reset()


@HOW
def test_the_gradient_of_every_sample(embedding: InputEmbedding, how: How) -> None:
    weights, ids = weights_of(embedding), torch.randint(VOCAB, (3, LENGTH))

    def loss(weights: Weights, ids: Tensor) -> Tensor:
        return functional_call(embedding, weights, (ids[None],)).pow(3).sum()

    found = how(vmap(grad(loss), in_dims=(None, 0)))(weights, ids)
    for sample, row in enumerate(ids):
        expected = grad(lambda w, row=row: by_formula(w, row).pow(3).sum())(weights)
        for name, gradient in expected.items():
            assert_close(found[name][sample], gradient)
    torch._dynamo.reset()


@HOW
def test_an_ensemble(embedding: InputEmbedding, how: How) -> None:
    members, ids = [weights_of(embedding) for _ in range(2)], torch.randint(VOCAB, (3, LENGTH))
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    found = how(vmap(lambda w: functional_call(embedding, w, (ids,))))(stacked)
    for y, member in zip(found, members, strict=True):
        assert_close(y, by_formula(member, ids))
    torch._dynamo.reset()
