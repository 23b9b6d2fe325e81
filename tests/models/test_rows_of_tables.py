"""Rows that need more than a layout: scalings on their tables, other layouts of weights, layers without a base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionRotaryEmbedding
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from locant import InputError, PositionEncoding, Positions, Rotary
from locant.checkpoints import convert_layout
from locant.models import encoding_from_config, layer_types
from tests.models.rotary_modules import Case, outcome
from tests.refusal import refuses

YARN = {
    "rope_type": "yarn", "rope_theta": 5e6, "factor": 3.0, "original_max_position_embeddings": 4096,
    "mrope_section": [24, 20, 20], "mrope_interleaved": True,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}

CHANGED: dict[str, tuple[str, type[torch.nn.Module], dict[str, Any]]] = {
    "qwen3_vl_text": ("qwen3_vl", Qwen3VLTextRotaryEmbedding, {"rope_parameters": YARN}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HunYuanDenseV1RotaryEmbedding, {"head_dim": 64, "rope_parameters": ALPHA}),
    "kimi_k25_vision": ("kimi_k25", Kimi_K25VisionRotaryEmbedding, {"hidden_size": 640}),
    "pixtral": (
        "pixtral",
        PixtralVisionRotaryEmbedding,
        {"head_dim": 96, "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
    ),
}


@pytest.mark.parametrize("model_type", CHANGED)
def test_other_sizes_bases_and_scalings_are_read(model_type: str) -> None:
    folder, cls, options = CHANGED[model_type]
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
    mixed = {**sizes, "rope_theta": 5e5, "layer_rope_theta": [5e5, 0, 5e5, 0]}
    assert layer_types(mixed) == ("with", "without")
    assert isinstance(encoding_from_config(mixed, layer_type="with"), Rotary)
    assert type(encoding_from_config(mixed, layer_type="without")) is PositionEncoding
    assert layer_types({**mixed, "layer_rope_theta": [5e5, 5e5]}) == ()
    with refuses(InputError, "layer_rope_theta"):
        encoding_from_config({**mixed, "layer_rope_theta": [5e5, 1e4]})


def test_the_text_of_a_model_that_thinks_and_talks_is_that_of_the_thinker() -> None:
    config = AutoConfig.for_model("qwen2_5_omni")
    assert repr(Rotary.from_config(config)) == repr(Rotary.from_config(config.thinker_config.text_config))
