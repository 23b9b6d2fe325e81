"""FIRE against the paper's MLP, evaluated pair by pair; its shared numbers have a dimension, for FSDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from locant import Fire, Positions, attend
from tests.positions import claims
from tests.positions.claims import zeros
from tests.positions.oracles_of_biases import fire
from tests.tolerances import ONE_ROUNDING, RATIO_OF_ONE, assert_close

HEADS = 3


def parameters(encoding: Fire) -> dict[str, torch.Tensor]:
    return {
        "c": encoding.c, "multiple": encoding.threshold_multiple, "w1": encoding.hidden.weight,
        "b1": encoding.hidden.bias, "w2": encoding.output.weight, "b2": encoding.output.bias,
    }  # fmt: skip


@pytest.mark.parametrize("hidden", [1, 5, 32])
def test_values_and_gradients_are_those_of_the_mlp(hidden: int) -> None:
    """Below the threshold, beyond it, and keys after the query."""
    encoding = claims.shaken(Fire(HEADS, hidden=hidden, threshold=9.0))
    with torch.no_grad():
        encoding.c.fill_(0.35)
    queries, keys = [0, 1, 4, 11, 30], [0, 3, 10, 29, 50]

    def oracle(c, multiple, w1, b1, w2, b2):  # type: ignore[no-untyped-def]
        return fire(queries, keys, c[0], multiple[0] * 9.0, w1, b1, w2, b2)

    claims.agrees_with_oracle(
        encoding, oracle, parameters(encoding), *zeros(HEADS, 5, 5), queries, keys, contextual=False
    )


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_hidden_unit_at_its_kink_learns_as_in_the_mlp(backend: str, dtype: torch.dtype) -> None:
    """At 0 the derivative of torch's ReLU is 0: at distance 0 where biases are, and for kinks at distance 3 here."""
    length = 12
    encoding = claims.shaken(Fire(2, hidden=5, threshold=20.0)).to(dtype)
    nn.init.ones_(encoding.threshold_multiple)
    places = torch.arange(length)
    before = (places[:, None] - places).abs()
    c, reach = encoding.c.abs(), (encoding.threshold_multiple * 20.0).abs()
    ratio = torch.log1p(c * before) / (torch.log1p(c * reach) + 1e-6)
    at_kink = ratio[3, 0].detach()
    with torch.no_grad():
        encoding.hidden.weight[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
        encoding.hidden.bias[:] = at_kink * torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0])
    q, k, v, cotangent = torch.randn(4, 1, 2, length, 4, dtype=dtype)
    ours = attend(q, k, v, encoding=encoding, positions=Positions.arange(length), backend=backend)
    mlp = encoding.output(encoding.hidden(ratio[..., None]).relu()).permute(2, 0, 1)
    scores = (q @ k.mT / 2 + mlp).masked_fill(places > places[:, None], -torch.inf)
    learned = (encoding.hidden.weight, encoding.hidden.bias, encoding.output.weight)
    both = (torch.autograd.grad(y, learned, cotangent) for y in (ours, scores.softmax(-1) @ v))
    for mine, theirs in zip(*both, strict=True):
        assert_close(mine, theirs)


def test_it_is_symmetric_and_its_ratio_ends_at_one() -> None:
    """From the last token of any length to the first the function sees one, up to the authors' 1e-6: no new input."""
    encoding = claims.shaken(Fire(2, threshold=4.0))
    bias = encoding.bias(*zeros(2, 50, 50), Positions.arange(50))
    assert torch.equal(bias, bias.transpose(2, 3))
    beginnings = bias[0, :, 5:, 0]
    torch.testing.assert_close(beginnings, beginnings[:, :1].expand_as(beginnings), rtol=0, atol=RATIO_OF_ONE)
    distant = encoding.bias(*zeros(2, 1, 1), Positions.of([2**31 - 1]), Positions.arange(1))
    torch.testing.assert_close(distant[0, :, :, 0], beginnings[:, :1], rtol=0, atol=RATIO_OF_ONE)


def test_below_the_threshold_a_pair_depends_on_its_distance_alone() -> None:
    encoding = claims.shaken(Fire(2, threshold=512.0), 0.1)
    with torch.no_grad():
        encoding.threshold_multiple.fill_(1.0)  # type: ignore[union-attr]
    near = encoding.bias(*zeros(2, 9, 9), Positions.arange(9))
    assert torch.equal(near, encoding.bias(*zeros(2, 9, 9), Positions.after(503, 9)))
    assert not torch.equal(near, encoding.bias(*zeros(2, 9, 9), Positions.after(505, 9)))


def test_it_starts_as_the_authors_start_it() -> None:
    encoding = Fire(4)
    assert encoding.c.item() == pytest.approx(0.1, rel=ONE_ROUNDING[torch.float32], abs=0)
    assert encoding.threshold_multiple.item() == 1
    assert encoding.hidden.weight.shape == (32, 1)
    assert encoding.output.weight.shape == (4, 32)
    assert float(encoding.output.weight.detach().abs().max()) <= 32**-0.5


def test_no_parameter_is_without_a_dimension() -> None:
    assert {name: tuple(each.shape) for name, each in Fire(2, hidden=3).named_parameters()} == {
        "c": (1,), "threshold_multiple": (1,), "hidden.weight": (3, 1), "hidden.bias": (3,),
        "output.weight": (2, 3), "output.bias": (2,),
    }  # fmt: skip


@pytest.mark.parametrize(("prefix", "assign"), [("", True), ("0.", False)])
def test_a_state_with_scalars_is_read(prefix: str, assign: bool) -> None:
    """As they were once."""
    saved, fresh = Fire(2, hidden=3), Fire(2, hidden=3)
    with torch.no_grad():
        saved.c.fill_(0.37)
        saved.threshold_multiple.fill_(1.3)
    state = {prefix + name: each.detach().clone() for name, each in saved.named_parameters()}
    for name in ("c", "threshold_multiple"):
        state[prefix + name] = state[prefix + name][0]
    model = torch.nn.Sequential(fresh) if prefix else fresh
    model.load_state_dict(state, assign=assign)
    assert state[prefix + "c"].ndim == 0
    q = torch.zeros(1, 2, 9, 4)
    assert torch.equal(fresh.bias(q, q, Positions.arange(9)), saved.bias(q, q, Positions.arange(9)))
    assert fresh.c.shape == (1,)
