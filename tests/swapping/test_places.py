"""Position ids of the caller's, with a mask and without, behind a cache and in a graph: what attention reads.

The oracles are attention written out by hand whose tokens stand where the ids say, the row alone, and the same tokens
without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import locant
from locant.positions import PoPE
from locant.swapping.attention_function import AttentionPoint, _prepare_attention, attention
from locant.swapping.forward_arguments import cache_in
from locant.swapping.new_encoding import NewEncoding, hold_encodings
from locant.swapping.token_places import Places
from tests.swapping import reference
from tests.swapping.families import Family, telling
from tests.swapping.work import behind, compiled, generated, ids, off, packed, padded
from tests.tolerances import DIFFERENT, LOGITS

GAP = torch.tensor([[*range(5), *range(105, 112)]])
HEADS, WIDTH = 4, 16


def trained(encoding: Any, std: float = 0.3) -> Any:
    """With parameters that say something: new ones may be zeros."""
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return encoding


ENCODINGS: dict[str, Callable[[], Any]] = {
    "alibi": lambda: locant.ALiBi(HEADS),
    "xpos": lambda: locant.XPos(WIDTH),
    "pope": lambda: PoPE(WIDTH, num_heads=2),
    "t5": lambda: trained(locant.T5Bias(HEADS)),
    "self_extend": lambda: locant.SelfExtend(locant.Rotary(WIDTH), 3, 4),
    "partial": lambda: locant.Rotary(WIDTH, rotary_dim=8),
    "cope": lambda: trained(locant.Cope(WIDTH), 1.0),
}
every = pytest.mark.parametrize("name", ENCODINGS)


def at(places: Tensor) -> reference.Way:
    """ALiBi of tokens that stand at these positions."""
    way, apart = reference.alibi(HEADS), (places[0][:, None] - places[0]).clamp(min=0).double()
    assert way.bias is not None
    bias = way.bias(apart)
    return reference.Way(bias=lambda distance: bias)


def in_parts(model: Any, tokens: Tensor, places: Tensor, mask: Tensor | None, ends: tuple[int, ...]) -> Tensor:
    """The logits of a row whose tokens come behind a cache of those before."""
    cache, parts = DynamicCache(config=model.config), []
    for begin, end in pairwise(ends):
        options = {} if mask is None else {"attention_mask": mask[:, :end]}
        where = places[:, begin:end]
        parts.append(model(tokens[:, begin:end], position_ids=where, **behind(model, cache), **options).logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def test_a_gap_in_the_position_ids_is_one_without_a_mask_and_behind_a_cache() -> None:
    """A batch without padding has no mask: then positions were slots, and a gap was none."""
    model = telling()
    tokens, places = ids()[:1], GAP
    expected = reference.logits(model, tokens, at(places))
    assert off(reference.logits(model, tokens, reference.alibi(HEADS)), expected) > DIFFERENT
    with locant.swap(model, locant.ALiBi(HEADS)):
        assert off(model(tokens, position_ids=places).logits, expected) <= LOGITS
        assert off(in_parts(model, tokens, places, None, (0, 4, 7, 8, 12)), expected) <= LOGITS
        first = model(tokens[:, :9], position_ids=places[:, :9], use_cache=True)  # a cache that the model made
        rest = model(tokens[:, 9:], position_ids=places[:, 9:], **behind(model, cache_in(first)))
        assert off(rest.logits, expected[:, 9:]) <= LOGITS


@every
@torch.no_grad()
def test_a_row_with_a_gap_is_the_same_in_a_padded_batch_and_in_parts(name: str) -> None:
    model = telling()
    tokens, mask, _ = padded()
    both, where = GAP.expand(2, -1), mask.flip(0)  # the second row is whole
    with locant.swap(model, ENCODINGS[name]()):
        alone = model(tokens[1:], position_ids=GAP, attention_mask=mask[:1]).logits
        beside = model(tokens, position_ids=both, attention_mask=where).logits[1:]
        assert off(beside, alone) <= LOGITS
        assert off(in_parts(model, tokens, both, where, (0, 4, 5, 6, 12))[1:], alone) <= LOGITS
        plain = model(tokens[1:]).logits
    assert name == "cope" or off(alone, plain) > DIFFERENT, "the gap changed nothing"


@every
@torch.no_grad()
def test_padded_rows_and_packed_documents_are_what_they_are_alone(name: str) -> None:
    """Padding before the row and in between, behind a cache too: CoPE counted it as tokens."""
    model = telling()
    tokens = ids()[1:]
    with locant.swap(model, ENCODINGS[name]()):
        alone = model(tokens).logits
        real = torch.tensor([slot not in (0, 1, 5, 6) for slot in range(16)])
        row = torch.zeros(1, 16, dtype=torch.int64).masked_scatter(real, tokens)
        mask, places = real.long()[None], (real.long().cumsum(0) - 1).clamp(min=0)[None]
        whole = model(row, attention_mask=mask, position_ids=places).logits[:, real]
        assert off(whole, alone) <= LOGITS
        assert off(in_parts(model, row, places, mask, (0, 8, 9, 16))[:, real], alone) <= LOGITS
        assert off(packed(model)[:, 5:], model(ids()[:, 5:]).logits) <= LOGITS
        steps = generated(model, 3, use_cache=False)
        for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
            assert off(generated(model, 3, **options), steps) <= LOGITS


@pytest.mark.unchecked  # what is compiled is not run while shapes are checked
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "xpos"])
@torch.no_grad()
def test_position_ids_are_read_in_one_graph(name: str) -> None:
    model = telling()
    with locant.swap(model, ENCODINGS[name]()):
        assert off(compiled(model), model(ids()).logits) <= LOGITS
        graph = torch.compile(model, fullgraph=True, backend="eager")
        expected = model(ids(), position_ids=GAP, use_cache=True).logits
        assert off(graph(ids(), position_ids=GAP, use_cache=True).logits, expected) <= LOGITS


@torch.no_grad()
def test_a_cache_that_is_cut_or_has_other_rows_goes_on() -> None:
    model, places = telling(), GAP
    with locant.swap(model, locant.ALiBi(HEADS)):
        expected = model(ids(), position_ids=places.expand(2, -1)).logits
        cache = DynamicCache(config=model.config)
        model(ids()[:, :10], position_ids=places[:, :10], **behind(model, cache))
        cache.crop(-2)
        rest = model(ids()[:, 8:], position_ids=places[:, 8:], **behind(model, cache))
        assert off(rest.logits, expected[:, 8:]) <= LOGITS
        tokens, mask, counted = padded()
        alone = model(tokens[1:, 3:]).logits[:, -1:]
        cache = DynamicCache(config=model.config)
        model(tokens[:, :11], attention_mask=mask[:, :11], position_ids=counted[:, :11], **behind(model, cache))
        cache.batch_repeat_interleave(2)
        twice = [each.repeat_interleave(2, 0) for each in (tokens[:, 11:], mask, counted[:, 11:])]
        logits = model(twice[0], attention_mask=twice[1], position_ids=twice[2], **behind(model, cache)).logits
        assert off(logits[2:], alone.expand(2, -1, -1)) <= LOGITS


@torch.no_grad()
def test_a_model_that_passes_nothing_on_is_read_by_the_ids_of_its_layers() -> None:
    """Nemotron's layers take position ids and nothing else."""
    model = telling(Family("nemotron", "NemotronForCausalLM"))
    tokens, mask, _ = padded()
    with locant.swap(model, locant.ALiBi(HEADS)):
        alone = model(tokens[1:], position_ids=GAP, attention_mask=mask[:1]).logits
        beside = model(tokens, position_ids=GAP.expand(2, -1), attention_mask=mask.flip(0)).logits[1:]
        assert off(beside, alone) <= LOGITS
        assert off(alone, model(tokens[1:]).logits) > DIFFERENT


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 12])
def test_layers_share_a_bias_within_a_call_and_not_between_calls(length: int) -> None:
    """The encoding computes it once for all layers, and again in the next call, when its parameters have changed."""

    class Counted(locant.Kerple):
        calls = 0

        def of_distance(self, *args: Any, **operands: Any) -> Tensor:
            self.calls += 1
            return super().of_distance(*args, **operands)

    model, tokens, encoding = telling(), ids()[:1], trained(Counted(HEADS))
    assert model.config.num_hidden_layers > 1
    rows = torch.cat([encoding.r1, encoding.r2]).abs().view(2, HEADS)
    expected = [reference.logits(model, tokens, reference.kerple(rows[0] * factor, rows[1])) for factor in (1.0, 3.0)]
    with locant.swap(model, encoding):
        for factor, logits in zip((1.0, 3.0), expected, strict=True):
            encoding.r1.copy_(rows[0] * factor)
            encoding.r2.copy_(rows[1])
            cache = DynamicCache(config=model.config)
            if length < 12:
                model(tokens[:, :-length], **behind(model, cache))
            encoding.calls = 0
            found = model(tokens[:, -length:], **behind(model, cache)).logits
            assert encoding.calls == 1
            assert off(found, logits[:, -length:]) <= LOGITS


@torch.no_grad()
def test_a_tile_of_inputs_that_layers_share_has_the_bias_of_its_tokens() -> None:
    encoding, tokens = trained(locant.Fire(HEADS)), locant.Positions.arange(7)
    q = torch.zeros(1, HEADS, 7, WIDTH)
    inputs, _ = _prepare_attention(q, q, q, tokens, tokens, True, encoding, None, 0.0)
    assert inputs.bias is not None
    next_layer = inputs.with_tensors(q + 1, q + 1, q)
    assert next_layer.bias is inputs.bias
    for start, stop in ((0, 7), (2, 5)):
        bias = next_layer.tile(start, stop).bias
        assert bias is not None
        assert torch.equal(bias.dense()[0], encoding.matrix(7)[:, start:stop, :stop])  # type: ignore[index]


@pytest.mark.unchecked
@torch.no_grad()
@pytest.mark.parametrize("wrong", ["value", "key", "query"])
def test_a_layer_with_other_tensors_is_checked_although_the_layer_before_was(wrong: str) -> None:
    module, places, encoding = torch.nn.Linear(1, 1), Places(first=11, shared={}), locant.ALiBi(HEADS)
    new = NewEncoding(module, 0, encoding)
    hold_encodings(module, [new], ExitStack())
    AttentionPoint(new, "sdpa").attach(module, ExitStack())
    layer: dict[str, Any] = {"query": torch.zeros(1, HEADS, 1, WIDTH), "key": torch.zeros(1, 2, 12, WIDTH)}
    layer["value"] = layer["key"]
    for tensors in (layer, layer):
        attention(module, **tensors, attention_mask=None, locant_places=places)
    shorter = layer[wrong][:, :, 1:] if wrong == "value" else layer[wrong][..., 1:]
    for other in (layer[wrong].double(), shorter):
        with pytest.raises(locant.ShapeError):
            attention(module, **(layer | {wrong: other}), attention_mask=None, locant_places=places)
