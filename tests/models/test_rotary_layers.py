"""Models that turn some of their layers only: which those are, and what the others do, is what their code does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from locant import InputError, PositionEncoding, Positions, RangeError, Rotary, ShapeError, attend
from locant.models import encoding_from_config, layer_types
from locant.positions.encodings.tempered import Tempered
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import assert_close

SIZES = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 4096, "intermediate_size": 8, "intermediate_size_mlp": 8, "vocab_size": 32,
    "num_local_experts": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def facts(model_type: str, **others: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, "rope_theta": 10_000.0, **others}


def turns(encoding: PositionEncoding) -> bool:
    return isinstance(encoding, Rotary)


# ------------------------------------------------------------------ windows


ATTENTION = {"cohere2": Cohere2Attention, "exaone4": Exaone4Attention}


def code_turns(config: Any) -> bool:
    """Whether what the attention of a model gives depends on the angles that it is given."""
    config._attn_implementation = "eager"
    attention = ATTENTION[config.model_type](config, 0)
    x, angles = torch.randn(1, 6, 64), torch.randn(1, 6, 32)
    with torch.no_grad():
        first, second = (attention(x, (a.cos(), a.sin()), None)[0] for a in (angles, 3 * angles))
    return not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("model_type", ["cohere2", "exaone4"])
def test_layers_turn_that_turn_in_the_models_code(model_type: str, window: int | None, kind: str) -> None:
    said = facts(model_type, num_hidden_layers=1, layer_types=[kind], sliding_window=window)
    config = AutoConfig.for_model(**said)
    expected = code_turns(config)
    for one in (said, config):
        assert turns(encoding_from_config(one, layer_type=kind)) == expected
        assert layer_types(one) == (() if window is None else ("sliding_attention", "full_attention"))


@pytest.mark.parametrize("model_type", ["cohere2", "exaone4"])
def test_a_window_that_is_not_mentioned_is_not_taken_for_none(model_type: str) -> None:
    with refuses(InputError, "sliding_window", model_type):
        encoding_from_config(facts(model_type))
    with refuses(InputError, "full_attention"):  # which kind of layers is meant has to be said
        encoding_from_config(facts(model_type, sliding_window=16))


# ------------------------------------------------------------------ lists


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("llama4_text", {"no_rope_layers": []}),
        ("llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": 3}),
        ("llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": 5}),
        ("llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": 1}),
        ("llama4_text", {"no_rope_layer_interval": 2}),
        ("llama4_text", {"no_rope_layers": [1, 0, 1, 1]}),
        ("llama4_text", {"no_rope_layers": [0, 0, 0, 0]}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("smollm3", {"no_rope_layer_interval": 9}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    ],
)
def test_the_layers_that_turn_are_those_that_transformers_makes_of_it(model_type: str, said: dict[str, Any]) -> None:
    own = facts(model_type, attn_temperature_tuning=False, **said)
    config = AutoConfig.for_model(**own)
    theirs = {bool(one) for one in config.no_rope_layers}
    for one in (own, config):
        kinds = layer_types(one)
        ours = {turns(encoding_from_config(one, layer_type=kind)) for kind in kinds or (None,)}
        assert ours == theirs
        assert kinds == () or {kind == "with" for kind in kinds} == theirs


@pytest.mark.parametrize(
    ("model_type", "said", "words"),
    [
        ("llama4_text", {}, ["without no_rope_layers"]),
        ("smollm3", {}, ["without no_rope_layers"]),
        ("smollm3", {"no_rope_layers": []}, ["no_rope_layers=[]", "4 ones"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers=[1, 0]", "4 ones"]),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, ["2"]),
        ("smollm3", {"no_rope_layers": 1}, ["no_rope_layers=1"]),
        ("smollm3", {"no_rope_layers": "1110"}, ["no_rope_layers='1110'"]),
        ("llama4_text", {"no_rope_layers": {"0": 1}}, ["no_rope_layers"]),
        ("llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": 0}, ["no_rope_layer_interval"]),
        ("llama4_text", {"no_rope_layers": [], "num_hidden_layers": None}, ["num_hidden_layers"]),
        ("llama4_text", {"no_rope_layers": [], "num_hidden_layers": "4"}, ["num_hidden_layers"]),
    ],
)
def test_a_list_that_does_not_say_it_is_refused(model_type: str, said: dict[str, Any], words: list[str]) -> None:
    with refuses(InputError, *words):
        layer_types(facts(model_type, **said))


# ------------------------------------------------------------------ queries that grow


@pytest.mark.parametrize("past", [0, 3, 900])
def test_the_other_layers_of_llama_4_attend_as_in_transformers(past: int) -> None:
    config = AutoConfig.for_model(**facts("llama4_text", no_rope_layers=[0] * 4, floor_scale=4, attn_scale=0.7))
    config._attn_implementation = "eager"
    theirs = Llama4TextAttention(config, 0)
    encoding = encoding_from_config(config, layer_type="without")
    assert isinstance(encoding, Tempered)
    x = torch.randn(1, past + 9, 64)
    with torch.no_grad():
        q, k, v = (
            projection(x).view(1, past + 9, 2, 32).transpose(1, 2)
            for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        hidden = torch.full((past + 9, past + 9), -math.inf).triu(1)
        expected, _ = theirs(x, None, hidden[None, None])
        where = Positions.arange(past + 9)
        q, k = encoding.rotate(q, k, where)
        ours = theirs.o_proj(attend(q, k, v, encoding=encoding, positions=where).transpose(1, 2).flatten(2))
    assert_close(ours, expected)


@pytest.mark.parametrize(("missing", "tuned"), [("attn_temperature_tuning", 0), ("floor_scale", 1), ("attn_scale", 1)])
def test_what_queries_grow_by_is_not_guessed(missing: str, tuned: int) -> None:
    said = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0]}
    del said[missing]
    with refuses(InputError, missing):
        encoding_from_config(facts("llama4_text", **said), layer_type="without")
    with refuses(InputError, "attn_temperature_tuning"):
        encoding_from_config(facts("llama4_text", **{**said, "attn_temperature_tuning": "yes"}), layer_type="without")
    plain = {**said, "attn_temperature_tuning": False}
    assert type(encoding_from_config(facts("llama4_text", **plain), layer_type="without")) is PositionEncoding
    assert turns(encoding_from_config(facts("llama4_text", **said), layer_type="with"))


def build(heads: int, width: int) -> Tempered:
    return Tempered(3, 0.9)


@pytest.mark.parametrize("dtype", claims.DTYPES, ids=str)
def test_every_row_gets_what_it_gets_alone(dtype: torch.dtype) -> None:
    claims.agrees_with_itself_alone(build, dtype)


def test_sizes_state_and_graphs() -> None:
    claims.handles_every_size(build)
    claims.has_no_state_but_parameters(build)
    claims.compiles_at_most_twice(build)


def test_queries_grow_in_place_and_keys_stay() -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    expected, _ = build(2, 4).rotate(q, k, Positions.arange(5))
    grown, kept = build(2, 4).rotate(q, k, Positions.arange(5), inplace=True)
    assert grown is q
    assert kept is k
    assert torch.equal(grown, expected)


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "step"):
        Tempered(0)
    with refuses(RangeError, "weight"):
        Tempered(8, math.nan)
    with refuses(ShapeError, "(3, 4)"):
        Tempered().rotate(torch.zeros(3, 4), torch.zeros(3, 4), Positions.arange(3))
