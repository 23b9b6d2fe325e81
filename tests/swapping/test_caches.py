"""Every encoding behind every kind of cache: a row in parts is what it is in one pass without a cache.

A cache with a window holds its last keys only, and a cache of one shape has slots that nothing is written to yet:
where a key stands in the cache is not where its token stands in the text.
"""

from __future__ import annotations

import inspect
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
    "cable", "fox", "inkling", "repo",  # read the hidden states of each layer
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


@pytest.mark.parametrize("cache", ["dynamic by layers", "quantized"])
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
