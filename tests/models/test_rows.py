"""The row of an architecture agrees with its code in `transformers`, also if it has more than a layout."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from locant import InputError, PositionEncoding, Positions, Rotary
from locant.checkpoints import convert_layout
from locant.models import encoding_from_config, layer_types
from locant.models.config_values import config_dict
from locant.models.rope_parameters import ropes_by_layer
from tests.models.configurations import ROTARY_KEYS
from tests.models.rotary_modules import Case, outcome
from tests.refusal import refuses

NOT_IN_TRANSFORMERS = {"exaone4_5_text", "kimi_k2"}
"""Kimi-K2 runs DeepSeek-V3's modeling code, shipped with its weights, EXAONE 4.5 those of EXAONE 4."""

IN_TRANSFORMERS = sorted(ROTARY_KEYS.keys() - NOT_IN_TRANSFORMERS)
CODED = [name for name in IN_TRANSFORMERS if ROTARY_KEYS[name].fixed_base is None]
"""Those whose rotary positions are configured at all."""


TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 16,
    "vocab_size": 32, "intermediate_size": 8, "intermediate_size_mlp": 8, "moe_intermediate_size": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4,
    "global_head_dim": 16, "layer_types": ["full_attention"], "no_rope_layers": [1],
}  # fmt: skip
"""One layer of any architecture; most have no use for some of these."""


def output(model_type: str, **options: Any) -> Tensor:
    """What one layer with random weights makes of nine tokens."""
    sizes = {key: value for key, value in TINY.items() if model_type != "falcon" or key != "head_dim"}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **{**sizes, **options}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model.eval()(torch.arange(3, 12)[None]).last_hidden_state


def reads(model_type: str, key: str) -> bool:
    """Whether the code turns another part of the head where this key says another share."""
    try:
        return not torch.equal(output(model_type, **{key: 0.25}), output(model_type, **{key: 0.75}))
    except RuntimeError as error:
        if "must match the size" in str(error):  # its tables are narrower, and the heads that they turn are not
            return False
        raise


@pytest.mark.parametrize("model_type", [name for name in CODED if "vl" not in name])
def test_a_share_is_read_if_the_code_rotates_a_part_of_the_head(model_type: str) -> None:
    for key in ("partial_rotary_factor", "rotary_pct"):
        assert reads(model_type, key) == (key in ROTARY_KEYS[model_type].share_keys)


FLAT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 32, "num_hidden_layers": 4,
    "max_position_embeddings": 4096, "sliding_window": 512,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}


def flat(model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    """A configuration in the form before transformers 5, with everything that this architecture has to be told."""
    keys = ROTARY_KEYS[model_type]
    bases = {key: 500_000.0 for key in keys.base_keys if key != "rope_theta" or keys.base_key == "rope_theta"}
    shares = dict.fromkeys(keys.share_keys[:1], 0.5)
    own = {key: value for key, value in FLAT.items() if model_type != "falcon" or key != "head_dim"}
    sections = {"mrope_section": [4, 6, 6]} if keys.default_sections else {}
    return {"model_type": model_type, **own, **bases, **shares, "rope_scaling": {**rope, **sections}}


NO_OLDER_FORM = {"gemma4_text"}
PHI = {"phi3", "phimoe"}
"""They take no linear scaling."""


@pytest.mark.filterwarnings("ignore:.*not the encoding of all layers:UserWarning")
@pytest.mark.parametrize("model_type", [name for name in CODED if name not in NO_OLDER_FORM])
def test_a_scaling_of_the_older_form_affects_the_same_layers_as_in_transformers(model_type: str) -> None:
    facts = flat(model_type, {"rope_type": "default"} if model_type in PHI else LINEAR)
    theirs = AutoConfig.for_model(**flat(model_type, facts["rope_scaling"]))
    kinds, other_kinds = (ropes_by_layer(config_dict(one), ROTARY_KEYS[model_type]) or {} for one in (facts, theirs))
    assert set(kinds) == set(other_kinds)
    for kind in kinds or (None,):
        ours, other = (Rotary.from_config(one, layer_type=kind) for one in (facts, theirs))
        for field in ("head_dim", "base", "scaling", "layout", "rotary_dim", "sections"):
            assert getattr(ours, field) == getattr(other, field), (kind, field)


YARN = {
    "rope_type": "yarn", "rope_theta": 5e6, "factor": 3.0, "original_max_position_embeddings": 4096,
    "mrope_section": [24, 20, 20], "mrope_interleaved": True,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}

CHANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", {"rope_parameters": YARN}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense", "HunYuanDenseV1RotaryEmbedding", {"head_dim": 64, "rope_parameters": ALPHA},
    ),
    "kimi_k25_vision": ("kimi_k25", "Kimi_K25VisionRotaryEmbedding", {"hidden_size": 640}),
    "pixtral": (
        "pixtral", "PixtralVisionRotaryEmbedding",
        {"head_dim": 96, "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", CHANGED)
def test_other_sizes_bases_and_scalings_are_read(model_type: str) -> None:
    folder, name, options = CHANGED[model_type]
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    config = AutoConfig.for_model(model_type, **options)
    assert outcome(Case(folder, cls, config, None)).verdict == "same bits"


QWEN_3_VL = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e4,
}


def test_weights_of_another_layout_have_a_table_of_that_layout() -> None:
    plain = {**QWEN_3_VL, "rope_parameters": {"mrope_section": [6, 5, 5]}}
    rotary = Rotary.from_config(plain)
    converted = Rotary.from_config({**plain, "rope_interleave": True})
    assert (rotary.pairs.layout, converted.pairs.layout) == ("half", "interleaved")
    assert Rotary.from_config(plain, layout="interleaved").pairs == converted.pairs
    weight = torch.randn(64, 64)
    moved = convert_layout({"layers.0.self_attn.q_proj.weight": weight}, plain, to="interleaved")
    x, where = torch.randn(5, 64), Positions.of(torch.randint(0, 50, (1, 5, 3)))
    one, other = (
        encoding.rotate_one((x @ rows.T).unflatten(-1, (2, 32)).transpose(0, 1)[None], where)
        for encoding, rows in ((rotary, weight), (converted, *moved.values()))
    )
    order = torch.arange(32).view(2, 16).T.flatten()
    assert torch.equal(one[..., order], other)


NO_LAYOUT: dict[str, dict[str, Any]] = {
    "gemma4_vision": {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "rope_theta": 100.0},
    "nanochat": {"hidden_size": 128, "num_attention_heads": 2, "rope_theta": 1e4},
    "qwen2_5_omni_dit": {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "rope_theta": 1e4},
}


@pytest.mark.parametrize("model_type", NO_LAYOUT)
def test_what_is_no_layout_is_not_converted(model_type: str) -> None:
    config = {"model_type": model_type, **NO_LAYOUT[model_type]}
    with refuses(InputError, model_type):
        convert_layout({"layers.0.self_attn.q_proj.weight": torch.ones(128, 1)}, config, to="interleaved")
    with refuses(InputError, model_type, "interleaved" if model_type != "qwen2_5_omni_dit" else "half"):
        Rotary.from_config(config, layout="half" if model_type == "qwen2_5_omni_dit" else "interleaved")


def test_a_base_of_zero_is_a_layer_without_positions_and_several_bases_are_refused() -> None:
    sizes = {"model_type": "muse_spark_text", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    mixed = {**sizes, "rope_parameters": {"rope_theta": 5e5}, "layer_rope_theta": [5e5, 0, 5e5, 0]}
    assert layer_types(mixed) == ("with", "without")
    assert isinstance(encoding_from_config(mixed, layer_type="with"), Rotary)
    assert type(encoding_from_config(mixed, layer_type="without")) is PositionEncoding
    assert layer_types({**mixed, "layer_rope_theta": [5e5, 5e5]}) == ()
    with refuses(InputError, "layer_rope_theta"):
        encoding_from_config({**mixed, "layer_rope_theta": [5e5, 1e4]})


def test_the_text_of_a_model_that_thinks_and_talks_is_that_of_the_thinker() -> None:
    config = AutoConfig.for_model("qwen2_5_omni")
    assert repr(Rotary.from_config(config)) == repr(Rotary.from_config(config.thinker_config.text_config))
