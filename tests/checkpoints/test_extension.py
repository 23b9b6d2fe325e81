"""Longer contexts: what changes is what the method says, nothing else does, and transformers takes the result."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from locant import InputError, Positions, RangeError, Rotary
from locant.checkpoints.extension import METHODS, extend
from locant.cli.configs import METHODS as OFFERED
from locant.models import layer_types
from locant.positions.scaling import DynamicNTK, Linear, Llama3, LongRoPE, Unscaled, YaRN
from tests.positions.published import PRESETS
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS, FORMULA, FREQUENCY, PRINTED

TRAINED, TO = 4096, 16384


def llama(**others: Any) -> dict[str, Any]:
    sizes = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": TRAINED}
    return {**sizes, "rope_theta": 10_000.0, "torch_dtype": "bfloat16", "eos_token_id": [1, 2], **others}


EXPECTED = {
    "yarn": YaRN(factor=4.0, original_max_seq_len=TRAINED),
    "linear": Linear(factor=4.0),
    "ntk": Unscaled(),
    "dynamic": DynamicNTK(factor=4.0, original_max_seq_len=TRAINED),
    "llama3": Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=TRAINED),
}


@pytest.mark.parametrize("method", EXPECTED)
def test_each_method_writes_its_own_scaling(method: str) -> None:
    extension = extend(llama(), to=TO, method=method)
    rotary = Rotary.from_config(extension.config)
    assert rotary.scaling == EXPECTED[method]
    assert rotary.base == pytest.approx(
        10_000 * 4 ** (64 / 62) if method == "ntk" else 10_000, rel=FEW_ROUNDINGS, abs=0
    )


def test_the_methods_are_those_that_are_tested() -> None:
    assert tuple(METHODS) == OFFERED, "the command line has a list of its own, which needs no torch"
    assert set(METHODS) == {*EXPECTED, "longrope"}


def test_ntk_stretches_the_slowest_pair_by_the_factor_and_leaves_the_fastest() -> None:
    stretches = extend(llama(), to=TO, method="ntk").stretches
    assert stretches[0] == 1.0
    assert stretches[-1] == pytest.approx(4.0, rel=FORMULA, abs=0)


def test_longrope_takes_the_ramp_of_yarn_for_its_long_factors_and_says_so() -> None:
    longrope, yarn = (extend(llama(), to=TO, method=method) for method in ("longrope", "yarn"))
    scaling = Rotary.from_config(longrope.config).scaling
    assert isinstance(scaling, LongRoPE)
    assert set(scaling.short_factor) == {1.0}
    assert list(scaling.long_factor) == pytest.approx(yarn.stretches, abs=PRINTED[6])
    assert scaling.effective_attention_factor == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(TRAINED)), rel=FEW_ROUNDINGS, abs=0
    )
    assert "searches them on data" in longrope.notes[0]


@pytest.mark.parametrize("method", METHODS)
def test_all_other_keys_stay_in_their_place(method: str) -> None:
    config = llama()
    before = copy.deepcopy(config)
    extension = extend(config, to=TO, method=method)
    assert config == before
    about = {"rope_theta", "rope_scaling", "max_position_embeddings", "original_max_position_embeddings"}
    assert {k: v for k, v in extension.config.items() if k not in about} == {
        k: v for k, v in config.items() if k not in about
    }
    assert list(extension.config)[: len(config)] == list(config)
    assert extension.config["max_position_embeddings"] == (TRAINED if method == "dynamic" else TO), "as programs expect"
    assert set(extension.changed) <= about
    assert all(extension.config[key] == new and config.get(key) == old for key, (old, new) in extension.changed.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", ["old", "new"])
def test_transformers_takes_the_result_and_turns_as_we_say(method: str, form: str) -> None:
    config = llama()
    if form == "new":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    extension = extend(config, to=TO, method=method)
    assert ("rope_parameters" in extension.config) == (form == "new")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in extension.config.items() if k != "model_type"}))
    cos, _ = theirs(torch.zeros(1, 1, 1), torch.arange(TRAINED)[None])
    ours, _ = Rotary.from_config(extension.config, angles="float32").cos_sin(Positions.arange(TRAINED))
    assert torch.equal(cos[..., :32], ours)
    theirs(torch.zeros(1, 1, 1), torch.tensor([[TO - 1]]))
    waves = [pair.wavelength for pair in extension.after.pairs]
    assert (2 * math.pi / theirs.inv_freq).tolist() == pytest.approx(waves, rel=FREQUENCY, abs=0)


def test_what_is_said_per_pair_is_the_ratio_of_the_wavelengths() -> None:
    extension = extend(llama(), to=TO, method="linear")
    assert extension.stretches == pytest.approx([4.0] * 32, rel=FORMULA, abs=0)
    assert (extension.before.trained, extension.after.trained, extension.after.length) == (TRAINED, TRAINED, TO)


def test_a_base_has_the_name_that_the_architecture_reads() -> None:
    extension = extend(PRESETS["gpt-neox-20b"], to=8192, method="ntk")
    assert set(extension.changed) == {"rotary_emb_base", "max_position_embeddings"}


def test_sections_stay() -> None:
    config = extend(PRESETS["qwen2-vl-7b"], to=131072, method="yarn").config
    rotary = Rotary.from_config(config)
    assert rotary.sections == (16, 24, 24)
    assert rotary.scaling == YaRN(factor=4.0, original_max_seq_len=32768)


def test_phi_3_keeps_its_trained_length_beside_the_dictionary() -> None:
    config = {**llama(), "model_type": "phi3"}
    extended = extend(config, to=TO, method="longrope").config
    assert extended["original_max_position_embeddings"] == TRAINED
    theirs = AutoConfig.for_model(**extended)
    assert Rotary.from_config(theirs).scaling == Rotary.from_config(extended).scaling


def test_the_temperature_of_latent_attention_acts_on_all_scores() -> None:
    plain = {k: v for k, v in PRESETS["deepseek-v3"].items() if k != "rope_scaling"} | {"max_position_embeddings": 4096}
    extension = extend(plain, to=163840, method="yarn")
    scaling = Rotary.from_config(extension.config).scaling
    assert scaling == YaRN(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)
    assert scaling.effective_attention_factor == 1.0


@pytest.mark.parametrize("form", ["old", "new"])
def test_only_full_attention_is_stretched_where_the_others_have_a_window(form: str) -> None:
    gemma = {k: v for k, v in PRESETS["gemma-3-4b"].items() if k != "rope_scaling"} | {"max_position_embeddings": 32768}
    if form == "new":
        gemma["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": gemma.pop("rope_theta")},
            "sliding_attention": {"rope_type": "default", "rope_theta": gemma.pop("rope_local_base_freq")},
        }
    extension = extend(gemma, to=131072, method="linear")
    assert extension.layer_type == "full_attention"
    assert Rotary.from_config(extension.config, layer_type="full_attention").scaling == Linear(factor=4.0)
    local = Rotary.from_config(extension.config, layer_type="sliding_attention")
    assert (local.base, local.scaling) == (10_000.0, Unscaled())
    theirs = AutoConfig.for_model(**extension.config)
    assert Rotary.from_config(theirs, layer_type="full_attention").scaling == Linear(factor=4.0)


def test_the_text_part_of_a_multimodal_configuration_is_changed_where_it_stands() -> None:
    outer = {"model_type": "llava", "text_config": llama(), "vision_config": {"hidden_size": 7}}
    extended = extend(outer, to=TO, method="linear").config
    assert extended["vision_config"] == {"hidden_size": 7}
    assert extended["model_type"] == "llava"
    assert extended["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert "rope_scaling" not in outer["text_config"]


def test_a_configuration_object_is_taken_and_left_alone() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=TRAINED)
    before = config.to_dict()
    extended = extend(config, to=TO, method="yarn").config
    assert config.to_dict() == before
    assert extended["rope_parameters"]["factor"] == 4.0
    assert LlamaConfig(**extended).rope_parameters["rope_type"] == "yarn"


OLMO_3 = llama(model_type="olmo3", rope_theta=500_000.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "config",
    [
        OLMO_3,
        llama(model_type="modernbert", global_rope_theta=160_000.0, local_rope_theta=10_000.0),
        llama(
            model_type="modernbert", global_rope_theta=160_000.0, local_rope_theta=10_000.0,
            rope_scaling={"rope_type": "default"},
        ),
        llama(model_type="gpt_oss", head_dim=64, rope_scaling={"rope_type": "default"}),
        llama(model_type="apertus", rope_scaling={"rope_type": "default"}),
        llama(rope_interleave=True),
    ],
)  # fmt: skip
def test_what_is_written_says_to_transformers_what_it_says_here(config: dict[str, Any], method: str) -> None:
    """For whichever layers, those that see a window as they were."""
    if (config["model_type"], method) == ("olmo3", "ntk"):
        pytest.skip("refused: one base for all layers")
    if config["model_type"] == "modernbert":
        config = {key: value for key, value in config.items() if key != "rope_theta"}
    extended = extend(config, to=TO, method=method).config
    theirs = AutoConfig.for_model(**copy.deepcopy(extended))
    kinds = layer_types(config)
    for kind in kinds or (None,):
        layout = "interleaved" if "rope_interleave" in config else None
        before, after, read = (
            Rotary.from_config(one, layer_type=kind, layout=layout) for one in (config, extended, theirs)
        )
        assert (after.base, after.scaling) == (read.base, read.scaling)
        stays = kind == "sliding_attention"
        assert ((after.base, after.scaling) == (before.base, before.scaling)) == stays


def test_the_weights_of_phi_3_5_moe_are_written() -> None:
    config = llama(model_type="phimoe")
    extended = extend(config, to=TO, method="longrope").config
    attention_factor = math.sqrt(1 + math.log(4) / math.log(TRAINED))
    assert extended["rope_scaling"]["short_mscale"] == extended["rope_scaling"]["long_mscale"] == attention_factor
    theirs = PhimoeRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(extended)))
    cos, _ = theirs(torch.zeros(1, 1, 1), torch.arange(TRAINED)[None])
    ours, _ = Rotary.from_config(extended, angles="float32").cos_sin(Positions.arange(TRAINED))
    assert torch.equal(cos[..., :32], ours)


@pytest.mark.parametrize(
    ("config", "to", "method", "kind", "words"),
    [
        (llama(), TRAINED, "yarn", RangeError, ["4096"]),
        (llama(), 100, "yarn", RangeError, ["100", "4096"]),
        (llama(), 2**31, "yarn", RangeError, ["2147483648", "at most 2147483647"]),
        (llama(), 2**40, "yarn", RangeError, ["1099511627776", "at most 2147483647"]),
        (llama(head_dim=2), TO, "ntk", RangeError, ["2 dimensions"]),
        (llama(rope_theta=1.0), TO, "yarn", RangeError, ["base"]),
        (llama(sliding_window="4096"), TO, "yarn", InputError, ["sliding_window"]),
        (llama(model_type="cohere2", sliding_window=None), TO, "yarn", InputError, ["without rotary layers"]),
        (llama(model_type="smollm3", no_rope_layers=[0, 0]), TO, "yarn", InputError, ["without rotary layers"]),
        (llama(model_type="gpt_oss", head_dim=64), TO, "ntk", InputError, ["gpt_oss", "'rope_type': 'default'"]),
        (OLMO_3, TO, "ntk", InputError, ["one base for all layers"]),
        (llama(), TO, "magic", RangeError, ["magic", "yarn"]),
        (dict(PRESETS["llama-3.1-8b"]), 10**6, "yarn", InputError, ["Llama3", "already"]),
        (dict(PRESETS["gpt2"]), TO, "yarn", InputError, ["gpt2", "rotary"]),
        (dict(PRESETS["bloom-7b1"]), TO, "yarn", InputError, ["bloom", "rotary"]),
        (llama(model_type="falcon", alibi=True), TO, "yarn", InputError, ["falcon", "rotary"]),
        (dict(PRESETS["gpt-j-6b"]), TO, "ntk", InputError, ["gptj"]),
        (llama(model_type="phi3"), TO, "yarn", InputError, ["phi3", "longrope"]),
        (llama(max_position_embeddings=None), TO, "yarn", InputError, ["max_position_embeddings"]),
        ({"model_type": "mamba"}, TO, "yarn", InputError, ["mamba", "llama"]),
        (llama(model_type="cohere2", sliding_window=4096), TO, "yarn", InputError, ["cohere2", "window"]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(config: Any, to: int, method: str, kind: type, words: list[str]) -> None:
    with refuses(kind, *words):
        extend(config, to=to, method=method)
