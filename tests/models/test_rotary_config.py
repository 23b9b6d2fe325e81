"""Configurations into rotary encodings and back: every key counts or is refused by name."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from locant import InputError, LocantError, Positions, Rotary
from locant.models import layer_types
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Proportional, Unscaled, YaRN
from tests.models.configurations import ROPES, fields, llama
from tests.positions.published import PUBLISHED, layer_type_of
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS

# ------------------------------------------------------------------ every key counts


def output(config: dict[str, Any]) -> list[torch.Tensor]:
    """What the encoding does: its angles at a short and a long length, on text and on a grid."""
    rotary = Rotary.from_config(config, angles="float32")
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
    """The angles, or what is wrong with the configuration; a warning names a key that is ignored."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not read: ignored|.*DeepSeek's own code makes")
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
def test_a_key_may_be_left_out_if_papers_or_lengths_imply_it(name: str, key: str) -> None:
    without = {k: v for k, v in ROPES[name].items() if k != key}
    assert fields(Rotary.from_config(llama(without))) == fields(Rotary.from_config(llama(ROPES[name])))


@pytest.mark.unchecked  # the place that a warning names is counted in frames
@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["alpha", "finetuned", "low_freq_facto", "betafast", "mrope_sections"])
def test_an_unread_key_is_ignored_with_a_warning(name: str, key: str) -> None:
    with pytest.warns(UserWarning, match=f"got {key}=1.0, which llama does not read: ignored") as said:
        rotary = Rotary.from_config(llama({**ROPES[name], key: 1.0}))
    assert [each.filename for each in said] == [__file__]
    assert fields(rotary) == fields(Rotary.from_config(llama(ROPES[name])))


CONTRADICTIONS: dict[str, Any] = {
    "rope_interleaved": True, "rotary_emb_interleaved": True, "rope_ratio": 0.5, "rotary_scaling_factor": 2,
    "rotary_base": 5e5, "rotary_emb_base": 5e5, "rotary_emb_scale_base": 512, "rotary_pct": 0.5, "rope_percentage": 0.5,
    "rotary_dim": 32, "rope_type": "yarn", "use_rope": False, "use_rotary_pos_emb": False, "rotary": False,
    "use_mrope": True, "no_rope_layers": [1, 1, 1, 0],
}  # fmt: skip
AGREEMENTS: dict[str, Any] = {
    "rope_interleaved": False, "rotary_emb_interleaved": False, "rope_ratio": 1, "rotary_scaling_factor": None,
    "rotary_base": 1e4, "rotary_emb_base": 10_000, "rotary_emb_scale_base": None, "rotary_pct": 1.0,
    "rope_percentage": 1, "rotary_dim": 64, "rope_type": "default", "use_rope": True, "use_rotary_pos_emb": True,
    "rotary": True, "use_mrope": False, "no_rope_layers": [1, 1, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_an_unread_outer_key_may_only_repeat_what_is_read(key: str) -> None:
    with refuses(InputError, repr(key), "llama", "contradicts"):
        Rotary.from_config(llama(**{key: CONTRADICTIONS[key]}))
    rotary = Rotary.from_config(llama(**{key: AGREEMENTS[key]}))  # and warnings are errors here
    assert fields(rotary) == fields(Rotary.from_config(llama()))


@pytest.mark.parametrize("key", ["rope_of_somebody", "indexer_rope_interleave"])
def test_an_unknown_outer_key_is_ignored_with_a_warning(key: str) -> None:
    with pytest.warns(UserWarning, match=f"got {key}=True, which llama does not read: ignored"):
        rotary = Rotary.from_config(llama(**{key: True}))
    assert fields(rotary) == fields(Rotary.from_config(llama()))


@pytest.mark.parametrize("key", ["hidden_act", "vocab_size", "use_cache"])
def test_keys_about_other_things_are_left_alone(key: str) -> None:
    assert fields(Rotary.from_config(llama(**{key: 1}))) == fields(Rotary.from_config(llama()))


def test_the_configuration_is_not_changed_by_being_read() -> None:
    for config in PUBLISHED.values():
        before = copy.deepcopy(config)
        Rotary.from_config(config, layer_type=layer_type_of(config))
        assert config == before


# ------------------------------------------------------------------ what each form says


def test_the_new_and_the_old_form_are_equal() -> None:
    rope = ROPES["llama3"]
    phi = {"model_type": "phi"}
    old = llama(
        {"type": "llama3", **{k: v for k, v in rope.items() if k != "rope_type"}}, partial_rotary_factor=0.5, **phi
    )
    new = llama(rope_parameters={**rope, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}, **phi)
    del new["rope_scaling"], new["rope_theta"]
    assert fields(Rotary.from_config(old)) == fields(Rotary.from_config(new))


def test_the_head_is_the_stated_one_or_a_share_of_the_width() -> None:
    assert Rotary.from_config(llama()).head_dim == 64
    assert Rotary.from_config(llama(head_dim=128)).head_dim == 128
    assert Rotary.from_config(llama(head_dim=None)).head_dim == 64
    assert Rotary.from_config(PUBLISHED["DeepSeek-V3"]).head_dim == 64


def test_deepseek_has_a_key_for_its_layout() -> None:
    assert Rotary.from_config({**PUBLISHED["DeepSeek-V3"], "rope_interleave": False}).layout == "half"


def test_each_layer_type_has_a_base_and_a_scaling() -> None:
    gemma = PUBLISHED["gemma-3-4b"]
    assert layer_types(gemma) == ("full_attention", "sliding_attention")
    full = Rotary.from_config(gemma, layer_type="full_attention")
    local = Rotary.from_config(gemma, layer_type="sliding_attention")
    assert (full.base, full.scaling) == (1_000_000.0, Linear(factor=8.0))
    assert (local.base, local.scaling) == (10_000.0, Unscaled())


def test_full_attention_of_gemma_4_has_wider_heads() -> None:
    config = AutoConfig.for_model("gemma4_text", head_dim=64, global_head_dim=128, num_hidden_layers=6)
    full = Rotary.from_config(config, layer_type="full_attention")
    assert (full.head_dim, full.scaling) == (128, Proportional(rotated_share=0.25))
    assert Rotary.from_config(config, layer_type="sliding_attention").head_dim == 64
    published = {**{k: v for k, v in config.to_dict().items() if k != "per_layer_config"}, "global_head_dim": 128}
    assert fields(Rotary.from_config(published, layer_type="full_attention")) == fields(full)


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    inside = {**PUBLISHED["gemma-3-4b"]}
    outer = {"model_type": "gemma3", "text_config": inside, "vision_config": {"rope_theta": 100.0}}
    assert fields(Rotary.from_config(outer, layer_type="full_attention")) == fields(
        Rotary.from_config(inside, layer_type="full_attention")
    )


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048}
    assert Rotary.from_config(llama(rope)).scaling == YaRN(factor=4.0, original_max_seq_len=2048)


def test_longrope_reads_its_lengths_beside_the_dictionary() -> None:
    scaling = Rotary.from_config(PUBLISHED["Phi-3-mini-128k"]).scaling
    assert isinstance(scaling, LongRoPE)
    assert (scaling.original_max_seq_len, scaling.factor) == (4096, 32.0)
    assert scaling.effective_attention_factor == pytest.approx(
        math.sqrt(1 + math.log(32) / math.log(4096)), rel=FEW_ROUNDINGS, abs=0
    )


def test_dynamic_takes_the_longest_length_for_the_trained_one() -> None:
    scaling = Rotary.from_config(llama({"type": "dynamic", "factor": 2.0})).scaling
    assert scaling == DynamicNTK(factor=2.0, original_max_seq_len=8192)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_phi_3_has_older_names_for_longrope(old: str) -> None:
    config = {**PUBLISHED["Phi-3-mini-128k"]}
    config["rope_scaling"] = {**config["rope_scaling"], "type": old}
    assert fields(Rotary.from_config(config)) == fields(Rotary.from_config(PUBLISHED["Phi-3-mini-128k"]))


def test_from_config_of_a_subclass_returns_the_subclass() -> None:
    class Mine(Rotary):
        pass

    assert type(Mine.from_config(llama())) is Mine


def test_the_weights_of_phi_3_5_moe_are_the_attention_factor() -> None:
    rope = {**PHI_3_5_MOE["rope_scaling"]}
    rotary = Rotary.from_config(PHI_3_5_MOE)
    assert isinstance(rotary.scaling, LongRoPE)
    assert (rotary.scaling.effective_attention_factor, rotary.scaling.factor) == (1.243163121016122, 32.0)
    theirs = PhimoeRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(PHI_3_5_MOE)))
    ours = Rotary.from_config(PHI_3_5_MOE, angles="float32").for_length(4096)
    cos, sin = theirs(torch.zeros(1, 1, 1), torch.arange(4096)[None])
    for mine, other in zip(ours.cos_sin(Positions.arange(4096)), (cos, sin), strict=True):
        assert torch.equal(mine, other[..., :64])
    with refuses(InputError, "short_mscale=1.24316", "long_mscale=1.3"):
        Rotary.from_config({**PHI_3_5_MOE, "rope_scaling": {**rope, "long_mscale": 1.3}})
    with refuses(InputError, "short_mscale"):
        Rotary.from_config({**PHI_3_5_MOE, "rope_scaling": {k: v for k, v in rope.items() if k != "short_mscale"}})
    with refuses(InputError, "'attention_factor'"):
        Rotary.from_config({**PHI_3_5_MOE, "rope_scaling": {**rope, "attention_factor": 1.2}})
    with pytest.warns(UserWarning, match="short_mscale=1.24.*, which llama does not read"):
        Rotary.from_config({**PHI_3_5_MOE, "model_type": "llama"})


PHI_3_5_MOE: dict[str, Any] = {
    "model_type": "phimoe", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "longrope", "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
        "short_factor": [1.0 + pair / 50 for pair in range(64)], "long_factor": [1.0 + pair for pair in range(64)],
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
