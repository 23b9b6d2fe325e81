"""ALiBi, against the paper and BLOOM; and a bias of its own for each of 131 072 distances."""

from __future__ import annotations

import mpmath
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant import ALiBi, Positions
from locant.positions.encodings.alibi import alibi_slopes
from locant.positions.heads import for_query_heads
from tests import oracles
from tests.positions.oracles_of_biases import alibi_slopes_of_the_paper
from tests.tolerances import SHORT_SUM, assert_close


def bias(encoding: ALiBi, queries: Positions, keys: Positions | None = None) -> Tensor:
    other = queries if keys is None else keys
    q = torch.zeros(queries.batch, encoding.num_heads, queries.seq_len, 2)
    return encoding.bias(q, torch.zeros(other.batch, 1, other.seq_len, 2), queries, keys)


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(-(2**20), 2**20), st.integers(1, 20))
def test_the_bias_depends_on_the_distance_only(i: int, j: int, shift: int, num_heads: int) -> None:
    encoding = ALiBi(num_heads)
    here = bias(encoding, Positions.of([i]), Positions.of([j]))
    there = bias(encoding, Positions.of([i + shift]), Positions.of([j + shift]))
    assert torch.equal(here, there)
    assert torch.equal(here, bias(encoding, Positions.of([j]), Positions.of([i]))), "symmetric"
    expected = torch.tensor([-abs(i - j) * slope for slope in oracles.alibi_slopes(num_heads)])
    assert_close(here[0, :, 0, 0], expected)


def test_slopes_for_1_to_256_heads_are_the_recipes() -> None:
    with mpmath.workdps(50):
        for num_heads in range(1, 257):
            slopes, expected = alibi_slopes(num_heads), alibi_slopes_of_the_paper(num_heads)
            assert len(slopes) == len(expected) == num_heads
            off = max(abs(mpmath.mpf(ours) / theirs - 1) for ours, theirs in zip(slopes, expected, strict=True))
            assert off <= 2.0**-52, f"{num_heads} heads: a slope is off by {float(off):.2g} of its size"
    for num_heads in (1, 2, 4, 8):  # whose exponents are whole numbers
        assert alibi_slopes(num_heads) == [2.0 ** (-8 // num_heads * (head + 1)) for head in range(num_heads)]


def test_learned_slopes_begin_as_the_papers_and_learn() -> None:
    heads, learned = 6, ALiBi(6, learned=True)
    q = torch.randn(1, heads, 7, 4)
    assert not ALiBi(heads).state_dict()
    assert [name for name, _ in learned.named_parameters()] == ["slopes"]
    assert torch.equal(learned.bias(q, q, Positions.arange(7)), ALiBi(heads).bias(q, q, Positions.arange(7)))
    assert torch.equal(learned.slopes.detach(), torch.tensor(oracles.alibi_slopes(heads)))
    cotangent = torch.randn(1, heads, 7, 7)
    learned.bias(q, q, Positions.arange(7)).backward(cotangent)
    steps = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    torch.testing.assert_close(learned.slopes.grad, -(cotangent[0] * steps).sum((1, 2)), **SHORT_SUM)


def test_key_heads_are_shared_by_neighbouring_query_heads() -> None:
    k = torch.arange(3.0).view(1, 3, 1, 1)
    assert for_query_heads(k, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert for_query_heads(k, 3) is k
