"""Every architecture is read in each spelling that `transformers` accepts for it, and as its class reads it."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from locant import InputError, Rotary
from locant.models import class_sizes, encoding_from_config, encodings_by_layer, layer_types, parts
from locant.models.config_values import LENGTHS, TRAINED
from locant.models.registry import ARCHITECTURES
from locant.models.rotary_config import read_rotary
from locant.models.unread_keys import find_unread_keys
from locant.positions.scaling import LongRoPE, YaRN
from tests.models.configurations import ROPES, llama
from tests.models.published_configurations import FOREIGN, REFUSED, UNBUILT, outcome_of
from tests.models.rotary_modules import cases, folders
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS

LAYERS = ["full_attention", *["sliding_attention"] * 3]
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "num_hidden_layers": 4, "compress_ratios": [0, 0, 4, 128], "rope_theta": 10000,
    "compress_rope_theta": 160000, "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", "head_dim": 192, "rope_theta": 5000000, "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334, "num_hidden_layers": 4,
}  # fmt: skip
STEP = {
    "model_type": "step3p5", "head_dim": 128, "num_hidden_layers": 4, "layer_types": LAYERS,
    "rope_theta": [5e6, 1e4, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0], "use_rope_layers": [],
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
}  # fmt: skip
T5_GEMMA_2 = {
    "model_type": "t5gemma2_text", "rope_theta": 5e5, "rope_local_base_freq": 2e4, "head_dim": 64,
    "num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
DOTS_3 = {"model_type": "dots3_note_text", "rope_theta": 7e7, "swa_rope_theta": 4e4, "num_hidden_layers": 6}
ULTRABERT = {
    "model_type": "ultrabert", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_theta": [3e4, 3e4, 1e6],
}  # fmt: skip
LAGUNA = {
    "model_type": "laguna", "num_hidden_layers": 4, "layer_types": LAYERS, "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 4096,
            "attention_factor": 1.0, "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
MINISTRAL = {
    "model_type": "ministral3", "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "mscale": 1.0, "mscale_all_dim": 0.0,
    },
}  # fmt: skip
GPT_NEOX_JAPANESE = {"model_type": "gpt_neox_japanese", "rotary_emb_base": 3e4, "rotary_pct": 0.5}

READ: dict[str, dict[str, Any]] = {
    "DeepSeek-V4": DEEPSEEK_V4,
    "DeepSeek-V4 without the width": {key: DEEPSEEK_V4[key] for key in DEEPSEEK_V4 if key != "qk_rope_head_dim"},
    "DeepSeek-V4 without a scaling": {key: DEEPSEEK_V4[key] for key in DEEPSEEK_V4 if key != "rope_scaling"},
    "DeepSeek-V4 without a base": {key: DEEPSEEK_V4[key] for key in DEEPSEEK_V4 if key != "compress_rope_theta"},
    "MiMo-V2": MIMO, "Step-3.5": STEP, "T5Gemma 2": T5_GEMMA_2, "dots3": DOTS_3, "UltraBERT": ULTRABERT,
    "Laguna": LAGUNA, "Laguna by its class": {"model_type": "laguna", "num_hidden_layers": 4},
    "mscale alone": MINISTRAL, "GPT-NeoX Japanese": GPT_NEOX_JAPANESE,
    "LLaVA of a model type": {"model_type": "llava", "text_config": {"max_position_embeddings": 4096}},
    "Fuyu": {"model_type": "fuyu", "text_config": {"model_type": "persimmon"}},
    "CSM": {"model_type": "csm"}, "Moonshine": {"model_type": "moonshine_streaming", "rope_theta": 10000.0},
}  # fmt: skip
REFUSALS = {
    "moonshine_streaming": {"rope_theta": 2e4}, "nemotron3_5_transcribe_asr_audio": {"rope_theta": 2e4},
    "muse_spark_text": {"rope_theta": 2e4}, "mimo_v2_flash": {"rope_theta": 2e4}, "gpt_neox": {"rope_theta": 2e4},
    "gemma3_text": {"rope_scaling": {"type": "linear", "factor": 8.0}},
}  # fmt: skip
"""Keys that a class does not read: other values than its own are refused, for they contradict what is read."""


@pytest.mark.parametrize("name", READ)
def test_a_published_spelling_is_read_as_its_class_reads_it(name: str) -> None:
    result = outcome_of(READ[name])
    assert CONFIG_MAPPING[READ[name]["model_type"]]
    assert result.verdict in ("same bits", "equal"), result


@pytest.mark.parametrize("model_type", REFUSALS)
def test_a_key_that_the_class_does_not_read_is_not_read(model_type: str) -> None:
    assert CONFIG_MAPPING[model_type]
    assert outcome_of({"model_type": model_type, **REFUSALS[model_type]}).verdict == REFUSED


def test_deepseek_v4_rotates_the_last_64_of_512_dimensions_and_scales_what_is_compressed() -> None:
    main, compress = (Rotary.from_config(DEEPSEEK_V4, layer_type=kind) for kind in layer_types(DEEPSEEK_V4))
    assert isinstance(compress.scaling, YaRN)
    assert main.scaling.effective_attention_factor == compress.scaling.effective_attention_factor == 1.0
    for rotary, base in ((main, 1e4), (compress, 1.6e5)):
        assert rotary.base == base
        assert sorted(dim for pair in rotary.pairs.dims for dim in pair) == [*range(448, 512)]


@pytest.mark.unchecked
def test_phi_3_takes_the_trained_length_of_its_class_for_one_that_stands_in_its_rope_parameters_alone() -> None:
    rope = {**ROPES["longrope"], "original_max_position_embeddings": 8192, "factor": 4.5, "rope_theta": 1e4}
    config = {"model_type": "phi3", "hidden_size": 128, "num_attention_heads": 2, "rope_parameters": rope}
    with pytest.warns(UserWarning, match="original_max_position_embeddings=8192 in rope parameters, where phi3 .*4096"):
        scaling = Rotary.from_config({**config, "max_position_embeddings": 8192}).scaling
    assert isinstance(scaling, LongRoPE)
    assert scaling.effective_attention_factor == pytest.approx(
        math.sqrt(1 + math.log(4.5) / math.log(4096)), rel=FEW_ROUNDINGS, abs=0
    )
    assert outcome_of({**config, "max_position_embeddings": 8192}).verdict in ("same bits", "equal")


@pytest.mark.unchecked
@pytest.mark.parametrize(("over", "under", "differs"), [(1.0, 0.0, False), (0.707, 0.0, True), (None, 1.0, True)])
def test_weights_that_transformers_does_not_read_are_named_where_deepseeks_code_differs(
    over: float | None, under: float, differs: bool
) -> None:
    rope = {**ROPES["yarn, weights"], "mscale": over, "mscale_all_dim": under}
    expected = YaRN(factor=8.0, original_max_seq_len=1024)
    if not differs:
        assert Rotary.from_config(llama(rope)).scaling == expected  # and warnings are errors here
        return
    with pytest.warns(UserWarning, match="as in transformers, but DeepSeek's own code makes"):
        assert Rotary.from_config(llama(rope)).scaling == expected


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
STRETCHED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip
BY_LAYER = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}


def by_layer(model_type: str, rope: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A configuration with a dictionary of rope parameters for each type of its two layers."""
    ropes = {
        "full_attention": {"rope_theta": 5e5, **rope}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        **others.pop("outer", {}),
    }  # fmt: skip
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    return {"model_type": model_type, **BY_LAYER, **layers, "rope_parameters": ropes, **others}


@pytest.mark.unchecked
@pytest.mark.parametrize("model_type", ["olmo3", "gemma3_text", "modernbert"])
@pytest.mark.parametrize(
    ("rope", "others", "told"),
    [
        ({**STRETCHED["yarn"], **YARN, "truncate": False}, {}, "got truncate=False .*: using True"),
        ({**STRETCHED["yarn"], **YARN}, {"outer": {"truncate": False}}, None),
        (
            {**STRETCHED["yarn"], **YARN, "truncate": True},
            {"outer": {"truncate": False}},
            "truncate=True .* using False",
        ),
        (STRETCHED["yarn"], {TRAINED: 2048}, "got original_max_.*=2048 outside .*max_position_embeddings=4096"),
        (STRETCHED["llama3"], {TRAINED: 1024}, "got original_max_.*=1024 outside .*max_position_embeddings=4096"),
        (STRETCHED["llama3"], {"outer": {TRAINED: 1024}}, "got original_max_.*=1024 outside .*max_position_"),
        (STRETCHED["longrope"], {TRAINED: 1024}, None),
    ],
)
def test_rope_parameters_of_a_layer_type_are_read_as_transformers_reads_them(
    model_type: str, rope: dict[str, Any], others: dict[str, Any], told: str | None
) -> None:
    """It reads ``truncate`` only outside the dictionaries of the layer types, and the trained length only inside."""
    config = by_layer(model_type, rope, **copy.deepcopy(others))
    result = outcome_of(config)
    takes_none = model_type == "modernbert" and "outer" in others  # its class takes nothing but dictionaries there
    assert result.verdict in ((UNBUILT,) if takes_none else ("same bits", "equal")), result
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Rotary.from_config(config, layer_type="full_attention")
    assert [bool(re.search(told or "$^", str(each.message))) for each in said] == [True] * (told is not None)


@pytest.mark.unchecked
def test_one_rope_scaling_for_layers_of_two_types_is_read_as_that_of_a_layer_type() -> None:
    older = {"model_type": "olmo3", **BY_LAYER, "num_hidden_layers": 4, "rope_theta": 5e5}
    config = {**older, "rope_scaling": {**STRETCHED["yarn"], "truncate": False}, TRAINED: 2048}
    assert outcome_of(config).verdict in ("same bits", "equal")
    named = "truncate=False|original_max_position_embeddings=2048"
    with pytest.warns(UserWarning, match=named) as said:
        Rotary.from_config(config, layer_type="full_attention")
    assert len(said) == 2


# ---------------------------------------------------------------------- every class, in every form

ANOTHER_MODULE = {"qwen2_5_omni_dit", "qwen3_omni_moe_talker_code_predictor"}
"""Whose folder has several rotary modules that take the configuration."""
BASE = 123_456.0


def spellings(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration of a class with another base: in rope parameters, flat, with a scaling, with less."""
    rope = config["rope_parameters"]
    beside = {key: value for key, value in config.items() if key != "rope_parameters"}
    yield "as it is", config
    yield "nothing", beside
    yield "the base alone", {**beside, "rope_theta": BASE}
    if any(isinstance(one, dict) for one in rope.values()):
        yield "linear", {**beside, "rope_theta": BASE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        stretched = {"rope_type": "yarn", **YARN, "truncate": False}
        yield "yarn", {**beside, "rope_parameters": {kind: one and {**one, **stretched} for kind, one in rope.items()}}
        return
    share = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", *share)}
    sections = {key: value for key, value in rest.items() if "mrope" in key}
    yield "flat", {**beside, "rope_theta": BASE, **share, **({"rope_scaling": rest} if len(rest) > 1 else {})}
    for name, scaling in {"linear": {"factor": 4.0}, "yarn": YARN}.items():
        yield name, {**beside, "rope_theta": BASE, **share, "rope_scaling": {**sections, "type": name, **scaling}}
        inside = {**sections, **share, "rope_theta": BASE, "rope_type": name, **scaling}
        yield f"{name} in rope parameters", {**beside, "rope_parameters": inside}
    yield "half of a head", {**beside, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}


OFTEN = ("llama", "gemma3", "gpt_neox", "deepseek_v3")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "folder", [folder if folder in OFTEN else pytest.param(folder, marks=pytest.mark.slow) for folder in folders()]
)
def test_no_spelling_is_misread(folder: str) -> None:
    for case in cases(folder):
        config = json.loads(json.dumps(case.config.to_dict(), default=str))
        name = config.get("model_type")
        if name not in CONFIG_MAPPING or name in ANOTHER_MODULE or not config.get("rope_parameters"):
            continue
        for spelling, values in spellings(config):
            result = outcome_of(copy.deepcopy(values))
            assert result.verdict != "differs", (name, spelling, result)
            if spelling == "as it is" and "allow_no_rotation" not in result.detail:
                assert result.verdict in ("same bits", "equal", FOREIGN), (name, result)


# ---------------------------------------------------------------------- every key of every row is used

SIZES = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "qk_rope_head_dim": 64, "kv_channels": 64, "attention_head_dim": 64,
    "sliding_window": 512, "attn_temperature_tuning": False, "position_embedding_type": "rope", "alibi": False,
    "position_embeddings_type": "rotary", "use_mem_rope": True, "no_rope_layers": [1, 1, 1, 0],
    "prefix_dense_sliding_window_pattern": 1, "projection_dim": 128, "global_head_dim": 64,
}  # fmt: skip
TEXT = [
    name
    for name, row in ARCHITECTURES.items()
    if row.rotary is not None and row.rotary_keys.pairs is None and row.rotary_keys.head_dim_of is None
]


@pytest.mark.parametrize("model_type", TEXT)
def test_a_key_that_a_row_lists_is_used(model_type: str) -> None:
    """Another value of the key changes the result, or raises an error."""
    row = ARCHITECTURES.find(model_type)
    keys = row.rotary_keys
    sizes = {
        key: value
        for key, value in SIZES.items()
        if not find_unread_keys({key: value}, (*keys.keys, "qk_rope_head_dim"))
    }
    base = {"model_type": model_type, **row.defaults, **sizes}
    base = {key: value for key, value in base.items() if key not in LENGTHS}
    pairs = sum(keys.default_sections or ()) / base.get("partial_rotary_factor", 1.0)
    base |= {"head_dim": 2 * int(pairs)} if pairs else {}
    base |= OVERRIDES.get(model_type, {})
    if keys.flat_keys and (keys.layer_kinds or not keys.per_layer):
        base.pop("rope_parameters", None)
    base = {**dict.fromkeys(keys.base_keys, 10_000.0), **base}
    base |= {"rope_scaling": {"rope_type": "default"}} if row.scaling_required else {}
    base |= {key: kind.only_base for kind in keys.layer_kinds.values() if kind.only_base for key in [kind.base_key]}
    shares = keys.share_keys if keys.flat_keys else ()
    for key in (*keys.base_keys, *shares, *keys.layer_keys):
        given = {other: value for other, value in base.items() if other not in MUTE.get(key, ())}
        before = reading(given)
        after = [reading({**given, key: value}) for value in OTHER_VALUES.get(key, (20_000.0, 30_000.0))]
        assert any(one != before for one in after), (key, before)


OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (0.25, 0.5), "rotary_pct": (0.25, 0.5), "rope_pct": (0.5,), "rotary_dim": (32, 16),
    "no_rope_layers": ([1, 0, 1, 1], [1, 1, 1, 1]), "no_rope_layer_interval": (3,),
    "layer_rope_theta": ([1e4, 0, 1e4, 0],),
    "use_mem_rope": (False,), "use_rope_layers": ([1],), "use_rotary_embedding": (False,),
}  # fmt: skip


OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"position_embedding_type": "rotary"} for name in ("esm", "SaProtConfig")},
    "moonshine": {"partial_rotary_factor": 0.5},
}
MUTE = {"no_rope_layer_interval": ("no_rope_layers",)}
"""Keys beside which another one does not count."""


def reading(config: dict[str, Any]) -> str:
    """What is read of all layers, or why not."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kinds = layer_types(config)
            found = [repr(encoding_from_config(config, layer_type=kind)) for kind in kinds or (None,)]
            try:
                found += map(repr, encodings_by_layer(config))
            except InputError as error:
                found.append(str(error))
        except ValueError as error:
            return str(error)
    return repr((kinds, found, sorted(str(each.message) for each in said)))


# ---------------------------------------------------------------------- what the classes know


def test_the_sizes_of_a_class_are_those_of_transformers() -> None:
    for name, sizes in class_sizes.CLASS_SIZES.items():
        config = CONFIG_MAPPING[name]()
        assert sizes == {key: getattr(config, key) for key in sizes}, name


def test_the_types_of_text_parts_are_those_of_transformers() -> None:
    for name, part in parts.TYPE_OF_PART.items():
        specs = CONFIG_MAPPING[name].sub_configs_defaults
        of_parts = [getattr(spec, "model_type", None) or spec.config_class.model_type for spec in specs.values()]
        assert part in of_parts, name


def test_factors_of_another_number_of_pairs_are_refused_when_they_are_read() -> None:
    row = ARCHITECTURES.find("llama")
    for key in ("short_factor", "long_factor"):
        config = llama({**ROPES["longrope"], key: [1.0] * 31})
        with refuses(InputError, key, "31", "32"):
            read_rotary(config, row, layer_type=None, layout=None)
