"""Entries about biases of attention scores: one query behind a cache, heads of one rank, buckets of distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from locant import ALiBi, KVCache, PositionEncoding, Positions, T5Bias, attend
from tests.known_bugs.exhibit import exhibit, same_alone
from tests.known_bugs.subjects import HEADS, queries
from tests.positions import test_same_alone as rows
from tests.positions.claims import ranks_make_the_whole
from tests.tolerances import ATTENDED


class OnlyTheNewTokens(ALiBi):
    """A bias for the tokens of this call, which broadcasts over everything that is cached."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q, q, positions)[..., :1].expand(-1, -1, -1, k.shape[2])


def test_74_one_query_behind_a_cache_has_the_last_row() -> None:
    """keras-team/keras-hub#2861, #2862 and #2977: ALiBi was zero at every step of decoding.

    With one query the bias was of one query and one key, 0, and broadcast over all keys in the cache. Every other bias
    is asked the same where it is tested, and every model in `tests/lab/test_decoder.py`.
    """
    ours = ALiBi(rows.HEADS), T5Bias(rows.HEADS)
    exhibit(
        same_alone("cached one by one"),
        *ours,
        twin=OnlyTheNewTokens(rows.HEADS),
        because="bias is not what the row alone gets",
    )


def test_75_the_newest_token_is_at_distance_0() -> None:
    """vllm-project/vllm#945: every distance of ALiBi was off by one while decoding.

    The new token is the last of the context, so it stands at the length of the context less one.
    """
    alibi = ALiBi(HEADS)

    def check(last_row: Callable[[int], Tensor]) -> None:
        for context in (1, 2, 17, 40):
            row = last_row(context)
            expected = -torch.arange(context - 1.0, -1, -1) * alibi.slopes[:, None]
            assert (row[:, -1] == 0).all(), f"with {context} tokens the newest is at a distance from itself"
            assert torch.equal(row.double(), expected.double()), f"with {context} tokens a distance is off"

    def ours(context: int) -> Tensor:
        x, cache = queries(alibi, context), KVCache()
        if context > 1:
            cache.append(x[:, :, :-1], x[:, :, :-1], Positions.arange(context - 1))
        positions = cache.next_positions()
        keys, _, k_positions = cache.append(x[:, :, -1:], x[:, :, -1:], positions)
        return alibi.bias(x[:, :, -1:], keys, positions, k_positions)[0, :, 0]

    def one_too_far(context: int) -> Tensor:
        x = queries(alibi, context)
        return alibi.bias(x[:, :, -1:], x, Positions.after(context, 1), Positions.arange(context))[0, :, 0]

    exhibit(check, ours, twin=one_too_far, because="with 1 tokens the newest is at a distance from itself")


class FirstHeads(ALiBi):
    """Knows how many heads it has, and not which."""

    def __init__(self, heads: int, part: slice | None) -> None:
        self.part = part or slice(0, heads)
        super().__init__(heads, head_slice=slice(0, self.part.stop - self.part.start))

    def extra_repr(self) -> str:
        return f"head_slice=slice({self.part.start}, {self.part.stop})"


def test_76_the_heads_of_all_ranks_are_the_heads_of_one() -> None:
    """flashinfer-ai/flashinfer#1606, deepspeedai/Megatron-DeepSpeed#227: every rank used the slopes of head 0 onwards.

    Under tensor parallelism a rank knew how many heads it has, and not which.
    """
    exhibit(
        ranks_make_the_whole,
        lambda heads, width, part: ALiBi(heads, head_slice=part),
        lambda heads, width, part: T5Bias(heads, head_slice=part),
        twin=lambda heads, width, part: FirstHeads(heads, part),
        because="2 ranks have the heads of others",
    )


STEPS = torch.arange(-4096, 4097)


def buckets_in_bfloat16(steps: Tensor, bidirectional: bool) -> Tensor:
    """The reference's formula, with its logarithm in bfloat16."""
    one_sided = 16 if bidirectional else 32
    distance = steps.abs() if bidirectional else steps.clamp(min=0)
    exact = one_sided // 2
    logarithm = distance.clamp(min=1).bfloat16().log() - torch.tensor(exact).bfloat16().log()
    share = logarithm / math.log(128 / exact)
    large = (exact + (share * (one_sided - exact)).long()).clamp(max=one_sided - 1)
    return (steps < 0).long() * 16 * bidirectional + torch.where(distance < exact, distance, large)


def one_bucket_for_each_distance(steps: Tensor, bidirectional: bool) -> Tensor:
    one_sided = 16 if bidirectional else 32
    return (steps < 0).long() * 16 * bidirectional + (steps.abs() if bidirectional else steps).clamp(0, one_sided - 1)


@pytest.mark.parametrize("twin", [buckets_in_bfloat16, one_bucket_for_each_distance])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_80_buckets_are_those_of_the_reference(bidirectional: bool, twin: Callable[[Tensor, bool], Tensor]) -> None:
    """huggingface/transformers#8518, huggingface/candle#727, mindspore-lab/mindone#670: buckets of T5.

    Logarithmic buckets were missing, or were computed in a dtype that puts a distance into its neighbour's. That every
    bucket reaches its scores is in `tests/positions/encodings/test_t5.py`.
    """
    reference = T5Attention._relative_position_bucket(-STEPS, bidirectional, num_buckets=32, max_distance=128)

    def check(buckets: Callable[[Tensor], Tensor]) -> None:
        wrong = STEPS[buckets(STEPS) != reference]
        assert not len(wrong), f"{len(wrong)} distances are in another bucket, such as {wrong[len(wrong) // 2]}"

    ours = (T5Bias(HEADS, bidirectional=bidirectional).to(dtype).buckets for dtype in (torch.float32, torch.bfloat16))
    twin = partial(twin, bidirectional=bidirectional)
    exhibit(check, *ours, twin=twin, because="[0-9]+ distances are in another bucket, such as")


@torch.no_grad()
def test_80_attention_to_another_sequence_has_no_bias_unless_it_is_given_one() -> None:
    """huggingface/transformers#8518: T5's attention to the encoder had a bias, which it must not have.

    The positions of two sequences have no distance. Attention without an encoding adds nothing, whatever it attends to.
    """
    t5 = T5Bias(HEADS, bidirectional=True)
    q, k = queries(t5, 6), queries(t5, 9)
    plain = nn.functional.scaled_dot_product_attention(q, k, k)

    def check(encoding: PositionEncoding | None) -> None:
        where = {"positions": Positions.arange(6), "k_positions": Positions.arange(9), "causal": False}
        y = attend(q, k, k, encoding=encoding, **where)  # type: ignore[call-overload]
        off = float((y - plain).abs().max())
        assert off <= ATTENDED, f"attention to the other sequence is off by {off:.2g}"

    nn.init.normal_(t5.weight)
    exhibit(check, None, PositionEncoding(), twin=t5, because="attention to the other sequence is off by")
