"""Where two configurations differ is where the modules of `transformers` for them differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from locant.checkpoints.config_comparison import compare_configs
from locant.checkpoints.rotary_settings import VISIBLE
from tests.positions.published import PRESETS
from tests.tolerances import FORMULA, FREQUENCY

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 1024, "rope_theta": 10_000.0,
}  # fmt: skip


def _cos_sin(config: dict[str, Any]) -> torch.Tensor:
    module = LlamaRotaryEmbedding(LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    return torch.stack(module(torch.zeros(1), torch.arange(1024)[None]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 10_100.0}, "base is 10,000 here and 10,100 there"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64}},
            "scaling is",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            "attention factor",
        ),
    ],
)  # fmt: skip
def test_the_first_position_and_the_largest_difference(change: dict[str, Any], words: str) -> None:
    (layers,) = compare_configs(LLAMA, {**LLAMA, **change}).layers
    off = (_cos_sin(LLAMA) - _cos_sin({**LLAMA, **change})).abs().amax((0, 1, 3))
    assert layers.first_position == int((off > VISIBLE).nonzero()[0, 0])
    assert layers.largest_difference == pytest.approx(float(off.max()), abs=1024 * FREQUENCY)
    assert any(words in difference for difference in layers.differences)
    assert f"from position {layers.first_position:,} on" in layers.differences[-1]


def test_equal_models_agree() -> None:
    comparison = compare_configs(LLAMA, {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert comparison.agrees
    assert comparison.layers[0].largest_difference == pytest.approx(0.0, abs=FORMULA)


def test_what_a_draft_model_lacks_is_named() -> None:
    comparison = compare_configs({**LLAMA, "max_position_embeddings": 512, "vocab_size": 90}, LLAMA)
    assert comparison.differences == (
        "the vocabulary has 90 entries here and 100 there",
        "the longest sequence has 512 positions here and 1,024 there",
    )
    assert comparison.layers[0].differences == ()
    assert not comparison.agrees


def test_each_kind_of_layers_is_compared() -> None:
    gemma = dict(PRESETS["gemma-3-4b"])
    comparison = compare_configs(gemma, {**gemma, "rope_local_base_freq": 20_000.0, "sliding_window": 512})
    assert [layers.names for layers in comparison.layers] == [("full_attention",) * 2, ("sliding_attention",) * 2]
    assert [bool(layers.differences) for layers in comparison.layers] == [False, True]
    assert comparison.differences == ("layers with a window attend to 1,024 tokens here and 512 tokens there",)
    kinds = [("sliding_attention", "full_attention")[number % 6 == 5] for number in range(34)]
    others = [("full_attention", "sliding_attention")[kind == "full_attention"] for kind in kinds]
    exchanged = compare_configs({**gemma, "layer_types": kinds}, {**gemma, "layer_types": others})
    assert exchanged.differences == ("34 of 34 layers have another window, the first of them layer 0",)
    others = compare_configs(LLAMA, PRESETS["gpt2"]).layers
    assert others[0].differences == ("Rotary here, Learned(max_seq_len=1024, d_model=768) there",)
    widths = compare_configs(LLAMA, {**LLAMA, "head_dim": 32}).layers[0]
    assert widths.first_position is None
    assert widths.differences[0] == "dimensions of a head are 64 here and 32 there"
