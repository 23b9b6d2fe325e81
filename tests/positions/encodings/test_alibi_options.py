"""ALiBi's learned slopes, and head slices for tensor parallelism in ALiBi and T5."""

from __future__ import annotations

import pytest
import torch

from locant import ALiBi, Positions, RangeError, T5Bias
from locant.positions.heads import Heads, for_query_heads
from tests.oracles import alibi_slopes
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import SHORT_SUM


@pytest.mark.parametrize("heads", [1, 6, 8, 12])
def test_learned_slopes_begin_as_the_papers_and_learn(heads: int) -> None:
    q = torch.randn(1, heads, 7, 4)
    learned = ALiBi(heads, learned=True)
    assert [name for name, _ in learned.named_parameters()] == ["slopes"]
    assert torch.equal(learned.bias(q, q, Positions.arange(7)), ALiBi(heads).bias(q, q, Positions.arange(7)))
    assert torch.equal(learned.slopes.detach(), torch.tensor(alibi_slopes(heads)))
    cotangent = torch.randn(1, heads, 7, 7)
    learned.bias(q, q, Positions.arange(7)).backward(cotangent)
    steps = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    torch.testing.assert_close(learned.slopes.grad, -(cotangent[0] * steps).sum((1, 2)), **SHORT_SUM)


def test_plain_slopes_are_no_parameter() -> None:
    assert not list(ALiBi(4).parameters())
    assert not ALiBi(4).state_dict()
    assert repr(ALiBi(4)) == "ALiBi(num_heads=4)"
    assert repr(ALiBi(4, learned=True)) == "ALiBi(num_heads=4, learned=True)"


@pytest.mark.parametrize("dtype", claims.DTYPES, ids=str)
def test_learned_slopes_give_every_row_what_it_gets_alone(dtype: torch.dtype) -> None:
    claims.agrees_with_itself_alone(lambda heads, width: ALiBi(heads, learned=True), dtype)


@pytest.mark.unchecked
def test_learned_slopes_pass_gradcheck_compile_and_keep_no_other_state() -> None:
    claims.passes_gradcheck(ALiBi(2, learned=True), 2, 3)
    claims.handles_every_size(lambda heads, width: ALiBi(heads, learned=True))
    claims.has_no_state_but_parameters(lambda heads, width: ALiBi(heads, learned=True))
    claims.score_mod_is_bias(lambda heads, width: ALiBi(heads, learned=True))
    claims.compiles_at_most_twice(lambda heads, width: ALiBi(heads, learned=True))


@pytest.mark.parametrize("learned", [False, True])
def test_alibi_ranks_hold_slices_of_one_model(learned: bool) -> None:
    claims.ranks_make_the_whole(lambda heads, width, part: ALiBi(heads, learned=learned, head_slice=part))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_ranks_hold_slices_of_one_model(bidirectional: bool) -> None:
    claims.ranks_make_the_whole(
        lambda heads, width, part: T5Bias(
            heads, num_buckets=8, max_distance=16, bidirectional=bidirectional, head_slice=part
        )
    )


def test_slopes_of_a_slice_are_those_of_all_heads() -> None:
    """Not those of a model with as many heads as the slice; also with a step, as interleaved ranks have it."""
    for heads in (6, 8, 40):
        for part in (slice(0, 2), slice(heads // 2, None), slice(1, None, 2)):
            learned = ALiBi(heads, learned=True, head_slice=part).slopes.detach()
            assert torch.equal(learned, torch.tensor(alibi_slopes(heads)[part]))


def test_slices_past_the_end_are_refused() -> None:
    """A Python slice would be cut short without a word."""
    assert Heads.of(8, slice(6, 8)).mine == range(6, 8)
    for wrong in (slice(6, 9), slice(7, 6), slice(8, 9)):
        with refuses(RangeError, "head_slice", "8 heads"):
            Heads.of(8, wrong)


def test_key_heads_are_shared_by_neighbouring_query_heads() -> None:
    k = torch.arange(3.0).view(1, 3, 1, 1)
    assert for_query_heads(k, 6).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert for_query_heads(k, 3) is k
