"""Cached keys that are moved are those that the model computes at the other place."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from locant import (
    ALiBi,
    InputError,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    encoding_from_config,
    move_cache,
    swap,
)
from locant.positions.scaling import DynamicNTK, YaRN
from tests.engines.record import record
from tests.refusal import refuses
from tests.tolerances import SHIFTED, assert_close

LENGTH = 9
IDS = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(5))
SIZES = {
    "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def _model(kind: str, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **sizes})).eval()


def _latents(model: PreTrainedModel, start: int) -> Any:
    """A cache of latents and rotated keys, which older releases keep as whole keys."""
    cache = _filled(model, start, DynamicCache())
    if cache.layers[0].keys.shape[-1] == LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]:
        pytest.skip(f"transformers {transformers.__version__} caches whole keys of latent attention, not latents")
    return cache


def _filled(model: PreTrainedModel, start: int, cache: Any) -> Any:
    places = torch.arange(start, start + LENGTH).expand(2, -1)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # until 5.23
    with torch.no_grad():
        model(IDS, position_ids=places, **{name: cache})
    return cache


@pytest.mark.parametrize("angles", ["float32", "exact"])
@pytest.mark.parametrize("by", [3, 1000])
@pytest.mark.parametrize(
    ("kind", "sizes", "order"),
    [
        ("llama", {}, None),
        ("gpt_neox", {"rotary_pct": 0.5}, None),
        ("deepseek_v3", LATENT, "half"),
        ("deepseek_v3", {**LATENT, "rope_interleave": False}, "half"),
        ("deepseek_v2", LATENT, "interleaved"),
    ],
)
def test_moved_keys_are_equal_to_the_model_at_the_other_position(
    kind: str, sizes: dict[str, Any], order: Any, by: int, angles: Any
) -> None:
    model = _model(kind, **sizes)
    fill = (lambda start: _filled(model, start, DynamicCache())) if order is None else partial(_latents, model)
    here, there = fill(0), fill(by)
    rotary = Rotary.from_config(model.config, angles=angles)
    rotated, rest = ("keys", "values") if order is None else ("values", "keys")
    if order is not None:
        with refuses(LocantError, "latent_layout"):
            move_cache(here, rotary, by=by)
        other: Any = {"half": "interleaved", "interleaved": "half"}[order]
        wrong = move_cache(copy.deepcopy(here), rotary, by=by, latent_layout=other)
        assert (wrong.layers[0].values - there.layers[0].values).abs().max() > 0.1
    before = [getattr(layer, rotated).clone() for layer in here.layers]
    values = [getattr(layer, rest).clone() for layer in here.layers]
    assert move_cache(here, rotary, by=by, latent_layout=order) is here
    limit = SHIFTED[torch.float32] if angles == "float32" else 1000 * SHIFTED[torch.float32]  # of the model's angles
    for layer, target, old, value in zip(here.layers, there.layers, before, values, strict=True):
        expected = getattr(target, rotated)
        off = float((getattr(layer, rotated) - expected).abs().max() / expected.abs().max())
        if angles == "float32":
            record("transformers", "keys moved in a cache", off, package="transformers", unit="of the largest key")
        assert off < limit
        assert (old - expected).abs().max() > 0.01, "nothing had to move"
        assert torch.equal(getattr(layer, rest), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(16),
        Rotary(16, layout="interleaved", rotary_dim=8),
        Rotary(16, scaling=YaRN(factor=4.0, original_max_seq_len=64)),
        Rotary(16, angles="float32"),
    ],
    ids=repr,
)
def test_spans_move_each_by_its_own_number(rotary: Rotary, dtype: torch.dtype) -> None:
    keys = torch.randn(2, 3, 12, 16, dtype=dtype)
    places = torch.arange(12)
    rotated = rotary.rotate_one(keys, Positions.arange(12))
    moved = rotated.clone()
    move_cache(moved, rotary, by=[100, -2, 0], spans=[(0, 3), (5, 9), (9, 11)])
    places[0:3] += 100
    places[5:9] -= 2
    expected = rotary.rotate_one(keys, Positions.of(places))
    assert_close(moved, expected)
    assert torch.equal(moved[:, :, 3:5], rotated[:, :, 3:5])
    assert torch.equal(moved[:, :, 11:], rotated[:, :, 11:])


@pytest.mark.parametrize("by", [2**31 - 12, -(2**31) + 1, 16_777_217])
def test_far_moves_are_exact(by: int) -> None:
    rotary, keys = Rotary(64), torch.randn(1, 2, 5, 64, dtype=torch.float64)
    moved = move_cache(rotary.rotate_one(keys, Positions.arange(5)), rotary, by=by)
    angle = (torch.arange(5) + by).double()[:, None] * rotary.inv_freq  # off by 3e-7 at 2^31
    a, b = keys.chunk(2, dim=-1)
    expected = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    assert (moved - expected).abs().max() < 10 * SHIFTED[torch.float32]


def test_ten_moves_drift_by_ten_roundings() -> None:
    rotary, keys = Rotary(64), torch.randn(1, 4, 32, 64)
    moved = rotary.rotate_one(keys, Positions.arange(32))
    for _ in range(10):
        move_cache(moved, rotary, by=12_345)
    assert (moved - rotary.rotate_one(keys, Positions.after(123_450, 32))).abs().max() < 10 * SHIFTED[torch.float32]


def test_blocks_of_a_paged_cache_move_in_place() -> None:
    rotary = Rotary(16)
    keys = torch.randn(1, 2, 32, 16)
    rotated = rotary.rotate_one(keys, Positions.arange(32))
    blocks = rotated[0].transpose(0, 1).reshape(4, 8, 2, 16).clone()  # four blocks of eight tokens
    move_cache(blocks.transpose(1, 2), rotary, by=50)
    expected = rotary.rotate_one(keys, Positions.after(50, 32))
    assert_close(blocks.reshape(32, 2, 16).transpose(0, 1)[None], expected)


def test_static_caches_and_layers_without_rotation() -> None:
    model = _model("llama")
    rotary = Rotary.from_config(model.config)
    static = _filled(model, 0, StaticCache(config=model.config, max_cache_len=16))
    dynamic = _filled(model, 0, DynamicCache())
    second = dynamic.layers[1].keys.clone()
    move_cache(static, rotary, by=7, spans=[(0, LENGTH)])
    move_cache(dynamic, [rotary, None], by=7)
    assert torch.equal(static.layers[0].keys[:, :, :LENGTH], dynamic.layers[0].keys)
    assert not static.layers[0].keys[:, :, LENGTH:].any()
    assert torch.equal(dynamic.layers[1].keys, second)


@pytest.mark.parametrize(
    ("keys", "options", "kind", "word"),
    [
        (torch.zeros(1, 2, 5, 16), {"by": 2**31}, RangeError, "by"),
        (torch.zeros(1, 2, 5, 16), {"by": 1, "spans": [(0, 6)]}, RangeError, "5 slots"),
        (torch.zeros(1, 2, 5, 16), {"by": 1, "spans": [(0, 3), (2, 4)]}, RangeError, "overlap"),
        (torch.zeros(1, 2, 5, 16), {"by": [1, 2], "spans": [(0, 3)]}, ShapeError, "2 numbers"),
        (torch.zeros(1, 2, 5, 24), {"by": 1}, ShapeError, "24"),
        (torch.zeros(2, 5, 16), {"by": 1}, ShapeError, "kv_heads"),
        (torch.zeros(1, 2, 5, 16, dtype=torch.int8), {"by": 1}, LocantError, "int8"),
        (torch.zeros(1, 2, 5, 16, dtype=torch.float8_e4m3fn), {"by": 1}, LocantError, "float8"),
        ({}, {"by": 1}, LocantError, "cache"),
    ],
)
def test_what_cannot_be_moved_raises(keys: Any, options: dict[str, Any], kind: Any, word: str) -> None:
    with refuses(kind, word):
        move_cache(keys, Rotary(16), **options)
    with refuses(LocantError, "ALiBi"):
        move_cache(torch.zeros(1, 2, 5, 16), ALiBi(2), by=1)  # type: ignore[arg-type]


def test_nothing_moves_if_a_later_layer_raises() -> None:
    class QuantizedLayer:
        is_sliding = False
        keys: Tensor | None = None

    cache = _filled(_model("llama"), 0, DynamicCache())
    before = cache.layers[0].keys.clone()
    cache.layers.append(QuantizedLayer())
    with refuses(LocantError, "QuantizedLayer"):
        move_cache(cache, Rotary(8), by=1)
    assert torch.equal(cache.layers[0].keys, before)


def test_moves_that_have_no_angle_or_would_lose_a_gradient_raise() -> None:
    keys = torch.randn(1, 2, 10, 16)
    dynamic = Rotary(16, scaling=DynamicNTK(factor=2.0, original_max_seq_len=16))
    for rotary, by in ((dynamic, 30), (Rotary(16), 2**31 - 5)):
        with refuses(RangeError):
            move_cache(keys.clone(), rotary, by=by)
    move_cache(keys.clone(), dynamic.for_length(64), by=30)
    weights = keys.clone().requires_grad_()
    with refuses(LocantError, "gradient"):
        move_cache(weights * weights, Rotary(16), by=3)
    with torch.no_grad():
        move_cache(weights * weights, Rotary(16), by=3)
    odd: list[Any] = [(0, 5), [(0, 5, 2)], [slice(0, 5)], [(0.5, 2)]]
    for spans in odd:
        with refuses(RangeError, "spans"):
            move_cache(keys, Rotary(16), by=1, spans=spans)
    by_array, by_tensor = (
        move_cache(keys.clone(), Rotary(16), by=by, spans=[(0, 5)]) for by in (np.array([1]), torch.tensor([1]))
    )
    assert torch.equal(by_array, by_tensor)


def test_spans_may_be_in_any_order() -> None:
    rotary, keys = Rotary(16), torch.randn(1, 2, 12, 16)
    first, second = (keys.clone(), keys.clone())
    move_cache(first, rotary, by=[5, 1000], spans=[(0, 3), (6, 12)])
    move_cache(second, rotary, by=[1000, 5], spans=[(6, 12), (0, 3)])
    assert torch.equal(first, second)


WINDOW = {"num_hidden_layers": 4, "sliding_window": 5}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
DIFFERENT_LAYERS: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 4},
    "llama4_text": {"num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "cohere2": WINDOW,
    "exaone4": {**WINDOW, "sliding_window_pattern": 4},
    "gemma3_text": {**WINDOW, "head_dim": 8, "layer_types": SLIDING},
}
"""Models where some layers do not rotate, or have another base or a window."""


def _off(ours: Any, theirs: Any) -> list[float]:
    """By how much the keys of each layer differ, over the largest."""
    pairs = [(mine.keys, other.keys) for mine, other in zip(ours.layers, theirs.layers, strict=True)]
    return [float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs]


@pytest.mark.filterwarnings("ignore:.*not the encoding of all layers:UserWarning")  # which is what is put in
@pytest.mark.parametrize("kind", DIFFERENT_LAYERS)
def test_each_layer_moves_as_the_model_rotates_it(kind: str) -> None:
    model = _model(kind, **DIFFERENT_LAYERS[kind])

    def filled(start: int) -> list[Any]:
        caches = [DynamicCache(), DynamicCache(config=model.config)]
        caches.append(StaticCache(config=model.config, max_cache_len=LENGTH))
        return [_filled(model, start, cache) for cache in caches]

    there = filled(7)
    for subject in (model, model.config, model.config.to_dict()):
        for ours, theirs in zip(filled(0), there, strict=True):
            move_cache(ours, subject, by=7)
            assert max(_off(ours, theirs)) < SHIFTED[torch.float32]
    one = Rotary.from_config(model.config, layer_type=None if kind != "gemma3_text" else "full_attention")
    for cache, theirs in zip(filled(0), there, strict=True):
        with refuses(LocantError, "whose layers differ", "move_cache(cache, model"):
            move_cache(cache, one, by=7)
        wrong = move_cache(cache, [one] * 4, by=7)
        assert max(_off(wrong, theirs)) > 0.01, "one encoding for all layers does no harm"


def test_one_rotary_raises_if_only_some_layers_have_a_window() -> None:
    model = _model("cohere2", **WINDOW)
    cache = _filled(model, 0, DynamicCache(config=model.config))
    with refuses(LocantError, "sliding window"):
        move_cache(cache, Rotary(8, layout="interleaved"), by=7)


def test_keys_of_a_sliding_window_follow_dropped_ones() -> None:
    model = _model("mistral", sliding_window=5)
    far, by = 100_003, 1000  # where a float32 angle is one of few numbers
    for make in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, max_cache_len=LENGTH)):
        here, there = (_filled(model, start, make()) for start in (far, far + by))
        rotary = Rotary.from_config(model.config, angles="float32")
        move_cache(here, rotary, by=by, positions=Positions.after(far, LENGTH))
        assert max(_off(here, there)) < SHIFTED[torch.float32]


def test_latent_attention_with_a_latent_as_wide_as_a_key() -> None:
    sizes = {**LATENT, "kv_lora_rank": 8}
    model = _model("deepseek_v3", **sizes)
    here, there = (_latents(model, start) for start in (0, 7))
    latents = [layer.keys.clone() for layer in here.layers]
    with refuses(LocantError, "latent_layout"):
        move_cache(here, model, by=7)
    move_cache(here, model, by=7, latent_layout="half")
    for layer, target, latent in zip(here.layers, there.layers, latents, strict=True):
        assert torch.equal(layer.keys, latent)
        assert (layer.values - target.values).abs().max() < SHIFTED[torch.float32]
    with refuses(LocantError, "latent_layout", "expected one head of 8"):
        move_cache(_filled(_model("llama"), 0, DynamicCache()), Rotary(8), by=7, latent_layout="half")


@pytest.mark.parametrize("angles", ["exact", "float32"])
@pytest.mark.parametrize("spans", [None, [(1, 4)]])
def test_keys_at_fractions_of_positions_move_by_whole_ones(angles: Any, spans: Any) -> None:
    places, rotary = torch.arange(6)[None] * 3, Rotary(16, angles=angles)
    keys, start, stop = torch.randn(1, 2, 6, 16), *(spans or [(0, 6)])[0]
    moved = rotary.rotate_one(keys, Positions.of(places, denominator=2))
    move_cache(moved, rotary, by=4, spans=spans, positions=Positions.of(places, denominator=2))
    places = places.clone()
    places[:, start:stop] += 8  # four positions are eight halves
    assert_close(moved, rotary.rotate_one(keys, Positions.of(places, denominator=2)))


@pytest.mark.parametrize("angles", ["exact", "float32"])
def test_keys_made_in_inference_mode_move(angles: Any) -> None:
    rotary = Rotary(16, angles=angles)
    with torch.inference_mode():
        keys = torch.randn(1, 2, 5, 16)
        cached = rotary.rotate_one(keys, Positions.arange(5)).clone()
        twice = move_cache(cached.clone(), rotary, by=3)
    move_cache(cached, rotary, by=3)
    assert_close(cached, rotary.rotate_one(keys, Positions.after(3, 5)))
    assert torch.equal(cached, twice)


def test_models_without_the_kinds_of_their_layers_raise() -> None:
    model, keys = _model("llama"), torch.zeros(1, 2, 5, 8)
    for subject, word in ((torch.nn.Linear(2, 2), "Linear"), (3, "got 3"), ("llama", "expected a Rotary")):
        with refuses(LocantError, word):
            move_cache(DynamicCache() if subject != 3 else keys, subject, by=1)
    with swap(model, ALiBi(4)), refuses(LocantError, "swapped"):
        move_cache(DynamicCache(), model, by=1)
    with refuses(InputError, "num_hidden_layers"):
        move_cache(DynamicCache(), {"model_type": "smollm3", "hidden_size": 32}, by=1)
    with refuses(LocantError, "one layer"):
        move_cache(keys, _model("smollm3", **DIFFERENT_LAYERS["smollm3"]), by=1)
    assert torch.equal(move_cache(keys, PositionEncoding(), by=1), keys)
    assert torch.equal(move_cache(keys.clone(), encoding_from_config(model.config), by=1), move_cache(keys, model, 1))


def test_other_rotated_states_raise_by_name() -> None:
    cache = _filled(_model("llama"), 0, DynamicCache())
    cache.layers[1].indexer_keys = torch.randn(2, LENGTH, 8)
    before = cache.layers[0].keys.clone()
    with refuses(LocantError, "indexer_keys"):
        move_cache(cache, Rotary(8), by=1)
    assert torch.equal(cache.layers[0].keys, before)


def test_positions_for_fewer_tokens_than_move_raise() -> None:
    for angles in ("exact", "float32"):
        with refuses(ShapeError, "3 tokens"):
            move_cache(torch.randn(1, 2, 5, 8), Rotary(8, angles=angles), by=1, positions=Positions.arange(3))  # type: ignore[arg-type]
