"""`distance_attention` alone: what torch is promised of it, memory of every shape, and the gradient of the table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locant.kernels import distance_attention as kernel
from locant.kernels.distance_attention import distance_attention
from tests import oracles
from tests.threads import threads
from tests.tolerances import assert_close

SCALE = 0.4


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 5)
    monkeypatch.setattr(kernel, "NARROW_TILE", 3)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def in_numpy(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, cotangent: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of q, k, v and the table, pair by pair."""
    i, j = np.ogrid[: q.shape[2], : k.shape[2]]
    entry = i - j + k.shape[2] - 1
    arrays = [x.detach().double().numpy() for x in (q, k, v)]
    bias = np.broadcast_to(table.detach().double().numpy()[:, entry], (q.shape[0], q.shape[1], *entry.shape))
    seen = np.broadcast_to((first <= entry) & (entry <= last), (q.shape[0], *entry.shape))
    found = oracles.attention_gradients(*arrays, bias, seen, SCALE, cotangent.double().numpy())
    of_table = np.zeros((q.shape[1], table.shape[1]))
    for h in range(q.shape[1]):
        np.add.at(of_table[h], entry, found.bias[:, h].sum(0))
    of_table = of_table if len(table) > 1 else of_table.sum(0, keepdims=True)
    y = torch.from_numpy(oracles.attention(*arrays, bias, seen, SCALE)[0])
    return y, [torch.from_numpy(each) for each in (found.q, found.k, found.v, of_table)]


def holds(q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: int, last: int, cotangent: Tensor | None) -> None:
    y, _ = distance_attention(q, k, v, table, first, last, SCALE)
    cotangent = torch.randn_like(y) if cotangent is None else cotangent
    expected, gradients = in_numpy(q, k, v, table, first, last, cotangent)
    assert_close(y, expected)
    leaves = [leaf for leaf in (q, k, v, table) if leaf.requires_grad]
    wanted = [each for leaf, each in zip((q, k, v, table), gradients, strict=True) if leaf.requires_grad]
    for found, truth in zip(torch.autograd.grad(y, leaves, cotangent), wanted, strict=True):
        assert_close(found, truth)


@given(
    st.integers(1, 14), st.integers(1, 14), st.integers(0, 27), st.integers(0, 27), st.booleans(), st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
)  # fmt: skip
def test_any_sizes_and_any_span_of_the_table(
    queries: int, keys: int, first: int, last: int, learned: bool, shared: bool, heads: tuple[int, int]
) -> None:
    """Spans that leave queries, or all of them, without a key included; with its gradient and without."""
    table = drawn(1 if shared else heads[0], queries + keys - 1).detach().requires_grad_(learned)
    shape = (2, heads[1], keys)
    holds(drawn(2, heads[0], queries, 4), drawn(*shape, 4), drawn(*shape, 4), table, first, last, None)


@pytest.mark.parametrize("widths", [(3, 5), (5, 3), (1, 1)])
@pytest.mark.parametrize("learned", [True, False])
def test_values_of_another_width(learned: bool, widths: tuple[int, int]) -> None:
    q, k, v = drawn(2, 4, 7, widths[0]), drawn(2, 2, 9, widths[0]), drawn(2, 2, 9, widths[1])
    holds(q, k, v, drawn(4, 15).detach().requires_grad_(learned), 4, 11, None)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("kind", ["transposed", "every second", "repeated", "last dimension apart"])
def test_memory_of_every_shape(kind: str, learned: bool) -> None:
    def laid_out(heads: int, length: int) -> Tensor:
        x = {
            "transposed": lambda: torch.randn(2, length, heads, 4, dtype=torch.float64).transpose(1, 2),
            "every second": lambda: torch.randn(2, heads, 2 * length, 4, dtype=torch.float64)[:, :, ::2],
            "repeated": lambda: torch.randn(1, heads, length, 4, dtype=torch.float64).expand(2, -1, -1, -1),
            "last dimension apart": lambda: torch.randn(2, heads, 4, length, dtype=torch.float64).mT,
        }[kind]()
        return x.requires_grad_()

    q, k, v = laid_out(3, 8), laid_out(3, 11), laid_out(3, 11)
    table = torch.randn(2 * 18, 3, dtype=torch.float64).mT[:, ::2].requires_grad_(learned)
    assert not kind or not q.is_contiguous() or kind == "repeated"
    holds(q, k, v, table, 3, 14, laid_out(3, 8).detach())
    holds(q, k, v, table, 0, 17, torch.ones(1, dtype=torch.float64).expand(2, 3, 8, 4))


def test_a_hidden_entry_may_hold_anything() -> None:
    q, k, v = drawn(1, 2, 6, 4), drawn(1, 2, 6, 4), drawn(1, 2, 6, 4)
    table = torch.randn(2, 11, dtype=torch.float64)
    cotangent = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    outcomes = []
    for filler in (0.0, float("nan"), float("inf")):
        filled = table.clone()
        filled[:, :5] = filler
        filled = filled.requires_grad_()
        y, _ = distance_attention(q, k, v, filled, 5, 10, SCALE)
        outcomes.append([y, *torch.autograd.grad(y, [q, k, v, filled], cotangent)])
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))
    assert not outcomes[0][-1][:, :5].any()


@pytest.mark.parametrize("steep", [0.5, 20.0, -3.0])
def test_steep_and_far_reaching_biases_keep_their_precision(steep: float) -> None:
    """float32, thousands of tokens apart: what is added is the bias itself, not a difference of large numbers."""
    queries, keys = 4, 3000
    q, k, v = (drawn(1, 2, n, 8, dtype=torch.float32) for n in (queries, keys, keys))
    steps = torch.arange(queries + keys - 1, dtype=torch.float64) - (queries - 1)
    table = (-steep * steps.abs() / 100).expand(2, -1).float()
    y, _ = distance_attention(q, k, v, table, 0, queries + keys - 2, SCALE)
    expected, _ = in_numpy(q, k, v, table, 0, queries + keys - 2, torch.zeros_like(y))
    assert_close(y, expected)


@pytest.mark.parametrize("learned", [pytest.param(True, marks=pytest.mark.slow), False])
def test_opcheck(learned: bool) -> None:
    q, k, v = drawn(1, 4, 7, 4), drawn(1, 2, 9, 4), drawn(1, 2, 9, 4)
    table = drawn(4, 15).detach().requires_grad_(learned)
    torch.library.opcheck(kernel._attend, (q, k, v, table, 4, 14, SCALE, None))
    torch.library.opcheck(kernel._attend, (q, k, v, table, 4, 14, SCALE, 0.7))
    out, sums = (x.detach() for x in kernel._attend(q, k, v, table, 4, 14, SCALE, None))
    saved = tuple(x.detach() for x in (q, k, v, table, out, sums))
    onto_y, onto_sums = torch.randn_like(out), torch.randn_like(sums)
    for grad_sums, softcap in ((None, None), (onto_sums, None), (onto_sums, 0.7)):
        operands = (onto_y, grad_sums, *saved, 4, 14, SCALE, softcap, learned)
        torch.library.opcheck(kernel._attend_backward, operands)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("learned", [True, False])
def test_gradcheck_of_the_output_and_the_log_sum_exp(learned: bool, softcap: float | None) -> None:
    q, k, v, table = drawn(1, 2, 4, 3), drawn(1, 1, 5, 3), drawn(1, 1, 5, 3), drawn(2, 8)
    table = table.detach().requires_grad_(learned)
    assert torch.autograd.gradcheck(lambda *x: distance_attention(*x, 1, 6, SCALE, softcap), (q, k, v, table))


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_the_log_sum_exp_alone_is_differentiated(softcap: float | None) -> None:
    """Its derivative by the scores are the weights, so by the table, whose entries are added to them, all their sum."""
    q, k, v, table = drawn(1, 2, 4, 3), drawn(1, 1, 5, 3), drawn(1, 1, 5, 3), drawn(2, 8)
    _, lse = distance_attention(q, k, v, table, 0, 7, SCALE, softcap)
    of_values, of_table = torch.autograd.grad(lse.sum(), [v, table])
    assert not of_values.any()
    assert_close(of_table.sum(1), torch.full((2,), 4.0, dtype=torch.float64))


def test_queries_without_a_key_have_no_logarithm() -> None:
    """Seven queries and 3 keys, entries 4 and 5: the first two queries come before all keys, the last one behind."""
    q, k = drawn(1, 1, 7, 4), drawn(1, 1, 3, 4)
    for span, seen in (((4, 5), slice(2, 6)), ((5, 4), slice(0, 0))):
        y, lse = distance_attention(q, k, k, torch.zeros(1, 9, dtype=torch.float64), *span, SCALE)
        expected = torch.full((7,), float("-inf"), dtype=torch.float64)
        expected[seen] = 0.0
        assert torch.equal(lse[0, 0].isfinite(), expected.isfinite())
        assert torch.equal(y[0, 0].any(-1), expected.isfinite())


@pytest.mark.parametrize("count", [1, 2])
def test_the_same_bits_again(count: int) -> None:
    q, k, v, table = drawn(2, 4, 20, 8), drawn(2, 2, 20, 8), drawn(2, 2, 20, 8), drawn(4, 39)
    cotangent = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    outcomes = []
    with threads(count):
        for _ in range(3):
            y, _ = distance_attention(q, k, v, table, 19, 38, SCALE)
            outcomes.append([y, *torch.autograd.grad(y, [q, k, v, table], cotangent)])
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))
