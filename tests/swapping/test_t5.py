"""T5 and its kin: their own bias put in again, and others in its place, beside what `transformers` computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5 import modeling_t5

import locant
from locant.attention.choice import FAST_MATRIX_SCORES
from locant.checkpoints import load_swapped
from locant.errors import InputError, RangeError
from locant.positions import Positions
from locant.swapping.forward_arguments import cache_in
from tests.largest import Largest
from tests.refusal import refuses
from tests.swapping import reference
from tests.swapping.families import Family, tiny
from tests.swapping.work import behind, generated, off
from tests.tolerances import DIFFERENT, LOGITS

T5 = Family("t5", "T5ForConditionalGeneration")
KIN = [T5, Family("mt5", "MT5ForConditionalGeneration"), Family("umt5", "UMT5ForConditionalGeneration")]
HEADS, WIDTH = 4, 16
SOURCE, TARGET = 3 + torch.arange(60).view(2, 30), 5 + torch.arange(34).view(2, 17)
MASK = torch.ones_like(SOURCE)
MASK[1, -9:] = 0
TARGET_MASK = torch.ones_like(TARGET)
TARGET_MASK[0, :4] = 0


def model_of(family: Family = T5, std: float = 0.3, **options: Any) -> Any:
    """More tokens than its buckets reach, and weights large enough that order shows."""
    layers = dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), 2)
    model = tiny(family, relative_attention_max_distance=20, **layers, **options)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


@torch.no_grad()
def logits(model: Any, source: Tensor = SOURCE, target: Tensor = TARGET, **options: Any) -> Tensor:
    return model(input_ids=source, decoder_input_ids=target, **options).logits


@torch.no_grad()
def cached(model: Any) -> Tensor:
    """The logits behind the first ten of the target."""
    beginning = model(input_ids=SOURCE, decoder_input_ids=TARGET[:, :10], use_cache=True)
    rest = {"encoder_outputs": (beginning.encoder_last_hidden_state,), **behind(model, cache_in(beginning))}
    return model(decoder_input_ids=TARGET[:, 10:], **rest).logits


@torch.no_grad()
def results(model: Any) -> dict[str, Tensor]:
    return {
        "both": logits(model),
        "as many": logits(model, SOURCE, SOURCE),
        "padded": logits(model, attention_mask=MASK, decoder_attention_mask=TARGET_MASK),
        "encoder": model.encoder(SOURCE, attention_mask=MASK).last_hidden_state,
        "cached": cached(model),
        "beams": generated(model, 3, num_beams=2),
        "static cache": generated(model, 3, cache_implementation="static"),
    }


SOME = [
    pytest.param(family, attention, marks=() if fast else pytest.mark.slow, id=f"{family.model_type}-{attention}")
    for family, quick in zip(KIN, ("sdpa", "neither", "eager"), strict=True)
    for attention in ("sdpa", "eager")
    for fast in [attention == quick]
]


@pytest.mark.parametrize(("family", "attention"), SOME)
def test_its_own_bias_keeps_every_bit(family: Family, attention: str) -> None:
    model = model_of(family)
    model.set_attn_implementation(attention)
    before = results(model)
    with locant.swap(model) as swapped:
        after = results(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert torch.equal(logits(model), before["both"])
    words = ["layer 0 (encoder): its own, T5Bias", "bidirectional=True"]
    assert all(word in swapped.sentences[0] for word in words)
    assert "layer 3 (decoder): its own, T5Bias" in swapped.sentences[-1]


def test_16_bits_stay_and_float32_gives_every_gradient() -> None:
    model = model_of()
    narrow = copy.deepcopy(model).bfloat16()
    before, expected = logits(narrow), gradients(model)
    with locant.swap(narrow), locant.swap(model, angles="float32"):
        assert torch.equal(logits(narrow), before)
        assert all(torch.equal(x, y) for x, y in zip(gradients(model), expected, strict=True))
    with locant.swap(model):
        assert max(map(off, gradients(model), expected)) <= LOGITS * max(each.abs().max().item() for each in expected)


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    model(input_ids=SOURCE, labels=TARGET).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@torch.no_grad()
def test_long_rows_need_no_matrix_of_heads_queries_and_keys() -> None:
    encoder = T5EncoderModel(model_of().config).eval()
    length = math.isqrt(FAST_MATRIX_SCORES // HEADS) + 9
    tokens = 3 + torch.arange(length)[None] % 90
    with Largest() as before:
        expected = encoder(tokens).last_hidden_state
    with locant.swap(encoder), Largest() as after:
        actual = encoder(tokens).last_hidden_state
    assert off(actual, expected) <= LOGITS
    assert before.numbers >= HEADS * length**2 > after.numbers


# ---------------------------------------------------------------------- other encodings


def by_hand(model: Any, bias: Callable[[Tensor], Tensor]) -> Any:
    """A copy of T5 whose own code adds this function of the distance (query less key) to the scores."""
    model = copy.deepcopy(model)
    for stack in (model.encoder, model.decoder):
        attention = stack.block[0].layer[0].SelfAttention

        def matrix(queries: int, keys: int, device: Any = None, past_seen_tokens: int = 0) -> Tensor:
            return bias(torch.arange(queries)[:, None] + past_seen_tokens - torch.arange(keys))[None]

        attention.compute_bias = matrix
    return model


def alibi(distance: Tensor) -> Tensor:
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])
    return -slopes[:, None, None] * distance.abs()


def nope(distance: Tensor) -> Tensor:
    return torch.zeros(HEADS, *distance.shape)


@pytest.mark.parametrize(
    ("encoding", "bias", "attention"),
    [
        pytest.param(locant.ALiBi(HEADS), alibi, "sdpa", id="alibi-sdpa"),
        pytest.param(locant.ALiBi(HEADS), alibi, "eager", id="alibi-eager", marks=pytest.mark.slow),
        pytest.param(locant.PositionEncoding(), nope, "sdpa", id="nope-sdpa", marks=pytest.mark.slow),
        pytest.param(locant.PositionEncoding(), nope, "eager", id="nope-eager"),
    ],
)
def test_another_bias_is_what_its_own_code_would_add(encoding: Any, bias: Any, attention: str) -> None:
    model = model_of()
    model.set_attn_implementation(attention)
    before, expected = logits(model), results(by_hand(model, bias))
    with locant.swap(model, encoding) as swapped:
        after = results(model)
    for name in after:
        assert off(after[name], expected[name]) <= LOGITS, name
    assert off(after["both"], before) > DIFFERENT
    assert torch.equal(logits(model), before)
    assert "its learned bias removed" in swapped.sentences[0]


def rotated_by_hand(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    if query.shape[2] == key.shape[2]:  # self-attention: the texts are not equally long
        query, key = (reference.rotary(WIDTH).turn(x, 1) for x in (query, key))
        hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        mask = query.new_zeros(()).masked_fill(hidden, -math.inf) if module.is_causal else None
    options["position_bias"] = None
    return modeling_t5.eager_attention_forward(module, query, key, value, mask, **options)


def test_rotary_positions_turn_queries_and_keys_of_self_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(std=0.15).double()  # scores are not divided by anything: with larger ones they tell float32 angles
    theirs = copy.deepcopy(model)
    name = "tests of locant: rotary by hand"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, rotated_by_hand)
    theirs.set_attn_implementation(name)
    expected = logits(theirs)
    with locant.swap(model, locant.Rotary(WIDTH)):
        assert off(logits(model), expected) <= LOGITS


@pytest.mark.parametrize("encoding", [locant.Sinusoidal(64), locant.XPos(WIDTH), locant.T5Bias(HEADS)], ids=str)
@torch.no_grad()
def test_padded_and_cached_rows_are_as_alone(encoding: Any) -> None:
    model = model_of().double()  # its scores are not divided by anything: float32 may miss more than the tolerance
    with locant.swap(model, encoding):
        assert off(cached(model), logits(model)[:, 10:]) <= LOGITS
        assert off(logits(model, attention_mask=MASK)[1:], logits(model, SOURCE[1:, :-9], TARGET[1:])) <= LOGITS


def test_token_embeddings_of_both_stacks_are_added_to() -> None:
    model, encoding = model_of(), locant.Sinusoidal(64)
    theirs = by_hand(model, nope)
    for stack, length in ((theirs.encoder, 30), (theirs.decoder, 17)):
        stack.embed_tokens.register_forward_hook(
            lambda module, args, y, n=length: y + encoding.embed(0 * y[:1], Positions.arange(n))
        )
    with locant.swap(model, encoding):
        assert off(logits(model), logits(theirs)) <= LOGITS


def test_layers_are_counted_through_and_told_by_their_stack() -> None:
    model = model_of()
    seen = list[tuple[int, Any]]()

    def plan(layer: int, kind: str | None) -> Any:
        seen.append((layer, kind))
        return locant.ALiBi(HEADS) if kind == "decoder" else None

    before = logits(model)
    encoded = model.encoder(SOURCE).last_hidden_state
    with locant.swap(model, layers=plan) as swapped:
        assert torch.equal(model.encoder(SOURCE).last_hidden_state, encoded)
        assert off(logits(model), before) > DIFFERENT
    assert seen == [(0, "encoder"), (1, "encoder"), (2, "decoder"), (3, "decoder")]
    assert "its own" in swapped.sentences[1]
    assert "ALiBi" in swapped.sentences[2]


@pytest.mark.filterwarnings("ignore")
def test_saved_with_another_encoding_it_is_read_again_and_with_its_own_it_is_as_before(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "before")
    with locant.swap(model):
        model.save_pretrained(tmp_path / "own")
        expected = logits(model)
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "own")), expected)
    written = [(tmp_path / folder / "config.json").read_text() for folder in ("before", "own")]
    assert written[0] == written[1]
    with locant.swap(model, locant.Kerple(HEADS)):
        model.save_pretrained(tmp_path / "kerple")
        expected = logits(model)
    assert torch.equal(logits(load_swapped(tmp_path / "kerple")), expected)
    with pytest.raises(ValueError, match="load_swapped"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "kerple")


def test_what_does_not_fit_is_refused() -> None:
    with refuses(RangeError, "num_heads=4"):
        locant.swap(model_of(), locant.ALiBi(8))
    with refuses(RangeError, "head_dim=16"):
        locant.swap(model_of(), locant.Rotary(8))
    long = tiny(Family("longt5", "LongT5ForConditionalGeneration"))
    with refuses(InputError, "LongT5LocalAttention", "not computed from query-key distances"):
        locant.swap(long)
    other = model_of()
    attention = other.decoder.block[0].layer[0].SelfAttention
    buckets = attention._relative_position_bucket
    attention._relative_position_bucket = lambda distance, **options: buckets(distance, **options).clamp(max=30)
    with refuses(InputError, "T5Attention", "does not compute the buckets"):
        locant.swap(other)
