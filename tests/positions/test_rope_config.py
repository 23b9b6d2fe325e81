"""Configurations into rotary encodings and back: every key counts or is refused by name."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, BertConfig, LlamaConfig, Phi3Config

from locant import InputError, LocantError, Positions, RangeError, Rotary, ShapeError
from locant.positions.rope_config import layer_types_of, rotary_from_config, rotary_to_config
from locant.positions.rope_dialects import DIALECTS
from locant.positions.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    Unscaled,
    YaRN,
)
from tests.positions.published import PUBLISHED, layer_type_of
from tests.refusal import refuses

FIELDS = ("head_dim", "base", "scaling", "layout", "rotary_dim", "sections")
PAIRS = 32


def fields(rotary: Rotary) -> dict[str, Any]:
    return {name: getattr(rotary, name) for name in FIELDS} | {"angles": rotary.angles.mode}


def llama(rope: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    sizes = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    return {**sizes, "rope_theta": 10_000.0, "rope_scaling": rope, **others}


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8192},
    "yarn": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 20.0,
        "beta_slow": 2.0, "truncate": True, "attention_factor": 1.3,
    },
    "yarn, weights": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + pair / 50 for pair in range(PAIRS)],
        "long_factor": [2.0 + pair for pair in range(PAIRS)], "original_max_position_embeddings": 1024, "factor": 8.0,
    },
    "longrope, attention factor": {
        "rope_type": "longrope", "short_factor": [1.0 + pair / 50 for pair in range(PAIRS)],
        "long_factor": [2.0 + pair for pair in range(PAIRS)], "original_max_position_embeddings": 1024, "factor": 8.0,
        "attention_factor": 1.1,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip


# ------------------------------------------------------------------ every key counts


def output(config: dict[str, Any]) -> list[torch.Tensor]:
    """What the encoding does: its angles at a short and a long length, on text and on a grid."""
    rotary = rotary_from_config(config, angles="float32")
    grid = Positions.of(torch.tensor([[[3, 5, 9], [11, 2, 7]]]))
    seen = [
        *rotary.for_length(20_000).cos_sin(Positions.of([7, 900, 19_000])),
        *rotary.for_length(900).cos_sin(Positions.of([7, 899])),
    ]
    return [*seen, *rotary.for_length(20_000).cos_sin(grid)] if rotary.sections else seen


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "linear" if value != "linear" else "default"
    if isinstance(value, list):
        return [*value[:-1], value[-1] + 1]
    return value * 2 if isinstance(value, int) or value > 0.5 else value / 2


KEYS = [(name, key) for name, rope in ROPES.items() for key in rope]


def output_or_refusal(config: dict[str, Any]) -> list[torch.Tensor] | str:
    """The angles, or what is wrong with the configuration."""
    try:
        return output(config)
    except LocantError as error:
        return error.remedy


def differ(before: list[torch.Tensor], after: list[torch.Tensor] | str) -> bool:
    """Whether anything changed; a refusal has to come with a remedy."""
    if isinstance(after, str):
        return bool(after)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_changing_any_key_changes_the_angles_or_raises(name: str, key: str) -> None:
    after = {**ROPES[name], key: changed(ROPES[name][key])}
    assert differ(output(llama(ROPES[name])), output_or_refusal(llama(after)))


IMPLIED = {
    ("default", "rope_type"),  # the default type
    ("dynamic", "original_max_position_embeddings"),  # the length beside the dictionary
    ("yarn", "truncate"),  # true
    ("longrope", "factor"),  # the ratio of the lengths
    ("longrope, attention factor", "factor"),
}
"""Keys whose absence says the same."""


@pytest.mark.parametrize(("name", "key"), [key for key in KEYS if key not in IMPLIED])
def test_leaving_any_key_out_changes_the_angles_or_raises(name: str, key: str) -> None:
    without = {k: v for k, v in ROPES[name].items() if k != key}
    assert differ(output(llama(ROPES[name])), output_or_refusal(llama(without)))


@pytest.mark.parametrize(("name", "key"), sorted(IMPLIED))
def test_what_a_key_says_is_implied_where_the_papers_and_the_lengths_imply_it(name: str, key: str) -> None:
    without = {k: v for k, v in ROPES[name].items() if k != key}
    assert fields(rotary_from_config(llama(without))) == fields(rotary_from_config(llama(ROPES[name])))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["alpha", "finetuned", "low_freq_facto", "betafast", "mrope_sections"])
def test_a_key_that_is_not_read_is_refused_by_name(name: str, key: str) -> None:
    with refuses(InputError, repr(key), ROPES[name]["rope_type"]):
        rotary_from_config(llama({**ROPES[name], key: 1.0}))


@pytest.mark.parametrize(
    "key",
    ["rope_ratio", "rotary_base", "rotary_emb_scale_base", "rotary_pct", "rotary_emb_base", "rope_type", "use_rope"],
)
def test_a_key_beside_the_dictionary_that_is_not_read_is_refused_by_name(key: str) -> None:
    with refuses(InputError, repr(key), "llama"):
        rotary_from_config(llama(**{key: 0.5}))


@pytest.mark.parametrize("key", ["hidden_act", "no_rope_layers", "vocab_size", "use_cache"])
def test_keys_about_other_things_are_left_alone(key: str) -> None:
    assert fields(rotary_from_config(llama(**{key: 1}))) == fields(rotary_from_config(llama()))


def test_the_configuration_is_not_changed_by_being_read() -> None:
    for config in PUBLISHED.values():
        before = copy.deepcopy(config)
        rotary_from_config(config, layer_type=layer_type_of(config))
        assert config == before


# ------------------------------------------------------------------ what each form says


def test_the_new_and_the_old_form_say_the_same() -> None:
    rope = ROPES["llama3"]
    old = llama({"type": "llama3", **{k: v for k, v in rope.items() if k != "rope_type"}}, partial_rotary_factor=0.5)
    new = llama(rope_parameters={**rope, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5})
    del new["rope_scaling"], new["rope_theta"]
    assert fields(rotary_from_config(old)) == fields(rotary_from_config(new))


def test_the_head_is_the_stated_one_or_a_share_of_the_width() -> None:
    assert rotary_from_config(llama()).head_dim == 64
    assert rotary_from_config(llama(head_dim=128)).head_dim == 128
    assert rotary_from_config(llama(head_dim=None)).head_dim == 64
    assert rotary_from_config(PUBLISHED["DeepSeek-V3"]).head_dim == 64


@pytest.mark.parametrize(("name", "dims"), [("phi-2", 32), ("gpt-neox-20b", 24), ("gpt-j-6b", 64), ("glm-4-9b", 64)])
def test_partial_rotation_under_all_its_names(name: str, dims: int) -> None:
    assert rotary_from_config(PUBLISHED[name]).rotary_dim == dims


@pytest.mark.parametrize(("name", "layout"), [
    ("Llama-2-7b", "half"), ("gpt-j-6b", "interleaved"), ("DeepSeek-V3", "interleaved"), ("glm-4-9b", "interleaved"),
    ("c4ai-command-r", "interleaved"), ("gpt-neox-20b", "half"), ("gpt-oss-20b", "half"),
])  # fmt: skip
def test_the_layout_is_that_of_the_architecture(name: str, layout: str) -> None:
    assert rotary_from_config(PUBLISHED[name]).layout == layout


def test_deepseek_says_its_layout_itself() -> None:
    assert rotary_from_config({**PUBLISHED["DeepSeek-V3"], "rope_interleave": False}).layout == "half"


def test_layer_types_have_a_base_and_a_scaling_each() -> None:
    gemma = PUBLISHED["gemma-3-4b"]
    assert layer_types_of(gemma) == ("full_attention", "sliding_attention")
    full = rotary_from_config(gemma, layer_type="full_attention")
    local = rotary_from_config(gemma, layer_type="sliding_attention")
    assert (full.base, full.scaling) == (1_000_000.0, Linear(factor=8.0))
    assert (local.base, local.scaling) == (10_000.0, Unscaled())


def test_layers_that_share_one_encoding_may_be_named() -> None:
    config = llama(layer_types=["full_attention", "sliding_attention"])
    assert fields(rotary_from_config(config, layer_type="sliding_attention")) == fields(rotary_from_config(config))


def test_full_attention_of_gemma_4_has_wider_heads() -> None:
    config = AutoConfig.for_model("gemma4_text", head_dim=64, global_head_dim=128, num_hidden_layers=6)
    full = rotary_from_config(config, layer_type="full_attention")
    assert (full.head_dim, full.scaling) == (128, Proportional(rotated_share=0.25))
    assert rotary_from_config(config, layer_type="sliding_attention").head_dim == 64
    published = {**{k: v for k, v in config.to_dict().items() if k != "per_layer_config"}, "global_head_dim": 128}
    assert fields(rotary_from_config(published, layer_type="full_attention")) == fields(full)


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    inside = {**PUBLISHED["gemma-3-4b"]}
    outer = {"model_type": "gemma3", "text_config": inside, "vision_config": {"rope_theta": 100.0}}
    assert fields(rotary_from_config(outer, layer_type="full_attention")) == fields(
        rotary_from_config(inside, layer_type="full_attention")
    )


def test_axes_have_sections() -> None:
    assert rotary_from_config(PUBLISHED["Qwen2-VL-7B"]).sections == (16, 24, 24)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048}
    assert rotary_from_config(llama(rope)).scaling == YaRN(factor=4.0, original_max_seq_len=2048)


def test_longrope_reads_its_lengths_beside_the_dictionary() -> None:
    scaling = rotary_from_config(PUBLISHED["Phi-3-mini-128k"]).scaling
    assert isinstance(scaling, LongRoPE)
    assert (scaling.original_max_seq_len, scaling.factor) == (4096, 32.0)
    assert scaling.magnitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-15)


def test_dynamic_takes_the_longest_length_for_the_trained_one() -> None:
    scaling = rotary_from_config(llama({"type": "dynamic", "factor": 2.0})).scaling
    assert scaling == DynamicNTK(factor=2.0, original_max_seq_len=8192)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_phi_3_has_older_names_for_longrope(old: str) -> None:
    config = {**PUBLISHED["Phi-3-mini-128k"]}
    config["rope_scaling"] = {**config["rope_scaling"], "type": old}
    assert fields(rotary_from_config(config)) == fields(rotary_from_config(PUBLISHED["Phi-3-mini-128k"]))


def test_rotary_has_both_ways_as_methods() -> None:
    rotary = Rotary.from_config(PUBLISHED["Llama-3.1-8B"], angles="float32")
    assert rotary.angles.mode == "float32"
    assert rotary.to_config() == rotary_to_config(rotary)


def test_a_subclass_gets_itself() -> None:
    class Mine(Rotary):
        pass

    assert type(Mine.from_config(llama())) is Mine


# ------------------------------------------------------------------ bad input


def test_a_missing_base_is_not_guessed() -> None:
    for name, config in PUBLISHED.items():
        bare = {k: v for k, v in config.items() if k not in ("rope_theta", "rotary_emb_base")}
        if name == "gpt-j-6b":
            assert rotary_from_config(bare).base == 10_000.0  # its code knows no other
            continue
        with refuses(InputError, "rope_theta" if "neox" not in name and "pythia" not in name else "rotary_emb_base"):
            rotary_from_config(bare, layer_type=layer_type_of(config))


@pytest.mark.parametrize("model_type", ["phi", "gpt_neox", "stablelm", "glm", "nemotron"])
def test_a_missing_share_is_not_guessed_where_the_class_would_not_take_the_whole_head(model_type: str) -> None:
    with refuses(InputError, "partial_rotary_factor", model_type):
        rotary_from_config({**llama(), "model_type": model_type})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gptj", "n_embd": 64, "n_head": 2}, ["rotary_dim"]),
        ({**PUBLISHED["gpt-j-6b"], "rope_theta": 5e5}, ["rope_theta", "gptj"]),
        ({**PUBLISHED["gpt-j-6b"], "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "gptj"]),
        (llama(rope_parameters={"rope_theta": 5e5}), ["rope_theta=10000.0", "500000.0"]),
        (llama({"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 1e4}), ["rope_scaling"]),
        (llama({"rope_type": "banana"}), ["banana", "yarn"]),
        (llama({"rope_type": "yarn", "type": "linear", "factor": 2.0}), ["yarn", "linear"]),
        (llama({"rope_type": ["yarn"]}), ["yarn"]),
        (llama({"rope_type": "mrope"}), ["mrope"]),
        (llama("yarn"), ["yarn", "dictionary"]),  # type: ignore[arg-type]
        (llama({"rope_type": "linear"}), ["factor"]),
        (llama({"rope_type": "linear", "factor": "2"}), ["factor", "'2'"]),
        (llama({"rope_type": "linear", "factor": True}), ["factor", "True"]),
        (llama({"rope_type": "linear", "factor": math.nan}), ["factor", "nan"]),
        (llama({"rope_type": "yarn", "factor": 4.0}), ["original_max_position_embeddings"]),
        (llama({"rope_type": "yarn", "original_max_position_embeddings": 1024}), ["factor"]),
        (llama({**ROPES["yarn"], "original_max_position_embeddings": 1.5}), ["original_max_position_embeddings=1.5"]),
        (llama({**ROPES["yarn"], "truncate": 1}), ["truncate"]),
        (llama({**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}), ["attention_factor", "mscale"]),
        (llama({**ROPES["yarn, weights"], "mscale_all_dim": None}), ["mscale", "mscale_all_dim"]),
        (llama({**ROPES["yarn, weights"], "mscale_all_dim": 0}), ["mscale_all_dim=0"]),
        (llama({**ROPES["yarn"], "factor": None}, max_position_embeddings=None), ["max_position_embeddings"]),
        (llama({"type": "dynamic", "factor": 2.0}, max_position_embeddings=None), ["max_position_embeddings"]),
        (llama({**ROPES["dynamic"], "original_max_position_embeddings": 4096}), ["4096", "8192"]),
        (llama({**ROPES["yarn"]}, original_max_position_embeddings=512), ["1024", "512"]),
        (llama({**ROPES["longrope"], "original_max_position_embeddings": None}), ["original_max_position_embeddings"]),
        (llama({**ROPES["longrope"], "long_factor": None}), ["long_factor"]),
        (llama({**ROPES["longrope"], "long_factor": 3.0}), ["long_factor"]),
        (llama({**ROPES["longrope"], "short_factor": [1.0, "x"]}), ["short_factor[1]"]),
        (llama({**ROPES["longrope, attention factor"], "factor": 9.0}), ["factor=9.0", "attention_factor"]),
        (llama({**ROPES["llama3"], "low_freq_factor": None}), ["low_freq_factor"]),
        (llama({"rope_type": "proportional"}), ["partial_rotary_factor"]),
        (llama(hidden_size=500), ["500", "8"]),
        (llama(hidden_size=None), ["head_dim"]),
        (llama(head_dim=64.5), ["head_dim", "64.5"]),
        (llama(partial_rotary_factor=0.5, rotary_dim=16), ["rotary_dim=16"]),
        (llama(n_embd=256), ["hidden_size=512", "n_embd=256"]),
        (llama(rope_interleave=True), ["rope_interleave", "half"]),
        (llama(rope_interleave="yes"), ["rope_interleave"]),
        (llama(alibi=True), ["alibi"]),
        ({**PUBLISHED["DeepSeek-V3"], "qk_rope_head_dim": None}, ["qk_rope_head_dim"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": None}, ["mrope_section"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": 24}}, ["mrope_section", "24"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": [16, -24]}}, ["mrope_section", "-24"]),
        ({**llama({"mrope_section": [16, 8, 8]}), "model_type": "qwen3_vl"}, ["mrope_section", "qwen3_vl"]),
        (llama({"mrope_section": [16, 8, 8], "mrope_interleaved": True}), ["mrope_interleaved"]),
        (7, ["int"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(config: Any, words: list[str]) -> None:
    with refuses(InputError, *words):
        rotary_from_config(config)


def test_a_layout_that_is_not_known_has_to_be_given() -> None:
    config = {**llama(), "model_type": "my_model"}
    with refuses(InputError, "my_model", "layout", "llama", "gptj"):
        rotary_from_config(config)
    assert rotary_from_config(config, layout="interleaved").layout == "interleaved"
    assert rotary_from_config(llama(), layout="interleaved").layout == "interleaved"
    with refuses(LocantError, "diagonal"):
        rotary_from_config(llama(), layout="diagonal")  # type: ignore[arg-type]


def test_a_layer_type_has_to_be_given_where_they_differ_and_exist_where_it_is() -> None:
    gemma = PUBLISHED["gemma-3-4b"]
    for layer_type in (None, "chunked_attention"):
        with refuses(InputError, "full_attention", "sliding_attention"):
            rotary_from_config(gemma, layer_type=layer_type)
    with refuses(InputError, "full_attention"):
        rotary_from_config(llama(), layer_type="full_attention")
    without = {k: v for k, v in gemma.items() if k != "rope_local_base_freq"}
    with refuses(InputError, "rope_local_base_freq"):
        rotary_from_config(without, layer_type="full_attention")
    narrow = {**llama(), "model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    with refuses(InputError, "global_head_dim"):
        rotary_from_config(narrow, layer_type="full_attention")
    none = {**llama(), "rope_theta": None, "rope_parameters": {"full_attention": None}}
    with refuses(InputError, "full_attention", "no rotary"):
        rotary_from_config(none, layer_type="full_attention")


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (llama(head_dim=33), RangeError, ["33"]),
        (llama(partial_rotary_factor=0.3), RangeError, ["19"]),
        (llama(partial_rotary_factor=1.5), RangeError, ["96"]),
        ({**PUBLISHED["gpt-j-6b"], "rotary_dim": 63}, RangeError, ["63"]),
        (llama({**ROPES["longrope"], "long_factor": [1.0] * 31}), ShapeError, ["31", "32"]),
        (llama({**ROPES["longrope"], "short_factor": [1.0] * 48}), ShapeError, ["48", "32"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": [16, 24, 23]}}, RangeError, ["64"]),
        (llama({"rope_type": "linear", "factor": -1.0}), RangeError, ["factor"]),
        (llama({"rope_type": "linear", "factor": 0}), RangeError, ["factor"]),
        (llama({**ROPES["llama3"], "high_freq_factor": 0.5}), RangeError, ["high_freq_factor"]),
        (llama({**ROPES["yarn"], "beta_fast": 1.0}), RangeError, ["beta_fast"]),
        (llama(rope_theta=-1.0), RangeError, ["base"]),
    ],
)  # fmt: skip
def test_numbers_that_make_no_encoding_are_refused(config: Any, kind: type[LocantError], words: list[str]) -> None:
    with refuses(kind, *words):
        rotary = rotary_from_config(config)
        rotary.for_length(100_000)


def test_a_model_without_rotary_positions_is_refused() -> None:
    with refuses(InputError):
        rotary_from_config(BertConfig())
    with refuses(InputError, "alibi"):
        rotary_from_config(AutoConfig.for_model("falcon", alibi=True))


# ------------------------------------------------------------------ and back

SCALINGS: dict[str, Scaling] = {
    "default": Unscaled(),
    "linear": Linear(factor=2.5),
    "dynamic": DynamicNTK(factor=2.0, original_max_seq_len=2048),
    "yarn": YaRN(factor=4.0, original_max_seq_len=2048),
    "yarn, all": YaRN(
        factor=4.0, original_max_seq_len=2048, beta_fast=30.0, beta_slow=2.0, truncate=False, attention_factor=1.2
    ),
    "yarn, weights": YaRN(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=0.7),
    "longrope": LongRoPE(short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, original_max_seq_len=4096, factor=32.0),
    "longrope, factor": LongRoPE(
        short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, original_max_seq_len=4096, factor=1.37, attention_factor=1.2
    ),
    "llama3": Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
    "proportional": Proportional(rotated_share=0.25, factor=2.0),
}  # fmt: skip


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", SCALINGS)
def test_written_and_read_again_it_is_equal(name: str, layout: str, form: str) -> None:
    rotary = Rotary(32, 123_456.0, scaling=SCALINGS[name], layout=layout)  # type: ignore[arg-type]
    again = Rotary.from_config(rotary.to_config(form=form))
    assert fields(again) == fields(rotary)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_survive_the_round_trip(name: str) -> None:
    rotary = rotary_from_config(PUBLISHED[name], layer_type=layer_type_of(PUBLISHED[name]))
    assert fields(Rotary.from_config(rotary.to_config())) == fields(rotary)


@given(st.integers(1, 64), st.data())
def test_any_share_of_any_head_survives_the_round_trip(half_head: int, data: st.DataObject) -> None:
    rotary_dim = 2 * data.draw(st.integers(1, half_head))
    rotary = Rotary(2 * half_head + data.draw(st.integers(0, 1)), rotary_dim=rotary_dim)
    assert fields(Rotary.from_config(rotary.to_config())) == fields(rotary)


def test_ntk_is_written_as_the_base_that_it_is() -> None:
    for form in ("aware", "base"):
        rotary = Rotary(64, scaling=NTK(factor=4.0, form=form))
        again = Rotary.from_config(rotary.to_config())
        assert isinstance(again.scaling, Unscaled)
        pairs = zip(again.angles.frequencies, rotary.angles.frequencies, strict=True)
        assert max(abs(float(a / b - 1)) for a, b in pairs) < 1e-14


def test_weights_without_effect_are_not_written() -> None:
    lone = Rotary(64, scaling=YaRN(factor=4.0, original_max_seq_len=2048, mscale=0.7))
    again = Rotary.from_config(lone.to_config())
    assert again.scaling.magnitude == lone.scaling.magnitude


def test_sections_are_written() -> None:
    rotary = Rotary(128, sections=(16, 24, 24))
    assert fields(Rotary.from_config(rotary.to_config())) == fields(rotary)


def test_frequencies_of_images_are_not_written_as_those_of_text() -> None:
    with refuses(InputError, "axial"):
        Rotary(64, sections=(16, 16), axial=True).to_config()


def test_the_length_of_a_sequence_is_not_part_of_the_configuration() -> None:
    rotary = Rotary(32, scaling=SCALINGS["dynamic"])
    assert rotary.for_length(9999).to_config() == rotary.to_config()


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "proportional"])
def test_transformers_takes_what_is_written_and_turns_as_we_do(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = Rotary(32, 123_456.0, scaling=SCALINGS[name], angles="float32").for_length(4096)
    written = rotary.to_config(max_seq_len=None if name in NEED_NONE else 8192)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, **written)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.arange(4096)[None])
    ours_cos, ours_sin = rotary.cos_sin(Positions.arange(4096))
    assert torch.equal(cos[..., :16], ours_cos)
    assert torch.equal(sin[..., :16], ours_sin)


NEED_NONE = ("dynamic", "longrope", "longrope, factor")


def test_phi_3_takes_the_trained_length_that_is_written() -> None:
    written = Rotary(32, scaling=SCALINGS["longrope"]).to_config()
    config = Phi3Config(hidden_size=64, num_attention_heads=2, **written)
    assert fields(Rotary.from_config(config)) == fields(Rotary(32, scaling=SCALINGS["longrope"]))


def test_a_longest_sequence_can_be_written() -> None:
    assert Rotary(64).to_config(max_seq_len=777)["max_position_embeddings"] == 777
    assert Rotary(64, scaling=SCALINGS["yarn"]).to_config()["max_position_embeddings"] == 8192
    with refuses(InputError, "2048"):
        Rotary(64, scaling=SCALINGS["dynamic"]).to_config(max_seq_len=777)
    with refuses(InputError, "toml"):
        Rotary(64).to_config(form="toml")


def test_an_interleaved_encoding_is_not_read_as_a_model_of_halves() -> None:
    written = Rotary(64, layout="interleaved").to_config()
    with refuses(InputError, "rope_interleave", "llama"):
        Rotary.from_config({**written, "model_type": "llama"})


def test_a_scaling_that_no_configuration_knows_is_refused() -> None:
    class Own(Unscaled):
        pass

    with refuses(InputError, "Own"):
        Rotary(64, scaling=Own()).to_config()


def test_every_known_architecture_has_a_layout() -> None:
    assert {dialect.layout for dialect in DIALECTS.values()} == {"half", "interleaved"}
