"""Entries about where tokens stand: rows that are padded, packed, cached or cut for several ranks, and biases there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel, MistralConfig, MistralForCausalLM
from transformers.models.t5.modeling_t5 import T5Attention

from locant import (
    ALiBi,
    Cope,
    Fire,
    KVCache,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    SelfExtend,
    Sinusoidal,
    T5Bias,
    XPos,
    attend,
    swap,
)
from locant.attention import merge
from locant.errors import InputError
from locant.positions.temperature import Temperature
from locant.swapping.forward_arguments import cache_argument
from tests.known_bugs.exhibit import exhibit, same_alone
from tests.known_bugs.subjects import HEADS, WIDTH, queries
from tests.positions import alone
from tests.positions.alone import CountsSlots
from tests.positions.claims import ranks_make_the_whole
from tests.refusal import refuses
from tests.tolerances import DECODED, LOGITS

OURS = (
    Rotary(alone.HEAD_DIM),
    Rotary(alone.HEAD_DIM, sections=(2, 2, 3)),
    Rotary(alone.HEAD_DIM, sections=(2, 2, 3), axial=True),
    ALiBi(alone.HEADS),
)


def test_72_a_padded_row_is_the_row_alone() -> None:
    """Left padding shifts the positions.

    unslothai/unsloth#3699, huggingface/transformers#22161, #26137 and #48161, ndif-team/nnsight#673: In a batch padded
    on the left, all rows shared the positions of the longest row, so the first token of a short row was not at 0.
    With padding on the right the same code happens to be right.

    Check: `locant check-batch batch.safetensors --model FOLDER`, for a model with absolute positions.

    Test: pads on either side: rotary of one axis and of several, and ALiBi; every other encoding in `tests/positions`.
    """
    twin = CountsSlots(alone.HEAD_DIM)
    exhibit(same_alone("padded left"), *OURS, twin=twin, because="q is not what the row alone gets")
    for encoding in (*OURS, twin):
        same_alone("padded right")(encoding)


class Way(NamedTuple):
    """How the second of two rows is padded, and where the prompt is cut."""

    left: int
    right: int
    cuts: Sequence[int]


PROMPT, NEW = 8, 2
PADDINGS = ((0, 0), (3, 0), (0, 3), (2, 1))
CUTS = ((0, 8), (0, 3, 4, 8))
WAYS = [Way(*padding, cuts) for padding, cuts in product(PADDINGS, CUTS)]
Chunk = Callable[[Tensor, int, int], Positions]


def decoded(encoding: PositionEncoding, x: Tensor, mask: Tensor, way: Way, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and outputs of all slots: the prompt in chunks, then tokens one at a time, all through a cache."""
    cache, outputs, keys = KVCache(), [], x
    for begin, end in (*pairwise(way.cuts), *((slot, slot + 1) for slot in range(PROMPT, PROMPT + NEW))):
        positions = chunk(mask, begin, end) if end <= PROMPT else cache.next_positions()
        some = x[:, :, begin:end]
        q, k = encoding.rotate(some, some, positions)
        keys, values, k_positions = cache.append(k, some, positions)
        outputs.append(attend(q, keys, values, encoding=encoding, positions=positions, k_positions=k_positions))
    return keys, torch.cat(outputs, dim=2)


@pytest.mark.parametrize("encoding", [Rotary(WIDTH), ALiBi(HEADS)], ids=["rotary", "alibi"])
@torch.no_grad()
def test_73_padding_together_with_a_cache(encoding: PositionEncoding) -> None:
    """Padding and a cache together give wrong positions.

    mosaicml/examples#257: Positions were right with padding alone and with a cache alone, but wrong with both. The mask
    was cut to the new tokens before it was summed, and cached tokens were added without leaving out the padding.

    Check: Generate two rows of different lengths in one batch and alone, and compare the tokens.

    Test: four paddings x two ways to cut a prompt, then decoding: keys to the bit, outputs to rounding.
    """
    x = queries(encoding, 2 * (PROMPT + NEW)).view(HEADS, 2, PROMPT + NEW, WIDTH).transpose(0, 1)

    def check_one(chunk: Chunk, way: Way) -> None:
        mask = torch.ones(2, PROMPT, dtype=torch.long)
        mask[1, : way.left] = mask[1, PROMPT - way.right :] = 0
        keys, outputs = decoded(encoding, x, mask, way, chunk)
        real = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1).bool()
        for row in range(2):
            alone, where = x[row, :, real[row]][None], Positions.arange(int(real[row].sum()))
            q, k = encoding.rotate(alone, alone, where)
            assert torch.equal(keys[row, :, real[row]], k[0]), f"{way}: keys are rotated differently"
            y = attend(q, k, alone, encoding=encoding, positions=where)
            off = float((outputs[row, :, real[row]] - y[0]).abs().max())
            assert off <= DECODED, f"{way}: the output is off by {off:.2g}"

    def check(chunk: Chunk) -> None:
        for way in WAYS:
            check_one(chunk, way)

    def ours(mask: Tensor, begin: int, end: int) -> Positions:
        return Positions.from_mask(mask).slice(begin, end)

    def cut_first(mask: Tensor, begin: int, end: int) -> Positions:
        some = Positions.from_mask(mask[:, begin:end])
        return Positions.of(some.index + begin, some.document)

    exhibit(check, ours, twin=cut_first, because=r"Way\(left=[23], .*: ")
    for way in WAYS:
        if not way.left + way.right or len(way.cuts) == 2:
            check_one(cut_first, way)  # with one of the two, the bug does not show


def test_77_a_document_packed_with_others_is_the_document_alone() -> None:
    """Packed documents continue each other's positions.

    allenai/OLMo-core#591 and #654, pytorch/torchtitan#2559 and #2560, huggingface/nanoVLM#201: Positions continued
    across packed documents. In other code they never arrived: `positions` was always None.

    Check: Print the position ids of a packed row: every document must begin at 0.

    Test: packed rows, to the bit; a whole model in `tests/lab/test_decoder.py`.
    """
    twin = CountsSlots(alone.HEAD_DIM)
    exhibit(same_alone("packed"), *OURS, twin=twin, because="q is not what the row alone gets")


def test_78_documents_of_one_token_stay_apart() -> None:
    """Documents of one token merge.

    modelscope/ms-swift#9904: Neighbouring documents of one token became one document. A boundary was seen where a
    position is smaller than the one before, and 0 follows 0.

    Check: Count the documents of a row packed as `[0, 0, 1, 2]`: there are two.

    Test: boundaries of documents of 0, 1 and 3 tokens.
    """

    def check(boundaries: Callable[[Positions], Tensor]) -> None:
        for lengths in ([3, 1], [1, 1], [0, 1, 0, 1, 3], [1, 3, 1, 1, 1]):
            real = [n for n in lengths if n]
            expected = [sum(real[:i]) for i in range(len(real) + 1)]
            found = boundaries(Positions.packed(lengths)).tolist()
            assert found == expected, f"documents of {lengths} begin at {found}, not {expected}"

    def where_it_decreases(positions: Positions) -> Tensor:
        index = positions.index[0]
        starts = (index[1:] < index[:-1]).nonzero().flatten() + 1
        return torch.cat([torch.tensor([0]), starts, torch.tensor([len(index)])])

    exhibit(check, Positions.cu_seqlens, twin=where_it_decreases, because=r"documents of \[1, 1\] begin at \[0, 2\]")


def test_79_every_document_is_cut_for_itself() -> None:
    """A packed row is cut over ranks as one sequence.

    NVIDIA/Megatron-LM#5243, NVIDIA-NeMo/Automodel#1482 and #2377: A rank had positions of the first sequence only,
    because the whole row was cut as if it were one. Documents of four and four tokens on two ranks give the first rank
    positions 0, 3, 0, 3.

    Check: Print the position ids of every rank for a row of two documents.

    Test: documents of 4 and 4 on two ranks. Every encoding on four ranks is in `tests/positions/test_same_alone.py`.
    """

    def check(cut: Callable[[Positions, int, int], Tensor]) -> None:
        slots = [cut(Positions.packed([4, 4]), rank, 2).tolist() for rank in range(2)]
        assert slots == [[0, 3, 4, 7], [1, 2, 5, 6]], f"rank 0 has {slots[0]}"

    def as_one_sequence(positions: Positions, rank: int, world: int) -> Tensor:
        return Positions.arange(positions.seq_len).shard_slots(rank, world)

    exhibit(check, Positions.shard_slots, twin=as_one_sequence, because=r"rank 0 has \[0, 1, 6, 7\]")


def test_114_ids_are_cut_where_tokens_are() -> None:
    """Position ids are cut over ranks before padding, tokens after it.

    volcengine/verl#6267, NVIDIA/Megatron-LM#5243: On two ranks position ids were one off, and wrong in a rank's second
    half. Tokens were cut after a document of 4,803 was padded to four equal parts, and ids were not.

    Check: Print tokens and position ids of every rank for a length that the ranks do not divide.

    Test: a document of 4,803 tokens, padded, on two ranks with zigzag.
    """

    def check(cut: Callable[[list[int], int], Tensor]) -> None:
        for length in (11, 4803):
            padded = -(-length // 4) * 4
            parts = np.split(np.arange(padded), 4)
            for rank in (0, 1):
                tokens = np.concatenate([parts[rank], parts[3 - rank]]).tolist()
                ids = cut([length], rank).tolist()
                assert ids == tokens, f"ids of rank {rank} begin at {ids[0]}, its tokens at {tokens[0]}"

    def ours(lengths: list[int], rank: int) -> Tensor:
        return Positions.packed([-(-length // 4) * 4 for length in lengths]).shard(rank, 2).index[0]

    def by_unpadded_length(lengths: list[int], rank: int) -> Tensor:
        (length,) = lengths
        part, size = length // 4, -(-length // 4)
        begins = (rank * part, length - (rank + 1) * part)
        return torch.cat([torch.arange(begin, begin + size) for begin in begins])

    exhibit(check, ours, twin=by_unpadded_length, because="ids of rank 1 begin at 2, its tokens at 3")


class OnlyTheNewTokens(ALiBi):
    """A bias for the tokens of this call, which broadcasts over everything that is cached."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q, q, positions)[..., :1].expand(-1, -1, -1, k.shape[2])


def test_74_one_query_behind_a_cache_has_the_last_row() -> None:
    """ALiBi is zero while decoding.

    keras-team/keras-hub#2861, #2862 and #2977: ALiBi was zero at every step of decoding. With one query the bias was
    made for one query and one key, which is 0, and broadcast over all keys in the cache.

    Check: Compare the last row of attention weights with a cache and without one.

    Test: every row of ALiBi and T5, one token at a time; every other encoding in `tests/positions`. Every other bias is
    asked the same where it is tested, and every model in `tests/lab/test_decoder.py`.
    """
    ours, twin = (ALiBi(alone.HEADS), T5Bias(alone.HEADS)), OnlyTheNewTokens(alone.HEADS)
    exhibit(same_alone("cached one by one"), *ours, twin=twin, because="bias is not what the row alone gets")


def test_75_the_newest_token_is_at_distance_0() -> None:
    """Every distance is off by one while decoding.

    vllm-project/vllm#945: Every distance of ALiBi was off by one while decoding. The new token is the last of the
    context, so its position is the length of the context less one.

    Check: The bias of the newest token at its own key must be 0.

    Test: the newest token is at distance 0, and every other at its own.
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
    """Every rank uses the slopes of the first heads.

    flashinfer-ai/flashinfer#1606, deepspeedai/Megatron-DeepSpeed#227: Under tensor parallelism every rank used the
    slopes of head 0 onwards. A rank knew the number of its heads, but not which heads they are.

    Check: Print the slopes on rank 1: they must not be those of rank 0.

    Test: ALiBi and T5 on 1 to 6 ranks: bias and score function; every other bias in `tests/positions`.
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
    """T5's logarithmic buckets are missing or off by one.

    huggingface/transformers#8518, huggingface/candle#727, mindspore-lab/mindone#670: Logarithmic buckets of T5 were
    missing, or were computed in a dtype that puts a distance into its neighbour's bucket.

    Check: Compare your buckets for −4,096 to 4,096 with `locant.T5Bias(1).buckets(distances)`.

    Test: all distances from -4096 to 4096, one way and both. That every bucket reaches its scores is in
    `tests/positions/encodings/test_t5.py`; attention to another sequence, which has no bias unless it is given one, in
    `tests/attention/test_attend.py`.
    """
    reference = T5Attention._relative_position_bucket(-STEPS, bidirectional, num_buckets=32, max_distance=128)

    def check(buckets: Callable[[Tensor], Tensor]) -> None:
        wrong = STEPS[buckets(STEPS) != reference]
        assert not len(wrong), f"{len(wrong)} distances are in another bucket, such as {wrong[len(wrong) // 2]}"

    ours = (T5Bias(HEADS, bidirectional=bidirectional).to(dtype).buckets for dtype in (torch.float32, torch.bfloat16))
    twin = partial(twin, bidirectional=bidirectional)
    exhibit(check, *ours, twin=twin, because="[0-9]+ distances are in another bucket, such as")


class CountsInEachShard(Cope):
    """A running sum over the keys that happen to be here, without a word that it needs the others."""

    needs_all_keys = False


def test_98_a_running_sum_over_keys_is_not_cut_into_shards() -> None:
    """A running sum over shards begins again on each.

    jax-ml/jax#21403: A cumulative sum over an axis that was spread over devices began again on each, silently. A
    contextual count such as CoPE has the same bug if every shard of the keys is attended to alone.

    Check: Compare `cumsum` over the sharded axis with the same sum on one device.

    Test: CoPE over two shards of the keys: refused, where any other bias is joined to the whole.
    """
    q, k, v = torch.randn(3, 1, HEADS, 12, WIDTH)
    where = Positions.arange(12)

    def shards(encoding: PositionEncoding) -> list[tuple[Tensor, Tensor]] | None:
        try:
            return [
                attend(
                    q, k[:, :, part], v[:, :, part], encoding=encoding, positions=where,
                    k_positions=where.slice(part.start, part.stop), return_lse=True,
                )
                for part in (slice(0, 6), slice(6, 12))
            ]  # fmt: skip
        except RangeError:
            return None

    def check(encoding: PositionEncoding) -> None:
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.normal_()
            found, whole = shards(encoding), attend(q, k, v, encoding=encoding, positions=where)
        error = 0.0 if found is None else float((merge(found)[0] - whole).abs().max())
        assert error <= DECODED, f"joined shards are off by {error:.1g}"

    exhibit(check, ALiBi(HEADS), Cope(WIDTH), twin=CountsInEachShard(WIDTH), because="joined shards are off by")
    assert shards(Cope(WIDTH)) is None
    assert shards(ALiBi(HEADS)) is not None


class ZeroedTails(KVCache):
    """Rows that accept fewer drafts than the longest keep the slots of the others, filled with zeros."""

    def truncate(self, length: int | Tensor) -> None:
        positions = self.positions
        super().truncate(length)
        self._positions = positions.slice(0, len(self))


def test_99_a_draft_that_was_not_accepted_is_no_key() -> None:
    """Rejected draft tokens stay as keys of zeros.

    Blaizzy/mlx-vlm#1962: After a round of drafts, rows with fewer accepted tokens continued to attend to zeros. A key
    of zeros has the score 0 and therefore a share of the weights.

    Check: Decode two rows that accept different numbers of drafts together and alone, and compare.

    Test: two rows that accept different numbers of drafts, against each alone; every cache and encoding in
    `tests/attention/test_rewound.py`.
    """
    q, k, v = torch.randn(3, 2, HEADS, 8, WIDTH)

    def check(kind: type[KVCache]) -> None:
        cache, accepted = kind(), torch.tensor([7, 5])
        with torch.no_grad():
            cache.append(k[:, :, :7], v[:, :, :7], Positions.arange(7))
            cache.truncate(accepted)
            where = Positions.after(accepted, 1)
            keys, values, k_positions = cache.append(k[:, :, 7:], v[:, :, 7:], where)
            y = attend(q[:, :, 7:], keys, values, positions=where, k_positions=k_positions)
            for row, length in enumerate(accepted.tolist()):
                mine = torch.tensor([*range(length), 7])
                alone = [x[row : row + 1, :, mine] for x in (q, k, v)]
                expected = attend(*alone, positions=Positions.arange(length + 1))[0, :, -1]
                error = float((y[row, :, 0] - expected).abs().max())
                assert error <= DECODED, f"row {row} attends to what it did not accept, and is off by {error:.1g}"

    exhibit(check, KVCache, twin=ZeroedTails, because="row 1 attends to what it did not accept")


class _RenamedCache(LlamaModel):
    """Calls its cache by a name that no release has used."""

    def forward(self, input_ids: Tensor | None = None, memory: Any = None, **options: Any) -> Any:
        return super().forward(input_ids, **{str(cache_argument(LlamaModel)): memory}, **options)


class _BySlots(nn.Module):
    """The twin: added positions that begin behind a cache which is looked up under a name from memory."""

    def __init__(self, model: Any, encoding: PositionEncoding) -> None:
        super().__init__()
        self.model = model

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            past = kwargs.get("past_key_values")
            x = model.get_input_embeddings()(args[0])
            seen = 0 if past is None else past.get_seq_length()
            added = encoding.to(x.dtype).embed(x, Positions.after(seen, x.shape[1]))
            return (), kwargs | {"inputs_embeds": added}

        model.register_forward_pre_hook(add, with_kwargs=True)


def test_116_a_cache_is_not_lost_when_a_release_renames_it() -> None:
    """A renamed argument loses the cache.

    huggingface/optimum-intel#187, salesforce/progen#36, huggingface/transformers#21443: The cache was not read, because
    a release had renamed its argument: `past` became `past_key_values`, and later `cache`. Code that looks for the old
    name finds no cache, and each new token gets position 0.

    Check: Print the position of the second generated token: it must be the length of the prompt plus one.

    Test: a swapped model whose cache is called as in the installed release, and one whose cache has a name that nobody
    knows, which is refused; other arguments in `tests/swapping/test_forward_arguments.py`.
    """

    @torch.no_grad()
    def check(swapped: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS}
        config = LlamaConfig(vocab_size=99, initializer_range=0.2, **sizes)
        tokens = torch.arange(3, 15)[None]
        for cls, name in ((LlamaModel, str(cache_argument(LlamaModel))), (_RenamedCache, "memory")):
            model = swapped(cls(config).double().eval())
            if model is None:  # refused
                continue
            whole = model(tokens).last_hidden_state
            cache = DynamicCache(config=config)
            parts = [model(each, **{name: cache}).last_hidden_state for each in tokens.split([7, 5], 1)]
            error = float((torch.cat(parts, 1) - whole).abs().max())
            assert error <= LOGITS, f"the cache called {name} is not read: hidden states are off by {error:.2g}"

    def ours(model: Any) -> Any:
        if not isinstance(model, _RenamedCache):
            swap(model, Sinusoidal(64))
            return model
        with refuses(InputError, "found no argument for its cache in _RenamedCache.forward"):
            swap(model, Sinusoidal(64))
        return None

    def by_memory(model: Any) -> Any:
        return _BySlots(model, Sinusoidal(64)).model

    exhibit(check, ours, twin=by_memory, because="the cache called .* is not read")


class _SlotsOfTheWindow(Rotary):
    """The twin: keys count from the first that the cache still holds."""

    def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
        keys = k.shape[2]
        after = Positions.after(keys - q.shape[2], q.shape[2])
        return super().rotate(q, k, after, Positions.arange(keys))


def test_117_a_key_in_a_window_has_the_position_of_its_token() -> None:
    """Positions in a window count from the first key in it.

    trymirai/lalamo#200: A cache with a window counted its rows from the first one that it held. Distances stay right,
    so only encodings that read absolute positions show it.

    Check: Compare decoding past the window with a whole forward pass, in a model with absolute positions.

    Test: a temperature, FIRE and SelfExtend behind a window of six; every encoding and cache in
    `tests/swapping/test_caches.py`. Here the temperature of queries grows with their position.
    """
    temperature = Temperature(step=4, weight=0.5)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = MistralConfig(vocab_size=99, initializer_range=0.2, num_key_value_heads=HEADS, sliding_window=6, **sizes)
    model: Any = MistralForCausalLM(config).double().eval()
    tokens = torch.arange(3, 15)[None]

    @torch.no_grad()
    def check(encoding: PositionEncoding) -> None:
        with swap(model, encoding):
            whole, cache = model(tokens, use_cache=False).logits, DynamicCache(config=config)
            name = str(cache_argument(model))
            parts = [model(each, **{name: cache}).logits for each in tokens.split([9, 1, 2], 1)]
        error = float((torch.cat(parts, 1) - whole).abs().max())
        assert error <= LOGITS, f"slots of the window are taken for positions: logits are off by {error:.2g}"

    ours = [Rotary(WIDTH, temperature=temperature), Fire(HEADS, threshold=1.0), SelfExtend(Rotary(WIDTH), 2, 3)]
    twin = _SlotsOfTheWindow(WIDTH, temperature=temperature)
    exhibit(check, *ours, twin=twin, because="slots of the window are taken for positions")


def test_100_position_ids_need_no_mask_to_be_read() -> None:
    """Position ids are dropped without a mask.

    huggingface/transformers#22828: The caller's position ids were set to None unless there was a mask. Rows without
    padding have no mask.

    Check: Call the model with `position_ids + 100` and no mask: a model with absolute positions must change its output.

    Test: a gap in the ids against padding in its place, in a swapped model; caches and graphs in
    `tests/swapping/test_places.py`.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.2, **sizes)).double().eval()
    places = torch.tensor([[*range(5), *range(9, 16)]])
    mask = torch.zeros(1, 16, dtype=torch.long).index_fill(1, places[0], 1)
    tokens = torch.arange(3, 19)[None]

    @torch.no_grad()
    def read(encoding: PositionEncoding, tokens: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        with swap(model, encoding):
            return model(tokens, position_ids=position_ids, attention_mask=mask).logits

    def read_with_a_mask(tokens: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        return read(ALiBi(HEADS), tokens, None if mask is None else position_ids, mask)

    def check(read: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]) -> None:
        expected = read(tokens, None, mask)[:, places[0]]
        off = (read(tokens[:, places[0]], places, None) - expected).abs().max().item()
        assert off <= LOGITS, f"a gap in the position ids is none without a mask: logits are off by {off:.2g}"

    encodings = (ALiBi(HEADS), T5Bias(HEADS), XPos(WIDTH), Rotary(WIDTH, base=500.0), Rotary(WIDTH, rotary_dim=8))
    for encoding in encodings:
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter)
    exhibit(check, *(partial(read, each) for each in encodings), twin=read_with_a_mask, because="a gap .* is none")
