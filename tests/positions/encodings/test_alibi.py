"""ALiBi, against the paper and BLOOM."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from locant import ALiBi, Positions, RangeError, ShapeError
from locant.positions.encodings.alibi import alibi_slopes
from tests import oracles
from tests.refusal import refuses
from tests.tolerances import MULTIPLIED_UP, POWER_IN_DOUBLE, TOLERANCES, assert_close


def bias(
    encoding: ALiBi, queries: Positions, keys: Positions | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    other = queries if keys is None else keys
    q = torch.zeros(queries.batch, encoding.num_heads, queries.seq_len, 2, dtype=dtype)
    return encoding.bias(q, torch.zeros(other.batch, 1, other.seq_len, 2, dtype=dtype), queries, keys)


def test_slopes_for_four_heads_and_the_first_row() -> None:
    assert [round(s, 4) for s in alibi_slopes(4)] == [0.25, 0.0625, 0.0156, 0.0039]
    assert bias(ALiBi(4), Positions.arange(6))[0, 0, 0].tolist() == [0, -0.25, -0.5, -0.75, -1, -1.25]


def test_slopes_are_blooms() -> None:
    for num_heads in range(1, 65):
        two_keys = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
        torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), two_keys[:, 0, 1], rtol=MULTIPLIED_UP, atol=0)


def test_slopes_are_the_papers() -> None:
    for num_heads in range(1, 257):
        slopes = alibi_slopes(num_heads)
        assert len(slopes) == num_heads
        assert slopes == pytest.approx(oracles.alibi_slopes(num_heads), rel=POWER_IN_DOUBLE, abs=0)


@pytest.mark.parametrize("num_heads", [1, 4, 11, 12])
def test_attention_weights_are_blooms(num_heads: int) -> None:
    """BLOOM adds slope times key position: the same up to a number per row, which the softmax takes away."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    positions = Positions.from_mask(mask)
    theirs = build_alibi_tensor(mask, num_heads, torch.float32).view(3, num_heads, 1, 7)
    scores = torch.randn(3, num_heads, 7, 7).masked_fill(~positions.mask(), float("-inf"))
    real = mask.bool()[:, None, :].expand(3, num_heads, 7)
    ours = bias(ALiBi(num_heads), positions)
    assert_close((scores + ours).softmax(-1)[real], (scores + theirs).softmax(-1)[real])
    assert not torch.allclose(ours, theirs.expand_as(ours))


@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(-(2**20), 2**20), st.integers(1, 20))
def test_the_bias_depends_on_the_distance_only(i: int, j: int, shift: int, num_heads: int) -> None:
    encoding = ALiBi(num_heads)
    here = bias(encoding, Positions.of([i]), Positions.of([j]))
    there = bias(encoding, Positions.of([i + shift]), Positions.of([j + shift]))
    assert torch.equal(here, there)
    assert torch.equal(here, bias(encoding, Positions.of([j]), Positions.of([i]))), "symmetric"
    expected = torch.tensor([-abs(i - j) * slope for slope in oracles.alibi_slopes(num_heads)])
    assert_close(here[0, :, 0, 0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_distance_has_a_bias_of_its_own_whatever_the_queries_dtype(dtype: torch.dtype) -> None:
    """bfloat16 tells 1153 of 32768 distances apart, so the bias is float32."""
    row = bias(ALiBi(11).to(dtype), Positions.after(32_767, 1), Positions.arange(32_768), dtype)
    assert row.dtype == torch.float32
    for head in range(11):
        assert len(torch.unique(row[0, head, 0])) == 32_768
    assert len(torch.unique(row.bfloat16()[0, 0, 0])) < 2000, "the twin"
    assert bias(ALiBi(3), Positions.arange(2), dtype=torch.float64).dtype == torch.float64


def test_one_query_behind_a_cache_gets_the_last_row() -> None:
    encoding = ALiBi(3)
    full = bias(encoding, Positions.arange(9))
    assert torch.equal(bias(encoding, Positions.after(8, 1), Positions.arange(9)), full[:, :, -1:])
    assert torch.equal(full.diagonal(dim1=-2, dim2=-1).abs(), torch.zeros(1, 3, 9))


def test_the_score_function_adds_the_bias() -> None:
    encoding, queries, keys = ALiBi(11), Positions.of([[3, 9], [4, 0]]), Positions.of([[0, 5, 9], [1, 2, 3]])
    q, k = torch.randn(2, 11, 2, 4), torch.randn(2, 11, 3, 4)
    score = torch.randn(2, 11, 2, 3)
    slots = torch.meshgrid(*(torch.arange(n) for n in score.shape), indexing="ij")
    modified = encoding.score_mod(q, k, queries, keys)(score, *slots)
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(modified, score + encoding.bias(q, k, queries, keys), rtol=rtol, atol=atol)


def test_alibi_has_no_parameters() -> None:
    assert not list(ALiBi(8).parameters())


@pytest.mark.parametrize("num_heads", [0, -1])
def test_no_heads_are_refused(num_heads: int) -> None:
    with refuses(RangeError, f"got {num_heads} for num_heads"):
        ALiBi(num_heads)


@pytest.mark.parametrize("door", ["bias", "score_mod"])
def test_queries_and_keys_of_another_shape_are_refused(door: str) -> None:
    ask, q = getattr(ALiBi(3), door), torch.zeros(2, 3, 5, 4)
    with refuses(ShapeError, "(2, 4, 5, 4)", "num_heads=3"):
        ask(torch.zeros(2, 4, 5, 4), q, Positions.arange(5))
    with refuses(ShapeError, "(3, 5, 4)"):
        ask(torch.zeros(3, 5, 4), q, Positions.arange(5))
    with refuses(ShapeError, "1 x 4", "2 x 5"):
        ask(q, q, Positions.arange(4))
    with refuses(ShapeError, "k has 2 x 5"):
        ask(q, q, Positions.arange(5), Positions.arange(6))
    with refuses(ShapeError, "2 axes"):
        ask(torch.zeros(1, 3, 6, 4), torch.zeros(1, 3, 6, 4), Positions.grid(2, 3))
    with refuses(ShapeError, "meta"):
        ask(q, q, Positions.arange(5, device="meta"))
