"""Unreadable values raise an error with the name of their key, and defaults of classes are not guessed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig

from locant import InputError, LocantError, RangeError, Rotary
from locant.checkpoints.explanation import explain
from locant.models import encoding_from_config, layer_types
from locant.positions.scaling import Proportional, Unscaled
from tests.models.configurations import ROPES, ROTARY_KEYS, ROWS, fields, llama, warns_of_default_or_raises
from tests.positions.published import PUBLISHED, layer_type_of
from tests.refusal import refuses

OLMO_3 = {**llama({"rope_type": "linear", "factor": 8.0}, rope_theta=500_000.0), "model_type": "olmo3"}

OLMO_3_TOP = {key: value for key, value in OLMO_3.items() if key != "rope_theta"}


def test_a_missing_base_is_not_guessed() -> None:
    for name, config in PUBLISHED.items():
        bare = {k: v for k, v in config.items() if k not in ("rope_theta", "rotary_emb_base")}
        if name == "gpt-j-6b":
            assert Rotary.from_config(bare).base == 10_000.0  # its code knows no other
            continue
        key = "rope_theta" if "neox" not in name and "pythia" not in name else "rotary_emb_base"
        warns_of_default_or_raises(bare, key, layer_type_of(config))


def test_a_missing_length_or_width_of_latent_attention_is_named() -> None:
    warns_of_default_or_raises(
        llama({**ROPES["yarn"], "factor": None}, max_position_embeddings=None), "max_position_embeddings"
    )
    warns_of_default_or_raises(
        llama({"type": "dynamic", "factor": 2.0}, max_position_embeddings=None), "max_position_embeddings"
    )
    deepseek = {key: value for key, value in PUBLISHED["DeepSeek-V3"].items() if key != "qk_rope_head_dim"}
    warns_of_default_or_raises(deepseek, "qk_rope_head_dim")
    warns_of_default_or_raises({**OLMO_3_TOP, "layer_types": ["sliding_attention"]}, "rope_theta", "full_attention")
    for read in (Rotary.from_config, encoding_from_config):
        with refuses(InputError, "layer_type='full_attention'"):  # which layers are meant comes first
            read(OLMO_3_TOP)


@pytest.mark.unchecked  # checks of shapes stand between the caller and us
def test_a_warning_names_the_deciding_key_and_the_line_of_the_caller() -> None:
    """A longest sequence decides nothing here, so it is not named though it is missing too."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}
    for read in (Rotary.from_config, encoding_from_config):
        with pytest.warns(UserWarning, match="without rope_theta: ") as told:
            read(config)
        assert [each.filename for each in told] == [__file__]
        assert "max_position_embeddings" not in str(told[0].message)


@pytest.mark.parametrize("model_type", [name for name, row in ROWS.items() if row.share_required])
def test_a_missing_share_is_not_guessed_if_the_default_is_not_the_whole_head(model_type: str) -> None:
    config = {**llama(), "model_type": model_type, "head_dim": 64}
    base = config.pop("rope_theta")
    if not ROTARY_KEYS[model_type].fixed_base:
        config[ROTARY_KEYS[model_type].base_key] = base
    warns_of_default_or_raises(config, ROTARY_KEYS[model_type].share_keys[0])


@pytest.mark.parametrize("model_type", [name for name, row in ROWS.items() if "head_dim" in row.defaults])
def test_a_missing_width_is_not_derived_if_the_class_has_another(model_type: str) -> None:
    rope = {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    config = {**llama(), "model_type": model_type, "rope_theta": None, "partial_rotary_factor": None}
    if not ROTARY_KEYS[model_type].per_layer:
        rope = {"rope_theta": 1e4}
    config = {**config, "rope_parameters": rope, "global_head_dim": 128}
    layer_type = "sliding_attention" if ROTARY_KEYS[model_type].per_layer else None
    warns_of_default_or_raises(config, "head_dim", layer_type)


@pytest.mark.parametrize("said", [{}, {"rope_scaling": {}}, {"rope_parameters": {}}])
@pytest.mark.parametrize("model_type", ["gpt_oss", "apertus"])
def test_missing_rope_parameters_raise_if_the_class_has_a_scaling(model_type: str, said: dict[str, Any]) -> None:
    with refuses(InputError, model_type, "{'rope_type': 'default'}"):
        Rotary.from_config({**llama(), "model_type": model_type, "head_dim": 64, **said})
    plain = Rotary.from_config(
        {**llama(), "model_type": model_type, "head_dim": 64, "rope_scaling": {"rope_type": "default"}}
    )
    assert plain.scaling == Unscaled()


WHOLE = [name for name, keys in ROTARY_KEYS.items() if not keys.share_keys and not keys.per_layer]


@pytest.mark.filterwarnings("ignore:.*not the encoding of all layers:UserWarning")
@pytest.mark.parametrize("model_type", WHOLE)
def test_a_share_raises_if_the_code_rotates_the_whole_head(model_type: str) -> None:
    sections = {"mrope_section": [16, 8, 8]} if "2" in model_type and "_vl" in model_type else {}
    rope = {"rope_type": "default", **sections}
    config = {**llama(rope), "model_type": model_type, "head_dim": 64, "qk_rope_head_dim": 64}
    for share in (0.25, 0.5):
        with refuses(InputError, f"partial_rotary_factor={share}", model_type):
            Rotary.from_config({**config, "partial_rotary_factor": share})
        with refuses(InputError, f"partial_rotary_factor={share}", model_type):
            Rotary.from_config({**config, "rope_scaling": {**rope, "partial_rotary_factor": share}})
    with refuses(InputError, "'rotary_dim': 16", model_type):
        Rotary.from_config({**config, "rotary_dim": 16})
    assert Rotary.from_config({**config, "partial_rotary_factor": 1.0, "rotary_dim": 64}).rotary_dim == 64


def test_a_share_has_the_name_that_the_code_reads() -> None:
    neox = {k: v for k, v in PUBLISHED["gpt-neox-20b"].items() if k != "rotary_pct"}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}
    for said in ({"rotary_pct": 0.25}, {}, {"rope_scaling": rope}):
        with refuses(InputError, "'partial_rotary_factor': 0.5, which gpt_neox does not read", "contradicts"):
            Rotary.from_config({**neox, **said, "partial_rotary_factor": 0.5})
    with refuses(InputError, "'partial_rotary_factor': 0.5, which gptj does not read"):
        Rotary.from_config({**PUBLISHED["gpt-j-6b"], "partial_rotary_factor": 0.5})
    same = Rotary.from_config({**neox, "rotary_pct": 0.25, "partial_rotary_factor": 0.25})
    assert same.rotary_dim == same.head_dim // 4
    with refuses(InputError, "'rotary_dim': 64", "phi"):
        Rotary.from_config({**PUBLISHED["phi-2"], "rotary_dim": 64})
    assert Rotary.from_config({**PUBLISHED["phi-2"], "rotary_dim": 32}).rotary_dim == 32


def test_unrotated_pairs_have_one_key() -> None:
    config = {**llama(ROPES["proportional"]), "model_type": "of_somebody"}
    for others in ({"rotary_dim": 32}, {"rotary_pct": 0.5}):
        with refuses(InputError, f"{next(iter(others))!r}", "proportional"):
            Rotary.from_config({**config, **others}, layout="half")
    with refuses(InputError, "0.5", "0.25"):
        Rotary.from_config(llama(ROPES["proportional"], partial_rotary_factor=0.25))
    beside = llama({"rope_type": "proportional"}, partial_rotary_factor=0.25)
    assert Rotary.from_config(beside).scaling == Proportional(rotated_share=0.25)


def test_one_base_for_all_layers_of_olmo_3_is_read_as_older_releases_write_it() -> None:
    """Until 5.12 at least, its class had one dictionary; a scaling in it affected all layers, and is an error."""
    plain = {key: OLMO_3[key] for key in OLMO_3 if key not in ("rope_theta", "rope_scaling")}
    flat = {**plain, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    older = {**plain, "rope_theta": 500_000.0}
    for kind in ("full_attention", "sliding_attention"):
        one, other = (encoding_from_config(config, layer_type=kind) for config in (flat, older))
        assert repr(one) == repr(other)
    for wrong, word in (
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"rope_type": "linear", "factor": 8.0}, "for all layers"),
    ):
        with refuses(InputError, word):
            encoding_from_config(
                {**flat, "rope_parameters": {**flat["rope_parameters"], **wrong}},
                layer_type="full_attention" if "factor" in wrong else "sliding_attention",
            )


OLMO_3_NESTED = {**OLMO_3, "rope_theta": None, "rope_scaling": None}
PER_LAYER = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (llama(rope_theta=None, rope_parameters=PER_LAYER), ["full_attention", "llama", "share one"]),
        (
            {**PUBLISHED["gemma-3-4b"], "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
            ["for all layers"],
        ),
        ({**OLMO_3, "rope_theta": 10_000.0}, ["rope_theta=10000", "sliding_attention", "500,000"]),
        ({**OLMO_3_NESTED, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["sliding"]),
        (
            {**OLMO_3_NESTED, "rope_parameters": {**PER_LAYER, "sliding_attention": None}},
            ["an entry for sliding_attention"],
        ),
    ],
)
def test_layer_types_have_the_form_that_their_code_reads(config: Any, words: list[str]) -> None:
    with refuses(InputError, *words):
        Rotary.from_config(config, layer_type="full_attention")
    with refuses(InputError, *words):
        layer_types(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gptj", "n_embd": 64, "n_head": 2}, ["rotary_dim"]),  # 64 are more than a head has
        ({**PUBLISHED["gpt-j-6b"], "rope_theta": 5e5}, ["rope_theta", "gptj"]),
        ({**PUBLISHED["gpt-j-6b"], "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "gptj"]),
        (llama(rope_parameters={"rope_theta": 5e5}), ["rope_theta=10000.0", "500000.0"]),
        (llama({"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 1e4}), ["rope_scaling"]),
        (llama({"rope_type": "banana"}), ["banana", "yarn"]),
        (llama({"rope_type": "yarn", "type": "linear", "factor": 2.0}), ["yarn", "linear"]),
        (llama({"rope_type": "mrope"}), ["mrope"]),
        (llama({"rope_type": "linear"}), ["factor"]),
        (llama({"rope_type": "yarn", "factor": 4.0}), ["original_max_position_embeddings"]),
        (llama({"rope_type": "yarn", "original_max_position_embeddings": 1024}), ["factor"]),
        (llama({**ROPES["yarn"], "truncate": 1}), ["truncate"]),
        (llama({**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}), ["attention_factor", "mscale"]),
        (llama({**ROPES["dynamic"], "original_max_position_embeddings": 4096}), ["4096", "8192"]),
        (llama({**ROPES["yarn"]}, original_max_position_embeddings=512), ["1024", "512"]),
        (llama({**ROPES["longrope"], "original_max_position_embeddings": None}), ["original_max_position_embeddings"]),
        (llama({**ROPES["longrope, attention factor"], "factor": 9.0}), ["factor=9.0", "an attention factor"]),
        (llama({"rope_type": "proportional"}), ["partial_rotary_factor"]),
        (llama(hidden_size=500), ["500", "8"]),
        (
            llama(model_type="of_somebody", rope_interleave=False, partial_rotary_factor=0.5, rotary_dim=16),
            ["rotary_dim=16"],
        ),
        (llama(partial_rotary_factor=1.5), ["1.5"]),
        ({**PUBLISHED["phi-2"], "partial_rotary_factor": 10**400}, ["1329 bits"]),
        (llama(max_position_embeddings=10**12), ["max_position_embeddings", "2147483647"]),
        (llama(hidden_size=10**12), ["hidden_size", "2147483647"]),
        (llama(layer_types=5), ["layer_types=5"]),
        (llama(layer_types=["full_attention", 5]), ["layer_types"]),
        (llama(n_embd=256), ["hidden_size=512", "n_embd=256"]),
        (llama(rope_interleave=True), ["rope_interleave", "half"]),
        (llama(alibi=True), ["alibi"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": 24}}, ["mrope_section", "24"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": [16, -24]}}, ["mrope_section", "-24"]),
        (
            {**llama({"mrope_section": [16, 8, 8], "mrope_interleaved": False}), "model_type": "qwen3_vl_moe_text"},
            ["mrope_interleaved", "qwen3_vl_moe_text"],
        ),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_interleaved": True}}, ["mrope_interleaved"]),
        (7, ["int"]),
    ],
)  # fmt: skip
def test_unreadable_values_raise_by_name(config: Any, words: list[str]) -> None:
    with refuses(InputError, *words):
        Rotary.from_config(config, layer_type="full_attention" if "layer_types" in words[0] else None)


def test_an_unknown_layout_has_to_be_passed() -> None:
    config = {**llama(), "model_type": "my_model"}
    with refuses(InputError, "my_model", "layout", "register_architecture"):
        Rotary.from_config(config)
    assert Rotary.from_config(config, layout="interleaved").layout == "interleaved"
    assert Rotary.from_config(llama(), layout="interleaved").layout == "interleaved"
    with refuses(RangeError, "diagonal"):
        Rotary.from_config(llama(), layout="diagonal")  # type: ignore[arg-type]


def test_a_layer_type_is_required_if_layers_differ_and_has_to_exist() -> None:
    gemma = PUBLISHED["gemma-3-4b"]
    for layer_type in (None, "chunked_attention"):
        with refuses(InputError, "full_attention", "sliding_attention"):
            Rotary.from_config(gemma, layer_type=layer_type)
    with refuses(InputError, "full_attention"):
        Rotary.from_config(llama(), layer_type="full_attention")
    without = {k: v for k, v in gemma.items() if k != "rope_local_base_freq"}
    warns_of_default_or_raises(without, "rope_local_base_freq", "full_attention")
    narrow = {**llama(), "model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    warns_of_default_or_raises(narrow, "global_head_dim", "full_attention")
    none = {**llama(), "model_type": "of_somebody", "rope_theta": None, "rope_parameters": {"full_attention": None}}
    with refuses(InputError, "full_attention", "no rotary"):
        Rotary.from_config(none, layer_type="full_attention", layout="half")


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (llama(head_dim=33), RangeError, ["33"]),
        ({**PUBLISHED["phi-2"], "partial_rotary_factor": 0.32}, RangeError, ["25"]),
        (llama(head_dim=2**31 - 2), RangeError, ["head_dim", "262144"]),
        ({**PUBLISHED["gpt-j-6b"], "rotary_dim": 63}, RangeError, ["63"]),
        (llama({**ROPES["longrope"], "long_factor": [1.0] * 31}), InputError, ["long_factor", "31", "32"]),
        (llama({**ROPES["longrope"], "short_factor": [1.0] * 48}), InputError, ["short_factor", "48", "32"]),
        ({**PUBLISHED["Qwen2-VL-7B"], "rope_scaling": {"mrope_section": [16, 24, 23]}}, RangeError, ["64"]),
        (llama({"rope_type": "linear", "factor": -1.0}), RangeError, ["factor"]),
        (llama({"rope_type": "linear", "factor": 0}), RangeError, ["factor"]),
        (llama({**ROPES["llama3"], "high_freq_factor": 0.5}), RangeError, ["high_freq_factor"]),
        (llama({**ROPES["yarn"], "beta_fast": 1.0}), RangeError, ["beta_fast"]),
        (llama(rope_theta=-1.0), RangeError, ["base"]),
    ],
)  # fmt: skip
def test_invalid_numbers_raise(config: Any, kind: type[LocantError], words: list[str]) -> None:
    with refuses(kind, *words):
        rotary = Rotary.from_config(config)
        rotary.for_length(100_000)


def test_a_model_without_rotary_positions_raises() -> None:
    with refuses(InputError):
        Rotary.from_config(BertConfig())
    with refuses(InputError, "alibi"):
        Rotary.from_config(AutoConfig.for_model("falcon", alibi=True))


def test_a_base_is_read_only_where_the_code_reads_it() -> None:
    """GPT-NeoX reads ``rotary_emb_base`` outside the dictionary, and OLMo 3 turns sliding layers by their own alone."""
    neox = {k: v for k, v in PUBLISHED["gpt-neox-20b"].items() if k != "rotary_emb_base"}
    with refuses(InputError, "'rope_theta'", "gpt_neox"):
        Rotary.from_config({**neox, "rotary_emb_base": 10_000, "rope_theta": 5e5})
    assert Rotary.from_config({**neox, "rope_parameters": {"rope_theta": 5e5}}).base == 5e5
    ropes = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "default"}}
    nested = {**llama(rope_theta=1e6, rope_parameters=ropes), "model_type": "olmo3"}
    with refuses(InputError, "rope_theta=1000000.0", "500,000"):
        Rotary.from_config(nested, layer_type="sliding_attention")


@pytest.mark.parametrize("name", ["olmo3", "gemma3_text", "modernbert"])
def test_dictionaries_per_layer_type_have_the_name_that_the_code_reads(name: str) -> None:
    config = {**llama(rope_theta=None), "model_type": name, "head_dim": 64}
    with refuses(InputError, "as rope_scaling", "'rope_parameters'"):
        Rotary.from_config({**config, "rope_scaling": PER_LAYER}, layer_type="full_attention")
    config = {key: value for key, value in config.items() if value is not None}
    assert Rotary.from_config({**config, "rope_parameters": PER_LAYER}, layer_type="full_attention").base == 5e5
    with refuses(InputError, "layer_type=['full_attention']"):
        Rotary.from_config({**config, "rope_parameters": PER_LAYER}, layer_type=["full_attention"])  # type: ignore[arg-type]


def test_sections_are_ignored_or_checked_as_the_code_reads_them() -> None:
    sections = {"type": "default", "mrope_section": [16, 8, 8], "mrope_interleaved": True}
    named = re.escape("mrope_section=[16, 8, 8], mrope_interleaved=True, which llama does not read: ignored")
    with pytest.warns(UserWarning, match=named):
        assert fields(Rotary.from_config(llama(sections))) == fields(Rotary.from_config(llama()))
    video = {**llama({"type": "mrope", "mrope_section": [16, 8, 8, 0]}, head_dim=64), "model_type": "qwen2_vl"}
    with refuses(InputError, "mrope_section=[16, 8, 8, 0]", "time, height, width"):
        Rotary.from_config(video)


@pytest.mark.unchecked
def test_a_doubtful_layout_causes_a_warning_unless_one_is_passed() -> None:
    """Of HY-V4 nobody here has seen the weights: its code pairs as half, its users say interleaved."""
    config = {**PUBLISHED["DeepSeek-V3"], "model_type": "hy_v4", "rope_scaling": None}
    for read in (Rotary.from_config, encoding_from_config):
        with pytest.warns(UserWarning, match="hy_v4 pairs dimensions as 'half'.*'interleaved'") as told:
            found = read(config)
        assert isinstance(found, Rotary)
        assert found.layout == "half"
        assert [each.filename for each in told] == [__file__]
        assert read(config, layout="interleaved").layout == "interleaved"  # type: ignore[union-attr]
    assert any("hy_v4 pairs" in warning for warning in explain(config).layers[0].warnings)
    assert not any("pairs dimensions as 'half'" in w for w in explain(PUBLISHED["DeepSeek-V3"]).layers[0].warnings)
