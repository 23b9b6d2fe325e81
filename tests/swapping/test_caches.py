"""Every encoding behind every kind of cache: a row in parts is what it is in one pass without a cache.

A cache with a window holds its last keys only, and a cache of one shape has slots that nothing is written to yet:
where a key stands in the cache is not where its token stands in the text.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import locant
from locant.errors import LocantError
from locant.positions import ModelShape
from locant.positions.registry import encodings
from locant.positions.temperature import Temperature
from tests.swapping.families import LLAMA, Family, telling
from tests.swapping.work import behind, off, padded
from tests.tolerances import DIFFERENT, LOGITS

LENGTH, WINDOW, WIDTH, HEADS, KV_HEADS = 12, 6, 16, 4, 2
PREFILL = {"at once": (0, 10, 11, 12), "in parts": (0, 4, 10, 12)}
"""Ends of the parts: some begin before the window is full, and some are as long as it."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: telling(LLAMA),
    "sliding": lambda: telling(Family("mistral", "MistralForCausalLM"), sliding_window=WINDOW),
    "sliding and full": lambda: telling(Family("gemma3_text", "Gemma3ForCausalLM"), sliding_window=WINDOW, **MIXED),
    "chunked": lambda: telling(
        Family("llama4_text", "Llama4ForCausalLM"), attention_chunk_size=WINDOW, layer_types=["chunked_attention"] * 2
    ),
}


class Unquantized(QuantizedLayer):
    """The layer of caches that quantize, which keeps some keys as they are and others packed, without the rounding."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor


CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(),
    "dynamic by layers": lambda config: DynamicCache(config=config),
    "static by layers": lambda config: StaticCache(config=config, max_cache_len=LENGTH + 3),
    "quantized": lambda config: Cache(layer_class_to_replicate=lambda: Unquantized(residual_length=3)),  # pyright: ignore[reportArgumentType]
}

SHAPE = ModelShape(d_model=64, num_heads=HEADS, num_kv_heads=KV_HEADS, max_seq_len=32)
OTHER: dict[str, Callable[[locant.Rotary], Any]] = {
    "fire": lambda rotary: locant.Fire(HEADS, threshold=1.0),
    "self_extend": lambda rotary: locant.SelfExtend(rotary, 2, 3),
    "dual_chunk": lambda rotary: locant.encoding("dual_chunk", rotary=rotary, chunk_size=8, local_size=2),
    "rerope": lambda rotary: locant.ReRoPE(rotary, window=3),
    "temperature": lambda rotary: locant.Rotary(
        WIDTH, temperature=Temperature(step=4, weight=0.5), layout=rotary.pairs.layout
    ),
}
"""With sizes at which absolute positions matter within twelve tokens."""
NOT_TAKEN = {
    "cable", "fox", "inkling", "path", "repo", "selective_rope",  # read the hidden states of each layer
    "convolutional",  # reads its neighbours, and refuses tokens behind a cache
    "rope_plus_plus",  # makes twice as many heads
}  # fmt: skip


def built(name: str, model: Any) -> Any:
    """With parameters that say something: new ones may be zeros."""
    torch.manual_seed(1)
    layout = "interleaved" if model.config.model_type == "llama4_text" else "half"
    if name in OTHER:
        encoding = OTHER[name](locant.Rotary(WIDTH, layout=layout))
    else:
        cls = encodings()[name]
        encoding = cls.for_model(SHAPE, **({"layout": layout} if "layout" in inspect.signature(cls).parameters else {}))
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoding


def in_parts(model: Any, tokens: Tensor, cache: Cache, ends: tuple[int, ...], places: Tensor | None = None) -> Tensor:
    """The logits of a row whose tokens come behind a cache of those before."""
    parts = []
    for begin, end in pairwise(ends):
        given = {} if places is None else {"position_ids": places[:, begin:end]}
        parts.append(model(tokens[:, begin:end], **behind(model, cache), **given).logits)
    return torch.cat(parts, 1)


def faults(model: Any, name: str, caches: tuple[str, ...], prefills: tuple[str, ...]) -> dict[str, float]:
    """By how much a row in parts is off, where it is."""
    tokens = torch.arange(3, 3 + LENGTH)[None]
    found: dict[str, float] = {}
    with locant.swap(model, built(name, model)):
        whole = model(tokens, use_cache=False).logits
        for cache in caches:
            for prefill in prefills:
                parts = in_parts(model, tokens, CACHES[cache](model.config), PREFILL[prefill])
                if not off(parts, whole) <= LOGITS:
                    found[f"{name}, {cache}, {prefill}"] = off(parts, whole)
    return found


@pytest.mark.parametrize(
    ("kind", "cache"),
    [("sliding", "dynamic by layers"), ("sliding and full", "static by layers"), ("chunked", "dynamic by layers")],
)
@pytest.mark.parametrize("name", ["fire", "fope", "self_extend", "dual_chunk", "temperature"])
@torch.no_grad()
def test_a_key_in_a_window_stands_where_its_token_does(kind: str, cache: str, name: str) -> None:
    assert not faults(MODELS[kind](), name, (cache,), ("in parts",))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_every_encoding_behind_every_cache_is_what_it_is_in_one_pass(kind: str) -> None:
    model, found, taken = MODELS[kind](), dict[str, float](), set[str]()
    names = {*encodings(), *OTHER}
    for name in sorted(names):
        with suppress(LocantError):
            found |= faults(model, name, tuple(CACHES), tuple(PREFILL))
            taken.add(name)
    assert not found
    assert names - taken == NOT_TAKEN


@torch.no_grad()
def test_a_scaling_by_length_is_for_the_text_and_not_for_the_window() -> None:
    """One layer, whose keys are rotated at every step: those of a second layer are of a shorter text."""
    model = telling(Family("mistral", "MistralForCausalLM"), sliding_window=WINDOW, num_hidden_layers=1)
    scaling = locant.scaling.DynamicNTK(factor=4.0, original_max_seq_len=8)
    tokens, ends = torch.arange(3, 3 + LENGTH)[None], PREFILL["in parts"]
    with locant.swap(model, locant.Rotary(WIDTH, rotary_dim=8, scaling=scaling)):
        parts = in_parts(model, tokens, DynamicCache(config=model.config), ends)
        for begin, end in pairwise(ends):
            whole = model(tokens[:, :end], use_cache=False).logits
            assert off(parts[:, begin:end], whole[:, begin:]) <= LOGITS


@pytest.mark.parametrize("cache", ["dynamic by layers", "static by layers", "quantized"])
@torch.no_grad()
def test_position_ids_with_a_gap_are_those_of_the_keys_that_a_window_holds(cache: str) -> None:
    model, tokens = MODELS["sliding and full"](), torch.arange(3, 3 + LENGTH)[None]
    places = torch.tensor([[*range(6), *range(106, 112)]])
    with locant.swap(model, built("fire", model)):
        whole = model(tokens, position_ids=places, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        assert off(whole, model(tokens, use_cache=False).logits) > DIFFERENT
        assert off(in_parts(model, tokens, CACHES[cache](model.config), PREFILL["at once"], places), whole) <= LOGITS


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("name", ["fire", "fope"])
@torch.no_grad()
def test_generated_tokens_behind_padding_are_those_of_the_row_alone(name: str, options: dict[str, Any]) -> None:
    """Of two rows the second has padding on its left; the window is passed by."""
    model = MODELS["sliding"]()
    tokens, mask, _ = padded()
    count = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with locant.swap(model, built(name, model)):
        both = model.generate(tokens, attention_mask=mask, **count, **options)
        alone = model.generate(tokens[1:, 3:], attention_mask=mask[1:, 3:], use_cache=False, **count)
    assert torch.equal(both[1, 12:], alone[0, 9:])


# ---------------------------------------------------------------------- rows that change

COUNT, BEFORE = 3, 9
ROWS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "selected thrice": (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 1])), [1, 1, 1]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}
"""What is done with a cache, and which rows it has then."""
OF_ROWS: dict[str, Callable[[], Any]] = {
    "alibi": lambda: locant.ALiBi(HEADS),
    "self_extend": lambda: locant.SelfExtend(locant.Rotary(WIDTH), 2, 3),
    "sinusoidal": lambda: locant.Sinusoidal(64),
}
of_rows = pytest.mark.parametrize("name", OF_ROWS)
of_kinds = pytest.mark.parametrize("kind", ["padding", "gaps"])


Given = tuple[Tensor, ...]
"""Tokens, their mask and their position ids."""


def uneven(kind: str) -> Given:
    """Rows with padding before them, or with gaps."""
    tokens, slots = torch.arange(3, 3 + COUNT * LENGTH).view(COUNT, LENGTH), torch.arange(LENGTH)
    if kind == "gaps":
        return tokens, torch.ones_like(tokens), slots + torch.tensor([[3], [8], [20]]) * (slots > 4)
    mask = (slots >= torch.tensor([[0], [2], [5]])).long()
    return tokens, mask, (mask.cumsum(1) - 1).clamp(min=0)


def filled(model: Any, given: Given, end: int = BEFORE) -> Cache:
    tokens, mask, places = (each[:, :end] for each in given)
    cache = DynamicCache(config=model.config)
    model(tokens, attention_mask=mask, position_ids=places, **behind(model, cache))
    return cache


def rest_off(model: Any, given: Given, cache: Cache) -> float:
    """By how much the last tokens behind the cache are off those of one pass, in parts."""
    tokens, mask, places = given
    whole = model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits[:, BEFORE:]
    parts = [
        model(tokens[:, at : at + 1], attention_mask=mask[:, : at + 1], position_ids=places[:, at : at + 1],
              **behind(model, cache)).logits
        for at in range(BEFORE, LENGTH)
    ]  # fmt: skip
    return off(torch.cat(parts, 1), whole)


def rebuilt(cache: Any, config: Any) -> Cache:
    """From the keys and values alone, as a saved prefix is."""
    other = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, index)
    return other


@of_rows
@of_kinds
@torch.no_grad()
def test_the_places_of_keys_go_where_the_rows_of_a_cache_go(name: str, kind: str) -> None:
    model, given, found = telling(), uneven(kind), dict[str, float]()
    with locant.swap(model, OF_ROWS[name]()):
        for change, (do, rows) in ROWS.items():
            cache = filled(model, given)
            do(cache)
            found[change] = rest_off(model, tuple(each[rows] for each in given), cache)
            copied = copy.deepcopy(filled(model, given))
            do(copied)
            found[f"{change} copy"] = rest_off(model, tuple(each[rows] for each in given), copied)
        longer = filled(model, given, LENGTH)
        longer.crop(BEFORE - LENGTH)
        ROWS["reordered"][0](longer)
        found["cropped and reordered"] = rest_off(model, tuple(each[[2, 0, 1]] for each in given), longer)
        saved = io.BytesIO()
        torch.save(filled(model, given), saved)
        saved.seek(0)
        found["saved"] = rest_off(model, given, torch.load(saved, weights_only=False))
    assert not {change: by for change, by in found.items() if not by <= LOGITS}


@pytest.mark.parametrize("name", ["alibi", "self_extend"])
@torch.no_grad()
def test_a_cache_that_others_filled_is_read_by_the_mask_or_refused(name: str) -> None:
    """Rows by slots and padded rows are determined by what is given for the next tokens; a gap is not."""
    model, padding, gaps = telling(), uneven("padding"), uneven("gaps")
    plain = (padding[0], torch.ones_like(padding[0]), torch.arange(LENGTH).expand(COUNT, -1))
    with locant.swap(model, OF_ROWS[name]()):
        for given in (plain, padding):
            assert rest_off(model, given, rebuilt(filled(model, given), model.config)) <= LOGITS
        cache = rebuilt(filled(model, plain), model.config)
        alone = model(plain[0][:, BEFORE:], **behind(model, cache)).logits
        assert off(alone, model(plain[0]).logits[:, BEFORE:]) <= LOGITS
        with pytest.raises(LocantError, match="do not determine them"):
            rest_off(model, gaps, rebuilt(filled(model, gaps), model.config))
        tokens, mask, places = padding
        for options in ({"attention_mask": mask}, {"position_ids": places[:, BEFORE:]}):
            cache = rebuilt(filled(model, padding), model.config)
            with pytest.raises(LocantError, match="do not determine them"):
                model(tokens[:, BEFORE:], **options, **behind(model, cache))


@torch.no_grad()
def test_rows_that_were_changed_behind_the_back_of_a_cache_are_not_guessed() -> None:
    """Layer by layer, or by tensors of one's own: by the mask where it says enough, else refused."""
    model, padding, gaps, order = telling(), uneven("padding"), uneven("gaps"), torch.tensor([2, 0, 1])
    with locant.swap(model, locant.ALiBi(HEADS)):
        for given in (padding, gaps):
            moved = tuple(each[order] for each in given)
            cache = filled(model, given)
            for layer in cache.layers:
                layer.reorder_cache(order)  # pyright: ignore[reportArgumentType]
            if given is padding:
                assert rest_off(model, moved, cache) <= LOGITS
                continue
            with pytest.raises(LocantError, match="changed its rows"):
                rest_off(model, moved, cache)


@pytest.mark.unchecked  # what is compiled is not run while shapes are checked
@pytest.mark.slow
@of_kinds
@torch.no_grad()
def test_a_graph_knows_the_places_in_a_cache_of_one_shape(kind: str) -> None:
    model, given = telling(), uneven(kind)
    tokens, mask, places = given
    with locant.swap(model, locant.ALiBi(HEADS)):
        whole = model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
        cache, first = StaticCache(config=model.config, max_cache_len=LENGTH + 3), [each[:, :BEFORE] for each in given]
        model(first[0], attention_mask=first[1], position_ids=first[2], **behind(model, cache))
        graph = torch.compile(model, backend="eager")
        for at in range(BEFORE, LENGTH):
            now = {"attention_mask": mask[:, : at + 1], "position_ids": places[:, at : at + 1]}
            logits = graph(tokens[:, at : at + 1], **now, **behind(model, cache)).logits
            assert off(logits[:, 0], whole[:, at]) <= LOGITS
