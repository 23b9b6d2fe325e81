"""Known bug 120: keys that are reused at another position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from locant import Rotary, move_cache
from tests.known_bugs.exhibit import exhibit
from tests.tolerances import SHIFTED

BY = 7


@pytest.mark.filterwarnings("ignore:smollm3. this is not the encoding:UserWarning")  # the twin does as it warns
def test_120_layers_that_do_not_rotate_keep_their_keys() -> None:
    """Keys of layers without positions are rotated when they move.

    LMCache/LMCache#4666: Cached keys were rotated to their new place in all layers, by one encoding. Every fourth layer
    of SmolLM3 has no positions, so its keys are the same everywhere.

    Check: `locant explain FOLDER` lists the layers without positions: their cached keys must not change.

    Test: a cache of SmolLM3, moved by its model; other models and caches in `tests/engines/test_kv_reuse.py`.
    """
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = SmolLM3Config(vocab_size=64, hidden_size=32, intermediate_size=48, **sizes)
    model, ids = SmolLM3ForCausalLM(config).eval(), torch.randint(0, 60, (1, 12))
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # until 5.23

    def cache_from(start: int) -> DynamicCache:
        cache = DynamicCache()
        with torch.no_grad():
            model(ids, position_ids=torch.arange(start, start + 12)[None], **{name: cache})
        return cache

    def check(move: Callable[[Any, PreTrainedModel], Any]) -> None:
        moved = move(cache_from(0), model)
        for number, (ours, theirs) in enumerate(zip(moved.layers, cache_from(BY).layers, strict=True)):
            off = float((ours.keys - theirs.keys).abs().max() / theirs.keys.abs().max())
            assert off < SHIFTED[torch.float32], f"keys of layer {number} are off by {off:.2g}"

    def by_one_encoding(cache: Any, model: PreTrainedModel) -> Any:
        rotary = Rotary.from_config(model.config)
        for layer in cache.layers:
            move_cache(layer.keys, rotary, by=BY)
        return cache

    def by_the_model(cache: Any, model: PreTrainedModel) -> Any:
        return move_cache(cache, model, by=BY)

    exhibit(check, by_the_model, twin=by_one_encoding, because="keys of layer 3 are off")
