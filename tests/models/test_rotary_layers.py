"""Models that turn some of their layers only: which those are, and what the others do, is what their code does."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3 import modeling_ministral3 as ministral3

from locant import InputError, PositionEncoding, Positions, RangeError, Rotary, ShapeError, attend
from locant.models import encoding_from_config, encodings_by_layer, layer_types
from locant.models.registry import ARCHITECTURES
from locant.positions import Pairs, Temperature
from locant.positions.temperature import Tempered
from tests.models.configurations import warns_of_default_or_raises
from tests.positions import claims
from tests.refusal import refuses
from tests.tolerances import PEER, assert_close

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
def test_the_same_layers_rotate_as_in_the_models_code(model_type: str, window: int | None, kind: str) -> None:
    said = facts(model_type, num_hidden_layers=1, layer_types=[kind], sliding_window=window)
    config = AutoConfig.for_model(**said)
    expected = code_turns(config)
    for one in (said, config):
        assert turns(encoding_from_config(one, layer_type=kind)) == expected
        assert layer_types(one) == (() if window is None else ("sliding_attention", "full_attention"))


@pytest.mark.parametrize("model_type", ["cohere2", "exaone4"])
def test_a_missing_window_is_not_read_as_none(model_type: str) -> None:
    for said in ({}, {"sliding_window": 16}):  # which kind of layers is meant has to be said
        with refuses(InputError, f"layer_type=None for {model_type}", "try: layer_type='sliding_attention'"):
            encoding_from_config(facts(model_type, **said))
    for read in (encoding_from_config, Rotary.from_config):
        with pytest.warns(UserWarning, match="without sliding_window: .*4096"):
            assert turns(read(facts(model_type), layer_type="sliding_attention"))
    with refuses(InputError, "layer_type='full_attention', which has no rotary", "try: layer_type='sliding_attention'"):
        Rotary.from_config(facts(model_type), layer_type="full_attention")


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
def test_rotated_layers_are_equal_to_transformers(model_type: str, said: dict[str, Any]) -> None:
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
def test_an_invalid_list_of_layers_raises(model_type: str, said: dict[str, Any], words: list[str]) -> None:
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
def test_the_growth_of_queries_is_not_guessed(missing: str, tuned: int) -> None:
    said = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0]}
    del said[missing]
    warns_of_default_or_raises(facts("llama4_text", **said), missing, "without", read=encoding_from_config)
    with refuses(InputError, "attn_temperature_tuning"):
        encoding_from_config(facts("llama4_text", **{**said, "attn_temperature_tuning": "yes"}), layer_type="without")
    plain = {**said, "attn_temperature_tuning": False}
    assert type(encoding_from_config(facts("llama4_text", **plain), layer_type="without")) is PositionEncoding
    assert turns(encoding_from_config(facts("llama4_text", **said), layer_type="with"))


MISTRAL = {"original_max_position_embeddings": 4, "factor": 16.0, "rope_type": "yarn", "mscale": 1.0}
MISTRAL |= {"rope_theta": 1e4, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}


def ministral_3() -> Any:
    said = {**facts("ministral3", rope_parameters=dict(MISTRAL)), "max_position_embeddings": 64}
    del said["rope_theta"]
    config = AutoConfig.for_model(**said)
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("past", [0, 3, 900])
def test_ministral_3_attends_as_in_transformers_forward_and_gradient(past: int) -> None:
    config, tokens = ministral_3(), past + 9
    theirs = ministral3.Ministral3Attention(config, 0)
    encoding = encoding_from_config(config, angles="float32")
    assert isinstance(encoding, Rotary)
    assert encoding.temperature == Temperature(step=4, weight=0.7)
    x, ids = torch.randn(2, tokens, 64, requires_grad=True), torch.arange(tokens)[None]
    angles = ministral3.Ministral3RotaryEmbedding(config)(x, ids)
    expected, _ = theirs(x, angles, torch.full((tokens, tokens), -math.inf).triu(1)[None, None], ids)
    q, k, v = (
        projection(x).unflatten(-1, (2, 32)).transpose(1, 2)
        for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    where = Positions.arange(tokens)
    q, k = encoding.rotate(q, k, where)
    ours = theirs.o_proj(attend(q, k, v, encoding=encoding, positions=where).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, **PEER)
    cotangent = torch.randn_like(ours)
    grads = (torch.autograd.grad(y, [x, theirs.q_proj.weight], cotangent) for y in (ours, expected))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, **PEER)


def test_mistral_4_multiplies_the_part_of_queries_that_is_not_rotated_too() -> None:
    said = facts("mistral4", rope_parameters={**MISTRAL, "partial_rotary_factor": 0.25}, rope_interleave=True)
    encoding = encoding_from_config({**said, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24})
    assert isinstance(encoding, Rotary)
    assert encoding.temperature is not None
    where = Positions.of([[0, 3, 4, 5000]])
    from transformers.models.mistral4 import modeling_mistral4 as mistral4

    expected = mistral4.get_llama_4_attn_scale(where.index, 0.7, 4)
    assert_close(encoding.temperature.of(where), expected[:, 0, :, 0])
    q = torch.randn(1, 2, 4, 8)
    plain = encoding.replace(temperature=None)
    assert_close(encoding.rotate(q, q, where)[0], plain.rotate_one(q, where) * expected)
    assert torch.equal(encoding.rotate(q, q, where)[1], plain.rotate_one(q, where))
    assert torch.equal(encoding.rotate_one(q, where), plain.rotate_one(q, where))


def test_a_temperature_is_written_as_it_is_read() -> None:
    encoding = Rotary.from_config(ministral_3())
    written = {"model_type": "ministral3", **encoding.to_config(max_seq_len=64)}
    assert written["rope_parameters"]["llama_4_scaling_beta"] == MISTRAL["llama_4_scaling_beta"]
    assert repr(Rotary.from_config(written)) == repr(encoding)
    for other in (Temperature(step=5), Temperature(step=4, shift=1)):
        with refuses(InputError, "Temperature", "one key"):
            encoding.replace(temperature=other).to_config()
    with refuses(RangeError, "temperature"):
        Rotary(8, temperature=0.1)  # type: ignore[arg-type]


BUILDS: dict[str, claims.Build] = {
    "without rotation": lambda heads, width: Tempered(3, 0.9),
    "rotated": lambda heads, width: Rotary(width, layout="interleaved", temperature=Temperature(step=3, weight=0.9)),
    "rotated, a table": lambda heads, width: Rotary(
        width, pairs=Pairs(dims=[(width - 1, 0)]), temperature=Temperature(step=3, weight=0.9)
    ),
}
builds = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


@builds
def test_every_row_gets_what_it_gets_alone(build: claims.Build) -> None:
    claims.agrees_with_itself_alone(build, torch.bfloat16)


@pytest.mark.unchecked
@builds
def test_sizes_state_and_graphs(build: claims.Build) -> None:
    claims.handles_every_size(build)
    claims.has_no_state_but_parameters(build)
    claims.compiles_at_most_twice(build)


@builds
def test_queries_grow_in_place_and_keys_do_not(build: claims.Build) -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    expected = build(2, 4).rotate(q, k, Positions.arange(5))
    grown, kept = build(2, 4).rotate(q, k, Positions.arange(5), inplace=True)
    assert grown is q
    assert kept is k
    assert all(map(torch.equal, (grown, kept), expected))
    if isinstance(build(2, 4), Rotary):
        with refuses(ShapeError, "one tensor", "k.clone()"):
            build(2, 4).rotate(q, q, Positions.arange(5), inplace=True)


def test_mistakes_are_named() -> None:
    with refuses(RangeError, "step"):
        Tempered(0)
    with refuses(RangeError, "weight"):
        Tempered(8, math.nan)
    with refuses(ShapeError, "(3, 4)"):
        Tempered().rotate(torch.zeros(3, 4), torch.zeros(3, 4), Positions.arange(3))


# ------------------------------------------------------------------ the encoding of each layer


BY_TYPE = {
    "afmoe", "cohere2", "exaone4", "flint", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
    "kolibri1", "laguna", "lara_mini", "mimo_v2_flash", "modernbert", "modernbert-decoder", "olmo3", "t5gemma2_text",
    "exaone_moe", "beam", "dory", "ultrabert", "mellum", "zaya",
}  # fmt: skip
"""Models whose layers of one type have one encoding."""


@pytest.mark.unchecked
@pytest.mark.parametrize("model_type", sorted(BY_TYPE))
def test_the_layers_of_a_configuration_without_layer_types_are_those_of_its_class(model_type: str) -> None:
    sizes = {"model_type": model_type, "num_hidden_layers": 13, "hidden_size": 256, "num_attention_heads": 8}
    types = AutoConfig.for_model(**sizes).layer_types
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "got a .* configuration without")
        ours = encodings_by_layer(sizes)
        of_types = {kind: encoding_from_config(AutoConfig.for_model(**sizes), layer_type=kind) for kind in types}
    assert len(ours) == 13
    assert [repr(each) for each in ours] == [repr(of_types[kind]) for kind in types]


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("llama4_text", {"no_rope_layers": []}),
        ("llama4_text", {"no_rope_layers": [1, 0, 1, 1]}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
        ("smollm3", {"no_rope_layer_interval": 2}),
    ],
)
def test_each_layer_rotates_that_rotates_in_transformers(model_type: str, said: dict[str, Any]) -> None:
    own = facts(model_type, attn_temperature_tuning=False, **said)
    config = AutoConfig.for_model(**own)
    for one in (own, config):
        assert [turns(each) for each in encodings_by_layer(one)] == [bool(has) for has in config.no_rope_layers]


def test_every_type_in_layer_types_has_an_encoding() -> None:
    llama_4 = AutoConfig.for_model(**facts("llama4_text", attn_temperature_tuning=False))
    assert {kind: turns(encoding_from_config(llama_4, layer_type=kind)) for kind in llama_4.layer_types} == {
        "chunked_attention": True,
        "full_attention": False,
    }
    deepseek = AutoConfig.for_model("deepseek_v4", num_hidden_layers=4, compress_ratios=[0, 0, 4, 128])
    for kind in deepseek.layer_types:
        rotary = encoding_from_config(deepseek, layer_type=kind)
        assert isinstance(rotary, Rotary)
        assert rotary.base == (1e4 if kind == "sliding_attention" else 1.6e5)
    qwen = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    assert [turns(each) for each in encodings_by_layer(qwen)] == [kind == "full_attention" for kind in qwen.layer_types]
    beam = AutoConfig.for_model("beam", num_hidden_layers=7)
    assert [turns(each) for each in encodings_by_layer(beam)] == [
        kind == "sliding_attention" for kind in beam.layer_types
    ]


@pytest.mark.unchecked
def test_a_type_whose_layers_differ_causes_a_warning() -> None:
    smollm_3 = AutoConfig.for_model(**facts("smollm3"))
    with pytest.warns(
        UserWarning, match="some layers of type 'full_attention' have rotary.*encodings_by_layer"
    ) as said:
        assert turns(encoding_from_config(smollm_3, layer_type="full_attention"))
    assert [each.filename for each in said] == [__file__]


@pytest.mark.unchecked
@pytest.mark.parametrize("model_type", ["llama4_text", "smollm3", "cohere2", "exaone4"])
def test_one_rotary_for_a_model_with_unrotated_layers_causes_a_warning(model_type: str) -> None:
    config = AutoConfig.for_model(**facts(model_type, sliding_window=16))
    with pytest.warns(UserWarning, match=f"{model_type}: this is not the encoding of all layers.*layer_type=") as said:
        assert turns(Rotary.from_config(config))
    assert [each.filename for each in said] == [__file__]


@pytest.mark.slow
@pytest.mark.unchecked
def test_every_model_with_rotary_positions_has_an_encoding_for_each_layer() -> None:
    """No type in the ``layer_types`` of any class is refused, and the list of encodings has one for each layer."""
    from transformers import CONFIG_MAPPING

    for name, row in ARCHITECTURES.items():
        if row.rotary is None or name not in CONFIG_MAPPING or row.rotary_keys.no_rotation is not None:
            continue
        try:
            config = CONFIG_MAPPING[name]()
        except ValueError:  # its own defaults contradict each other
            continue
        types = getattr(config, "layer_types", None)
        if not types or not isinstance(types, list):
            continue
        if getattr(config, "rope_parameters", None) == {}:  # its own module cannot be built from its defaults, either
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in dict.fromkeys(types):
                assert isinstance(encoding_from_config(config, layer_type=kind), PositionEncoding), (name, kind)
            assert len(encodings_by_layer(config)) == len(types), name
