"""Entries about biases of attention scores: one query behind a cache, heads of one rank, buckets of distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from locant import ALiBi, KVCache, PositionEncoding, Positions, T5Bias, attend
from locant.positions.base import ScoreMod
from tests.known_bugs.biased import BIASES, OF_DISTANCE, PER_HEAD, built
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import HEADS, WIDTH, queries
from tests.tolerances import ATTENDED

LENGTH = 40


def cached(
    encoding: PositionEncoding, x: Tensor, chunks: list[int]
) -> Iterator[tuple[Tensor, Tensor, Positions, Positions]]:
    """Queries and all keys so far, with their positions, where tokens arrive in chunks of these sizes."""
    cache, begin = KVCache(), 0
    for size in chunks:
        some, positions = x[:, :, begin : begin + size], cache.next_positions(size) if begin else Positions.arange(size)
        keys, _, k_positions = cache.append(some, some, positions)
        yield some, keys, positions, k_positions
        begin += size


CHUNKS = {"one by one": [1] * LENGTH, "a prompt, then one by one": [30] + [1] * 10, "chunks": [7, 1, 12, 20]}


class OnlyTheNewTokens(ALiBi):
    """A bias for the tokens of this call, which broadcasts over everything that is cached."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q, q, positions)[..., :1].expand(-1, -1, -1, k.shape[2])


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_74_one_query_behind_a_cache_has_the_last_row(name: str, chunks: list[int]) -> None:
    """keras-team/keras-hub#2861, #2862 and #2977: ALiBi was zero at every step of decoding.

    With one query the bias was of one query and one key, 0, and broadcast over all keys in the cache.
    """
    x = queries(ALiBi(HEADS), LENGTH)

    def check(encoding: PositionEncoding) -> None:
        full = encoding.bias(x, x, Positions.arange(LENGTH))
        assert full is not None
        for q, k, positions, k_positions in cached(encoding, x, chunks):
            bias = encoding.bias(q, k, positions, k_positions)
            end = k.shape[2]
            expected = full[:, :, end - q.shape[2] : end, :end]
            assert bias is not None
            assert torch.equal(bias, expected), f"query {end - 1} has biases up to {float(bias.abs().max()):.2g}"

    exhibit(check, built(name), twin=OnlyTheNewTokens(HEADS), because="query [0-9]+ has biases up to 0")


@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_74_weights_while_decoding_are_those_of_one_pass(name: str) -> None:
    """keras-team/keras-hub#2861: the same where it matters, in the weights of attention."""
    x = queries(ALiBi(HEADS), LENGTH)

    _, whole = attend(x, x, x, encoding=built(name), positions=Positions.arange(LENGTH), return_weights=True)

    def check(encoding: PositionEncoding) -> None:
        for q, k, positions, k_positions in cached(encoding, x, [30] + [1] * 10):
            where = {"positions": positions, "k_positions": k_positions}
            _, weights = attend(q, k, k, encoding=encoding, **where, return_weights=True)  # type: ignore[call-overload]
            end = k.shape[2]
            off = float((weights - whole[:, :, end - q.shape[2] : end, :end]).abs().max())
            assert off <= ATTENDED, f"query {end - 1}: weights are off by {off:.2g}"

    exhibit(check, built(name), twin=OnlyTheNewTokens(HEADS), because="query [0-9]+: weights are off by 0.")


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


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_75_the_diagonal_of_every_bias_is_its_distance_0(name: str) -> None:
    """vllm-project/vllm#945: and whatever a bias is at distance 0, it is that wherever the token stands."""
    encoding = built(name)
    x = queries(encoding, LENGTH)

    def check(shift: int) -> None:
        for start in (1, 2, 70_000):
            k_positions = Positions.after(start - shift, LENGTH)
            bias = encoding.bias(x, x, Positions.after(start, LENGTH), k_positions)
            at_0 = encoding.bias(x[:, :, :1], x[:, :, :1], Positions.arange(1))
            assert bias is not None
            assert at_0 is not None
            diagonal = bias.diagonal(dim1=-2, dim2=-1)
            assert torch.equal(diagonal, at_0[..., 0].expand_as(diagonal)), f"from {start} on, the diagonal is another"
            if name.startswith(("alibi", "kerple", "sandwich")):
                assert (diagonal == 0).all()

    exhibit(check, 0, twin=1, because="from 1 on, the diagonal is another")


OfRank = Callable[[str, int, slice], PositionEncoding]


def ours_of_rank(name: str, heads: int, mine: slice) -> PositionEncoding:
    return built(name, heads, head_slice=mine)


def without_offset(name: str, heads: int, mine: slice) -> PositionEncoding:
    return built(name, heads, head_slice=slice(0, mine.stop - mine.start))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (8, 4), (8, 8), (12, 3), (12, 4)])
@pytest.mark.parametrize("name", PER_HEAD)
def test_76_the_heads_of_all_ranks_are_the_heads_of_one(name: str, heads: int, ranks: int) -> None:
    """flashinfer-ai/flashinfer#1606, deepspeedai/Megatron-DeepSpeed#227: every rank used the slopes of head 0 onwards.

    Under tensor parallelism a rank knew how many heads it has, and not which.
    """
    x = torch.randn(1, heads, 24, WIDTH)
    share = heads // ranks
    full = built(name, heads).bias(x, x, Positions.arange(24))
    assert full is not None

    def check(of_rank: OfRank) -> None:
        biases, mods = [], []
        for rank in range(ranks):
            mine = slice(rank * share, (rank + 1) * share)
            encoding = of_rank(name, heads, mine)
            biases.append(encoding.bias(x[:, mine], x[:, mine], Positions.arange(24)))
            mods.append(_spelt_out(encoding.score_mod(x[:, mine], x[:, mine], Positions.arange(24)), share, 24))
        wrong = [head for head in range(heads) if not torch.equal(torch.cat(biases, 1)[:, head], full[:, head])]  # type: ignore[arg-type]
        assert not wrong, f"heads {wrong} have the bias of others"
        assert torch.equal(torch.cat(mods, 1), full), "the score function has the heads of others"

    exhibit(
        check, ours_of_rank, twin=without_offset, because=rf"heads \[{share}, .*{heads - 1}\] have the bias of others"
    )


def _spelt_out(score_mod: ScoreMod | None, heads: int, length: int) -> Tensor:
    """What a score function adds to scores of zero."""
    assert score_mod is not None
    head = torch.arange(heads)[:, None, None]
    slot = torch.arange(length)
    batch = torch.zeros((), dtype=torch.long)
    return score_mod(torch.zeros(heads, length, length), batch, head, slot[:, None], slot[None, :])[None]


FIRST_OF_BUCKET = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
"""T5's 32 buckets of one direction: the smallest distance of each; the last holds everything from 113 on."""

FIRST_OF_BUCKET_OF_16 = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
"""The 16 of each direction where there are two."""

FAR = 4096


def frozen(bidirectional: bool) -> Tensor:
    """The bucket of every distance from -4096 to 4096, key index less query index as in the paper's code."""

    def spread(starts: list[int]) -> list[int]:
        ends = [*starts[1:], FAR + 1]
        return [bucket for bucket, (a, b) in enumerate(zip(starts, ends, strict=True)) for _ in range(a, b)]

    if not bidirectional:
        return torch.tensor(spread(FIRST_OF_BUCKET)[:0:-1] + [0] * (FAR + 1))
    one_side = spread(FIRST_OF_BUCKET_OF_16)
    return torch.tensor(one_side[:0:-1] + [0] + [16 + bucket for bucket in one_side[1:]])


STEPS = torch.arange(-FAR, FAR + 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_80_the_frozen_buckets_are_those_of_the_reference(bidirectional: bool) -> None:
    """huggingface/transformers#8518: what the next test holds us to, held against the reference itself."""
    theirs = T5Attention._relative_position_bucket(STEPS, bidirectional, num_buckets=32, max_distance=128)
    assert len(frozen(bidirectional)) == 2 * FAR + 1
    assert torch.equal(frozen(bidirectional), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_80_buckets_are_frozen(bidirectional: bool, dtype: torch.dtype) -> None:
    """huggingface/transformers#8518, huggingface/candle#727, mindspore-lab/mindone#670: buckets of T5.

    Logarithmic buckets were missing, or were computed in a dtype that puts a distance into its neighbour's.
    """

    def check(buckets: Callable[[T5Bias, Tensor], Tensor]) -> None:
        encoding = T5Bias(HEADS, bidirectional=bidirectional).to(dtype)
        found = buckets(encoding, -STEPS)
        wrong = STEPS[found != frozen(bidirectional)]
        assert not len(wrong), f"{len(wrong)} distances are in another bucket, such as {wrong[len(wrong) // 2]}"

    def in_half_precision(encoding: T5Bias, steps: Tensor) -> Tensor:
        """The reference's formula, with its logarithm in bfloat16."""
        one_sided = 16 if bidirectional else 32
        distance = steps.abs() if bidirectional else steps.clamp(min=0)
        exact = one_sided // 2
        logarithm = distance.clamp(min=1).bfloat16().log() - torch.tensor(exact).bfloat16().log()
        share = logarithm / math.log(128 / exact)
        large = (exact + (share * (one_sided - exact)).long()).clamp(max=one_sided - 1)
        later = (steps < 0).long() * 16 if bidirectional else 0
        return later + torch.where(distance < exact, distance, large)

    def one_bucket_each(encoding: T5Bias, steps: Tensor) -> Tensor:
        one_sided = 16 if bidirectional else 32
        later = (steps < 0).long() * 16 if bidirectional else 0
        return later + (steps.abs() if bidirectional else steps).clamp(0, one_sided - 1)

    for twin in (in_half_precision, one_bucket_each):
        exhibit(check, T5Bias.buckets, twin=twin, because="[0-9]+ distances are in another bucket, such as")


@pytest.mark.parametrize("bidirectional", [False, True])
def test_80_every_bucket_reaches_its_scores(bidirectional: bool) -> None:
    """huggingface/transformers#8518: the same in the bias, with a table that tells all buckets apart.

    For NVIDIA/TensorRT-LLM#13870, a bias lost behind a cache, see entry 74, which is about T5 as well.
    """
    table = torch.arange(32.0)[:, None] + 100 * torch.arange(HEADS)

    def check(encoding: T5Bias) -> None:
        with torch.no_grad():
            encoding.weight.copy_(table)
        x = torch.zeros(1, HEADS, 2 * FAR + 1, 2)
        bias = encoding.bias(x[:, :, :1], x, Positions.of([0]), Positions.of(STEPS))
        assert torch.equal(bias[0, :, 0], table[frozen(bidirectional)].T), "scores have the biases of other distances"

    class TheOtherWayRound(T5Bias):
        def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
            assert k_positions is not None
            return super().bias(q, k, positions, Positions.of(-k_positions.index))

    ours, twin = (kind(HEADS, bidirectional=bidirectional) for kind in (T5Bias, TheOtherWayRound))
    exhibit(check, ours, twin=twin, because="scores have the biases of other distances")


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
